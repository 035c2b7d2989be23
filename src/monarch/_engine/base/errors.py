"""Every exception that the runtime raises, in one small tree.

``ActorError``        the endpoint raised: user code on the other side failed, the actor lives on.
``SupervisionError``  the actor, its process or its mesh has failed, is exiting, or was stopped.
``DeadlockError``     actors wait for each other in a cycle; it is raised in one of them.
``BackpressureError`` a receiver stayed full for longer than the configured time.
``PayloadTooLarge``   a message is larger than the configured limit; refused at the call.
``ProtocolError``     a peer sent bytes that are not our protocol; never the user's fault.

Misuse is reported with the built-in types (``TypeError``, ``ValueError``, ``RuntimeError``...).
``ActorError`` and ``SupervisionError`` report the module paths under which programs written for the
reference match and unpickle them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

from monarch._engine.base.error_page import see_page
from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import STOPPED

__all__ = [
    "ActorError",
    "BackpressureError",
    "DeadlockError",
    "PayloadTooLarge",
    "ProtocolError",
    "RemoteException",
    "SupervisionError",
    "UnhandledFaultHookException",
    "WouldBlockRuntime",
    "is_engine_frame",
    "is_package_frame",
    "user_stacklevel",
]

_HEADER = "Traceback (most recent call last):"
_REMOTE_HEADER = "Traceback of where the remote call failed (most recent call last):"


LONGEST_TEXT = 1 << 16
"""The number of characters of a traceback that are kept, half at the beginning, half at the end."""

LONGEST_LINE = 1 << 11
"""The same for a text of one line, such as the message of an exception."""

_IS_MISPLACED = "only works in main thread"  # of `signal`, and of the event loop's handlers
_IN_MAIN_THREAD = """
The main thread of a process runs the first actor that is spawned on it by another process, and \
further ones have threads of their own: spawn this actor first, or on a process of its own."""


def format_remote(exception: BaseException) -> str:
    """Return the traceback of `exception` as its user sees it: without frames of the engine.

    Engine frames are the same for every call and push the relevant lines off the screen. Those
    before the first frame of user code are always omitted. Those after the last are omitted if the
    engine raised one of its own errors, since then the user's line is the relevant one. The whole
    chain is shown.

    Never raises, whatever the code of the exception's class does. At most `LONGEST_TEXT`
    characters.
    """
    try:
        report = _shortened(_with_public_names(_format_remote(exception)), LONGEST_TEXT)
        return report + _IN_MAIN_THREAD if _IS_MISPLACED in report else report
    except BaseException as problem:
        return f"{_REMOTE_HEADER}\n{_frames(exception)}{_without_text(exception, problem)}"


def format_all(exception: BaseException) -> str:
    """Return the traceback of `exception` with all frames. Never raises."""
    try:
        import traceback  # loaded late: only failures need it

        return _shortened("".join(traceback.format_exception(exception)).rstrip(), LONGEST_TEXT)
    except BaseException as problem:
        return _without_text(exception, problem)


def _format_remote(exception: BaseException) -> str:
    import traceback  # loaded late: only failures need it

    report = traceback.TracebackException.from_exception(exception)
    seen: set[int] = set()
    pending: list[tuple[Any, Any]] = [(report, exception)]
    while pending:
        shown, error = pending.pop()
        if shown is None or error is None or id(shown) in seen:
            continue
        seen.add(id(shown))
        pending.append((shown.__cause__, error.__cause__))
        pending.append((shown.__context__, error.__context__))
        if getattr(shown, "exceptions", None):  # an exception group
            pending += zip(shown.exceptions, error.exceptions, strict=False)
        stack = shown.stack
        while stack and is_engine_frame(stack[0].filename):
            del stack[0]
        if issubclass(type(error), _DELIBERATE):
            while stack and is_engine_frame(stack[-1].filename):
                del stack[-1]
    lines = [_shortened(line, LONGEST_TEXT) for line in report.format()]
    return "".join(lines).replace(_HEADER, _REMOTE_HEADER).rstrip("\n")


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters left out ... {text[-half:]}"


# works for a class that overrides it, too
_TRACEBACK = vars(BaseException)["__traceback__"].__get__


def _frames(exception: BaseException) -> str:
    """Return the frames of user code, for an exception whose text cannot be made."""
    try:
        import traceback  # loaded late: only failures need it

        found = traceback.extract_tb(_TRACEBACK(exception))
        lines = traceback.format_list(
            [frame for frame in found if not is_engine_frame(frame.filename)]
        )
        return _shortened("".join(lines), LONGEST_TEXT)
    except BaseException:
        return ""


def type_name(exception: BaseException) -> str:
    """Return the name of the exception's class, with that of the module. Never raises."""
    kind = type(exception)
    if kind in _PUBLIC:
        return _PUBLIC[kind]
    try:
        return _shortened(f"{kind.__module__}.{kind.__qualname__}", LONGEST_LINE)
    except BaseException:
        return "an exception whose class has no name"


