"""`HostRanks`: the actor that runs the ranks of one host.

The ranks are processes of the host's fork server. A thread reads their output and their exits, and
sends both to the driver through one port, in order: a rank's output comes before its exit. On the
first host there is a further process, which holds the store of the rendezvous.

Each rank has a connection to this actor for `monarch.spmd.restarts`, through which it is
interrupted and gets the variables of its next attempt; `in_place` describes the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import selectors
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from monarch._spi import own_name, start_thread
from monarch.actor import Actor, Port, concurrent_endpoint
from monarch.spmd.fork_server.finder import KEEPER, reach, start
from monarch.spmd.message import Messages, send
from monarch.spmd.network import host_name, machine
from monarch.spmd.result import STORE
from monarch.spmd.store import AGENT_STORE, listen
from monarch.spmd.torchrun import Launch

__all__ = [
    "Event",
    "Exited",
    "HostRanks",
    "Output",
    "Raised",
    "RankSpec",
    "Ready",
    "Settled",
    "rank_environ",
]

_STREAMS = {1: "stdout", 2: "stderr"}
_INTERNAL = ("HYPERACTOR_", "MONARCH_CLIENT_TRACE_ID", "MONARCH_JOB_SECRET", KEEPER)
_CHUNK = 1 << 16
_ENDING = 60.0  # seconds for the exit of a process that was killed


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
    """The exit of a rank, or of `STORE`, with its wait status."""

    attempt: int
    rank: int
    status: int


class Ready(NamedTuple):
    """A rank that was interrupted, and whose process waits for the next attempt."""

    attempt: int
    rank: int


class Raised(NamedTuple):
    """An error of a rank: its own if `certain`, else perhaps the effect of another failure.

    In the first case the rank exits soon, in the second it waits to be interrupted, or for
    `HostRanks.accept_error`.
    """

    attempt: int
    rank: int
    certain: bool


class Settled(NamedTuple):
    """The answer to `HostRanks.settle`: what follows has happened later."""

    attempt: int


Event = Output | Exited | Ready | Raised | Settled


class _Process:
    """The process of a rank, or of `STORE`. `key` is its name for the fork server.

    `attempt` and `rank` are those of now. `state` is the last message of `in_place`.
    """

    def __init__(
        self, key: int, attempt: int, rank: int, local_rank: int, control: socket.socket | None
    ) -> None:
        self.key = key
        self.attempt = attempt
        self.rank = rank
        self.local_rank = local_rank
        self.state = ""
        self.interrupted = False
        self.exited = threading.Event()
        self.control = control
        self.messages = None if control is None else Messages(control)

    def order(self, op: str, **facts: Any) -> None:
        """Send an order to `in_place`."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # it has exited, which is reported
                send(self.control, {"op": op, **facts})


