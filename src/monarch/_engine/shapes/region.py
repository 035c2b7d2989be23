"""`Region`: labels and ranks of a part of a base mesh, seen from that base mesh.

A region holds the same data as a `Shape` and answers one more question: which point of this part is
a given rank of the base mesh? As the topmost module of the shapes, it also sets its constructor in
`Extent` and `Shape`, whose ``region`` property needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex, final

from monarch._engine.shapes.extent import Extent
from monarch._engine.shapes.natural import natural
from monarch._engine.shapes.point import Point, point_of
from monarch._engine.shapes.shape import Shape, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from monarch._engine.shapes.slice import Slice


@final
class Region:
    """Labels for the dimensions of a `Slice` of base ranks; immutable, hashable and picklable.

    Raises `ValueError` if there are not as many labels as dimensions.

    >>> column = Region(["hosts"], Slice(offset=1, sizes=[2], strides=[3]))
    >>> column.point_of_base_rank(4)
    {'hosts': 1/2}
    """

    __module__ = "monarch._rust_bindings.monarch_hyperactor.shape"
    __slots__ = ("_shape",)

    _shape: Shape

    def __new__(cls, labels: Iterable[str], slice: Slice) -> Region:
        return region_of(Shape(labels, slice))

    @property
    def labels(self) -> list[str]:
        """The labels in order, as a fresh list."""
        return self._shape.labels

    def slice(self) -> Slice:
        """Return the ranks, as a `Slice`."""
        return self._shape._slice

    def as_shape(self) -> Shape:
        """Return the same labels and ranks, as a `Shape`."""
        return self._shape

    def point_of_base_rank(self, rank: SupportsIndex) -> Point:
        """Return the point of `rank` of the base mesh; raises `ValueError` if it is not in here."""
        checked = natural(rank)
        try:
            position = self._shape._slice.index(checked)
        except ValueError:
            raise ValueError(
                f"out of range base rank: {checked} is not in the region {self._shape!r}"
            ) from None
        return point_of(position, self._shape.extent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self._shape == other._shape

    def __hash__(self) -> int:
        return hash(self._shape)

    def __reduce__(self) -> tuple[type[Region], tuple[tuple[str, ...], Slice]]:
        return Region, (self._shape._labels, self._shape._slice)


_new = object.__new__


def region_of(shape: Shape) -> Region:
    """Return the labels and ranks of `shape` as a `Region`."""
    self = _new(Region)
    self._shape = shape
    return self


def _region_of_extent(extent: Extent) -> Region:
    return region_of(shape_of(extent._labels, extent.ndslice))


Extent._to_region = _region_of_extent
Shape._to_region = region_of
