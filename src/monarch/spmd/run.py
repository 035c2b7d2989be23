"""Run a program on all ranks, as torchrun does: start, watch, try again, report.

One attempt starts all ranks. The first rank that fails ends the attempt: the others get SIGTERM,
and SIGKILL after `Launch.shutdown_timeout`. As long as attempts are left, the next one starts at
once on the hosts that are left, with a new rendezvous. The program goes on from its checkpoint, as
under torchrun. A host that is lost counts as a failure, too. `Launch.least` says with how many
hosts the program may go on.

A supervisor brings a lost host back when its worker answers again, or puts a host in its place that
the launch has not used, since there are more than `Launch.most`. When that host has imported its
modules, the attempt ends, and the next one has all hosts. This is no failure, as it is none under
torchrun. It does not happen once a rank has ended well, since the program is at its end then.

Ranks of a program that uses `monarch.spmd.restarts` are interrupted instead, and go on in their
processes with the next attempt. Each rank is kept or replaced by itself: one that has not asked to
be kept gets SIGTERM, and a new process.

An error of such a rank may be the effect of another failure that is not known yet. So the launch
waits a moment (`_MOMENT`), and then for all hosts to report the exits until then. A host that is
lost does not answer, and its loss is the failure. If nothing has failed, the first rank with an
error fails by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from monarch.actor import (
    ActorError,
    Channel,
    HostMesh,
    Restarted,
    SupervisionError,
    Supervisor,
)
from monarch.spmd.errors import Errors
from monarch.spmd.host_ranks import (
    Event,
    Exited,
    HostRanks,
    Output,
    Raised,
    RankSpec,
    Ready,
    Settled,
)
from monarch.spmd.result import HOST, STORE, Failure, Result
from monarch.spmd.torchrun import Launch
from monarch.spmd.variables import torchrun_variables

__all__ = ["run"]

_TAIL = 1 << 13  # bytes of a failed rank's stderr that are kept
_LINES = 30  # lines of it that are shown
_ENDING = 60.0  # seconds for hosts to report exits after SIGKILL
_MOMENT = 0.5  # seconds for a process to exit once its connections are closed
_RETURN = 15.0  # seconds for a host to come back if the others are too few
_SPARE = 3.0  # seconds for a host to take the place of a lost one before others go on without
_IMPORT = 300.0  # seconds for a host that came back to import its modules
_RESTARTS = 1 << 30  # of the actors of hosts: the launch has its own limit


class _Host:
    """A host with its actor, and the machine's name. One that was lost comes back as another."""

    def __init__(self, number: int, ranks: Any) -> None:
        self.number = number
        self.ranks = ranks
        self.count = 0
        self.machine = ""
        self.lost: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        return self.lost is not None and self.lost.done()

    @property
    def name(self) -> str:
        return self.machine.partition(" ")[0] or f"number {self.number}"


class _Joined(NamedTuple):
    """A host that came back, or took the place of a lost one, and is ready to start ranks."""

    host: _Host


class _Grown(NamedTuple):
    """The outcome of an attempt that ended since these hosts have joined."""

    hosts: list[_Host]

    def __str__(self) -> str:
        names = ", ".join(host.name for host in self.hosts)
        return f"host {names} has joined" if len(self.hosts) == 1 else f"hosts {names} have joined"


def run(
    launch: Launch,
    hosts: HostMesh,
    show: Callable[[int, int, bytes], None],
    *,
    say: Callable[[str], None] = lambda _text: None,
    environ: dict[str, str] | None = None,
    variables: dict[str, str] | None = None,
    modules: Sequence[str] = ("torch",),
    keep: float = 0.0,
    folder: str | None = None,
) -> Result:
    """Run a launch on these hosts. Blocks until the program has ended on all ranks.

    Args:
        launch: what is run.
        hosts: a mesh of hosts, of one dimension or none. If there are more than the launch may use,
            the others take the places of those that are lost.
        show: is called with the rank, the stream (1: stdout, 2: stderr) and the bytes of output.
        say: is called with a line of text about failures and attempts.
        environ: the environment of all ranks; None: that of each host, with `variables`.
        variables: environment variables of all ranks, over those of the hosts.
        modules: what the fork servers import before they fork ranks.
        keep: how many seconds fork servers wait for another launch.
        folder: the working directory of ranks, on hosts that have it; None: that of this process.

    Failures of ranks and hosts are in the result. Raises ValueError if there are fewer hosts than
    the launch needs, and RuntimeError if no rank can be started.
    """
    running = _Run(launch, hosts, show, say, environ, variables or {}, modules, keep, folder)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(running.go())
    # The thread of a notebook's cell has an event loop, which cannot run another one.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, running.go()).result()


