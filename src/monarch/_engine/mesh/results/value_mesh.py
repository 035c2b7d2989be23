"""`ValueMesh`: the results of a call on a mesh, in its shape; each is decoded when first read.

The result of a call with ``options(on_failure="partial")`` also holds failures. Failures are marked
as such (`Failed`), since an endpoint may return an exception as an ordinary value.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import ActorError
from monarch._engine.base.features import picture
from monarch._engine.runtime.proc.body import decode_body, unreadable
from monarch._engine.shapes import MeshTrait, Point, Shape, Slice
from monarch._engine.shapes.point import point_of
from monarch._engine.shapes.shape import shape_of

__all__ = ["Answered", "Failed", "ValueMesh", "failure_of"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


_decoding = threading.RLock()


class _Undecoded:
    """A value as received bytes, decoded when first read; or the error of decoding it."""

    __slots__ = ("_body", "error")

    def __init__(self, body: Any) -> None:
        self._body = body
        self.error: Any = None

    def decode(self) -> Any:
        """Return the value; if it cannot be decoded, this object with its `error` set."""
        if self.error is None:
            try:
                return decode_body(self._body)
            except BaseException as error:  # kept, so that every read raises the same error
                self.error = error
                self._body = None
        return self


class Failed(_Undecoded):
    """The failure of a rank, in the place of its value."""

    __slots__ = ()

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self.error = error


class Answered(_Undecoded):
    """As `_Undecoded`, in a mesh with failures: an error of decoding becomes a `Failed`."""

    __slots__ = ()

    def decode(self) -> Any:
        found = super().decode()
        return Failed(failure_of(self.error)) if found is self else found


def failure_of(error: BaseException) -> Exception:
    """Return `error`, wrapped in an `ActorError` if it is not an `Exception`."""
    if issubclass(type(error), Exception):
        return cast("Exception", error)
    return ActorError(error, "The answer of a remote actor is not an ordinary exception.")


class ValueMesh(MeshTrait, Generic[R_co]):
    """Values in the shape of a mesh; read-only.

    Args:
        shape: labels and sizes of the dimensions.
        values: one per rank, row-major.

    Raises ValueError if the number of values does not fit the shape.

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
        """Make a mesh from (rank, value) pairs in any order.

        Raises ValueError unless every rank of the shape has a value, and no other rank.
        """
        pairs = dict(values)
        if sorted(pairs) != list(range(len(shape))):
            raise ValueError(
                f"invalid value mesh: expected {len(shape)} ranks, but contains {len(pairs)} ranks"
            )
        return ValueMesh(shape, [pairs[rank] for rank in range(len(shape))])

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def get(self, rank: int) -> R_co:
        """Return the value of a rank of this mesh, 0 .. len - 1; ValueError for any other rank.

        If the rank failed, return its exception (see `failures`). Raises the error of decoding a
        value that cannot be decoded here.
        """
        if not 0 <= rank < len(self._cells):
            raise ValueError(f"index {rank} out of range (len={len(self._cells)})")
        return self._at(rank)

    def item(self, **coordinates: int) -> R_co:
        """Return the value at the coordinates, as `get`; all dimensions are required.

        Raises KeyError for missing or unknown dimensions, IndexError for an index that is too
        large, OverflowError for a negative one.
        """
        rank = 0
        extent = self._shape.extent
        extra = [label for label in coordinates if label not in extent]
        if extra:
            known = f"the dimensions are {list(extent)}"
            raise KeyError(f"item has extra dimensions: {extra}; {known}")
        missing = [label for label in extent if label not in coordinates]
        if missing:
            remedy = "name one for each dimension, or use values() for all values"
            raise KeyError(f"item has no index for the dimensions {missing}: {remedy}")
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
        """Yield pairs of (point, value), row-major; points are relative to this mesh."""
        extent = self._shape.extent
        for rank in range(len(self._cells)):
            yield point_of(rank, extent), self._at(rank)

    def values(self) -> list[R_co]:
        """Return the values, row-major; for a rank that failed, its exception (see `failures`)."""
        return [self._at(rank) for rank in range(len(self._cells))]

    def failures(self) -> list[tuple[Point, Exception]]:
        """Return pairs of (point, exception) for the ranks that failed, row-major.

        Only the result of a call with ``options(on_failure="partial")`` has any. An exception that
        an endpoint returned is not a failure, but a value.
        """
        extent = self._shape.extent
        cells = enumerate(self._decoded())
        return [(point_of(rank, extent), c.error) for rank, c in cells if type(c) is Failed]

    def successes(self: ValueMesh[R | Exception]) -> list[tuple[Point, R]]:
        """Return pairs of (point, value) for the ranks that answered, row-major.

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

    if not TYPE_CHECKING:  # for type checkers it is not there

        def __getitem__(self, key: object) -> NoReturn:
            sizes = ", ".join(f"{label}=..." for label in self._labels)
            raise TypeError(
                f"'ValueMesh' object is not subscriptable: use values()[{key!r}] for the value of "
                f"a rank, or item({sizes}){see_page('result-subscript')}"
            )

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
        """Return the value of the rank, or the `Failed` in its place."""
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

    _repr_html_ = picture

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
    """Return the shape with the same extent whose ranks are 0 .. len - 1."""
    extent = shape.extent
    return shape_of(extent._labels, Slice.new_row_major(extent.sizes))


def _set(mesh: Any, name: str, value: Any) -> None:
    object.__setattr__(mesh, name, value)


ValueMesh.__module__ = "monarch._src.actor.actor_mesh"
