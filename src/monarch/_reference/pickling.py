"""The picklers of the reference, for programs that use them: `flatten`, and tables of reducers.

verl registers codecs at the start of each worker: ``table[cls] = reducer``. The table of
`_TorchPickler` is that of messages, so such a codec serves the arguments and results of endpoints.
The table of `_Pickler` is that of `flatten`, which takes from the other one what it lacks.

`flatten` leaves tensors to torch, which takes them apart into storages and the rest. So its filter
can select storages: verl puts them into shared memory.
"""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from pickle import Unpickler
from typing import TYPE_CHECKING, Any, cast

from monarch import _spi
from monarch._reference.buffers import Buffer

__all__ = [
    "PicklingState",
    "_Pickler",
    "_TorchPickler",
    "_ensure_torch_pickle",
    "flatten",
    "pickle",
    "unflatten",
]

if TYPE_CHECKING:
    from cloudpickle import Pickler as _ByValuePickler
else:
    _ByValuePickler = _spi.by_value_pickler()


class _TorchPickler(_ByValuePickler):
    """Pickles as messages are; an entry of its table is a reducer of messages from then on."""

    dispatch_table = _spi.reducers


class _Pickler(_ByValuePickler):
    """The pickler of `flatten`."""

    _dispatch_table: dict[type, Callable[[Any], Any]] = {}  # noqa: RUF012 - programs write to it
    dispatch_table = ChainMap(  # noqa: RUF012 - programs write to it
        _dispatch_table, cast("dict[type, Any]", _ByValuePickler.dispatch_table)
    )

    def __init__(self, filter: Callable[[Any], object], file: Any) -> None:
        super().__init__(file, 5, None)
        self._filter = filter
        self.saved: list[Any] = []

    @classmethod
    def _init_torch_dispatch(cls) -> None:
        """Enter the reducers of torch's storages, where there are none yet."""
        for kind in _ensure_torch_pickle():
            cls._dispatch_table.setdefault(kind, _spi.reducers[kind])

    def persistent_id(self, obj: Any) -> int | None:
        if not self._filter(obj):
            return None
        self.saved.append(obj)
        return len(self.saved) - 1

    def reducer_override(self, obj: object) -> Any:
        kind = type(obj)
        if (reducer := self._dispatch_table.get(kind)) is not None:
            return reducer(obj)
        torch: Any = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor:
            return NotImplemented
        return super().reducer_override(obj)


class _Unpickler(Unpickler):
    def __init__(self, data: Any, values: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._values = iter(values)

    def persistent_load(self, number: int) -> Any:
        for value in self._values:
            return value
        raise ValueError(
            f"unflatten() needs a value for each object that flatten() has saved: there are only "
            f"{number}"
        )


def _ensure_torch_pickle() -> tuple[type, ...]:
    """Enter the reducers of torch's storages into the table of messages, if torch is loaded.

    Return the classes of storages.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    storages = (torch.UntypedStorage, torch.TypedStorage)
    for kind in storages:
        _spi.reducer_of(kind)
    return storages


def flatten(obj: Any, filter: Callable[[Any], object]) -> tuple[list[Any], Buffer]:
    """Pickle an object without the parts that a filter selects; return these parts, and the pickle.

    A part is saved as often as the object refers to it. Raises the errors of pickling.

    >>> saved, buffer = flatten({"steps": 3, "lock": ...}, lambda part: part is ...)
    >>> saved
    [Ellipsis]
    >>> unflatten(buffer.freeze(), ["a lock of its own"])
    {'steps': 3, 'lock': 'a lock of its own'}
    """
    buffer = Buffer()
    pickler = _Pickler(filter, buffer)
    pickler.dump(obj)
    return pickler.saved, buffer


def unflatten(data: Any, values: Iterable[Any]) -> Any:
    """Unpickle what `flatten` has pickled, with the next of `values` for each part that it saved.

    `data` is bytes, or a buffer. Raises ValueError if there are too few values.
    """
    return _Unpickler(data.freeze() if isinstance(data, Buffer) else data, values).load()


class PicklingState:
    """An object as a message: what `pickle` returns."""

    __slots__ = ("_stream",)

    def __init__(self, obj: Any) -> None:
        self._stream = b"".join(_spi.encode(obj, sys.maxsize).chunks)

    def unpickle(self) -> Any:
        """Return a new copy of the object, as an actor would receive it."""
        return _spi.decode(self._stream)


def pickle(obj: Any) -> PicklingState:
    """Pickle an object as messages are pickled. Raises the errors of pickling.

    >>> pickle([1, 2]).unpickle()
    [1, 2]
    """
    return PicklingState(obj)
