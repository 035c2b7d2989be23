"""The NIXL library: found, loaded without side effects, and its one agent in this process.

NIXL (on top of UCX) drives network cards with verbs, EFA and memory of GPUs. It is an extra of this
package, and is loaded when the first transfer needs it.

We call the layer under NIXL's Python interface. The Python interface fixes the poll period of the
progress thread to zero, which keeps a core busy as long as the agent exists. With a period the
thread sleeps until an event.

Loaded with its defaults, the library would close the log handlers of the program, print, and
replace signal handlers (of SIGHUP, SIGSEGV, ...). Environment variables that prevent this are set
while it loads; variables that the user has set take precedence.

An agent is never destroyed. Its destruction would close connections that a forked child shares with
its parent; and when a process exits, the kernel releases everything.

A process that has loaded the library exits without the destructors of C libraries: one that comes
with the wheels crashes there (libnl's `rtnl_tc_unregister`, seen with nixl-cu13 1.5.1), and a
script that has done its work would exit with SIGSEGV.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from monarch.rdma.hardware import is_ibverbs_available
from monarch.rdma.memory import CPU, Memory
from monarch.rdma.routes import Unavailable
from monarch.rdma.transfer import READ

__all__ = ["REMEDY", "Agent", "Disconnected", "Failed", "installed", "library"]

REMEDY = "pip install 'pymonarch[rdma]'"
_PACKAGES = ("nixl_cu13", "nixl_cu12")  # both run without CUDA; only GPUs need its driver
_PERIOD = 100_000  # microseconds between two polls of its thread when there are no events
_QUIET = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",  # no signal handlers
    "UCX_DEBUG_SIGNO": "0",
}
# UCX would listen at TCP ports of all interfaces, without authentication. With a card it need not.
_CLOSED = {"UCX_TLS": "^tcp"}


class Disconnected(Exception):
    """The peer is no longer reachable."""


class Failed(Exception):
    """The library refused a call, or failed; the text is the library's."""


@functools.cache
def installed() -> str | None:
    """Return the name of the package that has the library; None if none is installed."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name)), None)


@functools.cache
def library() -> Any:
    """Load and return the library. Raises Unavailable, with the remedy."""
    name = installed()
    if name is None:
        raise Unavailable("NIXL is not installed", REMEDY)
    try:
        with _environment(), _log_handlers_kept():
            found = importlib.import_module(f"{name}._bindings")
    except ImportError as error:
        raise Unavailable(f"NIXL cannot be loaded: {error}", f"{REMEDY}, anew") from None
    _exit_without_destructors()
    return found


def _exit_without_destructors() -> None:
    """Have the process exit once all that was registered from here on is done, with its status.

    The C library calls these functions last registered first, after the interpreter has ended: the
    streams of C are flushed, then `_exit` gets the status.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.on_exit(ctypes.cast(libc.fcloseall, ctypes.c_void_p), None)


@contextlib.contextmanager
def _environment() -> Generator[None, None, None]:
    wanted = _QUIET | _CLOSED if is_ibverbs_available() else _QUIET
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _log_handlers_kept() -> Generator[None, None, None]:
    """Ignore the library's own configuration of logging, which closes all log handlers."""
    import logging.config

    configure, raising = logging.config.dictConfig, logging.raiseExceptions

    def others(config: Any) -> None:
        if "nixl" not in config.get("loggers", ()):
            configure(config)

    logging.config.dictConfig = others
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raising


class Agent:
    """The NIXL agent of this process. Making one takes half a second. Raises Unavailable.

    The caller of each method must hold `lock`. (The library has a lock of its own, but waits for it
    with the interpreter lock held.)

    Args:
        name: of this process; the metadata carries it to peers.
    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        nixl: Any = library()
        self._nixl = nixl
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(nixl, name) for name in dir(nixl) if re.fullmatch("nixl.*Error", name)
        )
        self._operation = {True: nixl.NIXL_READ, False: nixl.NIXL_WRITE}
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PERIOD
        config.captureTelemetry = False
        try:
            with _environment():
                self._agent = nixl.nixlAgent(name, config)
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
                self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise Unavailable(f"NIXL cannot be started: {error}", "UCX_LOG_LEVEL=info") from None

    def register(self, memory: Memory) -> None:
        """Register memory with the hardware. It must exist until it is `unregister`ed."""
        self._call(self._agent.registerMem, self._registration(memory))

    def unregister(self, memory: Memory) -> None:
        """Undo one `register`."""
        self._call(self._agent.deregisterMem, self._registration(memory))

    def metadata(self, memory: Memory) -> bytes:
        """Return what a peer needs to reach this process and registered memory."""
        return bytes(self._call(self._agent.getLocalPartialMD, self._registration(memory), True))

    def meet(self, metadata: bytes) -> str:
        """Load the metadata of a peer; return the peer's name. Connects on first use."""
        return bytes(self._call(self._agent.loadRemoteMD, metadata)).decode()

    def part(self, peer: str) -> None:
        """Close the connection to a peer, and abort what is under way on it."""
        with contextlib.suppress(Failed, Disconnected):
            self._call(self._agent.invalidateRemoteMD, peer)

    def post(
        self, kind: int, pieces: Iterable[tuple[Memory, int, int, int]], device: str, peer: str
    ) -> int:
        """Begin to move `pieces`: (local memory, offset in it, remote address, bytes).

        Returns the number of the request. The local memories are registered and on one device;
        `device` is the remote one. Raises Failed, or Disconnected.
        """
        pieces = list(pieces)
        at, there = _place(pieces[0][0].device), _place(device)
        local = [(memory.address + start, count, at) for memory, start, _, count in pieces]
        remote = [(address, count, there) for _, _, address, count in pieces]
        nixl = self._nixl
        number: int = self._call(
            self._agent.createXferReq,
            self._operation[kind == READ],
            nixl.nixlXferDList(self._segment(pieces[0][0].device), local),
            nixl.nixlXferDList(self._segment(device), remote),
            peer,
        )
        try:
            self._call(self._agent.postXferReq, number)
        except (Failed, Disconnected):
            self.release(number)
            raise
        return number

    def arrived(self, number: int) -> bool:
        """Whether a posted request has completed. Raises Failed or Disconnected if it failed."""
        status = self._call(self._agent.getXferStatus, number)
        return bool(status != self._nixl.NIXL_IN_PROG)

    def release(self, number: int) -> None:
        """Release a posted request; call once for each."""
        with contextlib.suppress(Failed, Disconnected):
            self._call(self._agent.releaseXferReq, number)

    def _registration(self, memory: Memory) -> Any:
        place = (memory.address, memory.nbytes, _place(memory.device), "")
        return self._nixl.nixlRegDList(self._segment(memory.device), [place])

    def _segment(self, device: str) -> Any:
        return self._nixl.DRAM_SEG if device == CPU else self._nixl.VRAM_SEG

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            result = function(*args)
        except self._nixl.nixlRemoteDisconnectError as error:
            raise Disconnected(str(error)) from None
        except self._errors as error:
            raise Failed(str(error)) from None
        return result


def _place(device: str) -> int:
    """Return the number of a device within its type."""
    return int(device.partition(":")[2] or 0)
