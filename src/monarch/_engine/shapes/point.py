"""`Point`: one element of a mesh, as coordinates within an extent.

A point is made for every message that an actor handles and for every item of a result, and most are
never examined. So a point holds a rank and an `Extent`; a coordinate is computed on demand, with
strides that the extent has precomputed.

There are two classes of that name because programs use two: `BasePoint` (named ``Point`` in
``...shape``) and its subclass `Point` (exported by ``monarch.actor``), which adds the `Mapping`
interface. Every point, however made, is an instance of the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import SupportsIndex

from monarch._engine.shapes.extent import Extent, missing
from monarch._engine.shapes.natural import natural


class BasePoint:
    """A point without the `Mapping` interface; constructing one returns a `Point`."""

    __module__ = "monarch._rust_bindings.monarch_hyperactor.shape"
    __slots__ = ("_extent", "_rank")

    _rank: int
    _extent: Extent

    def __new__(cls, rank: SupportsIndex, extent: Extent) -> Point:
        checked = natural(rank)
        if not isinstance(extent, Extent):
            raise TypeError(f"the extent of a point must be an Extent, not {extent!r}")
        if checked >= extent._nelements:
            raise ValueError(
                f"out of range: total ranks {extent._nelements}; does not contain rank {checked}"
            )
        return point_of(checked, extent)

    @property
    def rank(self) -> int:
        """The row-major position of this point in its extent."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The extent in which this is a point."""
        return self._extent

    def size(self, label: str) -> int:
        """Return the size of a dimension of the extent."""
        return self._extent[label]

    def keys(self) -> list[str]:
        """Return the labels in order."""
        return list(self._extent._labels)

    def __getitem__(self, label: str) -> int:
        try:
            size, stride = self._extent._axes[label]
        except KeyError:
            missing(label)
        return self._rank // stride % size

    def __contains__(self, label: object) -> bool:
        return label in self._extent._axes

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._labels)

    def __len__(self) -> int:
        return len(self._extent._labels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BasePoint):
            return NotImplemented
        return self._rank == other._rank and self._extent == other._extent

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __repr__(self) -> str:
        parts: list[str] = []
        rest = self._rank
        sizes = self._extent._sizes
        for label, size in zip(reversed(self._extent._labels), reversed(sizes), strict=True):
            rest, coordinate = divmod(rest, size)
            parts.append(f"'{label}': {coordinate}/{size}")
        return "{" + ", ".join(reversed(parts)) + "}"

    def __reduce__(self) -> tuple[type[Point], tuple[int, Extent]]:
        return Point, (self._rank, self._extent)


BasePoint.__name__ = BasePoint.__qualname__ = "Point"


class Point(BasePoint, Mapping[str, int]):  # type: ignore[misc]  # keys() is a list, not a view
    """A read-only mapping from dimension label to coordinate; hashable and picklable.

    `rank` counts row-major within `extent`. Raises `ValueError` if the extent has no such rank;
    looking up a missing label raises an error that is a `ValueError` and a `KeyError`.

    >>> point = Point(4, Extent(["hosts", "gpus"], [2, 3]))
    >>> point, point["gpus"], dict(point), point.get("zones", 0)
    ({'hosts': 1/2, 'gpus': 1/3}, 1, {'hosts': 1, 'gpus': 1}, 0)
    """

    __module__ = "monarch._src.actor.actor_mesh"
    __slots__ = ()


_new = object.__new__


def point_of(rank: int, extent: Extent) -> Point:
    """Return the `Point` of a rank that is known to be in `extent`, without checks."""
    self = _new(Point)
    self._rank = rank
    self._extent = extent
    return self
