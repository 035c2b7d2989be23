"""`Slice`: an ordered set of ranks, described by an offset, sizes and strides.

This is the array layout of every tensor library, applied to ranks: a box of coordinates is mapped
to flat ranks by ``offset + sum(coordinate * stride)``. A mesh of ten thousand procs and any slice
of it stay a few integers, and slicing is arithmetic on them.

Invariant: the map is injective, and invertible by plain division. For that, each stride exceeds the
*span* of all smaller ones, i.e. the distance between the first and the last rank that they reach. A
dimension of size one reaches only one rank and constrains no other. Selecting with offset, stop and
step only shrinks spans and only grows strides, so every sub-slice keeps the invariant and is built
unchecked. (Rejected: the stricter rule "a stride is a multiple of the space below it", since it is
not closed under steps such as ``0:3:2`` on an inner dimension.) Strides need not descend: a
transposed slice is a legal slice.

`len`, ``in``, `get`, `index` and `coordinates` cost a few operations per dimension and never
enumerate. `ranks` is a `range` whenever the ranks form an arithmetic progression. That is the case
for whole meshes, and for rows, columns and blocks of rows; other ranks are enumerated into a tuple.
"""

from __future__ import annotations

import copyreg
import operator
from math import prod
from typing import TYPE_CHECKING, SupportsIndex, final, overload

from monarch._engine.shapes.natural import natural, naturals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense box: the last dimension varies fastest.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    strides.reverse()
    return tuple(strides)


