"""`Extent`: the named sizes of a mesh, without its ranks.

Extents are sent in the header of every message (with the rank they make a `Point`), although a
program has only a handful of them. So everything that a look-up needs is computed when an extent is
made. Decoding is a look-up too: `Extent.from_bytes` caches decoded extents by their bytes. The
cache is bounded in entries and in bytes an entry, since peers choose the bytes. A full cache is
emptied. Recency would cost something at every hit, and no known program has more live extents than
entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, SupportsIndex, final

from monarch._engine.shapes.encoding import Reader, put_count, put_natural, put_text
from monarch._engine.shapes.label import bare, labels_of
from monarch._engine.shapes.natural import naturals
from monarch._engine.shapes.slice import Slice, row_major, slice_of

if TYPE_CHECKING:
    from monarch._engine.shapes.region import Region

_REMEMBERED_EXTENTS = 1024
_REMEMBERED_BYTES = 1024


class MissingDimension(KeyError, ValueError):
    """A label names no dimension.

    Programs written for the interface catch `ValueError` here; a mapping promises `KeyError`, and
    ``get`` and ``in`` rely on it. This class is both.
    """

    __str__ = Exception.__str__  # KeyError would print the repr of the sentence


class _ToRegion(Protocol):
    def __call__(self, extent: Extent, /) -> Region: ...


@final
class Extent(Mapping[str, int]):
    """An ordered, immutable mapping from dimension label to size; hashable and picklable.

    Extents are equal when labels, order and sizes are. A label may occur twice; look-ups find the
    first. Looking up a missing label raises an error that is a `ValueError` and a `KeyError`.

    >>> extent = Extent(["hosts", "gpus"], [2, 3])
    >>> extent, extent["gpus"], extent.nelements, extent.get("zones", 1)
    ({hosts: 2, gpus: 3}, 3, 6, 1)
    """

    __module__ = "monarch._rust_bindings.monarch_hyperactor.shape"
    __slots__ = ("_axes", "_bytes", "_labels", "_nelements", "_sizes")

    _labels: tuple[str, ...]
    _sizes: tuple[int, ...]
    _nelements: int
    _axes: dict[str, tuple[int, int]]  # label -> (size, row-major stride); see point.py
    _bytes: bytes | None

    # Set by region.py, which imports this module; an import here would close a cycle.
    _to_region: ClassVar[_ToRegion]

    def __new__(cls, labels: Iterable[str], sizes: Iterable[SupportsIndex]) -> Extent:
        checked = labels_of(labels), naturals(sizes)
        if len(checked[0]) != len(checked[1]):
            raise ValueError(
                f"label/sizes dimension mismatch: {len(checked[0])} != {len(checked[1])}"
            )
        return extent_of(*checked)

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Extent:
        """Return the extent that `to_bytes` encoded; `ValueError` for any other bytes.

        Equal bytes usually give the same object. Safe on bytes from an untrusted peer.
        """
        key = data if type(data) is bytes else bytes(memoryview(data))
        try:
            return _decoded[key]
        except KeyError:
            return _decode(key)

    def to_bytes(self) -> bytes:
        r"""Return a compact encoding, equal for equal extents. It is computed once and cached.

        >>> Extent(["gpus"], [8]).to_bytes()
        b'\x01\x04gpus\x08'

        Raises `ValueError` beyond 64 dimensions.
        """
        data = self._bytes
        if data is None:
            out = bytearray()
            put_count(out, len(self._labels))
            for label, size in zip(self._labels, self._sizes, strict=True):
                put_text(out, label)
                put_natural(out, size)
            data = self._bytes = bytes(out)
        return data

    @property
    def labels(self) -> list[str]:
        """The labels in order, as a fresh list."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """The sizes in order, as a fresh list."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """The product of the sizes; 1 without dimensions."""
        return self._nelements

    @property
    def region(self) -> Region:
        """The `Region` of ranks ``0 .. nelements - 1`` in row-major order."""
        return Extent._to_region(self)

    @property
    def ndslice(self) -> Slice:
        """The dense `Slice` of ranks ``0 .. nelements - 1`` in row-major order."""
        return slice_of(0, self._sizes, row_major(self._sizes))

    def keys(self) -> list[str]:  # type: ignore[override]  # a list in the interface, not a view
        """Return the labels in order."""
        return list(self._labels)

    def __getitem__(self, label: str) -> int:
        try:
            return self._axes[label][0]
        except KeyError:
            missing(label)

    def __contains__(self, label: object) -> bool:
        return label in self._axes

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Extent):
            return NotImplemented
        return self._sizes == other._sizes and self._labels == other._labels

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        sizes = zip(self._labels, self._sizes, strict=True)
        return "{" + ", ".join([f"{bare(label)}: {size}" for label, size in sizes]) + "}"

    def __reduce__(self) -> tuple[type[Extent], tuple[tuple[str, ...], tuple[int, ...]]]:
        return Extent, (self._labels, self._sizes)


_new = object.__new__


def extent_of(labels: tuple[str, ...], sizes: tuple[int, ...]) -> Extent:
    """Return an `Extent` of labels and sizes that are known to be valid, without checks."""
    axes = {}
    stride = 1
    for label, size in zip(reversed(labels), reversed(sizes), strict=True):
        axes[label] = size, stride  # the first of equal labels is written last
        stride *= size
    self = _new(Extent)
    self._labels = labels
    self._sizes = sizes
    self._nelements = stride
    self._axes = axes
    self._bytes = None
    return self


def missing(label: object) -> NoReturn:
    """Raise the error for a label that names no dimension."""
    if not isinstance(label, str):
        raise TypeError(f"a dimension label must be a string, not {label!r}") from None
    raise MissingDimension(f"Dimension '{label}' not found") from None


_decoded: dict[bytes, Extent] = {}


def _decode(data: bytes) -> Extent:
    reader = Reader(data)
    labels: list[str] = []
    sizes: list[int] = []
    for _ in range(reader.count()):
        labels.append(reader.text())
        sizes.append(reader.natural())
    reader.finish()
    extent = extent_of(tuple(labels), tuple(sizes))
    extent._bytes = data
    if len(data) <= _REMEMBERED_BYTES:
        if len(_decoded) >= _REMEMBERED_EXTENTS:
            _decoded.clear()
        _decoded[data] = extent
    return extent