def text_of(exception: BaseException) -> str:
    """Return `str(exception)`, at most `LONGEST_TEXT` characters. Never raises."""
    try:
        return _shortened(f"{exception}", LONGEST_TEXT)
    except BaseException as problem:
        return f"<its text could not be made: {type_name(problem)}>"


def _without_text(exception: BaseException, problem: BaseException) -> str:
    return f"{type_name(exception)}: <its text could not be made: {type_name(problem)}>"


_ENGINE_DIR = __file__.rsplit("base", 1)[0]
_PACKAGE_DIR = __file__.rsplit("_engine", 1)[0]


def is_engine_frame(filename: str) -> bool:
    """Whether the code in this file belongs to the runtime, not to the user."""
    return filename.startswith(_ENGINE_DIR)


def is_package_frame(filename: str) -> bool:
    """Whether the code in this file belongs to this package: to the runtime or to a feature."""
    return filename.startswith(_PACKAGE_DIR)


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the caller of this function warns at the user's line."""
    level, frame = 1, sys._getframe(1)
    while is_package_frame(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def is_ours(exception: BaseException) -> bool:
    """Whether the engine itself raised the exception, not code that the engine called."""
    trace = _TRACEBACK(exception)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_engine_frame(trace.tb_frame.f_code.co_filename)


def headline(exception: BaseException) -> str:
    """Return the type and text of `exception` in one line.

    For an exception that reports another, the line includes the other's. Never raises, whatever the
    code of the exception's class does. At most `LONGEST_LINE` characters.
    """
    try:
        return _shortened(_with_public_names(_headline(exception)), LONGEST_LINE)
    except BaseException as problem:
        return _without_text(exception, problem)


def _headline(exception: BaseException) -> str:
    if isinstance(exception, ActorError):
        return f"ActorError: {exception.message} {headline(exception.exception)}"
    if isinstance(exception, SupervisionError) and exception.failure is not None:
        root = exception.failure.root
        return f"SupervisionError: {root.actor} {root.kind}: {_first_line(root.error)}"
    import traceback  # loaded late: only failures need it

    lines = traceback.format_exception_only(type(exception), exception)
    if isinstance(exception, SyntaxError):  # its first lines show the place
        return _first_line(lines[-1])
    return _first_line(lines[0])


def _first_line(text: str) -> str:
    first, more, _ = text.strip().partition("\n")
    return f"{first} ..." if more else first


class ActorError(Exception):
    """An endpoint raised. Carries the original exception, and where it was raised.

    Attributes:
        exception: the object that the endpoint raised, rebuilt on this side (without its
            traceback).
        message: the call that failed.
        exception_formatted: the remote traceback as text, root cause included.

    >>> error = ActorError(ValueError("bad value"), "Actor call aa.boom failed.")
    >>> error.exception
    ValueError('bad value')
    """

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        *,
        formatted: str | None = None,
        failure: Failure | None = None,
    ) -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = format_remote(exception) if formatted is None else formatted
        self._failure = failure

    @property
    def root(self) -> ActorError:
        """The error of the call that failed first, if actors passed it on; else this error."""
        error = self
        while issubclass(type(error.exception), ActorError):
            error = cast("ActorError", error.exception)
        return error

    @property
    def actor(self) -> str:
        """The actor that raised, as a chain of owners: ``<root>.<__main__.Worker w{'gpus': 1/2}>``.

        Empty for an error that did not come from an actor; then `rank`, `host`, `pid` and `when`
        are unknown as well.
        """
        return "" if self._failure is None else self._failure.actor

    @property
    def rank(self) -> int | None:
        """The rank that raised, in the mesh as spawned (not in a slice of it); None if unknown."""
        return None if self._failure is None else self._failure.ranks[0]

    @property
    def host(self) -> str:
        """The host on which it was raised; empty if unknown."""
        return "" if self._failure is None else self._failure.verdict.host

    @property
    def pid(self) -> int:
        """The process in which it was raised; 0 if unknown."""
        return 0 if self._failure is None else self._failure.verdict.pid

    @property
    def when(self) -> float:
        """The time in seconds since the epoch, by the clock of that host; 0 if unknown."""
        return 0.0 if self._failure is None else self._failure.verdict.when

    def _origin(self) -> tuple[Failure | None, list[str]]:
        """Return the failure that happened first, and the actors that passed it on."""
        calls: list[ActorError] = [self]
        # By type, since `isinstance` asks an object for its class and may run user code.
        while issubclass(type(calls[0].exception), ActorError):
            calls.insert(0, cast("ActorError", calls[0].exception))
        actors = [call.actor for call in calls if call.actor]
        lost = calls[0].exception
        if issubclass(type(lost), SupervisionError):
            failure = cast("SupervisionError", lost).failure
            if failure is not None:
                return failure._failure.root, actors
        return calls[0]._failure, actors[1:]

    def __str__(self) -> str:
        lines = [self.message]
        first, passed_on = self._origin()
        if first is not None:
            lines += [first.error, f"in {first.actor}", first.where()]
        if passed_on:
            lines += [
                "as a consequence:",
                *(f"  {who}, which did not catch it" for who in passed_on),
            ]
        lines.append(self.exception_formatted)
        return "\n ".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.exception, self.message, self.exception_formatted, self._failure)
        return _rebuild_actor_error, fields


