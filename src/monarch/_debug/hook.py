"""The function behind ``breakpoint()`` in a worker.

`post_mortem` is the function behind the setting `postmortem`.

The first breakpoint of an endpoint call opens a session with the client and a `RemotePdb`. Later
ones of the same call, on the same thread, stop in the same pdb, so that its breakpoints and
displayed expressions are kept. The session belongs to the call, and the engine reports the end of
the call. A thread that the user started runs in no call; there the session ends when the code
continues with no breakpoint left.

While an editor is attached to the process, both functions stop there, and open no session.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from monarch import _spi
from monarch._debug.link import SessionLink

if TYPE_CHECKING:
    from types import FrameType

    from monarch._debug.remote_pdb import RemotePdb

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
    editor = _editor()
    if editor is not None and editor.stop(frame):
        return
    debugger = _current.get()
    if debugger is None or debugger.finished or debugger.thread != threading.get_ident():
        debugger = _start(frame)
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
    wanted = isinstance(error, Exception) and not _is_quit(error)
    if shown or not wanted or os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    steps = list(traceback.walk_tb(error.__traceback__))
    if all(_spi.is_package_frame(frame.f_code.co_filename) for frame, _ in steps):
        return
    try:
        editor = _editor()
        if editor is not None and editor.stop(steps[-1][0], error):
            return
        link = SessionLink(*steps[-1])
        from monarch._debug.remote_pdb import RemotePdb

        RemotePdb(link).call_ended(error)
    except Exception:
        # The call keeps its outcome: only the inspection of the exception failed.
        _log.warning("no debugger could be attached to a failed call", exc_info=True)


def _editor() -> Any:
    """Return the module `editor` if an editor is attached to this process."""
    editor: Any = sys.modules.get("monarch._debug.editor")
    return editor if editor is not None and editor.is_attached() else None


def _is_quit(error: BaseException) -> bool:
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(error, bdb.BdbQuit)


def _start(frame: FrameType) -> RemotePdb:
    link = SessionLink(frame, frame.f_lineno)  # listed before pdb is loaded
    from monarch._debug.remote_pdb import RemotePdb

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
