"""Exceptions in payloads: they keep their class, also if it cannot be called again.

pickle rebuilds an exception by calling its class with ``args``. That fails if the constructor takes
something else: `urllib.error.HTTPError`, keyword-only parameters, none at all. So an exception is
sent with all that rebuilds it without the constructor: ``args``, the attributes (and with them the
notes), the values of slots and of the members that built-in classes have beside their attributes,
such as `OSError.filename` and `StopIteration.value`.

Invariants:

* The receiver calls the class, as pickle does. Only if that raises, it calls ``__new__`` of the
  built-in base class. In both cases it sets the rest afterwards. If both raise, the error is that
  of the class.
* A class that has a ``__reduce__`` of its own, or an entry in `copyreg`, is pickled by it alone.
* Causes and contexts are sent as well, as pickle does not. Each is a pickle of its own: one that
  cannot be sent, cannot be rebuilt, or is too large, is replaced by a `RemoteException`, and the
  exception arrives nevertheless.
* Parts are left out only of an exception that cannot be pickled as it is (``leaves_out``). A note
  names them.

Rejected: to rebuild every exception without its constructor, since a class may keep a part of its
state elsewhere, for example in C. Rejected: to try at the sender whether the class can be called
again, since constructors have effects.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from monarch._engine.base.errors import (
    LONGEST_LINE,
    PayloadTooLarge,
    RemoteException,
    text_of,
    type_name,
)

__all__ = ["reduce_exception"]

_LONGEST_CHAIN = 100
"""The number of exceptions of a chain that are sent, the nearest ones."""

_LARGEST_LINK = 1 << 20
"""The bytes that a cause or context may have; larger parts of it are left out."""

_SEARCHED = 100
"""The length of the longest list in which each element is tried."""

_GROUP: type = getattr(builtins, "BaseExceptionGroup", type(None))  # since Python 3.11

# They work for classes that override the names, too.
_ARGS = vars(BaseException)["args"]
_CAUSE = vars(BaseException)["__cause__"]
_CONTEXT = vars(BaseException)["__context__"]
_SUPPRESS = vars(BaseException)["__suppress_context__"]

_ELSEWHERE = (object, BaseException, _GROUP)
"""Classes whose members are sent in other ways."""
_NOT_SENT = frozenset((vars(AttributeError).get("obj"),))
"""Members that are objects of the program, of any size: pickle leaves them out as well."""
_LEFT_OUT = object()
_REASON = 200  # characters of the reason why a part is left out

Picklers: TypeAlias = Callable[[], tuple[Any, Any]]
"""Returns the class of a pickler, and of one that pickles classes by value."""


def reduce_exception(error: BaseException, pickler: Any) -> Any:
    """Return the value of ``reducer_override`` of a pickler of `codec` for an exception."""
    pickler.has_exceptions = True
    kind = type(error)
    linked = _links_of(error, pickler.picklers) if pickler.chained else None
    if not _is_plain(kind):
        return NotImplemented if linked is None else _own_reduction(error, linked)
    reduction: Any = kind.__reduce__(error)
    _, call, values = (*reduction, None)[:3]
    args = _ARGS.__get__(error)
    members = _members(error)
    made_of = args
    if issubclass(kind, _GROUP):
        made_of = tuple(vars(_GROUP)[name].__get__(error) for name in ("message", "exceptions"))
    if pickler.leaves_out:
        parts = _Parts(pickler.picklers, pickler.most)
        call = None
        args, made_of = parts.of("args", args), parts.of("args", made_of)
        values, members = parts.all_of(values or {}), parts.all_of(members)
        if parts.lacks:
            notes = values.get("__notes__")
            values["__notes__"] = [*(notes if isinstance(notes, list) else ()), parts.note()]
    state = (values, None, args, members, linked)
    return rebuilt, (kind, call, made_of), state, None, None, restore


def _is_plain(kind: Any) -> bool:
    """Whether pickle calls the class with ``args``: nothing else was asked for."""
    reduce: Any = kind.__reduce__
    return (
        type(reduce) is types.MethodDescriptorType
        and reduce.__objclass__.__module__ == "builtins"
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind not in copyreg.dispatch_table
    )


def _own_reduction(error: BaseException, linked: Any) -> Any:
    """Return the reduction that the class has asked for, and the chain with it."""
    registered: Any = copyreg.dispatch_table.get(type(error))
    own: Any = error.__reduce_ex__(5) if registered is None else registered(error)
    if not issubclass(type(own), tuple):
        return own  # the name of a global, or an error of the class, as pickle will say
    parts: list[Any] = [*own, None, None, None, None]
    function, args, state, items, pairs, setter = parts[:6]
    return function, args, (state, setter, None, {}, linked), items, pairs, restore


@functools.lru_cache(maxsize=256)
def _members_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the slots of a class, and members of built-in classes; whether each is a slot."""
    found: dict[str, tuple[Any, bool]] = {}
    for cls in kind.__mro__:
        if cls in _ELSEWHERE:
            continue
        own = vars(cls)
        kinds: tuple[type, ...] = (types.MemberDescriptorType,)
        if cls.__module__ == "builtins":
            kinds = (*kinds, types.GetSetDescriptorType)
        for name, member in own.items():
            if isinstance(member, kinds) and member not in _NOT_SENT:
                found.setdefault(name, (member, "__slots__" in own))
    return found


