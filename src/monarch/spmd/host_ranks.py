"""`HostRanks`: the actor that runs the ranks of one host.

The ranks are processes of the host's fork server. A thread reads their output and their exits, and
sends both to the driver through one port, in order: a rank's output comes before its exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import selectors
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from monarch._spi import start_thread
from monarch.actor import Actor, Port, concurrent_endpoint
from monarch.spmd.fork_server.finder import connect, start
from monarch.spmd.fork_server.message import Messages, send
from monarch.spmd.network import host_name, machine
from monarch.spmd.store import listen
from monarch.spmd.torchrun import Launch

__all__ = ["Exited", "HostRanks", "Output", "RankSpec", "rank_environ"]

_STREAMS = {1: "stdout", 2: "stderr"}
_INTERNAL = ("HYPERACTOR_", "MONARCH_CLIENT_TRACE_ID", "MONARCH_JOB_SECRET")
_CHUNK = 1 << 16


class RankSpec(NamedTuple):
    """A rank to start: its number, its number on its host, and torchrun's variables for it."""

    rank: int
    local_rank: int
    variables: dict[str, str]


class Output(NamedTuple):
    """Output of a rank; `stream` is 1 for stdout and 2 for stderr. `shown`: for the screen."""

    attempt: int
    rank: int
    stream: int
    data: bytes
    shown: bool


class Exited(NamedTuple):
    """The exit of a rank, with its wait status."""

    attempt: int
    rank: int
    status: int


class _Pipe(NamedTuple):
    """The output of one stream of a rank, and its file, if it is kept in one."""

    rank: int
    stream: int
    shown: bool
    file: BinaryIO | None


