"""The world of one simulation: its hosts, processes, network, faults and trace.

It stands in for the operating systems: it starts agents and processes on its hosts, ends them when
they exit, are killed or crash, and carries signals. `scheduler` decides which of them runs next.
"""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from monarch._engine.runtime.agent import client as clients
from monarch._engine.runtime.io import environment as environments
from monarch.testing.driver import SimEnvironment, SimEvent
from monarch.testing.faults import FaultPlan
from monarch.testing.host import SimHost
from monarch.testing.injector import Injector
from monarch.testing.invariants import Invariants
from monarch.testing.network import Listener, Network, NetworkEnd
from monarch.testing.proc import SimProc
from monarch.testing.scheduler import Place, Scheduler
from monarch.testing.worker import SimWorker

__all__ = ["World"]


class World:
    """The world of one simulation.

    Args:
        seed: of all random choices.
        hosts: how many there are; the script runs on the first.
        plan: the faults to inject.
        latency: the least and the most seconds that a packet between hosts takes.
        time_limit: virtual seconds after which the simulation fails.
        patience: real seconds that one step may take.
        trace: whether to record the events in `trace`.
    """

    def __init__(
        self,
        seed: object,
        hosts: int,
        plan: FaultPlan,
        latency: tuple[float, float],
        time_limit: float,
        patience: float,
        trace: bool,
    ) -> None:
        self.scheduler = Scheduler(seed, time_limit, patience)
        chance = random.Random(f"{seed}/chance")  # noqa: S311 - must be repeatable
        self._count = hosts
        self.driver = SimEnvironment(self.scheduler, chance, environments.current)
        self.trace: list[tuple[Any, ...]] | None = [] if trace else None
        self.procs: list[SimProc] = []  # all that were ever started, the client first
        self.by_uid: dict[int, SimProc] = {}
        self.agent_process = _AgentProcess(self)
        self._client_uid = chance.randrange(1 << 43) << 20 | 1 << 63
        self.workers = [SimWorker(self, number) for number in range(hosts)]
        self.hosts = [self._new_host(number) for number in range(hosts)]
        self.network = self.driver.network = Network(self, latency)
        self.injector = Injector(self, plan)
        self.invariants = Invariants(self)
        self.scheduler.books = self.invariants.on_send

    def start_client(self) -> SimProc:
        """Start the process of the script, on the first host."""
        host = self.hosts[0]
        client = self.new_proc(host, self._client_uid, {})
        client.adopt_agent(host.admit(client))
        return client

    def new_proc(self, host: SimHost, uid: int, spec: dict[str, Any]) -> SimProc:
        """Make a process on `host` with `spec`; an empty `spec` makes the script's."""
        proc = SimProc(self, host, uid, spec, len(self.procs))
        self.procs.append(proc)
        self.by_uid[uid] = proc
        self.injector.on_proc(proc)
        return proc

    def exit(self, proc: SimProc, status: int) -> None:
        """Exit `proc` now, with a status as from `os.waitpid`; its own code does not continue."""
        place = proc.place
        if place.dead:
            return
        self.scheduler.end(place)
        self.record("ended", proc.label, status)
        for link in list(proc.ends):
            link.close("the process ended")
        proc.ends.clear()
        for sock in proc.side_streams:
            sock.close()
        _break_off(proc.place)
        self.invariants.on_exit(proc)
        proc.host.exited(proc, status)
        strand = self.scheduler.strand
        running = clients._current if strand is None else strand.place.proc
        if running is proc:
            self.scheduler.vanish()

    def _new_host(self, number: int) -> SimHost:
        return SimHost(self, number, self._client_uid, self._count)

    def start_agent(self, number: int, name: str) -> None:
        """Start an agent on a host that has none, for a client that calls the host `name`."""
        self.scheduler.end(self.hosts[number].place)
        self.hosts[number] = SimHost(self, number, self._client_uid, self._count, name)

    def crash_host(self, host: SimHost) -> None:
        """Cut the power of `host`: its processes and its agent exit without a message."""
        self.scheduler.end(self.workers[host.ident].place)
        self._stop(host)

    def crash_agent(self, host: SimHost) -> None:
        """Crash the agent of `host` and all its processes; the host's worker starts another agent.

        The other hosts' connections to the agent are closed.
        """
        self._stop(host)
        self.workers[host.ident].agent_ended()
        self.hosts[host.ident] = self._new_host(host.ident)
        for place in (host.place, *(proc.place for proc in host.procs.values())):
            _break_off(place)

    def _stop(self, host: SimHost) -> None:
        self.record("ended", host.hostname)
        for proc in list(host.procs.values()):
            if not proc.place.dead:
                self.scheduler.end(proc.place)
        self.scheduler.end(host.place)

    def signal(self, pid: int, number: int, really: Callable[[int, int], None]) -> None:
        """Send a signal as `os.kill` does; a pid that is not simulated is passed to `really`."""
        proc = next((proc for proc in self.procs if proc.pid == pid), None)
        if proc is None:
            really(pid, number)
        elif proc.place.dead:
            raise ProcessLookupError(3, "No such process")
        elif number == signal.SIGSTOP:
            if not proc.suspended:
                proc.suspended = True
                self.scheduler.pause(proc.place)
                self.scheduler.yield_if_paused()
        elif number == signal.SIGCONT:
            if proc.suspended:
                proc.suspended = False
                self.scheduler.unpause(proc.place)
        elif number:
            self.exit(proc, number)

    def record(self, what: str, *details: Any) -> None:
        """Add an event of the present moment to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append((round(self.scheduler.now, 9), what, *details))


def _break_off(place: Place) -> None:
    """Close the connections of a process that has exited, and the ports at which it listens."""
    for end in list(place.ends):
        if isinstance(end, (NetworkEnd, Listener)):
            end.break_off()


class _AgentProcess:
    """The process of the client's host agent, as `client.close_client` sees it."""

    pid = 0  # there is no such process

    def __init__(self, world: World) -> None:
        self._ended = SimEvent(world.scheduler)

    def end(self) -> None:
        self._ended.set()

    def wait(self, timeout: float) -> None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the host agent", timeout)

    def kill(self) -> None:
        self._ended.set()
