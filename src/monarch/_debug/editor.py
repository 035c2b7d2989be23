"""An editor at the process of a rank: VS Code, or another client of the Debug Adapter Protocol.

debugpy serves the protocol. It is loaded when an editor connects, and listens at a port of loopback
only, which takes no request without a token that this process draws. The editor does not connect to
that port. It connects to the command ``monarch debug --dap``, the command to the script, and the
script opens a side stream to this process, which adds the token and copies bytes. So only the user
of the script gets in, over the connections that the hosts of a job have anyway.

While an editor is attached, breakpoints of all actors of this process stop there, those of
``breakpoint()`` at the line of the call. A rank that waits in its pdb is handed over as soon as the
editor has attached, and when the editor disconnects, all of them continue.

A breakpoint stops its thread and no other. The engine's threads are not traced, and its frames are
not shown, so a process whose actors are stopped still answers.

debugpy has no public function that stops a thread at the present line of a frame, so `stop` calls
the one by which pydevd (the debugger inside debugpy) stops at its own breakpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import secrets
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from monarch import _spi
from monarch._debug.client import tell_client

if TYPE_CHECKING:
    from types import FrameType

    from monarch._spi import Caller, Frame, FrameLink, Proc

__all__ = ["PURPOSE", "SERVICE", "is_attached", "on_request", "stop"]

SERVICE = "debuggee"
"""The service of every process, for the script."""

PURPOSE = "debuggee"
"""The purpose of side streams for the protocol."""

_SIZE = 1 << 16
_OLDEST = (1, 8, 9)  # version of debugpy
_ACTORS = "monarch-actor-"  # the begin of the names of their threads
_QUIET = "PYDEVD_DISABLE_FILE_VALIDATION"  # no warnings about modules of the standard library

_lock = threading.Lock()
_busy = threading.Lock()  # held while an editor is connected
_server: _Server | None = None


# -- requests of the script --------------------------------------------------------------------


def on_request(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Serve a request of the script; on the reactor thread."""
    request = _spi.Request(proc, link, frame)
    if json.loads(request.body)["op"] == "check":
        has_debugpy = importlib.util.find_spec("debugpy") is not None
        error = "" if has_debugpy else _missing(proc.hostname)
        request.answer(json.dumps({"cwd": _folder(), "error": error}).encode())
    else:
        _spi.start_thread("monarch-editor", lambda: _start(request))


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


def _missing(host: str) -> str:
    return f"an editor needs debugpy on {host}: pip install 'pymonarch[debugger]' there"


def _start(request: _spi.Request) -> None:
    """Start debugpy unless it runs, and be ready for the stream of an editor."""
    global _server
    _leave_untraced(threading.current_thread())
    if _busy.locked():
        request.refuse("another editor is connected")
        return
    try:
        with _lock:
            if _server is None:
                _server = _Server()
    except (ImportError, RuntimeError, OSError) as error:
        request.refuse(str(error))
    else:
        _spi.serve_streams(PURPOSE, _accept)
        request.answer(b"{}")


def _accept(stream: socket.socket, _caller: Caller) -> None:
    server = _server
    if server is None or not _busy.acquire(blocking=False):
        stream.close()  # there is an editor
        return

    def serve() -> None:
        try:
            server.connect(stream)
        finally:
            _busy.release()

    _spi.start_thread("monarch-editor", serve)


# -- breakpoints -------------------------------------------------------------------------------


def is_attached() -> bool:
    """Whether an editor is attached to this process, and has set its breakpoints."""
    return _server is not None and bool(_server.debugger.is_attached())