def _members(error: BaseException) -> dict[str, Any]:
    """Return the values of slots, and of members of built-in classes."""
    found: dict[str, Any] = {}
    kind: type = type(error)
    for name, (member, is_slot) in _members_of(kind).items():
        try:
            value = member.__get__(error)
        except AttributeError:  # it is not set
            continue
        if is_slot or value is not None:  # a member in C that is not set is None
            found[name] = value
    return found


# -- the receiver --------------------------------------------------------------------------------


def rebuilt(kind: Any, call: tuple[Any, ...] | None, made_of: tuple[Any, ...]) -> Any:
    """Return an exception of `kind`, made by its constructor or, if that raises, without it.

    Args:
        kind: the class.
        call: the arguments of the class; None: the constructor must not be called.
        made_of: the arguments of ``__new__``.

    If both raise, this raises the error of the constructor.
    """
    problem: Exception | None = None
    if call is not None:
        try:
            made = kind(*call)
            if issubclass(type(made), BaseException):
                return made
        except Exception as error:
            problem = error
    try:
        return _new_of(kind)(kind, *made_of)
    except Exception:
        if problem is None:
            raise
        raise problem from None


def _new_of(kind: Any) -> Any:
    """Return ``__new__`` of the nearest class that is not written in Python."""
    classes: tuple[type, ...] = kind.__mro__
    found = (vars(cls).get("__new__") for cls in classes)
    return next(new for new in found if isinstance(new, types.BuiltinMethodType))


def restore(error: Any, state: tuple[Any, ...]) -> None:
    """Set what an exception has besides the arguments of its class; for pickle."""
    values, setter, args, members, linked = state
    if setter is not None:
        setter(error, values)
    elif args is None:  # of a class with a reduction of its own
        if values is not None:
            error.__setstate__(values)
    else:
        if values is not None:
            _set_attributes(error, values)
        _ARGS.__set__(error, args)
        for name, value in members.items():
            _set_member(error, name, value)
    if linked is not None and issubclass(type(error), BaseException):
        _link(error, *linked)


def _set_attributes(error: BaseException, values: dict[str, Any]) -> None:
    try:
        error.__setstate__(values)
    except Exception:  # the class refuses changes, as a frozen dataclass does
        own: dict[str, Any] = object.__getattribute__(error, "__dict__")
        for name, value in values.items():
            try:
                object.__setattr__(error, name, value)
            except AttributeError:  # a property without a setter
                own[name] = value


def _set_member(error: BaseException, name: str, value: Any) -> None:
    kind: type = type(error)
    member, _ = _members_of(kind).get(name, (None, False))
    if member is not None:  # the class may be another version of that of the sender
        with contextlib.suppress(AttributeError, TypeError):  # read-only: `__new__` has set it
            member.__set__(error, value)


# -- causes and contexts -------------------------------------------------------------------------


def _links_of(error: BaseException, picklers: Picklers) -> Any:
    """Return the chain of an exception for `_link`; None if it has no cause and no context.

    A context that the program has suppressed (``raise ... from None``) is not sent.
    """
    chain, places = [error], {id(error): 0}
    linked: list[tuple[int | None, int | None, bool]] = []
    for each in chain:  # which grows meanwhile
        suppressed: bool = _SUPPRESS.__get__(each)
        cause, context = _CAUSE.__get__(each), _CONTEXT.__get__(each)
        for other in (cause, None if suppressed else context):
            if other is not None and id(other) not in places and len(chain) < _LONGEST_CHAIN:
                places[id(other)] = len(chain)
                chain.append(other)
        linked.append((places.get(id(cause)), places.get(id(context)), suppressed))
    return None if len(chain) == 1 else (linked, [_pickled(e, picklers) for e in chain[1:]])


