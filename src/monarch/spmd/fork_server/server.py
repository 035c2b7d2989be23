"""The fork server's process: one thread, which waits for requests, children and time.

Processes belong to the connection that asked for them. When it closes, however that happens, their
process groups are killed. So a host, or a driver, that is killed leaves no rank behind. Ranks die
with the server, too (``PR_SET_PDEATHSIG``).

A server of a job's host has a connection to its `keeper`, its lifeline. A byte there says that it
is to end as soon as it is idle. At the end of the connection it kills its ranks and exits. It
adopts the processes that ranks leave behind, in sessions of their own, and kills them when the last
launch has ended: nothing of a job outlives its hosts.

Requests are ``fork`` (answered by ``forked`` or ``refused``), ``signal``, ``devices``, ``prepare``
and ``settle`` (answered by ``settled``, after the exits so far); the exit of a process is reported
by ``exit`` with its wait status. The launch gives each process a number, its ``key``.

After ``prepare`` the modules that programs import a little later than torch are imported while
ranks run: those of the next attempt find them. An exit is reported up to a second later meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import math
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any, NoReturn

from monarch._spi import Children, adopt_orphans, die_with_parent
from monarch.spmd.fork_server.rank import Rank, restore_signals
from monarch.spmd.message import Messages, send

__all__ = ["main"]

# Programs import these a little later than torch: an optimizer loads the last, which loads sympy.
# They are imported between two launches, or on request while ranks run, one at a time. So the first
# launch does not wait for what it may not need.
_LATER = ("torch.distributed", "torch.nn.parallel", "sympy", "torch._dynamo")


class _Connection:
    """A launch, by its socket; `keys` are the pids of its processes, with the key of each."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.messages = Messages(sock)
        self.keys: dict[int, int] = {}

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended; its EOF is read next
            send(self.sock, message)

    def signal(self, number: int, keys: Collection[int]) -> None:
        for pid in [pid for pid, key in self.keys.items() if key in keys]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)  # it has no group yet if it was just forked
                os.killpg(pid, number)


class _Server:
    """The state of the process. Without a `path`, `sock` is the one connection that it serves."""

    def __init__(self, sock: socket.socket, path: str, keep: float, lifeline: int) -> None:
        self._path = path
        self._listening = sock if path else None
        self._keep = keep
        self._later = list(_LATER) if "torch" in sys.modules else []
        self._served = False
        self._prepares = False
        self._connections: set[_Connection] = set()
        self._pids: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        if path:
            self._selector.register(sock, selectors.EVENT_READ)
        else:
            self._connected(sock)
        self._children = Children()
        self._lifeline = lifeline
        if lifeline >= 0:
            adopt_orphans()
            self._selector.register(lifeline, selectors.EVENT_READ)
        self._selector.register(self._children.fileno, selectors.EVENT_READ)

    def serve(self) -> Rank | None:
        """Serve until idle for `keep` seconds. Return None then; in a forked child, its rank.

        At the end of the lifeline this process exits.
        """
        idle = time.monotonic()
        while True:
            busy = bool(self._connections or self._pids)
            if busy:
                idle = time.monotonic()
            left = None if busy else idle + self._keep - time.monotonic()
            # Until the last launch has ended, a child that was adopted may belong to a live rank.
            sweep = math.inf if busy or self._lifeline < 0 else self._children.sweep()
            idle_after_launch = not busy and self._served and bool(self._keep)
            may_import = idle_after_launch or (busy and self._prepares)
            if self._later and may_import and not self._selector.select(0):
                _import(self._later.pop(0))
                gc.freeze()
                continue
            if left is not None and left <= 0 and self._end():
                if self._lifeline >= 0:
                    self._children.end()
                return None
            if sweep < math.inf:
                left = min(left or 0.0, max(0.0, sweep - time.monotonic()))
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj == self._children.fileno:
                    self._reap()
                elif key.fileobj == self._lifeline:
                    if not os.read(self._lifeline, 1):
                        self._exit()
                    self._keep = 0.0
                else:
                    rank = self._handle(key.data)
                    if rank is not None:
                        return rank

    def _end(self) -> bool:
        """Remove the socket, unless a launch is just connecting."""
        if self._listening is None:
            return True
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # held by those who connect
            if select.select([self._listening], [], [], 0)[0]:
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            return True
        finally:
            os.close(folder)

    def _exit(self) -> NoReturn:
        """End this process, and all ranks with what they have started."""
        for connection in self._connections:
            connection.signal(signal.SIGKILL, connection.keys.values())
        self._children.own = set(self._pids)
        self._children.end()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os._exit(0)

    def _accept(self) -> None:
        assert self._listening is not None
        self._connected(self._listening.accept()[0])

    def _connected(self, sock: socket.socket) -> None:
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _handle(self, connection: _Connection) -> Rank | None:
        try:
            arrived = connection.messages.read()
        except EOFError:
            self._selector.unregister(connection.sock)
            self._connections.discard(connection)
            connection.sock.close()
            connection.signal(signal.SIGKILL, connection.keys.values())
            return None
        for message, fds in arrived:
            if message["op"] == "fork":
                rank = self._fork(connection, message, fds)
                if rank is not None:
                    return rank
            elif message["op"] == "signal":
                connection.signal(message["number"], message["keys"])
            elif message["op"] == "prepare":
                self._prepares = True
            elif message["op"] == "settle":
                self._reap()
                connection.tell(op="settled")
            elif message["op"] == "devices":
                connection.tell(op="devices", counts=_devices())
        return None

    def _fork(
        self, connection: _Connection, message: dict[str, Any], fds: list[int]
    ) -> Rank | None:
        rank = Rank(message["kind"], message["program"], message["environ"], message["folder"], fds)
        ours = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            connection.tell(op="refused", text=str(error))
            pid = -1
        if pid == 0:
            restore_signals()
            self._leave()
            _die_with(ours)
            return rank
        self._served = True
        for fd in fds:
            os.close(fd)
        if pid > 0:
            connection.keys[pid] = message["key"]
            self._pids[pid] = connection
            connection.tell(op="forked", pid=pid)
        return None

    def _leave(self) -> None:
        """In a rank: close what is the server's, before the numbers mean other descriptors."""
        self._selector.close()
        if self._listening is not None:
            self._listening.close()
        for connection in self._connections:
            connection.sock.close()
        self._children.leave_in_child()
        if self._lifeline >= 0:
            os.close(self._lifeline)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._children.fileno, 1 << 12)
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            connection = self._pids.pop(pid, None)
            if connection is not None:
                # Children that the rank has left behind. The number is the rank's until the wait.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if connection is not None:
                connection.tell(op="exit", key=connection.keys.pop(pid), status=status)


def _devices() -> dict[str, int]:
    """Return how many devices of each kind there are; nothing is initialised."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {"cpu": os.cpu_count() or 1, "gpu": 0, "xpu": 0}
    xpu = torch.xpu.device_count() if hasattr(torch, "xpu") else 0
    return {"cpu": os.cpu_count() or 1, "gpu": torch.cuda.device_count(), "xpu": xpu}


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # the program's own import reports it
        importlib.import_module(name)


def _die_with(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it has exited before the request
        os.kill(os.getpid(), signal.SIGKILL)


def main(fd: int, keep: float, path: str, modules: list[str], lifeline: int = -1) -> None:
    """Run the fork server, or a rank: the main function of both processes."""
    for name in modules:
        _import(name)
    gc.collect()
    gc.freeze()
    rank = _Server(socket.socket(fileno=fd), path, keep, lifeline).serve()
    if rank is not None:
        rank.run()
