"""The injector: carries out a fault plan in a running simulation.

It observes requests at the link on which they are sent, at the mailbox from which they are taken,
and at the link on which their reply is sent. In a simulation without faults at requests this costs
one comparison.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from monarch._engine.wire.frame import CALL, CAST, HEADER, POST, SPAWN
from monarch.testing.faults import (
    Crash,
    CrashAgent,
    CrashHost,
    Fault,
    FaultPlan,
    NetworkFault,
    Pause,
    Request,
    Slow,
)
from monarch.testing.link import calls_in

if TYPE_CHECKING:
    from monarch._engine.runtime.actor.cell import Cell
    from monarch.testing.link import SimLink
    from monarch.testing.proc import SimProc
    from monarch.testing.scheduler import Strand
    from monarch.testing.world import World

__all__ = ["Injector"]


class _Pending:
    """A fault that waits for its request."""

    __slots__ = ("fault", "left", "request")

    def __init__(self, fault: Fault, request: Request) -> None:
        self.fault = fault
        self.request = request
        self.left = request.nth


class Injector:
    """Carries out one fault plan.

    Attributes:
        executed: the faults that found their targets, in the order they happened.
        missed: a line for each fault that did not.
    """

    def __init__(self, world: World, plan: FaultPlan) -> None:
        self._world = world
        self._names: dict[int, str] = {}  # names of actor meshes, by uid
        self._awaited: dict[int, list[Fault]] = {}  # by the uid of a process not started yet
        self._arrivals: list[_Pending] = []
        self._runs: list[_Pending] = []
        self._replies: list[_Pending] = []
        self.executed: list[Fault] = []
        self.missed: list[str] = []
        self._planned = list(plan)
        for fault in plan:
            if isinstance(fault.at, Request):
                waiting = {
                    "before_arrival": self._arrivals,
                    "while_running": self._runs,
                    "before_reply": self._replies,
                }[fault.at.place]
                waiting.append(_Pending(fault, fault.at))
            else:
                world.scheduler.at(fault.at, None, self._strike, fault, None)
        if self._arrivals or self._replies:
            world.scheduler.on_send = self.on_send
        if self._runs:
            world.scheduler.on_run = self.on_run

    def on_spawn(self, uid: int, meta: bytes) -> None:
        """Record the name of actor mesh `uid` from `meta`, before its actors are made."""
        self._names[uid] = json.loads(meta)[0]

    # -- requests --------------------------------------------------------------------------------

    def on_send(self, link: SimLink, data: bytes) -> None:
        """Observe a frame that is being sent on `link`."""
        kind = data[4]
        if kind in (CALL, CAST):
            if self._arrivals:
                for call in list(calls_in(link, data)):
                    self.on_request(call.actor, call.to)
        elif kind == POST:
            if self._replies:
                cell = getattr(self._world.scheduler.strand, "_cell", None)
                if cell is not None:
                    for fault in self._due(self._replies, cell.identity.name):
                        self._strike(fault, cell.proc)
                    self._world.scheduler.yield_if_paused()
        elif kind == SPAWN:
            head = HEADER.unpack_from(data)
            self.on_spawn(head[4], data[HEADER.size : HEADER.size + head[3]])

    def on_request(self, uid: int, to: int) -> None:
        """Observe a request to an actor of mesh `uid` in proc `to` that is being sent."""
        for fault in self._due(self._arrivals, self._names.get(uid, "")):
            proc = self._world.by_uid.get(to)
            if proc is not None or getattr(fault, "proc", 0) is not None:
                self._strike(fault, proc)
            else:  # a message may be sent before its process is started
                self._awaited.setdefault(to, []).append(fault)

    def on_proc(self, proc: SimProc) -> None:
        """Let the faults happen that wait for a process which is being started."""
        for fault in self._awaited.pop(proc.uid, ()):
            self._world.scheduler.soon(proc.host.place, self._strike, fault, proc)

    def on_run(self, cell: Cell, strand: Strand) -> None:
        """Observe that an actor takes a request from its mailbox."""
        proc: Any = cell.proc
        for fault in self._due(self._runs, cell.identity.name):
            strand.doom = functools.partial(self._strike, fault, proc)

    def _due(self, waiting: list[_Pending], name: str) -> list[Fault]:
        due: list[Fault] = []
        for pending in list(waiting):
            wanted = pending.request.actor
            if wanted == name or (wanted is None and name not in _OWN):
                pending.left -= 1
                if not pending.left:
                    waiting.remove(pending)
                    due.append(pending.fault)
        return due

    # -- faults ----------------------------------------------------------------------------------

    def _strike(self, fault: Fault, serving: SimProc | None) -> None:
        world = self._world
        self._planned.remove(fault)
        if isinstance(fault, NetworkFault):
            if unknown := [
                n for n in (fault.a, fault.b) if n is not None and n >= len(world.hosts)
            ]:
                self._miss(fault, f"found no host {unknown[0]}", self._hosts())
                return
            world.network.add(fault)
            self._done(fault, fault.a, fault.b)
        elif isinstance(fault, (CrashHost, CrashAgent)):
            if 0 < fault.host < len(world.hosts) and not world.hosts[fault.host].place.dead:
                self._done(fault, world.hosts[fault.host].hostname)
                crash = world.crash_host if isinstance(fault, CrashHost) else world.crash_agent
                crash(world.hosts[fault.host])
            else:
                self._miss(fault, "found no host to crash", self._hosts(1))
        elif isinstance(fault, (Crash, Pause, Slow)):
            proc = self._find(fault.proc, serving)
            if proc is not None:
                self._done(fault, proc.label)
                self._strike_proc(fault, proc)
            else:
                alive = [p.label for p in world.procs[1:] if not p.client and not p.place.dead]
                self._miss(fault, "found no process", alive)

    def overdue(self) -> list[str]:
        """Return a line for each fault that changed nothing. Called when the program has ended."""
        waiting = (*self._arrivals, *self._runs, *self._replies)
        left = {id(pending.fault): pending.left for pending in waiting}
        for fault in self._planned:
            if not isinstance(fault.at, Request):
                self._miss(
                    fault, f"was due when the program was over ({self._world.scheduler.now:g} s)"
                )
            elif id(fault) in left:
                to = f" to actors named {fault.at.actor!r}" if fault.at.actor else ""
                seen = fault.at.nth - left[id(fault)]
                self._miss(fault, f"waited for request {fault.at.nth}{to}, and saw {seen}")
            else:  # the request came, but its process never started or had exited
                self._miss(fault, "found no process: that of its request had ended")
        self._planned.clear()
        return self.missed

    def _hosts(self, first: int = 0) -> list[str]:
        hosts = self._world.hosts
        return [str(n) for n in range(first, len(hosts)) if not hosts[n].place.dead]

    def _miss(self, fault: Fault, how: str, there: list[str] | None = None) -> None:
        if there is not None:
            more = f" and {len(there) - _SHOWN} more" if there[_SHOWN:] else ""
            how += f"; there are {', '.join(there[:_SHOWN])}{more}" if there else "; there are none"
        self.missed.append(f"fault {fault!r} {how}")

    def _done(self, fault: Fault, *whom: Any) -> None:
        self.executed.append(fault)
        self._world.record("fault", type(fault).__name__, *whom)

    def _find(self, wanted: str | int | None, serving: SimProc | None) -> SimProc | None:
        """Return the live process that a fault names; never the script's own."""
        procs = self._world.procs[1:]
        if wanted is None:
            found = serving
        elif isinstance(wanted, int):
            found = procs[wanted % len(procs)] if procs else None
        else:
            alive = (proc for proc in procs if proc.label == wanted and not proc.place.dead)
            found = next(alive, None)
        if found is None or found.client or found.place.dead:
            return None
        return found

    def _strike_proc(self, fault: Crash | Pause | Slow, proc: SimProc) -> None:
        scheduler = self._world.scheduler
        place = proc.place
        if isinstance(fault, Crash):
            self._world.exit(proc, fault.signal)
        elif isinstance(fault, Pause):
            scheduler.pause(place)
            scheduler.at(scheduler.now + fault.seconds, None, self._end_pause, place)
        else:
            place.lag += fault.lag
            scheduler.at(scheduler.now + fault.seconds, None, self._end_lag, place, fault.lag)

    def _end_pause(self, place: Any) -> None:
        if not place.dead:
            self._world.scheduler.unpause(place)

    def _end_lag(self, place: Any, lag: float) -> None:
        place.lag = max(0.0, place.lag - lag)


_SHOWN = 8  # most targets that the report of a miss lists
_OWN = frozenset({"", "setup", "controller_controller"})
"""The names of actors of the runtime; a count of requests to any actor leaves them out."""
