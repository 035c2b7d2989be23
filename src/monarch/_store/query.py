"""The interface of queries: a statement, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Answer", "Queries", "QueryError", "before_query"]

before_query: list[Callable[[], object]] = []
"""What a client calls before each query: a process that records delivers what waits."""


class QueryError(Exception):
    """A query cannot be answered; the text says why, and is meant for the person who wrote it."""


class Answer(NamedTuple):
    """The rows of a query; `types` are those of the database."""

    columns: list[str]
    types: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool = False
    """Whether there are more rows: than asked for, or than 64 MiB."""

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Queries(Protocol):
    """Something that answers SQL. From any thread."""

    def query(
        self,
        sql: str,
        timeout: float = 10.0,
        limit: int = 100_000,
        parameters: tuple[Any, ...] = (),
    ) -> Answer:
        """Return at most `limit` rows.

        Args:
            sql: one SELECT, EXPLAIN, SHOW TABLES or DESCRIBE; ``?`` stands for a parameter.
            timeout: seconds after which the query is ended.
            limit: the most rows that are returned; there may be fewer if they are large.
            parameters: the values of the marks in `sql`.

        Raises QueryError for anything else, for mistakes, and when the time is over.
        """
        ...
