"""The membership of one host, the tree of spawns, and notices about exited processes.

This is the state of a host agent without its sockets, pids and clocks. The agent passes in requests
and events, and performs the effects that are returned; so does the simulator. A *member* is a
process of the host that can receive notices: the client, or a proc.

Guarantees of a membership, whatever the order of its inputs:

* A parent is notified of the exit of each proc that it spawned, exactly once.
* A member that asks why a proc exited (`autopsy`) gets exactly one answer, within `ANSWER_WITHIN`
  seconds unless the proc is known to be exiting. Asking again while the question is open is the
  same question.
* The tree of processes is the tree of spawns: when a proc exits the procs that it spawned are
  killed, and when the client exits all are.
* Exited members receive no notices and no descriptors.
* A proc whose process stays stopped by a signal for longer than it may (`stopped`) is given up.
  Time in which `tick` was not called does not count: then the host, or the agent too, was stopped.
* A client may be *away* (`client_left`), and return as another process with the same uid. Until
  then a member that asks about the client is notified that it is away, and when it is back; the
  client's procs live on. The client is not notified of exits in that time: it asks after its
  return.
* A proc may `join` that another member has started by itself. Its driver observes its exit by its
  link, and knows no reason. It is not killed with the client, with which its driver ends, too.
* A proc that replaces another (a restart) is announced to all members that interacted with the old
  one, after the notice of the old one's exit. Introductions to the old one go to the new one.

A proc is reported to exit in two steps. `exited`: the process no longer exists; its children are
killed. `ended`: the reason is known, and is announced; the driver has read the proc's remaining
output in between. If both are known at once `ended` suffices. When the membership itself finds that
a proc must be killed it emits `Condemn`; the driver kills the proc, collects the evidence, and
calls `ended`.

Effects are returned in the order in which they are to be performed. Time is an argument in seconds;
`deadline` is when the membership next needs `tick`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from monarch._engine.base.verdict import FAILED, NOT_CREATED, STOPPED, SYSTEM, Verdict

__all__ = [
    "ANSWER_WITHIN",
    "Condemn",
    "Effect",
    "Hand",
    "Kill",
    "Membership",
    "Tell",
    "gone",
    "moved",
]

ANSWER_WITHIN = 1.0
"""After how many seconds a question about the exit of a proc that is still alive is answered."""

REMEMBERED = 10_000
"""The most members that are kept. Beyond that, the oldest exited ones are forgotten."""

_FORGOTTEN = Verdict(
    FAILED, "the process does not exist, exited long ago, or belongs to another program"
)
_CLOSED = Verdict(FAILED, "the process this actor was running on closed its connection")
_LEFT = Verdict(STOPPED, "the process exited or was lost")
_AWAY = Verdict(FAILED, "the driver of this job has ended; another may take its place", SYSTEM)
_LATE = 1.0  # a tick this many seconds late means that the driver did not run
_LAUNCHER_LOST = "the process was killed: its launcher ended unexpectedly"


class Tell(NamedTuple):
    """Effect: send `notice` to a member."""

    to: int
    notice: dict[str, Any]


class Hand(NamedTuple):
    """Effect: pass the link that came with an introduction to `to`, as the link to `sender`."""

    to: int
    sender: int


class Kill(NamedTuple):
    """Effect: kill these procs now. Their exits are reported like any other."""

    uids: list[int]


class Condemn(NamedTuple):
    """Effect: kill this proc now; report it as `ended` with FAILED and this error and code."""

    uid: int
    error: str
    code: str = ""


Effect: TypeAlias = Tell | Hand | Kill | Condemn


class _Member:
    """A proc, or the client. Dicts without values are sets that keep their order."""

    __slots__ = (
        "askers",
        "children",
        "exited",
        "guest",
        "joined",
        "known",
        "launcher",
        "parent",
        "patience",
        "ready",
        "stopped_at",
        "successor",
        "told",
        "uid",
        "verdict",
    )

    def __init__(self, uid: int, parent: int, launcher: Any, *, ready: bool) -> None:
        self.uid = uid
        self.parent = parent
        self.launcher = launcher
        self.ready = ready
        self.patience = math.inf  # seconds that it may stay stopped
        self.stopped_at = math.inf
        self.guest = False  # lives on another host, whose agent watches and kills it
        self.joined = False  # was started by its parent itself
        self.exited = False
        self.verdict: Verdict | None = None
        self.successor = 0
        self.children: dict[int, None] = {}
        self.askers: dict[int, None] = {}  # members with an open question about this one
        self.known: dict[int, None] = {}  # members connected to it, or that asked about it
        self.told: dict[int, None] = {}  # members notified of its exit


class Membership:
    """The membership of one host; see the module.

    `client` is the uid of the client, the first member.
    """

    def __init__(self, client: int) -> None:
        self.client = client
        self._members = {client: _Member(client, 0, None, ready=True)}
        self._away = False  # whether the client is away
        self._returned = False  # whether a client has returned
        self._awaiting: dict[int, None] = {}  # members notified that the client is away
        self._timers: list[tuple[float, int, Callable[..., list[Effect]], tuple[Any, ...]]] = []
        self._order = itertools.count()

    # -- queries -----------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """The time at which `tick` is due; infinity if nothing waits."""
        return self._timers[0][0] if self._timers else math.inf

    def alive(self, uid: int) -> bool:
        """Whether there is such a member and its process is not known to have exited."""
        member = self._members.get(uid)
        return member is not None and not member.exited

    def knows(self, uid: int) -> bool:
        """Whether there is, or recently was, such a member."""
        return uid in self._members

    def is_ready(self, uid: int) -> bool:
        """Whether the proc has connected to the agent (a forked one always has)."""
        member = self._members.get(uid)
        return member is not None and member.ready

    # -- requests of members -----------------------------------------------------------------------

    def spawn(
        self,
        parent: int,
        procs: Iterable[Mapping[str, Any]],
        launcher: Any,
        now: float,
        ready_timeout: float = math.inf,
        unresponsive_timeout: float = math.inf,
    ) -> list[Effect]:
        """Spawn procs of member `parent`, through `launcher` (any hashable).

        Each of `procs` is a mapping, of which these keys are used here:

        * ``uid``.
        * ``command``, present if a command is executed, which must become `ready` within
          `ready_timeout` seconds.
        * ``replaces``, if present, the uid of a proc to replace; its current incarnation is killed
          if necessary.
        * ``lost``, if present, the earlier incarnations that exited before this membership was
          made, each with its verdict.

        `unresponsive_timeout` is the number of seconds that the procs may stay `stopped`. Raises
        ValueError, and changes nothing, if the parent is not alive, a uid is not new, or the parent
        or the client is to be replaced.
        """
        procs = list(procs)
        replaced = {
            proc["uid"]: old
            for proc in procs
            if "replaces" in proc and (old := self._newest(proc["replaces"])) is not None
        }
        if not self.alive(parent):
            raise ValueError(f"a process that has exited cannot spawn: {parent:x}")
        uids = {proc["uid"] for proc in procs}
        if len(uids) < len(procs) or not uids.isdisjoint(self._members):
            raise ValueError("a proc must have a uid of its own")
        olds = {old.uid for old in replaced.values()}
        if len(olds) < len(replaced) or not olds.isdisjoint((parent, self.client)):
            raise ValueError("a proc can replace one other proc, not the one that asks")
        news = _News(self)
        for proc in procs:
            uid = proc["uid"]
            member = _Member(uid, parent, launcher, ready="command" not in proc)
            member.patience = unresponsive_timeout
            self._members[uid] = member
            self._members[parent].children[uid] = None
            if not member.ready:
                self._call_at(now + ready_timeout, self._check_ready, member, ready_timeout)
            for old_uid, *fields in proc.get("lost", ()):
                self._remember(old_uid, Verdict.from_fields(fields)).successor = uid
        for uid, old in replaced.items():
            old.successor = uid
            if old.verdict is not None:
                news.of_move(old)
        return [*self.kill(olds), *news.tell()]

    def join(self, uid: int, parent: int) -> None:
        """Add a proc that member `parent` has started by itself.

        Raises ValueError if the parent is not alive, or the uid is not new.
        """
        if not self.alive(parent) or uid in self._members:
            raise ValueError("a process joins with a uid of its own, while its parent is alive")
        member = self._members[uid] = _Member(uid, parent, None, ready=True)
        member.joined = True
        self._members[parent].children[uid] = None

    def ready(self, uid: int) -> None:
        """Record that an executed command became a proc."""
        member = self._members.get(uid)
        if member is not None:
            member.ready = True

    def introduce(self, asker: int, to: int, *, stream: bool = False) -> list[Effect]:
        """Pass the other end of a link, or of a `stream`, from member `asker` to `to`.

        A link for a proc that was replaced goes to its successor, and the asker is notified. (A
        stream does not: it concerns objects of the old incarnation.) For any other exited proc
        there is no `Hand`; the asker finds the link closed and asks for the reason.
        """
        old, new = self._members.get(to), self._newest(to)
        if old is None or new is None or new.exited or (stream and new is not old):
            return []
        self._acquaint(asker, new)
        hand = Hand(new.uid, asker)
        if new is old or not self.alive(asker):
            return [hand]
        return [hand, Tell(asker, {**moved(to, new.uid), "handed": True})]

    def autopsy(self, asker: int, uid: int, now: float) -> list[Effect]:
        """Answer member `asker`, which lost its link to `uid`, why that proc exited.

        The answer may come later, from `ended` or `tick`.
        """
        member = self._members.get(uid)
        if not self.alive(asker):
            return []
        if member is None:
            return [Tell(asker, gone([[uid, *_FORGOTTEN]]))]
        if uid == self.client and self._away:
            return self._tell_away([asker])
        # The link was to an earlier client, or is being made anew.
        if uid == self.client and self._returned:
            return [*self._tell_away([asker]), *self._tell_back()]
        if member.verdict is not None:
            news = _News(self)
            news.of_end(member, [asker])
            news.of_move(member, [asker])
            return news.tell()
        self._acquaint(asker, member)
        if asker not in member.askers:
            member.askers[asker] = None
            self._call_at(now + ANSWER_WITHIN, self._still_alive, member, asker)
        return []

    def kill(self, uids: Iterable[int]) -> list[Effect]:
        """Kill these procs, except the client, guests and procs that have exited."""
        members = self._members
        return _kill(
            [
                uid
                for uid in uids
                if uid != self.client and self.alive(uid) and not members[uid].guest
            ]
        )

    # -- events that the driver observes -----------------------------------------------------------

    def exited(self, uids: Iterable[int]) -> list[Effect]:
        """Report that these processes have exited. The reason follows with `ended`."""
        known = [self._members[uid] for uid in uids if uid in self._members and uid != self.client]
        return self._exited(known)

    def ended(self, ends: Iterable[tuple[int, Verdict]]) -> list[Effect]:
        """Report why these procs have exited. Exits in one call are announced in one notice."""
        fresh: list[_Member] = []
        for uid, verdict in ends:
            member = self._members.get(uid)
            if member is not None and member.verdict is None and uid != self.client:
                member.verdict = verdict
                fresh.append(member)
        effects = self._exited(fresh)
        news = _News(self)
        for member in fresh:
            news.of_end(member, [member.parent, *member.askers])
            if member.successor:
                news.of_move(member)
            for other in member.known:
                self._members[other].known.pop(member.uid, None)
            parent = self._members.get(member.parent)
            if parent is not None:
                parent.children.pop(member.uid, None)
        effects += news.tell()
        self._forget()
        return effects

    def stopped(self, uid: int, signal: str, now: float) -> None:
        """Report that the process was stopped by a signal of that name."""
        member = self._members.get(uid)
        if member is not None and not member.exited:
            member.stopped_at = now
            self._call_at(now + member.patience, self._check_stopped, member, signal)

    def continued(self, uid: int) -> None:
        """Report that the stopped process continues."""
        member = self._members.get(uid)
        if member is not None:
            member.stopped_at = math.inf

    def launcher_lost(self, launcher: Any) -> list[Effect]:
        """Report that a launcher exited, so the exits of its procs are no longer reported."""
        lost = [
            member
            for member in self._members.values()
            if member.launcher == launcher and not member.exited and member.uid != self.client
        ]
        return [effect for member in lost for effect in self._condemn(member, _LAUNCHER_LOST)]

    def admit(self, uid: int) -> None:
        """Add a proc of another host as a guest, which may ask questions and be a parent."""
        member = self._members[uid] = _Member(uid, 0, None, ready=True)
        member.guest = True

    def left(self, uid: int) -> list[Effect]:
        """Report that a guest exited or was lost: the procs that it spawned here are killed."""
        member = self._members.get(uid)
        if member is None or not member.guest:
            return []
        for other in member.known:
            self._members[other].known.pop(uid, None)
        effects = self._exited([member])
        member.verdict = _LEFT
        return effects

    @property
    def client_is_away(self) -> bool:
        """Whether the client has exited and another one is expected."""
        return self._away

    def families(self) -> list[tuple[int, int]]:
        """Return the procs of this host, each with its parent; exited ones too while remembered."""
        return [
            (member.uid, member.parent)
            for member in self._members.values()
            if not member.guest and member.uid != self.client
        ]

    def client_left(self) -> list[Effect]:
        """Report that the client's process has exited, and that another may replace it."""
        client = self._members[self.client]
        client.exited = self._away = True
        askers = list(client.askers)
        client.askers.clear()
        return self._tell_away(askers)

    def client_returned(self) -> list[Effect]:
        """Report that there is a client again."""
        self._members[self.client].exited = self._away = False
        self._returned = True
        return self._tell_back()

    def client_lost(self) -> list[Effect]:
        """Report that the client has exited for good: all procs that it started are killed."""
        self._members[self.client].exited = True
        return self.kill([uid for uid, member in self._members.items() if not member.joined])

    def tick(self, now: float) -> list[Effect]:
        """Perform what is due by `now`."""
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= now:
            _, _, function, args = heapq.heappop(self._timers)
            effects += function(now, *args)
        return effects

    # -- internals ---------------------------------------------------------------------------------

    def _call_at(self, when: float, function: Callable[..., list[Effect]], *args: Any) -> None:
        """Have `tick` call `function` with its `now`; the function checks if it still applies."""
        if when < math.inf:
            heapq.heappush(self._timers, (when, next(self._order), function, args))

    def _newest(self, uid: int) -> _Member | None:
        """Return the current incarnation of `uid`: the proc itself, or its last successor."""
        member = self._members.get(uid)
        while member is not None and member.successor in self._members:
            member = self._members[member.successor]
        return member

    def _exited(self, members: list[_Member]) -> list[Effect]:
        leaving = [member for member in members if not member.exited]
        for member in leaving:
            member.exited = True
        return self.kill([child for member in leaving for child in member.children])

    def _tell_away(self, askers: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        for asker in askers:
            if self.alive(asker):
                self._awaiting[asker] = None
                effects.append(Tell(asker, {"op": "away", "uid": self.client, "end": [*_AWAY]}))
        return effects

    def _tell_back(self) -> list[Effect]:
        waiting, self._awaiting = self._awaiting, {}
        notice = {"op": "back", "uid": self.client}
        return [Tell(uid, notice) for uid in waiting if self.alive(uid)]

    def _acquaint(self, asker: int, member: _Member) -> None:
        if self.alive(asker) and asker != member.uid:  # a successor may ask about its predecessor
            self._members[asker].known[member.uid] = None
            member.known[asker] = None

    def _condemn(self, member: _Member, error: str, code: str = "") -> list[Effect]:
        return [Condemn(member.uid, error, code), *self._exited([member])]

    def _still_alive(self, _now: float, member: _Member, asker: int) -> list[Effect]:
        """Answer a question that has been open for `ANSWER_WITHIN` seconds."""
        if member.exited or asker not in member.askers:
            return []  # already answered, or `ended` will answer it
        if asker == member.parent and not member.joined:
            # The owner can no longer reach the proc, not even to stop it.
            return self._condemn(member, _CLOSED.error)
        # A live proc that closed a link misbehaves only towards that peer, which must not wait.
        del member.askers[asker]
        if not self.alive(asker):
            return []
        return [Tell(asker, gone([[member.uid, *_CLOSED]]))]

    def _check_ready(self, _now: float, member: _Member, patience: float) -> list[Effect]:
        """Give up an executed command that did not become a proc."""
        if member.ready or member.exited:
            return []
        error = (
            f"error creating proc: its command did not become a proc within {patience:g} s "
            "(configuration key host_spawn_ready_timeout)"
        )
        return self._condemn(member, error, NOT_CREATED)

    def _check_stopped(self, now: float, member: _Member, signal: str) -> list[Effect]:
        """Give up a process that stays stopped."""
        due = member.stopped_at + member.patience
        if member.exited or due > now:
            return []
        if now > due + _LATE:
            self.stopped(member.uid, signal, now)
            return []
        error = (
            "the process this actor was running on became unresponsive and is assumed dead: it has "
            f"been stopped by a signal ({signal}) for {member.patience:g} s (configuration key "
            "unresponsive_timeout)"
        )
        return self._condemn(member, error)

    def _remember(self, uid: int, verdict: Verdict) -> _Member:
        """Return the record of a proc that exited before this membership was made."""
        member = self._members.get(uid)
        if member is None:
            member = self._members[uid] = _Member(uid, 0, None, ready=True)
            member.exited = True
            member.verdict = verdict
        return member

    def _forget(self) -> None:
        """Drop the oldest exited members; the latest are kept to answer questions."""
        if len(self._members) > REMEMBERED:
            for uid, member in list(self._members.items())[: REMEMBERED // 2]:
                if member.verdict is not None:
                    del self._members[uid]


class _News:
    """Collects notices: first the exits, in one notice for each member, then replacements."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._ends: dict[int, list[list[Any]]] = {}
        self._moves: list[Tell] = []

    def of_end(self, member: _Member, hearers: Iterable[int]) -> None:
        assert member.verdict is not None
        for hearer in dict.fromkeys(hearers):
            if self._membership.alive(hearer):
                member.told[hearer] = None
                self._ends.setdefault(hearer, []).append([member.uid, *member.verdict])

    def of_move(self, old: _Member, hearers: Iterable[int] | None = None) -> None:
        """Announce the successor of `old`, if any, to `hearers` or to all it interacted with."""
        newest = self._membership._newest(old.uid)
        if newest is None or newest is old:
            return
        if hearers is None:
            self.of_end(old, [hearer for hearer in old.known if hearer not in old.told])
            hearers = old.told
        for hearer in hearers:
            if self._membership.alive(hearer):
                self._moves.append(Tell(hearer, moved(old.uid, newest.uid)))

    def tell(self) -> list[Effect]:
        return [*(Tell(to, gone(ends)) for to, ends in self._ends.items()), *self._moves]


def _kill(uids: list[int]) -> list[Effect]:
    return [Kill(uids)] if uids else []


def gone(ends: list[list[Any]]) -> dict[str, Any]:
    return {"op": "gone", "procs": ends}


def moved(old: int, new: int) -> dict[str, Any]:
    return {"op": "moved", "uid": old, "to": new}