@final
class Slice:
    """Ranks ``offset + sum(coordinate * stride)`` for all coordinates within `sizes`.

    A `Slice` is immutable, hashable and picklable, and behaves as a sequence of ranks in row-major
    order of the coordinates. A slice without dimensions holds exactly one rank, its offset.

    Raises `ValueError` if sizes and strides differ in number or reach one rank twice.

    >>> column = Slice(offset=1, sizes=[2], strides=[3])
    >>> list(column), column.index(4), 3 in column
    ([1, 4], 1, False)
    """

    __module__ = "monarch._rust_bindings.monarch_hyperactor.shape"
    __slots__ = ("_len", "_offset", "_sizes", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]
    _len: int

    def __new__(
        cls,
        *,
        offset: SupportsIndex,
        sizes: Iterable[SupportsIndex],
        strides: Iterable[SupportsIndex],
    ) -> Slice:
        checked = naturals(sizes), naturals(strides)
        _check_injective(*checked)
        return slice_of(natural(offset), *checked)

    @staticmethod
    def new_row_major(sizes: Iterable[SupportsIndex]) -> Slice:
        """Return the dense slice of these sizes: ranks 0, 1, 2, ... in row-major order.

        >>> Slice.new_row_major([2, 3])
        Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }
        """
        checked = naturals(sizes)
        return slice_of(0, checked, row_major(checked))

    @staticmethod
    def from_list(ranks: Iterable[SupportsIndex]) -> list[Slice]:
        """Return one-dimensional slices that together cover `ranks`, in ascending order.

        Greedy: each slice takes as many ranks as continue its first step. A rank that is listed
        twice is covered twice.

        >>> for part in Slice.from_list([0, 1, 2, 4, 6]):
        ...     print(part)
        Slice { offset: 0, sizes: [3], strides: [1] }
        Slice { offset: 4, sizes: [2], strides: [2] }
        """
        ordered = sorted(naturals(ranks))
        parts: list[Slice] = []
        first = 0
        while first < len(ordered):
            end, step = first + 1, 1
            if end < len(ordered) and ordered[end] > ordered[first]:
                step = ordered[end] - ordered[first]
                while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
                    end += 1
            parts.append(slice_of(ordered[first], (end - first,), (step,)))
            first = end
        return parts

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    @property
    def offset(self) -> int:
        """The rank at coordinates ``[0, 0, ...]``."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """The size of each dimension, as a fresh list."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """The distance in ranks between neighbours along each dimension, as a fresh list."""
        return list(self._strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks, in order, are ``offset, offset + 1, ...`` without a gap."""
        ranks = self.as_range()
        return ranks is not None and (ranks.step == 1 or len(ranks) <= 1)

    def ranks(self) -> Sequence[int]:
        """Return all ranks in order: a `range` if they are an arithmetic progression, or a tuple.

        >>> Slice(offset=4, sizes=[2, 2], strides=[2, 1]).ranks()
        range(4, 8)
        >>> Slice(offset=0, sizes=[2, 2], strides=[4, 1]).ranks()
        (0, 1, 4, 5)
        """
        progression = self.as_range()
        if progression is not None:
            return progression
        ranks = [self._offset]
        for size, stride in self._loops():
            steps = range(0, size * stride, stride)
            ranks = [rank + step for rank in ranks for step in steps]
        return tuple(ranks)

    def as_range(self) -> range | None:
        """Return the ranks as a `range`, or None if they are not an arithmetic progression."""
        if self._len == 0:
            return range(0)
        loops = self._loops()
        if not loops:
            return range(self._offset, self._offset + 1)
        if len(loops) > 1:
            return None
        ((size, stride),) = loops
        return range(self._offset, self._offset + size * stride, stride)

    def get(self, index: SupportsIndex) -> int:
        """Return the rank at row-major position `index`; raises `ValueError` if there is none."""
        position = natural(index)
        if position >= self._len:
            raise ValueError(f"index {position} out of range {self._len}")
        return self._rank_at(position)

    def index(self, value: SupportsIndex) -> int:
        """Return the row-major position of rank `value`; raises `ValueError` if not in here."""
        position = 0
        for size, coordinate in zip(self._sizes, self.coordinates(value), strict=True):
            position = position * size + coordinate
        return position

    def coordinates(self, value: SupportsIndex) -> list[int]:
        """Return the coordinates of rank `value`; raises `ValueError` if it is not in here."""
        rank = natural(value)
        found = self._find(rank)
        if found is None:
            raise ValueError(f"value {rank} not in slice")
        return found

    def nditem(self, coordinates: Iterable[SupportsIndex]) -> int:
        """Return the rank at `coordinates`, which are not checked against the sizes.

        Raises `IndexError` if there are not as many coordinates as dimensions.
        """
        checked = naturals(coordinates)
        if len(checked) != len(self._sizes):
            raise IndexError(f"invalid dims: expected {len(self._sizes)}, got {len(checked)}")
        return self._offset + sum([c * s for c, s in zip(checked, self._strides, strict=True)])

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.ranks()[index])
        try:
            position = natural(index)
        except OverflowError as error:
            raise TypeError(f"a slice index must be a natural number: {error}") from None
        if position >= self._len:
            raise IndexError(f"index {position} out of range {self._len}")
        return self._rank_at(position)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def __len__(self) -> int:
        return self._len

    def __contains__(self, value: object) -> bool:
        try:
            rank = operator.index(value)  # type: ignore[arg-type]  # what it is made for
        except TypeError:
            return False
        return self._find(rank) is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        return (
            self._offset == other._offset
            and self._sizes == other._sizes
            and self._strides == other._strides
        )

    def __hash__(self) -> int:
        return hash((self._offset, self._sizes, self._strides))

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"

    def __reduce__(self) -> tuple[object, tuple[type[Slice], tuple[()], dict[str, object]]]:
        state = {"offset": self._offset, "sizes": self._sizes, "strides": self._strides}
        return copyreg.__newobj_ex__, (Slice, (), state)  # type: ignore[attr-defined]  # pickle names it

    def _loops(self) -> list[tuple[int, int]]:
        """Return (size, stride) of the fewest nested loops that visit the ranks in order."""
        loops: list[tuple[int, int]] = []
        for size, stride in zip(self._sizes, self._strides, strict=True):
            if size == 1:
                continue
            if loops and loops[-1][1] == size * stride:
                loops[-1] = (loops[-1][0] * size, stride)
            else:
                loops.append((size, stride))
        return loops

    def _rank_at(self, position: int) -> int:
        rank = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            position, coordinate = divmod(position, size)
            rank += coordinate * stride
        return rank

    def _find(self, rank: int) -> list[int] | None:
        """Return the coordinates of `rank`, or None. The invariant makes division exact."""
        rest = rank - self._offset
        if rest < 0 or self._len == 0:
            return None
        coordinates = [0] * len(self._sizes)
        for dim in sorted(range(len(self._sizes)), key=self._strides.__getitem__, reverse=True):
            size = self._sizes[dim]
            if size > 1:
                coordinates[dim], rest = divmod(rest, self._strides[dim])
                if coordinates[dim] >= size:
                    return None
        return coordinates if rest == 0 else None


_new = object.__new__


def slice_of(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Slice:
    """Return a `Slice` of numbers that are known to be valid, without checks."""
    self = _new(Slice)
    self._offset = offset
    self._sizes = sizes
    self._strides = strides
    self._len = prod(sizes)
    return self


def _check_injective(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if len(sizes) != len(strides):
        raise ValueError(f"invalid dims: expected {len(sizes)}, got {len(strides)}")
    if 0 in sizes:
        return
    span, previous = 0, -1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 1:
            continue
        if stride == previous:
            raise ValueError(f"nonunique strides: {stride} occurs twice")
        if stride <= span:
            raise ValueError(
                f"nonrectangular shape: stride {stride} must be larger than {span}, "
                "the span of the dimensions with smaller strides"
            )
        span += (size - 1) * stride
        previous = stride
