"""The function behind ``breakpoint()`` in a worker.

`post_mortem` is the function behind the setting `postmortem`.

The first breakpoint of an endpoint call opens a session with the controller and a `RemotePdb`.
Later ones of the same call, on the same thread, stop in the same pdb, so that its breakpoints and
displayed expressions are kept. The session belongs to the call, and the engine reports the end of
the call. A thread that the user started runs in no call; there the session ends when the code
continues with no breakpoint left.
"""

from __future__ import annotations

import bdb
import logging
import os
import socket
import threading
import traceback
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from monarch import _spi
from monarch._debug.controller import debug_controller
from monarch._debug.presence import Presence
from monarch._debug.remote_pdb import RemotePdb
from monarch._debug.sessions import DebugSessionInfo
from monarch._debug.waiting import wait_for
from monarch.actor import ActorError, context, this_proc

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["post_mortem", "stop_at"]

_log = logging.getLogger("monarch.debug")
_inspected: ContextVar[BaseException | None] = ContextVar("monarch_inspected", default=None)
_current: ContextVar[RemotePdb | None] = ContextVar("monarch_debugger", default=None)


def stop_at(frame: FrameType) -> None:
    """Stop the calling thread, in ``frame``, until a debugger lets it continue.

    ``PYTHONBREAKPOINT=0`` turns breakpoints off, as for the built-in. Raises `RuntimeError` if the
    client has no debug server: the endpoint would otherwise wait for a debugger that cannot come.
    """
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    debugger = _current.get()
    if debugger is None or debugger.finished or debugger.thread != threading.get_ident():
        debugger = _start()
    # No call may follow this one: the debugger would stop in that call first.
    debugger.set_trace(frame)


def post_mortem(error: BaseException) -> None:
    """Stop at the exception of the endpoint call that ends, until a debugger lets it continue.

    An exception that a debugger has shown already (the call had a breakpoint) is not shown again,
    one that no line of the program has raised is not shown, and none is if breakpoints are turned
    off (``PYTHONBREAKPOINT=0``). Without a debug server a warning is logged, and the caller gets
    the error at once.
    """
    shown = _inspected.get() is error
    _inspected.set(None)
    wanted = isinstance(error, Exception) and not isinstance(error, bdb.BdbQuit)
    if shown or not wanted or os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if all(map(_spi.is_package_frame, files)):
        return
    try:
        RemotePdb(_ControllerLink()).call_ended(error)
    except Exception:
        # The call keeps its outcome: only the inspection of the exception failed.
        _log.warning("no debugger could be attached to a failed call", exc_info=True)


def _start() -> RemotePdb:
    link = _ControllerLink()
    ended: list[Any] = []

    def at_end(error: BaseException | None) -> None:
        _current.set(None)
        if _spi.settings.postmortem:  # otherwise nothing asks, and the error would be kept alive
            _inspected.set(error)
        try:
            ended[0].call_ended(error)
        except Exception:
            # The call keeps its outcome: only the inspection of the exception failed.
            _log.warning("the debugger was lost at the end of a call", exc_info=True)

    debugger = RemotePdb(link, scoped=_spi.at_call_end(at_end))
    ended.append(debugger)
    _current.set(debugger)
    return debugger


class _ControllerLink:
    """A session with the controller in the client process."""

    def __init__(self) -> None:
        here = context()
        point = here.message_rank
        info = DebugSessionInfo(
            actor_name=here.actor_instance.name,
            rank=point.rank,
            coords=dict(point.items()),
            hostname=socket.gethostname(),
            function=None,
            lineno=None,
        )
        try:
            self._controller = debug_controller()
        except ActorError as error:
            raise RuntimeError(f"breakpoint(): {error.exception}") from error
        self._presence: Any = this_proc().spawn("debugger", Presence)
        self._number: int = wait_for(self._controller.session_start.call_one(info, self._presence))

    def read(self, output: str, function: str | None, lineno: int | None) -> str | None:
        call = self._controller.session_read.call_one(self._number, output, function, lineno)
        try:
            line: str | None = wait_for(call)
        except ActorError as error:
            raise bdb.BdbQuit(f"{error.exception}") from None
        return line

    def write(self, output: str) -> None:
        wait_for(self._controller.session_write.call_one(self._number, output))

    def end(self, output: str) -> None:
        wait_for(self._controller.session_end.call_one(self._number, output))
        self._presence.stop()
