"""`ValueMesh`: the results of a call on a mesh, in its shape, decoded one by one when looked at.

The result of a call with ``options(on_failure="partial")`` also holds failures. They are kept apart
from values, since an endpoint may well return an exception as its value.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, NoReturn, TypeVar, cast

from monarch._engine.base.errors import ActorError
from monarch._engine.runtime.body import decode_body, unreadable
from monarch._engine.shapes import MeshTrait, Point, Shape, Slice
from monarch._engine.shapes.point import point_of
from monarch._engine.shapes.shape import shape_of

__all__ = ["Answered", "Failed", "ValueMesh", "failure_of"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


_decoding = threading.RLock()


class _Undecoded:
    """A value still as bytes, decoded by whoever looks first; or the error of doing so."""

    __slots__ = ("_body", "error")

    def __init__(self, body: Any) -> None:
        self._body = body
        self.error: Any = None

    def decode(self) -> Any:
        """The value, or this with its `error` set."""
        if self.error is None:
            try:
                return decode_body(self._body)
            except BaseException as error:  # raised at every look, as the same error
                self.error = error
                self._body = None
        return self


class Failed(_Undecoded):
    """Takes the place of a value that there is not."""

    __slots__ = ()

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self.error = error


class Answered(_Undecoded):
    """A value as bytes, of a mesh with failures: that it cannot be decoded here is one, too."""

    __slots__ = ()

    def decode(self) -> Any:
        found = super().decode()
        return Failed(failure_of(self.error)) if found is self else found


def failure_of(error: BaseException) -> Exception:
    """`error` as what stands in for a value, always an Exception."""
    if issubclass(type(error), Exception):
        return cast("Exception", error)
    return ActorError(error, "The answer of a remote actor is not an ordinary exception.")


class ValueMesh(MeshTrait, Generic[R_co]):
    """Values in the shape of a mesh.

    Args:
        shape: labels and sizes.
        values: one per rank, row-major.

    Raises ValueError when the number of values does not fit the shape.

    >>> from monarch._engine.shapes import Shape, Slice
    >>> ValueMesh(Shape(["gpus"], Slice.new_row_major([2])), [8, 8])
    ValueMesh({gpus: 2}):
      (({'gpus': 0/2}, 8), ({'gpus': 1/2}, 8))
    """

    __slots__ = ("_cells", "_shape", "_source")

    _shape: Shape
    _cells: list[Any]
    _source: str  # the call that gave the values, if they are still to be decoded

    def __init__(self, shape: Shape, values: list[R_co]) -> None:
        if len(values) != len(shape):
            raise ValueError(
                f"invalid value mesh: expected {len(shape)} ranks, but contains {len(values)} ranks"
            )
        _set(self, "_shape", shape)
        _set(self, "_cells", list(values))

    @classmethod
    def _lazy(cls, shape: Shape, bodies: list[Any], source: str) -> ValueMesh[Any]:
        self = cls._of_cells(shape, [_Undecoded(body) for body in bodies])
        _set(self, "_source", source)
        return self

    @classmethod
    def _of_cells(cls, shape: Shape, cells: list[Any]) -> ValueMesh[Any]:
        self: ValueMesh[Any] = object.__new__(cls)
        _set(self, "_shape", _dense(shape))
        _set(self, "_cells", cells)
        return self

    @staticmethod
    def from_indexed(shape: Shape, values: Iterable[tuple[int, R]]) -> ValueMesh[R]:
        """A mesh from (rank, value) pairs in any order; each rank exactly once."""
        pairs = dict(values)
        if sorted(pairs) != list(range(len(shape))):
            raise ValueError(
                f"invalid value mesh: expected {len(shape)} ranks, but contains {len(pairs)} ranks"
            )
        return ValueMesh(shape, [pairs[rank] for rank in range(len(shape))])

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def get(self, rank: int) -> R_co:
        """The value of the local rank, 0 .. len - 1. Raises ValueError outside."""
        if not 0 <= rank < len(self._cells):
            raise ValueError(f"index {rank} out of range (len={len(self._cells)})")
        return self._at(rank)

    def item(self, **coordinates: int) -> R_co:
        """The value at the coordinates; all dimensions are required.

        Raises KeyError for missing or unknown dimensions, IndexError outside the shape.
        """
        rank = 0
        extent = self._shape.extent
        extra = [label for label in coordinates if label not in extent]
        if extra:
            known = f"the dimensions are {list(extent)}"
            raise KeyError(f"item has extra dimensions: {extra}; {known}")
        for label in extent:
            size = extent[label]
            index = coordinates[label]
            if index < 0:
                raise OverflowError(f"negative index {index} for dimension {label}")
            if index >= size:
                raise IndexError(
                    f"rank {rank * size + index} not in current shape: index {index} of "
                    f"dimension {label}, which has size {size}"
                )
            rank = rank * size + index
        return self._at(rank)

    def items(self) -> Generator[tuple[Point, R_co], None, None]:
        """Pairs of (point, value), row-major; points are relative to this mesh."""
        extent = self._shape.extent
        for rank in range(len(self._cells)):
            yield point_of(rank, extent), self._at(rank)

    def values(self) -> list[R_co]:
        """The values, row-major; of a rank that failed, the exception (see `failures`)."""
        return [self._at(rank) for rank in range(len(self._cells))]

    def failures(self) -> list[tuple[Point, Exception]]:
        """Pairs of (point, exception) for the ranks that failed, row-major.

        Only a call with ``options(on_failure="partial")`` has any. An exception that an endpoint
        returned is a value like others.
        """
        extent = self._shape.extent
        cells = enumerate(self._decoded())
        return [(point_of(rank, extent), c.error) for rank, c in cells if type(c) is Failed]

    def successes(self: ValueMesh[R | Exception]) -> list[tuple[Point, R]]:
        """Pairs of (point, value) for the ranks that answered, row-major.

        >>> from monarch._engine.shapes import Shape, Slice
        >>> mesh = ValueMesh(Shape(["gpus"], Slice.new_row_major([2])), [7, 8])
        >>> mesh.successes(), mesh.failures()
        ([({'gpus': 0/2}, 7), ({'gpus': 1/2}, 8)], [])
        """
        extent = self._shape.extent
        cells = enumerate(self._decoded())
        return [(point_of(rank, extent), c) for rank, c in cells if type(c) is not Failed]

    def __iter__(self) -> Iterator[tuple[Point, R_co]]:
        return iter(self.items())

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self._shape.labels)

    def _new_with_shape(self, shape: Shape) -> ValueMesh[R_co]:
        ranks = self._shape.ranks()
        if ranks == list(range(len(ranks))):
            picked = [self._cell(rank) for rank in shape.ranks()]
        else:
            place = {rank: index for index, rank in enumerate(ranks)}
            picked = [self._cell(place[rank]) for rank in shape.ranks()]
        return ValueMesh(_dense(shape), picked)

    def _at(self, rank: int) -> R_co:
        cell: Any = self._cells[rank]
        if isinstance(cell, _Undecoded):
            cell = self._cell(rank)
            if type(cell) is Failed:
                cell = cell.error
        found: R_co = cell
        return found

    def _cell(self, rank: int) -> Any:
        """The value of the rank, or the `Failed` in its place."""
        cell: Any = self._cells[rank]
        if isinstance(cell, _Undecoded):
            with _decoding:
                cell = self._cells[rank]
                if isinstance(cell, _Undecoded):
                    cell = self._cells[rank] = cell.decode()
        if type(cell) is _Undecoded:
            error = cell.error
            if isinstance(error, (ImportError, AttributeError, SystemExit)):
                where = point_of(rank, self._shape.extent)
                error = unreadable(error, f"the result of {self._source} at {where}")
            raise error.with_traceback(None)
        return cell

    def _decoded(self) -> list[Any]:
        return [self._cell(rank) for rank in range(len(self._cells))]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"ValueMesh is read-only: cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        cells = self._decoded()
        failed = [rank for rank, cell in enumerate(cells) if type(cell) is Failed]
        if failed:
            return _rebuild_partial, (self._shape, self.values(), failed)
        return ValueMesh, (self._shape, cells)

    def __repr__(self) -> str:
        import pprint
        import textwrap

        pairs = pprint.pformat(tuple(self.items()), width=78)
        return f"ValueMesh({self._shape.extent}):\n{textwrap.indent(pairs, '  ')}"


def _rebuild_partial(shape: Shape, values: list[Any], failed: list[int]) -> ValueMesh[Any]:
    for rank in failed:
        values[rank] = Failed(values[rank])
    return ValueMesh(shape, values)


def _dense(shape: Shape) -> Shape:
    """The shape with the same extent whose ranks are 0 .. len - 1."""
    extent = shape.extent
    return shape_of(extent._labels, Slice.new_row_major(extent.sizes))


def _set(mesh: Any, name: str, value: Any) -> None:
    object.__setattr__(mesh, name, value)


ValueMesh.__module__ = "monarch._src.actor.actor_mesh"
