"""The rows of an answer, fetched from a database in portions, up to a number and a size.

The first portion is one row, and each further one is as large as the rows so far let expect. So a
query of few rows costs two calls, and one of large rows never has much more than the limit at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from monarch._store.query import QueryError

__all__ = ["LARGEST", "gathered"]

LARGEST = 64 << 20
"""Bytes of the values of an answer, about."""

_PORTION = 10_000  # rows
_CELL = 16  # bytes of any value: its place


def gathered(
    fetch: Callable[[int], Sequence[Sequence[Any]]],
    plain: Callable[[Any], Any],
    limit: int,
    largest: int = LARGEST,
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return rows and whether there are more.

    Args:
        fetch: ``fetch(count)`` returns the next rows, at most `count`; none after the last.
        plain: makes a value of the answer of one of the database.
        limit: the most rows.
        largest: the most bytes of all values, but for the row that exceeds it.

    Raises QueryError for a row that alone has more.

    >>> source = iter([("a",), ("b",), ("c",)])
    >>> fetch = lambda count: [row for _, row in zip(range(count), source)]
    >>> gathered(fetch, str.upper, 10, largest=100)
    ([('A',), ('B',)], True)
    """
    rows: list[tuple[Any, ...]] = []
    size, portion = 0, 1
    while found := fetch(min(portion, limit + 1 - len(rows))):
        for row in found:
            if len(rows) == limit or size > largest:
                return rows, True
            made = tuple(map(plain, row))
            more = sum(map(_size, made))
            if more > largest:
                raise QueryError(f"a row has {more:,} bytes; an answer has at most {largest:,}")
            size += more
            rows.append(made)
        average = max(size // len(rows), 1)
        portion = max(1, min(_PORTION, (largest - size) // average))
    return rows, False


def _size(value: Any) -> int:
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType] - any
    if kind is str or kind is bytes:
        return _CELL + sys.getsizeof(value)
    if kind is list:
        return _CELL + sum(map(_size, value))
    if kind is dict:
        return _CELL + sum(map(_size, cast("dict[str, Any]", value).values()))
    return _CELL
