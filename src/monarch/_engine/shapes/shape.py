"""`Shape`: a `Slice` whose dimensions have names. Meshes are cut here.

A mesh and each of its sub-meshes hold one shape: its slice has the ranks of the underlying mesh
that belong to it, and its labels name the dimensions. All ways to cut, `at`, `index`, `select` and
`ShapeExt.slice`, are one pass over the dimensions (`Shape._cut`). They differ only in their
arguments and errors, which are fixed by the interface.

A step is legal on every dimension, as any ``offset, stride`` pair is. A negative step is not, since
the ranks along a dimension of a mesh ascend.
"""

from __future__ import annotations

import builtins
import operator
from typing import TYPE_CHECKING, ClassVar, Protocol, SupportsIndex, final

from monarch._engine.shapes.encoding import Reader, put_count, put_natural, put_text
from monarch._engine.shapes.extent import Extent, extent_of
from monarch._engine.shapes.label import labels_of, quoted
from monarch._engine.shapes.natural import natural
from monarch._engine.shapes.slice import Slice, slice_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from monarch._engine.shapes.region import Region


class _ToRegion(Protocol):
    def __call__(self, shape: Shape, /) -> Region: ...


@final
class Shape:
    """Labels for the dimensions of a `Slice`; immutable, hashable and picklable.

    Raises `ValueError` if there are not as many labels as dimensions.

    >>> shape = Shape(["hosts", "gpus"], Slice.new_row_major([2, 3]))
    >>> print(shape, shape.at("gpus", 1).ranks(), shape.coordinates(5))
    {hosts=2,gpus=3} [1, 4] {'hosts': 1, 'gpus': 2}
    """

    __module__ = "monarch._rust_bindings.monarch_hyperactor.shape"
    __slots__ = ("_extent", "_labels", "_slice")

    _labels: tuple[str, ...]
    _slice: Slice
    _extent: Extent | None

    # Set by region.py, which imports this module; an import here would close a cycle.
    _to_region: ClassVar[_ToRegion]

    def __new__(cls, labels: Iterable[str], slice: Slice) -> Shape:
        checked = labels_of(labels)
        if not isinstance(slice, Slice):
            raise TypeError(f"the slice of a shape must be a Slice, not {slice!r}")
        if len(checked) != slice.ndim:
            raise ValueError(f"label slice dimension mismatch: {len(checked)} != {slice.ndim}")
        return shape_of(checked, slice)

    @staticmethod
    def unity() -> Shape:
        """Return the shape without dimensions; it holds one rank, 0."""
        return _UNITY

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Shape:
        """Return the shape that `to_bytes` encoded; `ValueError` for any other bytes.

        Safe on bytes from an untrusted peer.
        """
        reader = Reader(bytes(memoryview(data)))
        ndim = reader.count()
        labels = [reader.text() for _ in range(ndim)]
        sizes = [reader.natural() for _ in range(ndim)]
        strides = [reader.natural() for _ in range(ndim)]
        offset = reader.natural()
        reader.finish()
        return shape_of(tuple(labels), Slice(offset=offset, sizes=sizes, strides=strides))

    def to_bytes(self) -> bytes:
        """Return a compact encoding, equal for equal shapes; `ValueError` beyond 64 dimensions."""
        out = bytearray()
        put_count(out, len(self._labels))
        for label in self._labels:
            put_text(out, label)
        for number in (*self._slice._sizes, *self._slice._strides, self._slice._offset):
            put_natural(out, number)
        return bytes(out)

    @property
    def labels(self) -> list[str]:
        """The labels in order, as a fresh list."""
        return list(self._labels)

    @property
    def ndslice(self) -> Slice:
        """The ranks, as a `Slice`."""
        return self._slice

    @property
    def extent(self) -> Extent:
        """The labels and sizes, as an `Extent`."""
        extent = self._extent
        if extent is None:
            extent = self._extent = extent_of(self._labels, self._slice._sizes)
        return extent

    @property
    def region(self) -> Region:
        """The same labels and ranks, as a `Region`."""
        return Shape._to_region(self)

    def ranks(self) -> list[int]:
        """Return all ranks in row-major order, as a list; ``ndslice.ranks()`` is cheaper."""
        return list(self._slice.ranks())

    def coordinates(self, rank: SupportsIndex) -> dict[str, int]:
        """Return label to coordinate of `rank`; raises `ValueError` if the rank is not in here."""
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def at(self, label: str, index: SupportsIndex) -> Shape:
        """Return the sub-shape at `index` along `label`, without that dimension.

        Raises `ValueError` if the label is unknown or the index beyond the size, and
        `OverflowError` if it is negative.
        """
        return self._cut({label: natural(index)})

    def index(self, **coordinates: SupportsIndex) -> Shape:
        """Return the sub-shape at several indices at once, as `at` does for one.

        >>> Shape(["h", "g"], Slice.new_row_major([2, 3])).index(h=1, g=2).ranks()
        [5]
        """
        return self._cut({label: natural(index) for label, index in coordinates.items()})

    def select(self, label: str, slice: builtins.slice) -> Shape:
        """Return the sub-shape of a range along `label`, keeping that dimension.

        The range is clamped, and counted from the end, as in Python. Raises `ValueError` if the
        label is unknown, the range is empty, or the step is not positive.

        >>> Shape(["h", "g"], Slice.new_row_major([2, 3])).select("g", slice(0, 3, 2)).ranks()
        [0, 2, 3, 5]
        """
        if not isinstance(slice, builtins.slice):
            raise TypeError(f"select takes a slice such as slice(0, 2), not {slice!r}")
        return self._cut({label: slice})

    def __len__(self) -> int:
        return self._slice._len

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self._labels == other._labels and self._slice == other._slice

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __str__(self) -> str:
        sizes = zip(self._labels, self._slice._sizes, strict=True)
        return "{" + ",".join([f"{label}={size}" for label, size in sizes]) + "}"

    def __repr__(self) -> str:
        labels = ", ".join(map(quoted, self._labels))
        return f"Shape {{ labels: [{labels}], slice: {self._slice} }}"

    def __reduce__(self) -> tuple[type[Shape], tuple[tuple[str, ...], Slice]]:
        return Shape, (self._labels, self._slice)

    def _cut(self, cuts: Mapping[str, int | slice]) -> Shape:
        """Cut each named dimension: a number removes it, a slice narrows it."""
        rest = dict(cuts)
        offset = self._slice._offset
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(
            self._labels, self._slice._sizes, self._slice._strides, strict=True
        ):
            cut = rest.pop(label, None)
            if cut is None:
                kept, step = size, 1
            elif isinstance(cut, slice):
                start, stop, step = cut.indices(size)
                if step < 0:
                    raise ValueError(
                        f"negative step {step} for dimension {label}: ranks of a mesh ascend"
                    )
                if start >= stop:  # the error shows the given range, not the clamped one
                    given = cut.start or 0, size if cut.stop is None else cut.stop, step
                    kind = "out of range" if start >= size else "empty range"
                    raise ValueError(_refused(kind, *given, label, size))
                kept = len(range(start, stop, step))
                offset += start * stride
            else:
                if cut >= size:
                    raise ValueError(_refused("out of range", cut, cut + 1, 1, label, size))
                offset += cut * stride
                continue
            labels.append(label)
            sizes.append(kept)
            strides.append(stride * step)
        if rest:
            unknown = ", ".join(map(quoted, rest))
            raise ValueError(f"invalid labels `[{unknown}]`; the dimensions are {self}")
        return shape_of(tuple(labels), slice_of(offset, tuple(sizes), tuple(strides)))