def _pickled(error: BaseException, picklers: Picklers) -> tuple[bytes | None, str]:
    """Return the pickle of an exception without its chain, if it has one, and its text."""
    summary = f"{type_name(error)}: {text_of(error)[:LONGEST_LINE]}"
    try:
        return _stream(error, picklers, _LARGEST_LINK, leaves_out=True), summary
    except BaseException as problem:  # raised by the exception's own code, or too large
        return None, f"{summary} (the exception could not be pickled: {text_of(problem)})"


def _link(
    error: BaseException,
    linked: list[tuple[int | None, int | None, bool]],
    pickles: list[tuple[bytes | None, str]],
) -> None:
    chain = [error, *(_unpickled(stream, summary) for stream, summary in pickles)]
    for each, (cause, context, suppressed) in zip(chain, linked, strict=True):
        if cause is not None:
            _CAUSE.__set__(each, chain[cause])
        if context is not None:
            _CONTEXT.__set__(each, chain[context])
        _SUPPRESS.__set__(each, suppressed)


def _unpickled(stream: bytes | None, summary: str) -> BaseException:
    if stream is None:
        return RemoteException(summary)
    try:
        found: Any = pickle.loads(stream)
    except BaseException as problem:  # raised by user code: it must not end the receiver
        return RemoteException(f"{summary} (it could not be rebuilt here: {text_of(problem)})")
    is_one = issubclass(type(found), BaseException)
    return cast("BaseException", found) if is_one else RemoteException(summary)


# -- parts that cannot be pickled ----------------------------------------------------------------


class _Parts:
    """Finds the parts of an exception that can be pickled, each by itself in `most` bytes.

    A list or tuple is searched, too. An exception whose parts can be left out in turn is kept.
    """

    def __init__(self, picklers: Picklers, most: int) -> None:
        self.lacks: list[str] = []
        self._picklers = picklers
        self._most = most

    def of(self, name: str, value: Any) -> Any:
        """Return `value` as far as it can be pickled; `_LEFT_OUT` if it cannot be."""
        kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType] - it is any
        if issubclass(kind, BaseException) and _is_plain(kind):
            return value
        try:
            _stream(value, self._picklers, self._most, leaves_out=False)
        except Exception as problem:
            if kind in (list, tuple) and len(value) <= _SEARCHED:
                kept: list[Any] = [self.of(f"{name}[{i}]", part) for i, part in enumerate(value)]
                for i, part in enumerate(value):
                    if kept[i] is _LEFT_OUT:
                        kept[i] = _stand_in(part)
                return kept if kind is list else tuple(kept)
            self.lacks.append(f"{name} (a {kind.__name__}: {text_of(problem)[:_REASON]})")
            return _LEFT_OUT
        return value

    def all_of(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return those of the named values that can be pickled."""
        found = {name: self.of(name, value) for name, value in values.items()}
        return {name: value for name, value in found.items() if value is not _LEFT_OUT}

    def note(self) -> str:
        """Return the text that says what is missing."""
        lacks = list(dict.fromkeys(self.lacks))
        return f"monarch: this copy lacks what could not be sent: {', '.join(lacks)}"


def _stand_in(value: Any) -> Any:
    """Return a text in the place of a value, or an exception in that of an exception."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType] - it is any
    if issubclass(kind, BaseException):
        return RemoteException(f"{type_name(value)}: {text_of(value)}")
    if kind.__module__ == "builtins":  # its text may be as large as the value
        return f"<a {kind.__name__} that could not be sent>"
    return text_of(value)


def _stream(value: Any, picklers: Picklers, most: int, *, leaves_out: bool) -> bytes:
    """Pickle a part by itself, without chains. Raises the error of pickling it, if too large, too.

    With `leaves_out`, parts of exceptions in it are left out rather than that.
    """
    plain, by_value = picklers()
    problem: Exception | None = None
    for make, leaves in ((plain, False), (by_value, False), (by_value, True))[: 2 + leaves_out]:
        chunks = _Chunks(most)
        pickler = make(chunks, 5, buffer_callback=None)
        pickler.chained, pickler.leaves_out, pickler.most = False, leaves, most
        try:
            pickler.dump(value)
            return b"".join(chunks.chunks)
        except Exception as error:
            problem = error
    assert problem is not None  # each attempt returns or has one
    raise problem


class _Chunks:
    """The file that a pickler of a part writes to; refuses more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self.chunks: list[Any] = []
        self._left = most

    def write(self, chunk: Any) -> None:
        """Keep a chunk. Raises PayloadTooLarge."""
        self._left -= memoryview(chunk).nbytes
        if self._left < 0:
            raise PayloadTooLarge("it is too large to be sent with an exception")
        self.chunks.append(chunk)
