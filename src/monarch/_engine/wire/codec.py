"""Objects to payloads and back: pickle protocol 5, big buffers out of band.

`encode` tries the C pickler first, which calls `reducer_override` for functions, classes and
instances only. For an object that must travel by value (defined in ``__main__``, in a function,
interactively), `reducer_override` raises `_ByValue`. Then, and for anything that plain pickle
refuses, cloudpickle pickles the whole object. Plain arguments never pay for that.

Buffers (numpy arrays, `PickleBuffer`, tensors and storages by the table of reducers) of at least
`threshold` bytes stay out of the pickle stream, and large `bytes` are handed over by the C pickler
as they are, without a copy. A payload is a list of chunks and a list of buffers. The transport puts
them into a shared segment or on a socket, or copies them.

Exceptions keep their class, their causes and contexts (`exception`). If an object cannot be
pickled, and there are exceptions in it, it is tried once more, without those parts of the
exceptions that cannot be.

A class that travels by value is made once per process: instances that come back to the process
where it was defined are of that very class, and it stays as it is there. The state that comes back
with them is a copy, and its functions have copied globals.

Tensors and large `bytes` have modules of their own (`tensor`, `bulk`); higher layers register
reducers for other types that plain pickle handles badly (`register_reducer`).
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import PayloadTooLarge, user_stacklevel
from monarch._engine.wire.bulk import BULK, Bulk
from monarch._engine.wire.tensor import tensor_reducer

__all__ = [
    "Payload",
    "UnsendableResult",
    "by_value_pickler",
    "decode",
    "encode",
    "encode_call",
    "encode_result",
    "loads",
    "reducer_of",
    "reducers",
    "register_reducer",
    "travels_by_name",
]

Reducer = Callable[[Any], Any]

reducers: dict[type, Reducer] = {}
"""``{class: reducer}`` for the instances of exactly that class. Programs write to it, too."""
loads = pickle.loads
"""`decode` for a stream without buffers, without the cost of a Python call."""
_dumps = pickle.dumps
_NO_BUFFERS: list[memoryview] = []
_UNLIMITED = sys.maxsize


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Have instances of exactly `cls` pickled by `reducer(obj) -> __reduce__ value`."""
    reducers[cls] = reducer


class _ByValue(Exception):
    """Control flow: this object needs cloudpickle."""


_function_types = (types.FunctionType, type)
_own: dict[int, Any] = {}  # by id: functions and classes of this package, which travel by name

# The script; and what it is called in the children of multiprocessing that are not forked.
_SCRIPT = frozenset(("__main__", "__mp_main__"))


def travels_by_name(obj: Any) -> bool:
    """Whether the other side can import a function or class by its module and name."""
    if _own.get(id(obj)) is obj:
        return True
    module_name = getattr(obj, "__module__", None)
    if module_name is None or module_name in _SCRIPT:
        return False
    module = sys.modules.get(module_name)
    if module is None:
        if not module_name.startswith("monarch."):
            return False
        # Our public classes name the paths that programs know, which load on demand.
        module = importlib.import_module(module_name)
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not obj:
        return False
    if module_name.startswith("monarch."):
        _own[id(obj)] = obj
        return True
    cloudpickle = sys.modules.get("cloudpickle")
    if cloudpickle is None:
        return True
    by_value = cloudpickle.list_registry_pickle_by_value()
    return not any(module_name == name or module_name.startswith(name + ".") for name in by_value)


class _ExceptionOptions:
    """How a pickler pickles exceptions; see `exception`."""

    chained = True
    """Whether their causes and contexts are sent."""
    leaves_out = False
    """Whether parts that cannot be pickled are left out."""
    most = _UNLIMITED
    """The number of bytes that the pickle may have, for the search for such parts."""
    has_exceptions = False
    """Whether there was an exception in what was pickled."""

    @staticmethod
    def picklers() -> tuple[Any, Any]:
        """Return the class of a pickler, and of one that pickles classes by value."""
        return _Pickler, by_value_pickler()


class _Pickler(_ExceptionOptions, pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, _function_types):
            if travels_by_name(obj):
                return NotImplemented
            raise _ByValue
        kind = type(obj)
        reducer = reducer_of(kind)
        if reducer is not None:
            return reducer(obj)
        return _reduce_exception(obj, self) if issubclass(kind, BaseException) else NotImplemented


def _reduce_exception(error: Any, pickler: Any) -> Any:
    from monarch._engine.wire.exception import reduce_exception  # cold

    return reduce_exception(error, pickler)