class ShapeExt:
    """Operations on a `Shape` that are not its methods, for historical reasons."""

    __module__ = "monarch._src.actor.shape"

    @staticmethod
    def slice(shape: Shape, /, **cuts: SupportsIndex | builtins.slice) -> Shape:
        """Return the sub-shape cut as `MeshTrait.slice` cuts a mesh.

        A number removes the dimension, a slice narrows it. Raises `TypeError` for an unknown
        label, `IndexError` for a number outside ``0 .. size - 1``, and `ValueError` for a slice
        that selects nothing or has a negative step.

        >>> ShapeExt.slice(Shape(["h", "g"], Slice.new_row_major([2, 3])), h=1, g=slice(1, 3))
        Shape { labels: ["g"], slice: Slice { offset: 4, sizes: [2], strides: [1] } }
        """
        if not cuts:
            return shape
        checked: dict[str, int | builtins.slice] = {}
        for label, cut in cuts.items():
            size = shape.extent.get(label)
            if size is None:
                raise TypeError(
                    f"Shape does not have dimension labeled {label!r}; the dimensions are {shape}"
                )
            if isinstance(cut, builtins.slice):
                checked[label] = cut
            else:
                checked[label] = number = operator.index(cut)
                if not 0 <= number < size:
                    raise IndexError(
                        f"index out of range: {number} for dimension {label} of size {size}"
                    )
        return shape._cut(checked)


_new = object.__new__


def shape_of(labels: tuple[str, ...], slice: Slice) -> Shape:
    """Return a `Shape` of parts that are known to match, without checks."""
    self = _new(Shape)
    self._labels = labels
    self._slice = slice
    self._extent = None
    return self


def _refused(kind: str, start: int, stop: int, step: int, label: str, size: int) -> str:
    return f"{kind} {start}:{stop}:{step} for dimension {label} of size {size}"


_UNITY = shape_of((), slice_of(0, (), ()))