def stop(frame: FrameType, error: BaseException | None = None) -> bool:
    """Stop the calling thread in the editor, at the present line of `frame`, or at an exception.

    Blocks until the editor lets the thread continue, or disconnects. Return False if no editor is
    attached.
    """
    if _server is None:
        return False
    constants = _module("_pydevd_bundle.pydevd_constants")
    set_break = _module("_pydevd_bundle.pydevd_comm_constants").CMD_SET_BREAK
    debugger: Any = _server.debugger
    thread: Any = threading.current_thread()
    _trace_this_thread()
    debugger.disable_tracing()  # not the functions of the debugger, until the editor has answered
    debugger.set_suspend(thread, set_break)
    if not debugger.is_attached():  # an editor that disconnects later resumes the thread
        thread.additional_info.pydev_state = constants.STATE_RUN
        return False
    if error is None:
        debugger.do_wait_suspend(thread, frame, "line", None)
    else:
        raised = type(error), error, error.__traceback__
        debugger.do_wait_suspend(thread, frame, "exception", raised)
    monitors = constants.PYDEVD_USE_SYS_MONITORING  # Python 3.12 and later
    if monitors or debugger.is_attached():
        _trace_this_thread()
        debugger.set_trace_for_frame_and_parents(thread.ident, frame)
    if monitors:
        monitoring = _module("_pydevd_sys_monitoring.pydevd_sys_monitoring")
        monitoring.update_monitor_events(suspend_requested=True)
        monitoring.restart_events()  # otherwise lines passed before are not reported
    return True


def _trace_this_thread() -> None:
    _module("pydevd").settrace(suspend=False, trace_only_current_thread=True, notify_stdin=False)


# -- debugpy -----------------------------------------------------------------------------------


class _Server:
    """debugpy in this process. Raises ImportError without the package, and RuntimeError."""

    def __init__(self) -> None:
        _load()
        pydevd = _module("pydevd")
        get_global_debugger = _module("_pydevd_bundle.pydevd_constants").get_global_debugger
        if get_global_debugger() is not None:
            raise RuntimeError("the program has started debugpy itself in this process")
        for thread in threading.enumerate():
            if thread.name.startswith("monarch-") and not thread.name.startswith(_ACTORS):
                _leave_untraced(thread)
        self._token = secrets.token_hex(32)
        pydevd.settrace(
            host="127.0.0.1",
            port=0,
            suspend=False,
            wait_for_ready_to_run=False,
            block_until_connected=False,
            patch_multiprocessing=False,
            notify_stdin=False,
            access_token=self._token,
            dont_trace_start_patterns=(_folder_of("debugpy"), _folder_of("monarch")),
        )
        self.debugger: Any = get_global_debugger()
        self.debugger.wait_for_server_socket_ready()
        self.debugger.multi_threads_single_notification = False  # stop one thread, not all
        # No warning about the pdb of a rank that is handed over.
        _module("pydevd_tracing").TracingFunctionHolder._warn = False
        pydevd.add_dap_messages_listener(_Listener())
        kind_of: Any = self.debugger.get_file_type

        def get_file_type(frame: Any, *args: Any, **kwargs: Any) -> Any:
            # The first frame of the main thread is the `python -c` that started the process.
            is_string = frame.f_code.co_filename == "<string>"  # so it is a frame, and no stand-in
            is_start = is_string and frame.f_back is None
            return self.debugger.PYDEV_FILE if is_start else kind_of(frame, *args, **kwargs)

        self.debugger.get_file_type = get_file_type

    def connect(self, stream: socket.socket) -> None:
        """Carry the connection of an editor, until one side has closed it."""
        _leave_untraced(threading.current_thread())
        stream.setblocking(True)
        with stream, socket.create_connection(self.debugger._server_socket_name) as debuggee:
            self._trace()
            self._authorize(debuggee)
            back = threading.Thread(target=_copy, args=(debuggee, stream), name="monarch-editor")
            back.daemon = True
            _leave_untraced(back)
            back.start()
            _copy(stream, debuggee)
            if self.debugger.is_attached():  # the editor was lost: continue, as if it had said so
                api = _module("_pydevd_bundle.pydevd_api").PyDevdAPI()
                api.request_disconnect(self.debugger, resume_threads=True)
            with contextlib.suppress(OSError):
                debuggee.shutdown(socket.SHUT_RDWR)
            back.join()
        self._leave_all_untraced()
        _detached()

    def _trace(self) -> None:
        """Trace all threads of the program, those that run already included."""
        self.debugger.patch_threads()
        self.debugger.enable_tracing(self.debugger.trace_dispatch, apply_to_all_threads=True)
        self.debugger.set_tracing_for_untraced_contexts()

    def _leave_all_untraced(self) -> None:
        """Let the program run at its own speed again: tracing makes calls ten times as slow."""
        if _module("_pydevd_bundle.pydevd_constants").PYDEVD_USE_SYS_MONITORING:
            return  # Python 3.12 and later, where it costs nothing without breakpoints
        _module("_pydev_bundle.pydev_monkey").undo_patch_thread_modules()
        threading.settrace(None)  # of new threads
        _module("pydevd_tracing").set_trace_to_threads(_end_trace)

    def _authorize(self, debuggee: socket.socket) -> None:
        """Show the token, and take the answer off the stream."""
        asked = {
            "seq": 0,
            "type": "request",
            "command": "pydevdAuthorize",
            "arguments": {"debugServerAccessToken": self._token},
        }
        body = json.dumps(asked).encode()
        debuggee.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        with debuggee.makefile("rb", buffering=0) as lines:
            size = int(lines.readline().partition(b":")[2])
            lines.readline()
            while size > 0:
                size -= len(lines.read(size) or b"")