def _reduce_file(file: io.TextIOWrapper) -> Any:
    """Refuse files except the standard streams: cloudpickle would send a copy of the content."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"cannot pickle an open file: send its name ({file.name!r}), or what is in it")


reducers[io.TextIOWrapper] = _reduce_file


def reducer_of(kind: type) -> Reducer | None:
    """Return the reducer of instances of exactly `kind`; None for those that pickle knows."""
    reducer = reducers.get(kind)
    if (
        reducer is None
        and kind.__module__ in ("torch", "torch.storage")  # no set: it would hash the name
        and (reducer := tensor_reducer(kind))
    ):
        reducers[kind] = reducer
    return reducer


class _Chunks(list[Any]):
    """The file that a pickler writes to: keeps all chunks and copies none."""

    write = list[Any].append


class Payload:
    """An encoded object: pickle `chunks` and out-of-band `buffers`, written once per cast.

    `stream` is the pickle stream when it is small, else None. `stored` is where a transport keeps
    the shared copy it made for the first receiver. Raises PayloadTooLarge above `limit` bytes.
    """

    __slots__ = ("buffers", "chunks", "nbytes", "stored", "stream")

    def __init__(
        self,
        chunks: list[Any],
        buffers: list[memoryview],
        threshold: int,
        limit: int = _UNLIMITED,
    ) -> None:
        self.chunks = chunks
        self.buffers = buffers
        self.stored: Any = None
        if not buffers and len(chunks) == 1 and len(chunks[0]) < threshold:
            self.stream: bytes | None = chunks[0]
            self.nbytes = size = len(chunks[0])
        else:
            size = sum(memoryview(chunk).nbytes for chunk in chunks)
            self.nbytes = size + sum(buffer.nbytes for buffer in buffers)
            self.stream = b"".join(chunks) if not buffers and size < threshold else None
        if self.nbytes > limit:
            raise PayloadTooLarge(
                f"the message has {self.nbytes} bytes, more than the limit of {limit} "
                "(configuration key codec_max_frame_length); send it in parts, or raise the limit"
                f"{see_page('message-too-large')}"
            )


_ATOMS = frozenset((int, float, bool, type(None), complex))
_NO_ARGUMENTS = _dumps(((), {}), 5)
_SHORT = 1024


def encode_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], threshold: int, limit: int = _UNLIMITED
) -> Payload:
    """Encode the arguments of a call; plain scalars and short `bytes` skip the pickler's set-up."""
    scalars = not kwargs
    for value in args:
        kind: type = type(value)  # pyright: ignore[reportUnknownVariableType] - it is any
        if kind in _ATOMS:
            continue
        if kind is bytes:
            if len(value) < BULK:
                continue
            args = tuple(map(_bulk, args))
            scalars = False
            break
        if kind is not str or len(value) > _SHORT:
            scalars = False
    if scalars and len(args) < 64:
        stream = _dumps((args, kwargs), 5) if args else _NO_ARGUMENTS
        return Payload([stream], _NO_BUFFERS, threshold, limit)
    if kwargs:
        kwargs = {name: _bulk(value) for name, value in kwargs.items()}
    return encode((args, kwargs), threshold, limit)


class UnsendableResult(Exception):
    """An endpoint's result that cannot be pickled, and the error of pickling it."""

    def __init__(self, value: Any, error: TypeError | pickle.PicklingError) -> None:
        super().__init__(value, error)
        self.value = value
        self.error = error


def encode_result(value: Any, threshold: int, limit: int = _UNLIMITED) -> Payload:
    """Encode an endpoint's result; plain scalars skip the pickler's set-up.

    Raises UnsendableResult, or an error of the result's class.
    """
    kind: type = type(value)  # pyright: ignore[reportUnknownVariableType] - it is any
    if kind in _ATOMS or (kind is str and len(value) < _SHORT):
        return Payload([_dumps(value, 5)], _NO_BUFFERS, threshold, limit)
    try:
        return encode(_bulk(value), threshold, limit)
    except (TypeError, pickle.PicklingError) as error:
        raise UnsendableResult(value, error) from None


def _bulk(value: Any) -> Any:
    if type(value) is bytes and len(value) >= BULK:
        if len(value) >= _HUGE:
            _advise()
        return Bulk(value)
    return value


_HUGE = 1 << 28


