"""An interactive shell on a host, with a terminal of its own there that follows the one here.

The local terminal is raw while it lasts: every key, Ctrl-C included, is the business of the one
over there, as is every character that comes back. The shell is the child of a process that is
spawned for it, so nothing of it outlives this script.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Callable, Generator, Mapping
from types import FrameType

from monarch.actor import (
    Actor,
    Channel,
    Future,
    HostMesh,
    Port,
    concurrent_endpoint,
    context,
    endpoint,
)
from monarch.job.command import exec_command

__all__ = ["shell"]

_SIZE = 1 << 16
_GRACE = 2.0  # seconds between the ways to end a shell
_RUN_INPUT = ("/bin/sh", "-c", 'exec "${SHELL:-bash}" -s')
# A process that opens a terminal first of all in its session owns it: then Ctrl-C works there.
_OPEN = 'exec "$@" <>"$0" >&0 2>&0'


def shell(
    host_mesh: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None
) -> int:
    """Run a shell on a host, with stdin and stdout as its keyboard and screen; its exit status.

    Args:
        host_mesh: a mesh of one host.
        env: more variables for it.
        workdir: where it starts; default: this directory, if there is one of that name, or else
            that of the host.

    It is the host's ``$SHELL``, or bash, interactive. If stdin is no terminal the shell runs what
    is in it, as ``bash -s`` does, once that has come to its end. 128 + n: it was ended by signal n.
    A terminal that is closed hangs it up. Blocks until it has ended. Raises ValueError for a mesh
    that is not of size 1, and what befalls the host.
    """
    if len(host_mesh) != 1:
        raise ValueError(f"a shell runs on one host, and this is a mesh of {host_mesh.extent}")
    if not os.isatty(0):
        given = sys.stdin.buffer.read()
        return exec_command(host_mesh, _RUN_INPUT, env, workdir, stdin=given).get()
    context()  # the client is made by the caller
    procs = host_mesh.spawn_procs(name="shell")
    try:
        environ = {"TERM": os.environ.get("TERM", "dumb"), **(env or {})}
        remote = procs.spawn("shell", _Shell, environ, workdir, os.getcwd(), *_window())
        return _Screen(remote).run()
    finally:
        procs.stop().get()


class _Screen:
    """This side: keyboard, screen, and the size of the window."""

    def __init__(self, remote: _Shell) -> None:
        self._remote = remote
        self._woken, self._wake = os.pipe()  # tells the loop below that there is news

    def run(self) -> int:
        port, receiver = Channel[bytes | None].open()
        status: Future[int] = self._remote.run.call_one(port)

        def show() -> None:
            while (data := receiver.recv().get()) is not None:
                with contextlib.suppress(OSError):  # nobody looks at the screen any more
                    _write(1, data)

        shower = threading.Thread(target=show, name="monarch-shell-output", daemon=True)
        shower.start()
        ended: concurrent.futures.Future[int] = concurrent.futures.Future()

        def wait() -> None:
            try:
                ended.set_result(status.get())
            except BaseException as error:
                ended.set_exception(error)
            os.write(self._wake, b"e")

        waiter = threading.Thread(target=wait, name="monarch-shell-status", daemon=True)
        waiter.start()
        try:
            with _raw(0), _resizes(lambda: os.write(self._wake, b"w")):
                self._serve(ended)
            return ended.result()
        finally:
            port.send(None)  # comes after all that was printed
            shower.join()
            if ended.done():
                waiter.join()
                os.close(self._wake)
                os.close(self._woken)

    def _serve(self, ended: concurrent.futures.Future[int]) -> None:
        """Pass on what is typed, until the shell has ended."""
        sources = [self._woken, 0]
        while not ended.done():
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready and b"w" in os.read(self._woken, _SIZE):
                self._remote.resize.broadcast(*_window())
            if 0 in ready:
                data = _read(0)
                if data:
                    self._remote.write.broadcast(data)
                else:
                    sources.remove(0)
                    self._remote.hang_up.broadcast()


class _Shell(Actor):
    """The other side: a shell on a terminal."""

    def __init__(
        self, env: dict[str, str], workdir: str | None, here: str, rows: int, columns: int
    ) -> None:
        if workdir is None and os.path.isdir(here):
            workdir = here
        # The shell opens its side by name. This one keeps it open, or reading might fail before.
        self._terminal, self._other_side = pty.openpty()
        os.set_blocking(self._terminal, False)
        _set_window(self._terminal, rows, columns)
        environ = {**os.environ, **env}
        program = environ.get("SHELL") or "bash"
        self._ended = asyncio.Event()
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _OPEN, os.ttyname(self._other_side), program, "-i"],
            env=environ,
            cwd=workdir,
            start_new_session=True,
        )

    @concurrent_endpoint
    async def run(self, port: Port[bytes | None]) -> int:
        """Send what it prints; its exit status."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._terminal, self._forward, port)
        status = await loop.run_in_executor(None, self._child.wait)
        self._ended.set()
        loop.remove_reader(self._terminal)
        while self._forward(port):  # its last words
            pass
        os.close(self._other_side)
        return status if status >= 0 else 128 - status

    def _forward(self, port: Port[bytes | None]) -> bool:
        data = _read(self._terminal)
        if data:
            port.send(data)
        return bool(data)

    @endpoint
    async def write(self, data: bytes) -> None:
        while data and not self._ended.is_set():
            try:
                data = data[os.write(self._terminal, data) :]
            except BlockingIOError:  # it does not read just now
                await self._room()

    async def _room(self) -> None:
        """Wait until the terminal takes more, or the shell has ended."""
        loop = asyncio.get_running_loop()
        room = asyncio.Event()
        loop.add_writer(self._terminal, room.set)
        try:
            await room.wait()
        finally:
            loop.remove_writer(self._terminal)

    @endpoint
    async def resize(self, rows: int, columns: int) -> None:
        _set_window(self._terminal, rows, columns)

    @concurrent_endpoint
    async def hang_up(self) -> None:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
            if self._ended.is_set():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _GRACE)

    async def __cleanup__(self, exc: Exception | None) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)


def _read(fd: int) -> bytes:
    """What is there; nothing at the end, which a terminal tells by an error."""
    try:
        return os.read(fd, _SIZE)
    except BlockingIOError:
        return b""
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _window() -> tuple[int, int]:
    """Rows and columns of this terminal, if it is one."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(fd)
            return rows, columns
    return 24, 80


def _set_window(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def _raw(fd: int) -> Generator[None]:
    """Have the terminal pass on every key, if it is one."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead counts
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # it was closed
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes(tell: Callable[[], object]) -> Generator[None]:
    """Call `tell` whenever the window has another size; on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def changed(_number: int, _frame: FrameType | None) -> None:
        tell()

    before = signal.signal(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
