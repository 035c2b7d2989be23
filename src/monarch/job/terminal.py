"""An interactive shell on a host, on a remote terminal that mirrors the local one.

The local terminal is in raw mode while the shell runs: every key, Ctrl-C included, is handled by
the remote terminal, and its output is written unchanged. The shell is the child of a process that
is spawned for it, so the shell does not outlive this script.
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
_GRACE = 2.0  # seconds after each signal that asks a shell to end, before the next
_RUN_INPUT = ("/bin/sh", "-c", 'exec "${SHELL:-bash}" -s')
# The session leader that opens a terminal without a session gets it as its controlling terminal.
# Ctrl-C works in the shell only with one.
_OPEN = 'exec "$@" <>"$0" >&0 2>&0'


def shell(
    host_mesh_singleton: HostMesh,
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
) -> int:
    """Run a shell on a host, with stdin and stdout as keyboard and screen; return its exit status.

    Args:
        host_mesh_singleton: a mesh of one host.
        env: additional environment variables of the shell.
        workdir: the shell's working directory. Default: the path of the current directory if the
            host has such a directory, otherwise the working directory of the host.

    The shell is the host's ``$SHELL``, or bash, and interactive. If stdin is no terminal, it is
    read to EOF and the shell then runs it as a script, like ``bash -s``. An exit status of 128 + n
    means that signal n ended the shell. Closing the local terminal hangs up the shell. Blocks until
    the shell has exited. Raises ValueError for a mesh that is not of size 1, and the failure of the
    host if it fails.
    """
    if len(host_mesh_singleton) != 1:
        raise ValueError(
            f"a shell runs on one host, and this is a mesh of {host_mesh_singleton.extent}"
        )
    if not os.isatty(0):
        given = sys.stdin.buffer.read()
        return exec_command(host_mesh_singleton, _RUN_INPUT, env, workdir, stdin=given).get()
    context()  # create the client on the calling thread
    procs = host_mesh_singleton.spawn_procs(name="shell")
    try:
        environ = {"TERM": os.environ.get("TERM", "dumb"), **(env or {})}
        remote = procs.spawn("shell", _Shell, environ, workdir, os.getcwd(), *_window())
        return _Screen(remote).run()
    finally:
        procs.stop().get()


class _Screen:
    """The local side: keyboard, screen, and the size of the window."""

    def __init__(self, remote: _Shell) -> None:
        self._remote = remote
        self._woken, self._wake = os.pipe()  # wakes `_serve`: "w" for a new size, "e" for the exit

    def run(self) -> int:
        port, receiver = Channel[bytes | None].open()
        status: Future[int] = self._remote.run.call_one(port)

        def show() -> None:
            while (data := receiver.recv().get()) is not None:
                with contextlib.suppress(OSError):  # the local terminal was closed
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
            port.send(None)  # in-order delivery: it arrives after all output
            shower.join()
            if ended.done():
                waiter.join()
                os.close(self._wake)
                os.close(self._woken)

    def _serve(self, ended: concurrent.futures.Future[int]) -> None:
        """Forward input and window sizes until the shell has exited."""
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
    """The remote side: a shell on a pseudo-terminal."""

    def __init__(
        self, env: dict[str, str], workdir: str | None, here: str, rows: int, columns: int
    ) -> None:
        if workdir is None and os.path.isdir(here):
            workdir = here
        # The shell opens its side of the terminal by name. This process keeps that side open as
        # well: otherwise reading would fail with EIO until the shell has opened it.
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
        """Send the output of the shell to `port` until the shell exits; return its exit status."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._terminal, self._forward, port)
        status = await loop.run_in_executor(None, self._child.wait)
        self._ended.set()
        loop.remove_reader(self._terminal)
        while self._forward(port):  # the remaining output
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
            except BlockingIOError:  # the terminal's buffer is full
                await self._room()

    async def _room(self) -> None:
        """Wait until the terminal is writable, or the shell has exited."""
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
    """Return the available bytes; no bytes if there are none, or at EOF.

    At EOF a pseudo-terminal raises EIO.
    """
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
    """Return rows and columns of the local terminal; 24 and 80 if there is none."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(fd)
            return rows, columns
    return 24, 80


def _set_window(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def _raw(fd: int) -> Generator[None]:
    """Switch the terminal to raw mode; do nothing if `fd` is no terminal."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # TCSADRAIN keeps input that was typed ahead
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes(tell: Callable[[], object]) -> Generator[None]:
    """Call `tell` whenever the size of the window changes; on the main thread only."""
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