class _Run:
    def __init__(
        self,
        launch: Launch,
        hosts: HostMesh,
        show: Callable[[int, int, bytes], None],
        say: Callable[[str], None],
        environ: dict[str, str] | None,
        variables: dict[str, str],
        modules: Sequence[str],
        keep: float,
        folder: str | None,
    ) -> None:
        count = hosts.extent.nelements
        self._least = launch.least or count
        if count < self._least:
            raise ValueError(f"--nnodes {launch.least}: there are only {count} hosts")
        most = launch.most or count
        self._spares: list[HostMesh] = []
        if count > most:
            label = hosts.extent.labels[0]
            first: dict[str, Any] = {label: slice(0, most)}
            others: dict[str, Any] = {label: slice(most, count)}
            self._spares.append(hosts.slice(**others))
            hosts = hosts.slice(**first)
        self._launch = launch
        self._mesh = hosts
        self._hosts: list[_Host] = []  # by their number; the last of each
        self._arriving: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._show = show
        self._say = say
        self._environ = environ
        self._variables = variables
        self._modules = list(modules)
        self._keep = keep
        self._folder = os.getcwd() if folder is None else folder
        self._events: asyncio.Queue[Event | _Host | _Joined] = asyncio.Queue()
        self._settling: asyncio.Task[None] | None = None
        self._result = Result(max_restarts=launch.max_restarts)
        self._began = time.monotonic()

    async def go(self) -> Result:
        port, receiver = Channel[Event].open()
        procs = self._mesh.spawn_procs()
        reader = None
        loop = asyncio.get_running_loop()

        def restarted(event: Restarted) -> None:
            with contextlib.suppress(RuntimeError):  # the launch has ended, and with it the loop
                loop.call_soon_threadsafe(self._arrived, event.rank)

        supervisor = Supervisor(max_restarts=_RESTARTS, spares=self._spares, on_restart=restarted)
        try:
            actors = supervisor.spawn(
                procs,
                "ranks",
                HostRanks,
                self._launch,
                self._folder,
                self._environ,
                self._variables,
                self._modules,
                self._keep,
                port,
            )
            reader = asyncio.create_task(self._read(receiver))
            labels = actors.extent.labels
            for number in range(actors.extent.nelements):
                place: dict[str, Any] = dict.fromkeys(labels, number)
                self._hosts.append(self._watched(_Host(number, actors.slice(**place))))
            await self._attempts()
        finally:
            for host in self._present():
                host.ranks.finish.broadcast()
            all_tasks = (reader, self._settling, *self._arriving, *self._watching)
            tasks = [task for task in all_tasks if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await procs.stop()
        self._result.seconds = self._elapsed()
        return self._result

    async def _attempts(self) -> None:
        result = self._result
        cause: str | None = None
        while True:
            hosts = self._present()
            result.attempts += 1
            number = result.attempts - 1
            ended = await self._attempt(number, hosts, cause)
            if ended is None:
                result.succeeded = True
                return
            await asyncio.gather(*map(self._confirm, hosts))
            if isinstance(ended, _Grown):
                result.grown += 1
                if len(self._present()) < self._least:  # others were lost meanwhile
                    lost = next(host for host in hosts if host.is_lost)
                    ended = self._host_lost(number, lost, {}), lost
            if isinstance(ended, _Grown):
                cause = str(ended)
            else:
                failure, culprit = ended
                if culprit.is_lost and failure.rank != HOST:
                    failure = replace(self._host_lost(number, culprit, {}), at=failure.at)
                result.failures.append(failure)
                cause = str(failure)
                if not result.restarts_left or not await self._are_enough(cause):
                    return
            last = self._launch.max_restarts + 1 + result.grown
            self._say(f"{cause}; attempt {result.attempts + 1} of at most {last} starts")

    def _present(self) -> list[_Host]:
        return [host for host in self._hosts if not host.is_lost]

    async def _are_enough(self, failure: str) -> bool:
        """Return whether enough hosts are left; wait for others if they are too few.

        Also wait a moment for a spare host, which may make a second restart unnecessary.
        """
        began = time.monotonic()
        said = False
        while len(self._present()) < len(self._hosts):
            few = len(self._present()) < self._least
            limit = _RETURN if few else _SPARE if self._spares else 0.0
            if self._arriving and (few or self._spares):
                limit = _IMPORT
            left = began + limit - time.monotonic()
            if left <= 0:
                break
            if few and not said:
                said = True
                self._say(f"{failure}; {self._lack()}: waiting {_RETURN:g} s for another")
            with contextlib.suppress(asyncio.TimeoutError):
                event = await asyncio.wait_for(self._events.get(), min(left, 1.0))
                if isinstance(event, _Joined):
                    self._join(event)
        if len(self._present()) < self._least:
            self._say(self._lack())
            return False
        return True

    def _lack(self) -> str:
        count = len(self._present())
        left = "1 host is" if count == 1 else f"{count or 'no'} hosts are"
        return f"{left} left, and the program needs {self._least} (--nnodes)"

    def _arrived(self, number: int) -> None:
        """Handle that the actor of this host runs again."""
        task = asyncio.ensure_future(self._prepare(number))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _prepare(self, number: int) -> None:
        """Have a host that came back import its modules; then it has `_Joined`."""
        former = self._hosts[number]
        if former.lost is not None:
            await asyncio.wait({former.lost})  # so its loss is reported first
        host = self._watched(_Host(number, former.ranks))
        with contextlib.suppress(ActorError, SupervisionError):  # it was lost again: no news
            host.count, host.machine = await host.ranks.processes.call_one()
            self._events.put_nowait(_Joined(host))

    def _join(self, event: _Joined) -> None:
        self._hosts[event.host.number] = event.host

    async def _confirm(self, host: _Host) -> None:
        """Wait until this host has answered, or is known to be lost.

        The ranks of a dying host exit before its loss is reported. Without this, that loss would be
        reported as the exit of a rank, and the next attempt would include the host.
        """
        try:
            await host.ranks.processes.call_one()
        except ActorError:
            pass  # of a host that is there; the next attempt raises it
        except Exception:
            if host.lost is not None:
                await asyncio.wait({host.lost}, timeout=_ENDING)

    async def _attempt(
        self, attempt: int, hosts: list[_Host], cause: str | None
    ) -> tuple[Failure, _Host] | _Grown | None:
        """Run the program once. Return the first failure and its host, or None at a good end.

        `cause` says why this is not the first attempt.
        """
        running: dict[int, _Host] = {}
        tails: dict[int, bytearray] = {}
        try:
            for host in hosts:
                host.count, host.machine = await host.ranks.processes.call_one()
            counts = {host.count for host in hosts}
            if len(counts) > 1:
                raise RuntimeError(f"hosts differ in their devices ({sorted(counts)}): give "
                                   "--nproc-per-node a number")  # fmt: skip
            address, port = await self._rendezvous(attempt, hosts)
            local, world = hosts[0].count, sum(host.count for host in hosts)
            kept = 0
            for place, host in enumerate(hosts):
                specs = [
                    self._spec(attempt, place * local + number, local, world, address, port)
                    for number in range(local)
                ]
                running.update({spec.rank: host for spec in specs})
                kept += await host.ranks.start.call_one(attempt, specs, cause)
            self._started(kept)
        except Exception as error:
            lost = next((host for host in hosts if host.is_lost), None)
            await self._end(attempt, running, tails, goes_on=self._result.restarts_left > 0)
            if lost is None:
                raise
            return self._failure(attempt, HOST, lost.name, _first_line(error)), lost
        ended = await self._events_of(attempt, hosts, running, tails)
        if ended is not None:
            goes_on = isinstance(ended, _Grown) or self._result.restarts_left > 0
            await self._end(attempt, running, tails, goes_on=goes_on)
        return ended

    async def _rendezvous(self, attempt: int, hosts: list[_Host]) -> tuple[str, int]:
        launch = self._launch
        address = launch.master_addr
        if not address and len({host.machine for host in hosts}) == 1:
            address = "127.0.0.1"
        found: tuple[str, int] = await hosts[0].ranks.open_store.call_one(
            attempt,
            "127.0.0.1" if address in ("127.0.0.1", "localhost") else "",
            launch.master_port,
        )
        return address or found[0], found[1]

    def _spec(
        self, attempt: int, rank: int, local: int, world: int, address: str, port: int
    ) -> RankSpec:
        launch = self._launch
        local_rank = rank % local
        variables = torchrun_variables(rank, world, local, address, port, launch.role)
        variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt - self._result.grown)
        variables["TORCHELASTIC_MAX_RESTARTS"] = str(launch.max_restarts)
        variables["TORCHELASTIC_RUN_ID"] = launch.run_id
        if launch.virtual_local_rank:
            variables["LOCAL_RANK"] = "0"
            variables["CUDA_VISIBLE_DEVICES"] = str(local_rank)
        return RankSpec(rank, local_rank, variables)

    async def _events_of(
        self,
        attempt: int,
        hosts: list[_Host],
        running: dict[int, _Host],
        tails: dict[int, bytearray],
    ) -> tuple[Failure, _Host] | _Grown | None:
        """Handle events until all ranks have exited, one has failed, or a host has joined."""
        errors = Errors(len(hosts))
        has_ended = False
        while running:
            joined = [host for host in self._present() if host not in hosts]
            if joined and not has_ended:
                return _Grown(joined)
            event = await self._events.get()
            if isinstance(event, _Joined):
                self._join(event)
                continue
            if isinstance(event, _Host):
                if event not in hosts:
                    continue  # it came back, and was lost again before it took part
                return self._host_lost(attempt, event, running), event
            if event.attempt != attempt:
                continue
            if isinstance(event, Output):
                self._output(event, tails)
            elif isinstance(event, Exited):
                host = hosts[0] if event.rank == STORE else running.pop(event.rank)
                if event.status:
                    text = tails.get(event.rank, bytearray()).decode(errors="replace")
                    stderr = tuple(text.splitlines()[-_LINES:])
                    ending = _ending(event.status)
                    return self._failure(attempt, event.rank, host.name, ending, stderr), host
                errors.exited(event.rank)
                has_ended = True
            elif isinstance(event, Raised):
                errors.raised(event.rank, certain=event.certain)
            elif isinstance(event, Settled):
                errors.settled()
            if errors.take_question():
                self._settling = asyncio.create_task(self._settle(attempt, hosts))
            culprit = errors.take_culprit()
            if culprit is not None:
                with contextlib.suppress(Exception):  # its host is lost, which is reported
                    await running[culprit].ranks.accept_error.call_one(culprit)
        return None

    async def _settle(self, attempt: int, hosts: list[_Host]) -> None:
        """Have all hosts report the exits until now, and then `Settled`."""
        watched = [host.lost for host in hosts if host.lost is not None]
        await asyncio.wait(watched, timeout=_MOMENT, return_when=asyncio.FIRST_COMPLETED)
        calls = [host.ranks.settle.call_one(attempt) for host in hosts if not host.is_lost]
        await asyncio.gather(*calls, return_exceptions=True)

    def _host_lost(self, attempt: int, host: _Host, running: dict[int, _Host]) -> Failure:
        for rank in [rank for rank, its in running.items() if its is host]:
            del running[rank]
        error = host.lost.exception() if host.lost is not None else None
        text = _first_line(error) if error else "it has ended"
        return self._failure(attempt, HOST, host.name, text)

    def _failure(
        self, attempt: int, rank: int, host: str, text: str, stderr: tuple[str, ...] = ()
    ) -> Failure:
        return Failure(attempt, rank, host, text, stderr, at=self._elapsed())

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _started(self, kept: int) -> None:
        """Note the cost of the last failure, now that its next attempt has all its ranks."""
        failures = self._result.failures
        if failures and failures[-1].cost is None:
            cost = self._elapsed() - failures[-1].at
            failures[-1] = replace(failures[-1], cost=cost, kept=kept)

    def _output(self, event: Output, tails: dict[int, bytearray]) -> None:
        if event.stream == 2:
            tail = tails.setdefault(event.rank, bytearray())
            tail += event.data
            del tail[:-_TAIL]
        if event.shown:
            self._show(event.rank, event.stream, event.data)

    async def _end(
        self,
        attempt: int,
        running: dict[int, _Host],
        tails: dict[int, bytearray],
        *,
        goes_on: bool,
    ) -> None:
        """End the ranks that run, and wait until they have exited, or are ready to go on."""
        for last, patience in ((False, self._launch.shutdown_timeout), (True, _ENDING)):
            for host in set(running.values()):
                if not host.is_lost:
                    with contextlib.suppress(Exception):
                        if goes_on and not last:
                            await host.ranks.interrupt.call_one()
                        else:
                            number = signal.SIGKILL if last else signal.SIGTERM
                            await host.ranks.signal.call_one(int(number))
            drain = asyncio.create_task(self._drain(attempt, running, tails))
            done, _ = await asyncio.wait({drain}, timeout=patience)
            if done:
                return
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)

    async def _drain(
        self, attempt: int, running: dict[int, _Host], tails: dict[int, bytearray]
    ) -> None:
        while running:
            event = await self._events.get()
            if isinstance(event, _Host):
                self._host_lost(attempt, event, running)
            elif isinstance(event, _Joined):
                self._join(event)
            elif event.attempt == attempt and isinstance(event, Output):
                self._output(event, tails)
            elif event.attempt == attempt and isinstance(event, Exited | Ready):
                running.pop(event.rank, None)

    async def _read(self, receiver: Any) -> None:
        while True:
            self._events.put_nowait(await receiver.recv())

    def _watched(self, host: _Host) -> _Host:
        host.lost = asyncio.create_task(self._watch(host))
        self._watching.append(host.lost)
        return host

    async def _watch(self, host: _Host) -> None:
        try:
            await host.ranks.wait.call_one()
        except asyncio.CancelledError:
            raise
        except Exception:
            self._events.put_nowait(host)
            raise


def _ending(status: int) -> str:
    """Return the meaning of a wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, SupervisionError) and error.failure is not None:
        error = RuntimeError(error.failure.root.error)
    return (str(error) or type(error).__name__).splitlines()[0]