def _rebuild_actor_error(
    exception: BaseException, message: str, formatted: str, failure: Failure | None = None
) -> ActorError:
    return ActorError(exception, message, formatted=formatted, failure=failure)


class RemoteException(Exception):
    """Replaces an exception that could not be sent; the message has its type and text."""


class SupervisionError(RuntimeError):
    """The callee cannot answer: it, its process or its mesh failed or was stopped.

    Args:
        message: what happened, root cause first.
        endpoint: the call that could not be answered, as ``mesh.method()``.

    Attributes:
        failure: the same as data (`MeshFailure`): who, which rank, host and process, when, why.
            None for errors that programs make themselves.
    """

    def __init__(self, message: str, endpoint: str | None = None) -> None:
        super().__init__(message, endpoint)
        self.message = message
        self.endpoint = endpoint
        self.failure: MeshFailure | None = None

    @staticmethod
    def of(failure: Failure, endpoint: str | None = None) -> SupervisionError:
        """Return the error for a caller that needed the failed actor."""
        error = SupervisionError(failure.report(), endpoint)
        error.failure = MeshFailure(failure)
        return error

    def __str__(self) -> str:
        if self.endpoint is None:
            return self.message
        return f"Endpoint call {self.endpoint} failed, {self.message}"

    def __repr__(self) -> str:
        if self.endpoint is None:
            return f"SupervisionError({self.message!r})"
        return f"SupervisionError(endpoint={self.endpoint!r}, {self.message!r})"


