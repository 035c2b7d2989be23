"""The part of a database that the store uses: rows in, answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from monarch._store.query import Answer

__all__ = ["Database", "Rows"]

Rows = Mapping[str, Sequence[Any]]
"""Columns by name, of one length."""


class Database(Protocol):
    """A database in memory. `insert`, `drop` and `replace` come from one thread at a time."""

    def insert(self, table: str, generation: int, columns: Rows) -> None:
        """Add rows to a generation of a table of rows, which is made if need be."""
        ...

    def drop(self, table: str, generation: int) -> None:
        """Drop a generation of a table of rows."""
        ...

    def replace(self, table: str, columns: Rows, where: tuple[str, Any] | None = None) -> None:
        """Replace all rows of a plain table or ``running``, or those where a column has a value."""
        ...

    def query(self, sql: str, parameters: Sequence[Any], timeout: float, limit: int) -> Answer:
        """Answer one statement that reads; from any thread. Raises QueryError."""
        ...

    def close(self) -> None:
        """Free the memory; no other call is under way or follows."""
        ...
