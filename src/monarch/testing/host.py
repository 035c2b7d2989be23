"""A simulated host: its agent's books are the real `Roster`, its processes are `SimProc`s.

The agent speaks the real control protocol (JSON in CONTROL frames) with each process of its host,
over links as slow as any. Exits are seen a moment after they happen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.verdict import INFRASTRUCTURE, Verdict
from monarch._engine.protocol.roster import Condemn, Effect, Hand, Kill, Roster, Tell
from monarch._engine.runtime.agent import _cause
from monarch._engine.wire.frame import CONTROL, pack
from monarch.testing.driver import EPOCH
from monarch.testing.link import SimLink, SimSocket, socket_pair
from monarch.testing.scheduler import Entry, Place

if TYPE_CHECKING:
    from monarch.testing.proc import SimProc
    from monarch.testing.world import World

__all__ = ["SimHost"]

_LAUNCH = 1.5e-3
"""Seconds that a process takes to begin, on average."""

_REAP = 300e-6
"""Seconds until an exit is seen, on average."""

_UNLIMITED = 1 << 60


class SimHost:
    """See the module. `ident` is its number; `client` the first member of its books."""

    def __init__(self, world: World, ident: int, client: int) -> None:
        self.world = world
        self.ident = ident
        self.name = f"host{ident}"
        self.place = Place(self.name)
        self.roster = Roster(client)
        self.client = client
        self.procs: dict[int, SimProc] = {}  # those that run
        self._control: dict[int, SimLink] = {}
        self._ends: list[tuple[int, Verdict]] = []  # to be announced
        self._alarm: Entry | None = None

    # -- members ---------------------------------------------------------------------------------

    def admit(self, proc: SimProc) -> SimSocket:
        """Make a control link to `proc`; its end of it."""
        mine, theirs = socket_pair(self.world.scheduler)
        link = mine.link
        link.uid = proc.uid
        link.attach(self.place, proc.label, self._read, _UNLIMITED, _UNLIMITED)
        self._control[proc.uid] = link
        self.procs[proc.uid] = proc
        return theirs

    def _read(self, link: SimLink) -> bool:
        frames = link.receive(None)
        for frame in frames:
            message = json.loads(frame.body)
            fds = link.take_fds(frame.nfd)
            getattr(self, f"_on_{message['op']}")(link.uid, message, fds)
        if link.lost is not None and link.fileno >= 0:
            link.fileno = -1
            link.close()
            if link.uid == self.client:
                self.perform(self.roster.client_lost())
                self.world.agent_process.end()
        return bool(frames)

    def tell(self, uid: int, notice: dict[str, Any], fds: Sequence[Any] = ()) -> None:
        """Send a notice to a member."""
        link = self._control.get(uid)
        if link is not None:
            body = json.dumps(notice, separators=(",", ":")).encode()
            link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=len(fds)), list(fds))

    # -- requests --------------------------------------------------------------------------------

    def _on_spawn(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.spawn(asker, message["spec"], message["procs"], fds)

    def spawn(
        self, parent: int, spec: dict[str, Any], procs: list[dict[str, Any]], ends: list[SimLink]
    ) -> None:
        """Start procs here; `ends` are their links to the parent."""
        world = self.world
        scheduler = world.scheduler
        effects = self.roster.spawn(parent, procs, "launcher", scheduler.now, spec["ready_timeout"])
        self.perform(effects)
        for fields, end in zip(procs, ends, strict=True):
            uid = fields["uid"]
            self.roster.ready(uid)
            proc = world.new_proc(self, uid, {**spec, **fields, "parent": parent})
            scheduler.pause(proc.place)  # it is being started
            proc.adopt_agent(self.admit(proc))  # type: ignore[arg-type]
            proc.adopt(SimSocket(end), parent)  # type: ignore[arg-type]
            delay = _LAUNCH * (0.5 + scheduler.random.random())
            scheduler.at(scheduler.now + delay, self.place, self._started, proc)

    def _started(self, proc: SimProc) -> None:
        if not proc.place.dead:
            self.world.record("began", proc.label)
            self.world.scheduler.unpause(proc.place)

    def _on_introduce(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        effects = self.roster.introduce(asker, message["to"])
        taken = any(isinstance(effect, Hand) for effect in effects)
        self.perform(effects, fds)
        if not taken:
            for end in fds:
                end.close("nobody takes it")

    def _on_autopsy(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.perform(self.roster.autopsy(asker, message["uid"], self.world.scheduler.now))

    def _on_kill(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.perform(self.roster.kill(message["uids"]))

    def _on_ready(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        """Known already: see `spawn`."""

    def _on_preload(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        """Modules are loaded: there is one interpreter."""

    def _on_logging(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        for rank, uid in enumerate(message["uids"]):
            notice = {
                "op": "log_level",
                "from": asker,
                "port": message["port"],
                "rank": rank,
            }
            self.tell(uid, notice)

    def _on_log_flush(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.tell(asker, {"op": "log_flushed", "id": message["id"]})

    # -- ends ------------------------------------------------------------------------------------

    def exited(self, proc: SimProc, status: int) -> None:
        """A process of this host has just ended: the agent will see it."""
        scheduler = self.world.scheduler
        delay = _REAP * (0.5 + scheduler.random.random())
        scheduler.at(scheduler.now + delay, self.place, self._reap, proc, status)

    def _reap(self, proc: SimProc, status: int) -> None:
        link = self._control.get(proc.uid)
        if link is None:
            return  # condemned before
        while link.fileno >= 0 and self._read(link):
            pass  # what it asked for before it ended still counts
        self.perform(self.roster.exited([proc.uid]))
        kind, text, cause = _cause({"status": status})
        self._left(proc, kind, text, cause)

    def _left(self, proc: SimProc, kind: str, text: str, cause: str = INFRASTRUCTURE) -> None:
        self.procs.pop(proc.uid, None)
        link = self._control.pop(proc.uid, None)
        if link is not None and link.fileno >= 0:
            link.fileno = -1
            link.close()
        when = EPOCH + self.world.scheduler.now
        verdict = Verdict(kind, text, cause, self.name, proc.pid, when)
        if not self._ends:
            self.world.scheduler.soon(self.place, self._announce)
        self._ends.append((proc.uid, verdict))

    def _announce(self) -> None:
        ends, self._ends = self._ends, []
        self.perform(self.roster.ended(ends))

    # -- what the roster decides -----------------------------------------------------------------

    def perform(self, effects: Sequence[Effect], fds: Sequence[Any] = ()) -> None:
        """Do what the books say; `fds` go to whom they were handed."""
        for effect in effects:
            if isinstance(effect, Tell):
                self.tell(effect.to, effect.notice)
            elif isinstance(effect, Hand):
                self.tell(effect.to, {"op": "peer", "uid": effect.sender}, fds)
            elif isinstance(effect, Kill):
                for uid in effect.uids:
                    self._kill(uid)
            elif isinstance(effect, Condemn):
                proc = self.procs[effect.uid]
                self._kill(effect.uid)
                self._left(proc, "failed", effect.error)
        self._set_alarm()

    def _kill(self, uid: int) -> None:
        proc = self.procs.get(uid)
        if proc is not None:
            self.world.exit(proc, 9)

    def _set_alarm(self) -> None:
        scheduler = self.world.scheduler
        deadline = self.roster.deadline
        if self._alarm is not None:
            if self._alarm[0] <= deadline:
                return
            scheduler.cancel(self._alarm)
            self._alarm = None
        if deadline < math.inf:
            self._alarm = scheduler.at(deadline, self.place, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.perform(self.roster.tick(self.world.scheduler.now))