def stop_behind(error: BaseException) -> Failure | None:
    """Return the stop because of which a call could not be answered; None if it is another error.

    An actor has not failed if the program has stopped an actor that it was calling.
    """
    while issubclass(type(error), ActorError):
        error = cast("ActorError", error).exception
    if not issubclass(type(error), SupervisionError):
        return None
    failure = cast("SupervisionError", error).failure
    root = None if failure is None else failure._failure.root
    return root if root is not None and root.kind == STOPPED else None


class WouldBlockRuntime(RuntimeError):
    """Blocking is refused here because the wait could never end."""


class UnhandledFaultHookException(Exception):
    """Raised by a fault hook that did not handle the failure."""


class BackpressureError(RuntimeError):
    """A send waited `backpressure_timeout` for a receiver that stayed full."""


class DeadlockError(RuntimeError):
    """This wait could never end: actors wait for each other in a cycle.

    It is raised by the ``get`` or ``await`` of one of them; the others then get the error of a call
    that failed. The call of the broken wait is recalled, as by `Future.cancel`, unless another
    thread or task waits for it: its actor would handle it later, and begin the same cycle again.

    Attributes:
        cycle: for each actor that waits: the actor, the call, and the place in its program. Each
            waits for the next one, the last for the first.

    >>> me = "<root>.<app.Cook cook>"
    >>> print(DeadlockError([(me, "cook.taste()", "app.py:12, in cook")]))  # doctest: +ELLIPSIS
    <root>.<app.Cook cook> waits for itself, so it can never answer:
      it waits for cook.taste() at app.py:12, in cook
    An actor handles one message at a time, and no other while it waits. ...
    """

    def __init__(self, cycle: Iterable[tuple[str, str, str]]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(self.cycle)

    def __str__(self) -> str:
        if len(self.cycle) == 1:
            ((who, call, place),) = self.cycle
            lines = [
                f"{who} waits for itself, so it can never answer:",
                f"  it waits for {call} at {place}",
            ]
        else:
            lines = [f"{len(self.cycle)} actors wait for each other, so none can ever answer:"]
            lines += [f"  {who} waits for {call} at {place}" for who, call, place in self.cycle]
        return "\n".join([*lines, _REMEDY + see_page("deadlock")])


_REMEDY = (
    "An actor handles one message at a time, and no other while it waits. Ways out: within one "
    "actor, call a plain method instead of an endpoint; send the call and return, without waiting "
    "for the result; wait in a concurrent_endpoint of an async actor, which handles other messages "
    "meanwhile; or limit the wait, with get(timeout=...)."
)


class PayloadTooLarge(ValueError):
    """A message exceeds `codec_max_frame_length`; nothing was sent."""


class ProtocolError(Exception):
    """A peer sent bytes that are not valid frames. The text names the peer; the link is closed."""


# Errors that the engine raises on purpose: the relevant line is the one that called the engine.
_DELIBERATE = (
    ActorError,
    BackpressureError,
    DeadlockError,
    PayloadTooLarge,
    SupervisionError,
    TimeoutError,
    WouldBlockRuntime,
)


ActorError.__module__ = "monarch._src.actor.actor_mesh"
SupervisionError.__module__ = "monarch._rust_bindings.monarch_hyperactor.supervision"
WouldBlockRuntime.__module__ = "monarch._rust_bindings.monarch_hyperactor.handle"
DeadlockError.__module__ = "monarch.actor"
UnhandledFaultHookException.__module__ = "monarch._src.actor.supervision"

_PUBLIC: dict[type, str] = {
    cls: f"monarch.actor.{cls.__qualname__}" for cls in (ActorError, SupervisionError)
}
"""The public names of errors whose `__module__` is that of the reference."""

_FOUND_AT = {f"{cls.__module__}.{cls.__qualname__}": name for cls, name in _PUBLIC.items()}


def _with_public_names(text: str) -> str:
    for found, name in _FOUND_AT.items():
        if found in text:
            text = text.replace(found, name)
    return text