class HostRanks(Actor):
    """Runs ranks of a launch on this host; for `monarch.spmd.run`.

    Args:
        launch: what is launched.
        folder: the driver's working directory, which ranks get if this host has it.
        environ: the environment of all ranks; None: that of this process, with `variables`.
        variables: environment variables for all ranks, over those of this process.
        modules: the modules that the fork server imports.
        keep: how many seconds the fork server waits for another launch.
        port: where output and exits go.
    """

    def __init__(
        self,
        launch: Launch,
        folder: str,
        environ: dict[str, str] | None,
        variables: dict[str, str],
        modules: list[str],
        keep: float,
        port: Port[Output | Exited],
    ) -> None:
        self._launch = launch
        self._folder = folder if os.path.isdir(folder) else os.getcwd()
        self._environ = rank_environ(variables) if environ is None else environ
        self._port = port
        self._attempt = 0
        self._answers: list[dict[str, Any]] = []
        self._answered = threading.Condition()
        self._running: set[int] = set()
        self._store: socket.socket | None = None
        self._lost = False
        self._finished = asyncio.Event()
        self._pipes: dict[int, _Pipe] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._waking = os.pipe()
        # Without a next launch there is nothing to share, and one's own server ends with this host.
        self._sock = (
            connect(self._environ, modules, keep) if keep else start(self._environ, modules)
        )
        self._messages = Messages(self._sock)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._sock, selectors.EVENT_READ)
        start_thread("monarch-ranks", self._read_all)

    # -- requests of the driver ------------------------------------------------------------------

    @concurrent_endpoint
    async def processes(self) -> tuple[int, str]:
        """Return how many ranks this host runs, and a name of the machine.

        Waits until the fork server has imported its modules.
        """
        return await _in_thread(self._count), machine()

    @concurrent_endpoint
    async def open_store(self, address: str, port: int) -> tuple[str, int]:
        """Listen for the store of the next attempt, which the first rank here will hold."""
        if self._store is not None:
            self._store.close()
        self._store = listen(address, port)
        return address or host_name(), self._store.getsockname()[1]

    @concurrent_endpoint
    async def start(self, attempt: int, ranks: list[RankSpec]) -> None:
        """Start ranks. Raises RuntimeError if one cannot be started."""
        self._attempt = attempt
        for number, spec in enumerate(ranks):
            await _in_thread(self._fork, spec, not number)
        if attempt < self._launch.max_restarts and self._launch.kind != "command":
            self._request({"op": "prepare"})

    @concurrent_endpoint
    async def signal(self, number: int) -> None:
        """Send a signal to all ranks here, with their child processes."""
        self._request({"op": "signal", "number": number})

    @concurrent_endpoint
    async def wait(self) -> None:
        """Return after `finish`; the driver's call fails earlier if this host is lost."""
        await self._finished.wait()

    @concurrent_endpoint
    async def finish(self) -> None:
        """End the connection to the fork server, and with it all ranks."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._finished.set()

    # -- implementation --------------------------------------------------------------------------

    def _count(self) -> int:
        wanted = self._launch.per_host
        if isinstance(wanted, int):
            self._ask({"op": "devices"})  # so that a slow import is not the first rank's
            return wanted
        counts = self._ask({"op": "devices"})["counts"]
        if wanted == "auto":
            wanted = "gpu" if counts["gpu"] else "xpu" if counts["xpu"] else "cpu"
        count: int = counts[wanted]
        if not count:
            raise RuntimeError(
                f"--nproc-per-node {wanted}: {host_name()} has no such device; give a number"
            )
        return count

    def _fork(self, spec: RankSpec, first: bool) -> None:
        fds: list[int] = []
        pipes: dict[int, _Pipe] = {}
        try:
            for stream in _STREAMS:
                read, write = os.pipe()
                fds.append(write)
                shown = self._launch.is_shown(spec.local_rank, stream)
                pipes[read] = _Pipe(spec.rank, stream, shown, self._file(spec.local_rank, stream))
            theirs = list(fds)
            if first and self._store is not None:
                theirs.append(self._store.fileno())
            request = {
                "op": "fork",
                "rank": spec.rank,
                "kind": self._launch.kind,
                "program": list(self._launch.program),
                "environ": {**self._environ, **spec.variables},
                "folder": self._folder,
            }
            self._pipes.update(pipes)
            self._running.add(spec.rank)
            for read in pipes:
                os.set_blocking(read, False)
            os.write(self._waking, b"p")
            answer = self._ask(request, theirs)
        finally:
            for fd in fds:
                os.close(fd)
            if first and self._store is not None:
                self._store.close()
                self._store = None
        if answer["op"] == "refused":
            raise RuntimeError(f"{host_name()} cannot start rank {spec.rank}: {answer['text']}")

    def _file(self, local_rank: int, stream: int) -> BinaryIO | None:
        if not self._launch.to_file(local_rank, stream):
            return None
        folder = os.path.join(
            self._folder,
            self._launch.log_dir,
            self._launch.run_id,
            f"attempt_{self._attempt}",
            str(local_rank),
        )
        os.makedirs(folder, exist_ok=True)
        return open(os.path.join(folder, f"{_STREAMS[stream]}.log"), "ab", buffering=0)

    def _request(self, request: dict[str, Any]) -> None:
        with self._answered, contextlib.suppress(BrokenPipeError):  # no server: no ranks
            send(self._sock, request)

    def _ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        with self._answered:
            send(self._sock, request, fds or ())
            while not self._answers:
                if self._lost:
                    raise RuntimeError(
                        f"the process that forks ranks on {host_name()} has exited: is the machine "
                        "out of memory?"
                    )
                self._answered.wait()
            return self._answers.pop(0)

    def _read_all(self) -> None:
        """Read output and exits until the fork server closes the connection."""
        watched: set[int] = set()
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    os.read(self._wake, _CHUNK)
                    for fd in set(self._pipes) - watched:
                        self._selector.register(fd, selectors.EVENT_READ)
                        watched.add(fd)
                elif key.fd in self._pipes:
                    if not self._read_pipe(key.fd):
                        self._selector.unregister(key.fd)
                        watched.discard(key.fd)
                        self._close_pipe(key.fd)
                elif not self._read_answers():
                    return

    def _read_answers(self) -> bool:
        try:
            arrived = self._messages.read()
        except EOFError:
            with self._answered:
                self._lost = True
                self._answered.notify_all()
            for rank in sorted(self._running):
                self._port.send(Exited(self._attempt, rank, signal.SIGKILL))
            return False
        for message, _ in arrived:
            if message["op"] == "exit":
                self._exited(message["rank"], message["status"])
            else:
                with self._answered:
                    self._answers.append(message)
                    self._answered.notify_all()
        return True

    def _exited(self, rank: int, status: int) -> None:
        for fd, pipe in list(self._pipes.items()):
            if pipe.rank == rank:
                while self._read_pipe(fd, only_now=True):
                    pass
        self._running.discard(rank)
        self._port.send(Exited(self._attempt, rank, status))

    def _read_pipe(self, fd: int, *, only_now: bool = False) -> bool:
        """Read output once. Return whether there may be more; `only_now`: at this moment."""
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return not only_now
        if data:
            if pipe.file is not None:
                pipe.file.write(data)
            if pipe.shown or pipe.stream == 2:
                self._port.send(Output(self._attempt, pipe.rank, pipe.stream, data, pipe.shown))
        return bool(data)

    def _close_pipe(self, fd: int) -> None:
        pipe = self._pipes.pop(fd)
        os.close(fd)
        if pipe.file is not None:
            pipe.file.close()


def rank_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for ranks: without the engine's own variables."""
    own = {name: v for name, v in os.environ.items() if not name.startswith(_INTERNAL)}
    return {**own, **variables}


async def _in_thread(function: Any, *arguments: Any) -> Any:
    call = functools.partial(function, *arguments)
    return await asyncio.get_running_loop().run_in_executor(None, call)