class _Pipe:
    """The output of one stream of a rank, and its file, if it is kept in one.

    `following` is the file of the rank's next attempt; the thread that reads goes over to it.
    """

    def __init__(self, process: _Process, stream: int, shown: bool, file: BinaryIO | None) -> None:
        self.process = process
        self.stream = stream
        self.shown = shown
        self.file = file
        self.following: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        """Write output to the file."""
        if self.following is not None:
            self.close()
            self.file, self.following = self.following, None
        if self.file is not None:
            self.file.write(data)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


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
        port: Port[Event],
    ) -> None:
        self._launch = launch
        self._folder = folder if os.path.isdir(folder) else os.getcwd()
        self._environ = rank_environ(variables) if environ is None else environ
        self._port = port
        self._has_torch = "torch" in modules
        self._answers: list[dict[str, Any]] = []
        self._answered = threading.Condition()
        self._asking = threading.Lock()
        self._changing = threading.Lock()  # a process exits, or gets its next attempt
        self._keys = itertools.count()
        self._processes: dict[int, _Process] = {}
        self._store: _Process | None = None
        self._lost = False
        self._finished = asyncio.Event()
        self._pipes: dict[int, _Pipe] = {}
        self._controls: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._waking = os.pipe()
        # Without a next launch there is nothing to share, and one's own server ends with this host.
        self._sock = reach(self._environ, modules, keep) if keep else start(self._environ, modules)
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
    async def open_store(self, attempt: int, address: str, port: int) -> tuple[str, int]:
        """Open the store of an attempt in a process of its own; close that of the last attempt.

        Without torch, a port is returned that no process listens on. Raises OSError if the address
        is not of this host, or the port is taken.
        """
        return address or own_name(), await _in_thread(self._open_store, attempt, address, port)

    @concurrent_endpoint
    async def start(self, attempt: int, ranks: list[RankSpec], failure: str | None) -> int:
        """Start ranks. Return how many of them go on in their process.

        `failure` says in words why there is another attempt. Raises RuntimeError if a rank cannot
        be started.
        """
        kept = 0
        for spec in ranks:
            kept += await _in_thread(self._start, attempt, spec, failure)
        if attempt < self._launch.max_restarts and self._launch.kind != "command":
            self._request({"op": "prepare"})
        return kept

    @concurrent_endpoint
    async def interrupt(self) -> None:
        """End the attempt of all ranks here. A process that is not to be kept gets SIGTERM."""
        ending: list[_Process] = []
        for process in self._ranks():
            process.interrupted = True
            if process.state in ("asked", "raised"):
                process.order("interrupt")
            else:
                ending.append(process)
        self._signal(signal.SIGTERM, ending)

    @concurrent_endpoint
    async def accept_error(self, rank: int) -> None:
        """Let a rank that has `Raised` fail by its error."""
        for process in self._ranks():
            if process.rank == rank and process.state == "raised":
                process.order("raise")

    @concurrent_endpoint
    async def settle(self, attempt: int) -> None:
        """Report `Settled` after all exits until now."""
        await _in_thread(self._ask, {"op": "settle"})
        self._port.send(Settled(attempt))

    @concurrent_endpoint
    async def signal(self, number: int) -> None:
        """Send a signal to all ranks here that are not ready, with their child processes."""
        self._signal(number, self._ranks())

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

    def _ranks(self) -> list[_Process]:
        """Return the processes that run an attempt."""
        found = list(self._processes.values())
        return [process for process in found if process.rank != STORE and process.state != "ready"]

    def _signal(self, number: int, processes: list[_Process]) -> None:
        keys = [process.key for process in processes]
        self._request({"op": "signal", "number": number, "keys": keys})

    def _open_store(self, attempt: int, address: str, port: int) -> int:
        if self._store is not None:
            self._signal(signal.SIGKILL, [self._store])
            if not self._store.exited.wait(_ENDING):  # the next one may listen on the same port
                raise RuntimeError(f"the last store on {host_name()} does not exit after SIGKILL")
            self._store = None
        with listen(address, port) as listening:
            if self._has_torch:
                self._store = _Process(next(self._keys), attempt, STORE, 0, None)
                null = os.open(os.devnull, os.O_WRONLY)
                try:
                    self._fork(self._store, "store", (), {}, [null, null, listening.fileno()])
                finally:
                    os.close(null)
            opened: int = listening.getsockname()[1]
            return opened

    def _start(self, attempt: int, spec: RankSpec, failure: str | None) -> bool:
        """Start a rank. Return whether it goes on in its process."""
        variables = {**spec.variables, **({AGENT_STORE: "True"} if self._has_torch else {})}
        with self._changing:
            for process in self._processes.values():
                if process.state == "ready" and process.local_rank == spec.local_rank:
                    for pipe in list(self._pipes.values()):
                        if pipe.process is process:
                            pipe.following = self._file(attempt, spec.local_rank, pipe.stream)
                    process.attempt, process.rank = attempt, spec.rank
                    process.state, process.interrupted = "asked", False
                    process.order("go", variables=variables, failure=failure)
                    return True
        self._start_process(attempt, spec, variables)
        return False

    def _start_process(self, attempt: int, spec: RankSpec, variables: dict[str, str]) -> None:
        ours = theirs = None
        if self._launch.kind != "command":
            ours, theirs = socket.socketpair()
        process = _Process(next(self._keys), attempt, spec.rank, spec.local_rank, ours)
        fds: list[int] = []
        pipes: dict[int, _Pipe] = {}
        try:
            for stream in _STREAMS:
                read, write = os.pipe()
                fds.append(write)
                os.set_blocking(read, False)
                shown = self._launch.is_shown(spec.local_rank, stream)
                file = self._file(attempt, spec.local_rank, stream)
                pipes[read] = _Pipe(process, stream, shown, file)
            if theirs is not None:
                fds.append(theirs.detach())
            self._pipes.update(pipes)
            if ours is not None:
                self._controls[ours.fileno()] = process
            os.write(self._waking, b"p")
            self._fork(process, self._launch.kind, self._launch.program, variables, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(
        self,
        process: _Process,
        kind: str,
        program: Sequence[str],
        variables: dict[str, str],
        fds: list[int],
    ) -> None:
        self._processes[process.key] = process
        request = {
            "op": "fork",
            "key": process.key,
            "kind": kind,
            "program": list(program),
            "environ": {**self._environ, **variables},
            "folder": self._folder,
        }
        answer = self._ask(request, fds)
        if answer["op"] == "refused":
            del self._processes[process.key]
            name = "the store" if process.rank == STORE else f"rank {process.rank}"
            raise RuntimeError(f"{host_name()} cannot start {name}: {answer['text']}")

    def _file(self, attempt: int, local_rank: int, stream: int) -> BinaryIO | None:
        if not self._launch.to_file(local_rank, stream):
            return None
        folder = os.path.join(
            self._folder,
            self._launch.log_dir,
            self._launch.run_id,
            f"attempt_{attempt}",
            str(local_rank),
        )
        os.makedirs(folder, exist_ok=True)
        return open(os.path.join(folder, f"{_STREAMS[stream]}.log"), "ab", buffering=0)

    def _request(self, request: dict[str, Any]) -> None:
        with self._answered, contextlib.suppress(BrokenPipeError):  # no server: no ranks
            send(self._sock, request)

    def _ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        with self._asking, self._answered:
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
                    for fd in {*self._pipes, *self._controls} - watched:
                        self._selector.register(fd, selectors.EVENT_READ)
                        watched.add(fd)
                elif key.fd in self._pipes:
                    if not self._read_pipe(key.fd):
                        self._selector.unregister(key.fd)
                        watched.discard(key.fd)
                        self._close_pipe(key.fd)
                elif key.fd in self._controls:
                    if not self._read_control(self._controls[key.fd]):
                        self._selector.unregister(key.fd)
                        watched.discard(key.fd)
                        self._close_control(key.fd)
                elif not self._read_answers():
                    return

    def _read_answers(self) -> bool:
        try:
            arrived = self._messages.read()
        except EOFError:
            with self._answered:
                self._lost = True
                self._answered.notify_all()
            left = list(self._processes.values())
            for process in sorted(left, key=lambda process: process.rank == STORE):
                self._exited(process.key, signal.SIGKILL)
            return False
        for message, _ in arrived:
            if message["op"] == "exit":
                self._exited(message["key"], message["status"])
            else:
                with self._answered:
                    self._answers.append(message)
                    self._answered.notify_all()
        return True

    def _exited(self, key: int, status: int) -> None:
        with self._changing:
            process = self._processes.pop(key)
        self._read_rest(process)
        process.exited.set()
        self._port.send(Exited(process.attempt, process.rank, status))

    def _read_rest(self, process: _Process) -> None:
        """Read the output that a process has written until now."""
        for fd, pipe in list(self._pipes.items()):
            if pipe.process is process:
                while self._read_pipe(fd, only_now=True):
                    pass

    def _read_control(self, process: _Process) -> bool:
        """Read what a rank reports. Return whether there may be more."""
        assert process.messages is not None
        try:
            arrived = process.messages.read()
        except EOFError:
            return False
        for message, _ in arrived:
            op = message["op"]
            if op == "ready":
                self._read_rest(process)
            process.state = op
            if op == "ready":
                self._port.send(Ready(process.attempt, process.rank))
            elif op in ("raised", "failed"):
                self._port.send(Raised(process.attempt, process.rank, op == "failed"))
            if process.interrupted and op == "asked":
                process.order("interrupt")
            elif process.interrupted and op in ("left", "failed"):
                self._signal(signal.SIGTERM, [process])
        return True

    def _close_control(self, fd: int) -> None:
        control = self._controls.pop(fd).control
        if control is not None:
            control.close()

    def _read_pipe(self, fd: int, *, only_now: bool = False) -> bool:
        """Read output once. Return whether there may be more; `only_now`: at this moment."""
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return not only_now
        if data:
            pipe.write(data)
            if pipe.shown or pipe.stream == 2:
                its = pipe.process
                self._port.send(Output(its.attempt, its.rank, pipe.stream, data, pipe.shown))
        return bool(data)

    def _close_pipe(self, fd: int) -> None:
        pipe = self._pipes.pop(fd)
        os.close(fd)
        pipe.close()


def rank_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for ranks: without the engine's own variables."""
    own = {name: v for name, v in os.environ.items() if not name.startswith(_INTERNAL)}
    return {**own, **variables}


async def _in_thread(function: Any, *arguments: Any) -> Any:
    call = functools.partial(function, *arguments)
    return await asyncio.get_running_loop().run_in_executor(None, call)
