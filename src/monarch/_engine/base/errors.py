"""Every exception the runtime raises, in one tree a caller can learn in a minute.

``ActorError``        the endpoint raised: user code on the other side failed, the actor lives on.
``SupervisionError``  the actor, its process or its mesh is dead, dying or stopped.
``BackpressureError`` a receiver stayed full for longer than the configured time.
``PayloadTooLarge``   a message is larger than the configured limit; refused at the call.
``ProtocolError``     a peer sent bytes that are not our protocol; never the user's fault.

Misuse is reported with the built-in types (``TypeError``, ``ValueError``, ``RuntimeError``...).
``ActorError`` and ``SupervisionError`` report the module paths under which programs written for
the reference match and unpickle them.
"""

from __future__ import annotations

import traceback
from typing import Any

__all__ = [
    "ActorError",
    "BackpressureError",
    "PayloadTooLarge",
    "ProtocolError",
    "RemoteException",
    "SupervisionError",
    "UnhandledFaultHookException",
    "WouldBlockRuntime",
]

_HEADER = "Traceback (most recent call last):"
_REMOTE_HEADER = "Traceback of where the remote call failed (most recent call last):"


def format_remote(exception: BaseException) -> str:
    """The traceback of `exception` from the first frame of user code on, chain included.

    Frames of the engine itself at the start of each traceback are left out: they are the same
    for every call and push the line that matters off the screen.
    """
    report = traceback.TracebackException.from_exception(exception)
    seen: set[int] = set()
    node: traceback.TracebackException | None = report
    pending = [node]
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        while node.stack and _is_engine_frame(node.stack[0].filename):
            del node.stack[0]
        pending += [node.__cause__, node.__context__]
    return "".join(report.format()).replace(_HEADER, _REMOTE_HEADER).rstrip("\n")


_ENGINE_DIR = __file__.rsplit("base", 1)[0]


def _is_engine_frame(filename: str) -> bool:
    return filename.startswith(_ENGINE_DIR)


class ActorError(Exception):
    """An endpoint raised. Carries the original exception and where it was raised.

    Attributes:
        exception: the object the endpoint raised, rebuilt on this side (without its traceback).
        message: which call failed.
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
    ) -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = format_remote(exception) if formatted is None else formatted

    def __str__(self) -> str:
        return f"{self.message}\n {self.exception_formatted}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_actor_error, (self.exception, self.message, self.exception_formatted)


def _rebuild_actor_error(exception: BaseException, message: str, formatted: str) -> ActorError:
    return ActorError(exception, message, formatted=formatted)


class RemoteException(Exception):
    """Stands in for an exception that could not travel; its type and text are in the message."""


class SupervisionError(RuntimeError):
    """The callee cannot answer: it, its process or its mesh failed or was stopped.

    Args:
        message: what happened, root cause first.
        endpoint: the call that noticed, as ``mesh.method()``.
    """

    def __init__(self, message: str, endpoint: str | None = None) -> None:
        super().__init__(message, endpoint)
        self.message = message
        self.endpoint = endpoint

    def __str__(self) -> str:
        if self.endpoint is None:
            return self.message
        return f"Endpoint call {self.endpoint} failed, {self.message}"

    def __repr__(self) -> str:
        if self.endpoint is None:
            return f"SupervisionError({self.message!r})"
        return f"SupervisionError(endpoint={self.endpoint!r}, {self.message!r})"


class WouldBlockRuntime(RuntimeError):
    """Blocking is refused here because it could never end."""


class UnhandledFaultHookException(Exception):
    """Raised by a fault hook to say that it did not handle the failure."""


class BackpressureError(RuntimeError):
    """A send waited `backpressure_timeout` for a receiver that stayed full."""


class PayloadTooLarge(ValueError):
    """A message exceeds `codec_max_frame_length`; nothing was sent."""


class ProtocolError(Exception):
    """A peer's bytes are not valid frames. Names the peer; the link is closed."""


ActorError.__module__ = "monarch._src.actor.actor_mesh"
SupervisionError.__module__ = "monarch._rust_bindings.monarch_hyperactor.supervision"
WouldBlockRuntime.__module__ = "monarch._rust_bindings.monarch_hyperactor.handle"
UnhandledFaultHookException.__module__ = "monarch._src.actor.supervision"
