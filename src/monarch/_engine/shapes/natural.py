"""Checks of natural numbers: the valid values of a rank, a size, a stride or an offset.

Geometry is integer arithmetic on unsigned 64-bit numbers, because those fit a wire frame and other
implementations of these shapes have them. Every argument of a caller is checked here once;
arithmetic on checked numbers is never checked again. A negative or an oversized number is an
`OverflowError`, and a value that is not an integer is a `TypeError`, so neither can be mistaken for
the `ValueError`s about geometry.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, SupportsIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 1 << 64


def natural(value: SupportsIndex) -> int:
    """Return `value` as a plain int in ``[0, 2**64)``.

    >>> natural(True)
    1
    """
    number = int(index(value))
    if number < 0:
        raise OverflowError(f"{number} is negative; a rank, size, stride or offset cannot be")
    if number >= LIMIT:
        raise OverflowError(f"{number} does not fit into 64 bits")
    return number


def naturals(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return `values` as a tuple of plain ints in ``[0, 2**64)``."""
    return tuple([natural(value) for value in values])