@functools.lru_cache(maxsize=1)  # once per process, of whatever size
def _advise() -> None:
    """Warn that an array is faster than huge `bytes`."""
    warnings.warn(
        f"a message has bytes of more than {_HUGE >> 20} MiB, which every receiver copies; an "
        "array over them, numpy.frombuffer(data, 'u1'), is handed over without a copy",
        UserWarning,
        stacklevel=user_stacklevel(),
    )


def encode(obj: Any, threshold: int, limit: int = _UNLIMITED) -> Payload:
    """Encode `obj`. Raises the errors of its pickling, unchanged, and PayloadTooLarge.

    >>> decode(encode(("hello", 1), 65536).stream)
    ('hello', 1)
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous: in band, pickle copies it into shape
            return True
        if view.nbytes < threshold:
            return True
        buffers.append(view)
        return False

    chunks = _Chunks()
    try:
        _Pickler(chunks, 5, buffer_callback=keep).dump(obj)
    except Exception:  # by value, or plain pickle refused: cloudpickle decides, with its own error
        buffers.clear()
        chunks = _Chunks()
        pickler = by_value_pickler()(chunks, 5, buffer_callback=keep)
        try:
            pickler.dump(obj)
        except Exception:
            if not pickler.has_exceptions:
                raise
            buffers.clear()
            chunks = _Chunks()
            pickler = by_value_pickler()(chunks, 5, buffer_callback=keep)
            pickler.leaves_out = True
            pickler.dump(obj)
    return Payload(chunks, buffers, threshold, limit)


def decode(stream: Any, buffers: Any = None) -> Any:
    """Return the object of a pickle `stream` and its `buffers`, which it may keep using."""
    return loads(stream, buffers=buffers)


# Classes that travel by value: those defined here, and those that came from elsewhere.
_defined: weakref.WeakSet[type] = weakref.WeakSet()
_received: weakref.WeakSet[type] = weakref.WeakSet()


def _set_state(setter: Callable[[type, Any], Any], cls: type, state: Any) -> None:
    """Set the state of a received class, unless the class was defined here."""
    if cls not in _defined:
        _received.add(cls)
        setter(cls, state)


@functools.lru_cache
def _setter_with(setter: Callable[[type, Any], Any]) -> Any:
    return functools.partial(_set_state, setter)


def _with_file(reduce: Callable[[types.CodeType], Any], code: types.CodeType) -> Any:
    """Reduce a code object as cloudpickle does, and keep the name of its file.

    cloudpickle replaces the name since 3.1.3. Tracebacks and debuggers need it.
    """
    make, parts = reduce(code)
    return make, tuple(
        code.co_filename if isinstance(part, str) and part == _NO_FILE else part for part in parts
    )


_NO_FILE = "<dynamic-code>"
_by_value_class: Any = None


def by_value_pickler() -> Any:
    """Return cloudpickle's pickler, with the reducers and the care for classes of this module.

    It is called with a file, a protocol, and a callback for buffers or None.
    """
    # cloudpickle costs 10 ms to import: only programs that ship code by value pay.
    global _by_value_class
    if _by_value_class is None:
        import cloudpickle

        if "__mp_main__" in sys.modules:  # cloudpickle takes it for one that can be imported
            cloudpickle.register_pickle_by_value(types.ModuleType("__mp_main__"))

        tables: Any = cloudpickle.Pickler.dispatch_table  # a ChainMap; one map is copyreg's

        class ByValuePickler(_ExceptionOptions, cloudpickle.Pickler):
            def __init__(self, file: io.IOBase, protocol: int, buffer_callback: Any) -> None:
                # The reducers of the base class, in a dict: the pickler, which takes the table when
                # it is made, looks into it for each object.
                table: dict[type, Any] = {}
                for known in reversed(tables.maps):
                    table.update(known)
                table[types.CodeType] = functools.partial(_with_file, table[types.CodeType])
                self.dispatch_table = table
                super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)

            def reducer_override(self, obj: object) -> Any:
                reducer = reducer_of(type(obj))
                if reducer is not None:
                    return reducer(obj)
                if isinstance(obj, _function_types) and travels_by_name(obj):
                    return NotImplemented
                if issubclass(type(obj), BaseException):
                    return _reduce_exception(obj, self)
                reduced = super().reducer_override(obj)
                # Python 3.10 counts `dict[str, int]` among the types; it is pickled as an object.
                if reduced is NotImplemented:
                    return reduced
                if isinstance(obj, type) and len(reduced) == 6:  # with what sets its state
                    if obj not in _received:
                        _defined.add(obj)
                    return (*reduced[:5], _setter_with(reduced[5]))
                return reduced

        _by_value_class = ByValuePickler
    return _by_value_class