def _load() -> None:
    """Import debugpy, which makes the modules of pydevd importable."""
    has_choice, hook = _QUIET in os.environ, sys.breakpointhook
    if not has_choice:
        os.environ[_QUIET] = "1"
    try:
        version = _module("debugpy").__version__
        if tuple(map(int, version.split(".")[:3])) < _OLDEST:
            raise ImportError(f"{_missing(socket.gethostname())} (there is {version}, too old)")
        _module("debugpy.server.api")
    except ModuleNotFoundError as error:
        if error.name != "debugpy":
            raise
        raise ImportError(_missing(socket.gethostname())) from None
    finally:
        if not has_choice:
            del os.environ[_QUIET]
        sys.breakpointhook = hook  # debugpy has set its own


def _module(name: str) -> Any:
    """Return a module of debugpy, or of pydevd, which it brings."""
    return importlib.import_module(name)


def _folder_of(package: str) -> str:
    return os.path.dirname(os.path.abspath(sys.modules[package].__file__ or "")) + os.sep


def _leave_untraced(thread: Any) -> None:
    """Have pydevd neither trace, stop nor show a thread."""
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True


def _end_trace(*_event: Any) -> None:
    """End the tracing of a thread: it calls this at its next function call."""
    sys.settrace(None)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one side has closed
        while data := source.recv(_SIZE):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# -- reports to the client ---------------------------------------------------------------------

_stopped: set[int] = set()  # threads, by the numbers of the protocol


class _Listener:
    """Reads what debugpy sends to the editor; implements `pydevd.IDAPMessagesListener`."""

    def after_receive(self, message: dict[str, Any]) -> None:
        """Do nothing with requests."""

    def before_send(self, message: dict[str, Any]) -> None:
        """Report to the client when the editor has attached, and when threads stop."""
        event: str | None = message.get("event")
        body: dict[str, Any] = message.get("body") or {}
        if message.get("command") == "configurationDone" and message.get("success"):
            cells = list(_spi.client_proc().cells.values())
            names = [
                f"{cell.identity.name} {cell.rank}"
                for cell in cells
                if not cell.identity.short()[0].startswith("monarch.")
            ]
            tell_client(op="editor", names=sorted(names))
        elif message.get("command") == "disconnect":
            _detached()
        elif event == "stopped":
            _stopped.add(body.get("threadId", 0))
            tell_client(op="stopped", threads=len(_stopped))
        elif event == "continued":
            _stopped.discard(body.get("threadId", 0))
            tell_client(op="stopped", threads=len(_stopped))


def _detached() -> None:
    _stopped.clear()
    tell_client(op="editor", names=None)
