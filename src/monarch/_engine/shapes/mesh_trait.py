"""`MeshTrait`: slicing, renaming and measuring, the same for every kind of mesh.

Hosts, procs, actors and values form meshes, and all of them are sliced in the same way. A subclass
provides its ranks and labels, and a way to make another mesh of its kind with a different shape;
this class does the geometry. No operation here copies ranks or communicates.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING, SupportsIndex

from monarch._engine.shapes.extent import Extent, MissingDimension, extent_of
from monarch._engine.shapes.shape import Shape, ShapeExt
from monarch._engine.shapes.slice import Slice, row_major, slice_of

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self


class MeshTrait(ABC):
    """Slicing, renaming and measuring, for classes that provide three members.

    >>> class Ranks(MeshTrait):
    ...     def __init__(self, shape): self.shape = shape
    ...     @property
    ...     def _ndslice(self): return self.shape.ndslice
    ...     @property
    ...     def _labels(self): return tuple(self.shape.labels)
    ...     def _new_with_shape(self, shape): return Ranks(shape)
    >>> mesh = Ranks(Shape(["hosts", "gpus"], Slice.new_row_major([2, 4])))
    >>> mesh.slice(hosts=1, gpus=slice(2, 4)).shape.ranks()
    [6, 7]
    >>> mesh.split(gpus=("pipeline", "tensor"), tensor=2).sizes
    {'hosts': 2, 'pipeline': 2, 'tensor': 2}
    >>> mesh.flatten("rank").sizes
    {'rank': 8}
    """

    __module__ = "monarch._src.actor.shape"
    __slots__ = ()

    @property
    @abstractmethod
    def _ndslice(self) -> Slice:
        """The ranks of this mesh."""

    @property
    @abstractmethod
    def _labels(self) -> tuple[str, ...]:
        """The labels of the dimensions, in order."""

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Self:
        """Return a mesh of the same kind over the ranks of `shape`."""

    def _in_columns(self, column: str, values: Iterable[object]) -> str:
        """Return the coordinates of all elements, and a value of each, in columns of text."""
        points = itertools.product(*map(range, self._ndslice.sizes))
        rows = [(*self._labels, column)]
        for point, value in zip(points, values, strict=True):
            rows.append((*map(str, point), str(value)))
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [map(str.rjust, row, widths) for row in rows]
        return "\n".join(map("  ".join, lines))

    def slice(self, /, **cuts: SupportsIndex | builtins.slice) -> Self:
        """Return the sub-mesh at the given coordinates.

        A number removes its dimension, a `slice` narrows it; dimensions not named stay whole.
        ``mesh.slice(**point)`` is the element at `point`. Raises `TypeError` for an unknown label,
        `IndexError` for a number outside ``0 .. size - 1``, and `ValueError` for a slice that
        selects nothing or has a negative step.
        """
        return self._new_with_shape(ShapeExt.slice(Shape(self._labels, self._ndslice), **cuts))

    def split(self, /, **dims: Sequence[str] | int) -> Self:
        """Return this mesh with dimensions replaced by several smaller ones.

        ``split(dim=("a", "b"), b=2)`` replaces `dim` by `a` and `b`, the latter of size 2. Of the
        dimensions that replace one, at most one size may be left out. The order of ranks is kept.
        Raises `ValueError` if the sizes do not multiply to the size of the replaced dimension,
        cannot be inferred or are not used, if a label is unknown, or if labels collide.
        """
        parts, given = self._split_arguments(dims)
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        ndslice = self._ndslice
        for dim, size, stride in zip(self._labels, ndslice._sizes, ndslice._strides, strict=True):
            names = parts.get(dim, (dim,))
            inner = _sizes_of_parts(dim, size, names, given) if dim in parts else (size,)
            labels.extend(names)
            sizes.extend(inner)
            strides.extend([stride * step for step in row_major(inner)])
        unused = tuple(
            label for label in given if not any(label in part for part in parts.values())
        )
        if unused:
            raise ValueError(f"unused size constraints: {unused}")
        for position, label in enumerate(labels):
            if label in labels[:position]:
                raise ValueError(f"Duplicate dimension name {label!r}")
        return self._new_with_shape(
            Shape(labels, slice_of(ndslice._offset, tuple(sizes), tuple(strides)))
        )

    def flatten(self, name: str) -> Self:
        """Return this mesh with all its dimensions replaced by one, in the order of the ranks.

        Raises `ValueError` unless the ranks are equally spaced, as they are in a whole mesh, in
        one row or column of it, and in a block of whole rows.
        """
        ndslice = self._ndslice
        ranks = ndslice.as_range()
        if ranks is None:
            raise ValueError(
                f"cannot flatten sparse mesh: ndslice.strides={ndslice.strides} != "
                f"dense_strides={list(row_major(ndslice._sizes))}, and the ranks are not "
                "equally spaced"
            )
        return self._new_with_shape(
            Shape((name,), slice_of(ndslice._offset, (len(ranks),), (ranks.step,)))
        )

    def rename(self, /, **names: str) -> Self:
        """Return this mesh with dimensions renamed, ``rename(old="new")``.

        Raises `ValueError` if the old name is unknown or the new one is taken.
        """
        return self.split(**{old: (new,) for old, new in names.items()})

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the size of one dimension, the product of several, or of all by default.

        Raises `KeyError` (which is a `ValueError` too) if there is no such dimension.
        """
        if dim is None:
            return len(self)
        extent = self.extent
        sizes: list[int] = []
        for label in (dim,) if isinstance(dim, str) else dim:
            if label not in extent:
                raise MissingDimension(f"{self!r} does not have dimension {label!r}")
            sizes.append(extent[label])
        return prod(sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Label to size, in order, as a fresh dict."""
        return dict(zip(self._labels, self._ndslice._sizes, strict=True))

    @property
    def extent(self) -> Extent:
        """The labels and sizes, as an `Extent`."""
        return extent_of(tuple(self._labels), self._ndslice._sizes)

    def __len__(self) -> int:
        return len(self._ndslice)

    def _split_arguments(
        self, dims: dict[str, Sequence[str] | int]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
        """Separate the dimensions to split from the sizes of new ones."""
        parts: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for label, value in dims.items():
            if isinstance(value, int):
                given[label] = int(value)
            elif label not in self._labels:
                raise ValueError(
                    f"{label!r} is not an existing dim. "
                    "Expected an integer size constraint on a new dim."
                )
            elif isinstance(value, str):
                raise ValueError(f"expected a sequence of dimensions, but got {value!r}")
            else:
                parts[label] = tuple(value)
        return parts, given


def _sizes_of_parts(
    dim: str, size: int, names: tuple[str, ...], given: dict[str, int]
) -> tuple[int, ...]:
    """Return the sizes of the dimensions that replace `dim`, inferring at most one."""
    unknown = [name for name in names if name not in given]
    if len(unknown) > 1:
        first, second = unknown[-1], unknown[-2]
        raise ValueError(
            f"Cannot infer size of {names} because both {first} and {second} have unknown size. "
            f"Specify at least one as argument, e.g. {first}=4"
        )
    sizes = [given[name] for name in names if name in given]
    known = prod(sizes)
    missing, rest = divmod(size, known) if min(sizes, default=1) > 0 else (0, 1)
    if rest or (missing != 1 and not unknown):
        shown = tuple(given.get(name, "?") for name in names)
        raise ValueError(
            f"Dimension {dim!r} of size {size} is not evenly divided by {names} with sizes {shown}"
        )
    return tuple(given.get(name, missing) for name in names)
