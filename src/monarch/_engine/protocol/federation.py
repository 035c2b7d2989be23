"""The federation: how the agents of several hosts act as one for the procs of a job.

Every agent keeps the books of its own host (`Roster`). The federation adds what lies beyond: on
which host a proc lives, which procs of other hosts (*guests*) have to do with ours, and what has to
be passed on. It wraps the roster: the driver asks it instead, and performs its effects.

The procs notice nothing. A proc that spawns or calls beyond its host makes a socket pair and hands
one end to its agent, as always; the agent keeps that end and carries what passes through it to the
agent of the other host, which hands an end of its own to the proc there (a *tunnel*). Asking why
somebody is gone, being told so, and being killed are messages between agents on the control lane.

Who asks for what is known where it ends up: a guest is a member of the roster of the host that it
has to do with, so all promises of the roster hold for it: it hears of its children's ends, and with
it go its children. When a host is lost its guests have left, and its procs are gone.

Where a proc lives is known to the agent that spawned it, to the one where it lives, and to *home*,
the agent of the client's host. The agent of who spawns tells home first, also of procs on its own
host, since their handles travel. Others ask home, and again for a while if it does not know, since
the message may be on the way to it; home waits likewise for what its own members ask. There is no
broadcast, and no table of everything but home's.

The news of a proc may be faster than the proc: who has heard of it asks its host for it, while the
order to start it is under way by another path. So a link for an unknown proc is kept for a while.

Messages between agents, all on the control lane and in order (JSON objects with an ``op``)::

    open      the other end of a tunnel, from `near` (there) to `far` (here); `first`: the link to
              the parent of a proc that the next `spawn` is about
    spawn     launch procs for a guest
    ask       what a guest asks its agent and does not concern descriptors
    notice    what a roster tells a guest
    left      a guest has ended
    ended     for home: these procs of the sender's host have ended
    where     on which host does this proc live?
    lives     the answer, or the news: these procs live there (or on a host that is not known)
    lost      from home: there is no way to that host; and ``found``: there is another session
    attach    to home: begin another session with that host
    moved     this proc, which was lost with its host, was replaced by that one, there

A host is lost with its session, and with it all procs of that session. Home tells the others, so
that all have the ends and beginnings of sessions in one order. A spawn on a lost host asks for
another session (`Attach`), since the worker of the host may be well, and starts a new agent then.
The procs of the old session stay lost: their books go on under a name that is no host's. If one is
replaced, the new agent gets its entry with the order to spawn, and all questions about it go there
again; its former peers are informed by the agents that have reported its end to them.

Home may be lost, and another come in its place (`home_lost`, `home_found`; see
runtime.job_keeper). Meanwhile the client is away, as the roster says, and questions wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, Verdict
from monarch._engine.protocol import roster as rosters
from monarch._engine.protocol.roster import Roster, Tell

__all__ = [
    "HOME",
    "Admit",
    "Attach",
    "Effect",
    "Federation",
    "Keep",
    "Refuse",
    "Send",
    "Spread",
    "Tunnel",
]

HOME = ""
"""The name of the client's host, for all agents of its job."""

_ASK_AGAIN = 0.05
_WAIT_FOR = 5.0  # longer than the path between two hosts may be out, by default (`host_timeout`)
_RANKS = 20  # low bits of a uid that count the procs of one spawn

_UNKNOWN = "the process does not exist, or ended long ago"


class Send(NamedTuple):
    """Send `message` to the agent of `host`."""

    host: str
    message: dict[str, Any]


class Tunnel(NamedTuple):
    """Carry the link whose end came with a request of `near`, a member here, to `far` on `host`."""

    host: str
    near: int
    far: int
    first: bool
    stream: str = ""  # what it is for, if it is no link: see runtime.side_stream


class Refuse(NamedTuple):
    """Close the end that `near` sent for `far`: there is nobody to take it."""

    near: int
    far: int
    stream: str = ""


class Keep(NamedTuple):
    """Keep the end that `near` sent for `far`: `Admit` or `Refuse` follows."""

    near: int
    far: int


class Admit(NamedTuple):
    """Perform `introduce_here` with the end that `near` sent for `far`, who has come."""

    near: int
    far: int
    stream: str = ""


class Attach(NamedTuple):
    """Begin a new session with `host`, whose last one has ended: its worker may be there."""

    host: str


class Spread(NamedTuple):
    """Send `message` to the agents of all other hosts."""

    message: dict[str, Any]


Effect: TypeAlias = rosters.Effect | Send | Tunnel | Refuse | Keep | Admit | Attach | Spread


class _Question(NamedTuple):
    """A request that waits until home knows where a proc lives."""

    asker: int
    request: dict[str, Any] | None  # None: an introduction
    stream: str = ""


class Federation:
    """See the module.

    Args:
        roster: of this host.
        here: the name of this host.
    """

    def __init__(self, roster: Roster, here: str) -> None:
        self.roster = roster
        self.here = here
        self._lives: dict[int, dict[int, str]] = {}  # spawn -> procs of it -> host
        self._ended: deque[int] = deque()  # those of them that have ended, the last ones
        # Members of our roster that live elsewhere, and where. Everywhere but at home the client
        # is one.
        self._guests: dict[int, str] = {} if here == HOME else {roster.client: HOME}
        self._abroad: dict[int, set[str]] = {}  # members here, and the hosts where they are guests
        self._children: dict[int, int] = {}  # procs on other hosts, and who here spawned them
        self._open: dict[str, set[tuple[int, int]]] = {}  # host -> who asked there, about whom
        self._lost: dict[str, Verdict] = {}
        self._former: set[str] = set()  # sessions with hosts that there is another one with: lost
        self._bereft: dict[int, dict[int, None]] = {}  # lost procs, and members that know of it
        self._questions: dict[int, list[_Question]] = {}
        self._asked: dict[int, float | None] = {}  # of home, and since when it does not know
        self._again: set[int] = set()  # about whom to ask it again, and when
        self._ask_at: float | None = None
        self._early: dict[int, list[tuple[int, float]]] = {}  # procs to come: who waits, and until

    # -- what members of this host ask -----------------------------------------------------------

    def host_of(self, uid: int) -> str | None:
        """The host where proc `uid` lives, this one included; None if that is not known here."""
        if uid in self._guests:
            return self._guests[uid]
        if self.roster.knows(uid):
            return self.here
        return self._lives.get(uid >> _RANKS, {}).get(uid)

    def spawn_there(
        self, asker: int, host: str, spec: Mapping[str, Any], procs: Sequence[Mapping[str, Any]]
    ) -> list[Effect]:
        """Member `asker` spawns `procs` on another host; the ends of their links came along."""
        uids = [proc["uid"] for proc in procs]
        effects = [*self._attach(host), *self._publish(uids, host)]
        verdict = self._lost.get(host)
        if verdict is not None:
            failed = verdict._replace(kind=FAILED)  # if the host was let go: these never began
            gone = [[uid, *failed] for uid in uids]
            refused = (Refuse(asker, uid) for uid in uids)
            return [*effects, *refused, Tell(asker, rosters.gone(gone))]
        procs = [self._with_predecessors(proc) for proc in procs]
        for proc in procs:
            for old, *_ in proc.get("lost", ()):
                effects += self._moved(old, proc["uid"], host)
                if self.here != HOME:
                    news = {"op": "moved", "uid": old, "to": proc["uid"], "host": host}
                    effects.append(Send(HOME, news))
        for uid in uids:
            self._children[uid] = asker
            effects.append(Tunnel(host, asker, uid, first=True))
        self._goes(asker, host)
        request = {"op": "spawn", "parent": asker, "spec": spec, "procs": procs}
        return [*effects, Send(host, request)]

    def spawn_here(
        self,
        asker: int,
        procs: Sequence[Mapping[str, Any]],
        launcher: Any,
        now: float,
        ready_timeout: float = math.inf,
        unresponsive_timeout: float = math.inf,
    ) -> list[Effect]:
        """`asker`, a member or a guest, spawns `procs` on this host; see `Roster.spawn`."""
        effects = self._route(
            self.roster.spawn(asker, procs, launcher, now, ready_timeout, unresponsive_timeout)
        )
        if asker in self._guests:  # its own agent has informed home
            return effects
        return [*self._publish([proc["uid"] for proc in procs], self.here), *effects]

    def introduce(self, asker: int, to: int, now: float, stream: str = "") -> list[Effect]:
        """Member `asker` sends the other end of a link for `to`, or of a stream for that."""
        host = self.host_of(to)
        refuse: list[Effect] = [Refuse(asker, to, stream)]
        if host == self.here:
            return list(self.roster.introduce(asker, to, stream=bool(stream))) or refuse
        if host is None:
            found = self._look_up(to, _Question(asker, None, stream), now)
            return refuse if found is None else found
        if host in self._lost:
            return refuse
        self._goes(asker, host)
        return [Tunnel(host, asker, to, first=False, stream=stream)]

    def introduce_here(self, near: int, far: int, *, stream: bool) -> list[Effect]:
        """Hand the end that `near` sent to `far`, of this host. No effect: it cannot be taken."""
        return self._route(self.roster.introduce(near, far, stream=stream))

    def autopsy(self, asker: int, uid: int, now: float) -> list[Effect]:
        """Member `asker` lost its link to `uid`, and wants to know why."""
        host = self.host_of(uid)
        if host == self.here or (uid == self.roster.client and self.roster.client_is_away):
            return self._route(self.roster.autopsy(asker, uid, now))
        request = {"op": "autopsy", "uid": uid}
        if host is None:
            found = self._look_up(uid, _Question(asker, request), now)
            if found is None:
                return self._tell_gone(asker, uid, Verdict(FAILED, _UNKNOWN))
            return found
        return self._ask(asker, host, request)

    def kill(self, uids: Iterable[int]) -> list[Effect]:
        """Somebody wants these procs ended, wherever they are."""
        here: list[int] = []
        there: dict[str, list[int]] = {}
        for uid in uids:
            host = self.host_of(uid)
            if host == self.here:
                here.append(uid)
            elif host is not None and host not in self._lost:
                there.setdefault(host, []).append(uid)
        effects: list[Effect] = list(self.roster.kill(here))
        for host, those in there.items():
            effects.append(Send(host, {"op": "ask", "request": {"op": "kill", "uids": those}}))
        return effects

    def split(self, asker: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[Effect]]:
        """The part for this host of a request about procs, of these `uids`, `ranks` and `hosts`.

        The other parts go to the other hosts.
        """
        parts: dict[str, list[tuple[int, int, str]]] = {self.here: []}
        for entry in zip(request["uids"], request["ranks"], request["hosts"], strict=True):
            parts.setdefault(entry[2], []).append(entry)
        asks = {
            host: {
                **request,
                "uids": [uid for uid, _, _ in part],
                "ranks": [rank for _, rank, _ in part],
                "hosts": [host] * len(part),
            }
            for host, part in parts.items()
        }
        mine = asks.pop(self.here)
        return mine, [
            effect for host, ask in asks.items() for effect in self.ask_there(asker, host, ask)
        ]

    def ask_there(self, asker: int, host: str, request: Mapping[str, Any]) -> list[Effect]:
        """Member `asker` asks the agent of another host."""
        if host in self._lost:
            return []
        self._goes(asker, host)
        return [Send(host, {"op": "ask", "from": asker, "request": request})]

    # -- what the driver sees --------------------------------------------------------------------

    def started(self, uids: Iterable[int], now: float) -> list[Effect]:
        """These procs are in the roster of this host now: who waits for them is let in."""
        effects: list[Effect] = []
        for uid in uids:
            effects += [Admit(near, uid) for near, _ in self._early.pop(uid, ())]
            if uid in self._questions:
                effects += self._answer(uid, self.here, now)
        return effects

    def exited(self, uids: Iterable[int]) -> list[Effect]:
        """These processes of this host are gone; see `Roster.exited`."""
        uids = list(uids)
        return [*self._route(self.roster.exited(uids)), *self._farewells(uids)]

    def ended(self, ends: Iterable[tuple[int, Verdict]]) -> list[Effect]:
        """These procs of this host are gone, and why; see `Roster.ended`."""
        ends = list(ends)
        effects = self._route(self.roster.ended(ends))
        uids = [uid for uid, _ in ends]
        if self.here != HOME and HOME not in self._lost:
            effects.append(Send(HOME, {"op": "ended", "uids": uids}))
        return [*effects, *self._farewells(uids)]

    def route(self, effects: Iterable[rosters.Effect]) -> list[Effect]:
        """Effects of the roster, with what is for guests sent to where they live."""
        return self._route(effects)

    def host_found(self, host: str) -> list[Effect]:
        """There is another session with `host`; the procs of the last one are lost all the same."""
        verdict = self._lost.pop(host, None)
        if verdict is None:
            return []
        former = f"{host}#{self.here}{len(self._former)}"
        self._former.add(former)
        self._lost[former] = verdict
        for procs in (*self._lives.values(), self._guests):
            for uid, at in procs.items():
                if at == host and uid != self.roster.client:
                    procs[uid] = former
        return self._spread({"op": "found", "host": host})

    def host_left(self, host: str, text: str) -> list[Effect]:
        """The client has let `host` go: its procs have ended as asked, which is no failure.

        The host decides that, not the handle by which a proc was spawned, nor its owner.
        """
        return self.host_lost(host, Verdict(STOPPED, text, INFRASTRUCTURE))

    def host_lost(self, host: str, verdict: Verdict) -> list[Effect]:
        """There is no way to `host` any more: its procs are gone, and its guests have left."""
        self._lost[host] = verdict
        effects: list[Effect] = []
        awaited = self.roster.client if self.roster.client_is_away else 0
        for guest in [uid for uid, home in self._guests.items() if home == host and uid != awaited]:
            effects += self._left(guest)
        for hosts in self._abroad.values():
            hosts.discard(host)
        homeless = [uid for procs in self._lives.values() for uid in procs if procs[uid] == host]
        self._forget(homeless)
        lost = {
            (parent, uid) for uid, parent in self._children.items() if self.host_of(uid) == host
        }
        for _, uid in lost:
            del self._children[uid]
        bereaved: dict[int, list[list[Any]]] = {}
        for hearer, uid in sorted(lost | self._open.pop(host, set())):
            if uid == awaited:
                effects += self._route(self.roster.autopsy(hearer, uid, 0.0))
            else:
                self._bereave(hearer, uid)
                bereaved.setdefault(hearer, []).append([uid, *verdict])
        effects += [
            Tell(parent, rosters.gone(ends))
            for parent, ends in bereaved.items()
            if self.roster.alive(parent)
        ]
        return [*effects, *self._spread({"op": "lost", "host": host, "end": [*verdict]})]

    # -- another home ----------------------------------------------------------------------------

    def home_lost(self, verdict: Verdict) -> list[Effect]:
        """There is no way home any more, and another home is waited for.

        What home would have to be asked waits as well.
        """
        effects = self._route(self.roster.client_left())
        self._asked.clear()
        return [*effects, *self.host_lost(HOME, verdict)]

    def home_found(self) -> list[Effect]:
        """There is another home, which knows what the hosts have told it."""
        effects = self.host_found(HOME)
        effects += self._route(self.roster.client_returned())
        for uid in self._questions:
            self._asked[uid] = None
            effects.append(Send(HOME, {"op": "where", "uid": uid}))
        return effects

    def resumed(self, host: str, procs: Sequence[Sequence[int]]) -> None:
        """At another home: these procs live on `host`, each with its parent."""
        for uid, parent in procs:
            self._learn([uid], [host])
            if parent == self.roster.client:
                self._children[uid] = parent
        self._goes(self.roster.client, host)

    @property
    def deadline(self) -> float:
        """When `tick` is due; infinity if nothing waits."""
        deadline = self.roster.deadline
        if self._early:
            deadline = min(deadline, *(at for kept in self._early.values() for _, at in kept))
        return deadline if self._ask_at is None else min(deadline, self._ask_at)

    def tick(self, now: float) -> list[Effect]:
        """What is due by `now`."""
        effects = self._route(self.roster.tick(now))
        for uid, kept in list(self._early.items()):
            effects += [Refuse(near, uid) for near, until in kept if until <= now]
            self._early[uid] = [(near, until) for near, until in kept if until > now]
            if not self._early[uid]:
                del self._early[uid]
        if self._ask_at is None or now < self._ask_at:
            return effects
        self._ask_at = None
        again = sorted(self._again & self._asked.keys())
        self._again.clear()
        for uid in again:
            if self.here != HOME:
                effects.append(Send(HOME, {"op": "where", "uid": uid}))
            elif (host := self.host_of(uid)) is None:
                effects += self._unknown(uid, now)
            else:
                effects += self._answer(uid, host, now)
        return effects

    # -- what other agents say -------------------------------------------------------------------

    def admit(self, uid: int, host: str) -> None:
        """A proc of `host` has to do with ours from now on."""
        if not self.roster.knows(uid):
            self._guests[uid] = host
            self.roster.admit(uid)

    def opened(
        self, host: str, near: int, far: int, now: float, *, stream: bool = False
    ) -> list[Effect]:
        """A tunnel from `near` on `host` for `far` here. No effect: there is nobody to take it.

        (A stream is asked for by who has something of `far`, which therefore has been here.)
        """
        self.admit(near, host)
        where = self.host_of(far)
        if where is None and not stream:
            self._keep(near, far, now)
            return [Keep(near, far)]
        return self.introduce_here(near, far, stream=stream) if where == self.here else []

    def heard(self, host: str, message: Mapping[str, Any], now: float) -> list[Effect]:
        """A message of the agent of `host`, if it is the federation's; see the module."""
        op = message["op"]
        if op == "notice":
            return self._on_notice(message["to"], message["notice"])
        if op == "ended":
            self._forget(message["uids"])
            return []
        if op == "left":
            return self._left(message["uid"]) if self._guests.get(message["uid"]) == host else []
        if op == "where":
            return self._where(host, message["uid"])
        if op == "attach":
            return self._attach(message["host"])
        if op == "found":
            return self.host_found(message["host"])
        if op == "moved":
            return self._moved(message["uid"], message["to"], message["host"])
        if op == "lives" and message["hosts"] == [None]:
            return self._unknown(message["uids"][0], now)
        if op == "lives":
            if "lost" in message:
                self._former.update(message["hosts"])
                self._lost[message["hosts"][0]] = Verdict.from_fields(message["lost"])
            self._learn(message["uids"], message["hosts"])
            return [
                effect
                for uid, known in zip(message["uids"], message["hosts"], strict=True)
                for effect in self._answer(uid, known, now)
            ]
        raise ValueError(f"unknown message between agents: {op!r}")

    # -- how it works ----------------------------------------------------------------------------

    def _publish(self, uids: Sequence[int], host: str) -> list[Effect]:
        """These procs of a member are about to live on `host`: remember, and tell home."""
        hosts = [host] * len(uids)
        self._learn(uids, hosts)
        if self.here == HOME or HOME in self._lost:  # (each host informs another home)
            return []
        return [Send(HOME, {"op": "lives", "uids": uids, "hosts": hosts})]

    def _learn(self, uids: Sequence[int], hosts: Sequence[str]) -> None:
        for uid, host in zip(uids, hosts, strict=True):
            if host != self.here and not self.roster.knows(uid):
                self._lives.setdefault(uid >> _RANKS, {})[uid] = host

    def _forget(self, uids: Iterable[int]) -> None:
        """These have ended. Where they lived is remembered of the last ones only."""
        self._ended.extend(uids)
        while len(self._ended) > rosters.REMEMBERED:
            uid = self._ended.popleft()
            procs = self._lives.get(uid >> _RANKS, {})
            procs.pop(uid, None)
            if not procs:
                self._lives.pop(uid >> _RANKS, None)

    def _goes(self, uid: int, host: str) -> None:
        """A member of this host becomes a guest on another."""
        self._abroad.setdefault(uid, set()).add(host)

    def _left(self, guest: int) -> list[Effect]:
        """A guest is gone. Where it lived is remembered as long as the roster remembers it."""
        effects = self._route(self.roster.left(guest))
        if len(self._guests) > rosters.REMEMBERED:
            self._guests = {uid: at for uid, at in self._guests.items() if self.roster.knows(uid)}
        return effects

    def _farewells(self, uids: Iterable[int]) -> list[Effect]:
        return [
            Send(host, {"op": "left", "uid": uid})
            for uid in uids
            for host in sorted(self._abroad.pop(uid, ()))
            if host not in self._lost
        ]

    def _ask(self, asker: int, host: str, request: dict[str, Any]) -> list[Effect]:
        verdict = self._lost.get(host)
        if verdict is not None:
            return self._tell_gone(asker, request["uid"], verdict)
        self._goes(asker, host)
        self._open.setdefault(host, set()).add((asker, request["uid"]))
        return [Send(host, {"op": "ask", "from": asker, "request": request})]

    def _tell_gone(self, asker: int, uid: int, verdict: Verdict) -> list[Effect]:
        if not self.roster.alive(asker):
            return []
        self._bereave(asker, uid)
        return self._route([Tell(asker, rosters.gone([[uid, *verdict]]))])

    # -- hosts that are attached anew ------------------------------------------------------------

    def _attach(self, host: str) -> list[Effect]:
        """Somebody wants to spawn on `host`: if it was lost, begin a new session with it."""
        verdict = self._lost.get(host)
        if verdict is None or verdict.kind != FAILED or HOME in self._lost:
            return []
        found = self.host_found(host)
        if self.here != HOME:  # the worker lets in other hosts of a job once home has been there
            found.append(Send(HOME, {"op": "attach", "host": host}))
        return [*found, Attach(host)]

    def _bereave(self, member: int, uid: int) -> None:
        """A member here is about to learn that `uid` was lost with its host."""
        self._bereft.setdefault(uid, {})[member] = None
        while len(self._bereft) > rosters.REMEMBERED:
            del self._bereft[next(iter(self._bereft))]

    def _with_predecessors(self, proc: Mapping[str, Any]) -> dict[str, Any]:
        """A proc to spawn, with those before it that were lost with its host, and why."""
        lost = [
            [old, *self._lost[former]]
            for old in proc.get("former", ())
            if (former := self.host_of(old) or "") in self._former
        ]
        return {**proc, "lost": lost} if lost else dict(proc)

    def _moved(self, old: int, new: int, host: str) -> list[Effect]:
        """Proc `old`, lost with its host, is replaced by `new` on `host`, whose roster has both."""
        if host == self.here or self.host_of(old) == host:
            return []
        self._learn([old], [host])
        if old in self._guests:
            self._guests[old] = host
        effects = self._route(
            Tell(member, rosters.moved(old, new))
            for member in self._bereft.pop(old, ())
            if self.roster.alive(member)
        )
        return [*effects, *self._spread({"op": "moved", "uid": old, "to": new, "host": host})]

    def _spread(self, message: dict[str, Any]) -> list[Effect]:
        return [Spread(message)] if self.here == HOME else []

    def _where(self, host: str, uid: int) -> list[Effect]:
        """The agent of `host` asks where `uid` lives, or lived."""
        found = self.host_of(uid)
        answer: dict[str, Any] = {"op": "lives", "uids": [uid], "hosts": [found]}
        if found in self._former:
            answer["lost"] = [*self._lost[found]]
        return [Send(host, answer)]

    def _look_up(self, uid: int, question: _Question, now: float) -> list[Effect] | None:
        """Ask home where `uid` lives, or itself again; None if there is no home to ask."""
        if HOME in self._lost and not self.roster.client_is_away:
            return None
        self._questions.setdefault(uid, []).append(question)
        if HOME in self._lost or uid in self._asked:  # (another home is asked when there is one)
            return []
        self._asked[uid] = None
        if self.here == HOME:
            return self._unknown(uid, now)
        return [Send(HOME, {"op": "where", "uid": uid})]

    def _unknown(self, uid: int, now: float) -> list[Effect]:
        """Home does not know either. As long as it says nothing, nothing follows."""
        if uid not in self._asked:
            return []
        since = self._asked[uid]
        if since is None:
            self._asked[uid] = since = now
        if now - since >= _WAIT_FOR:
            return self._answer(uid, None, now)
        self._again.add(uid)
        if self._ask_at is None:
            self._ask_at = now + _ASK_AGAIN
        return []

    def _keep(self, near: int, far: int, now: float) -> None:
        self._early.setdefault(far, []).append((near, now + _WAIT_FOR))

    def _answer(self, uid: int, host: str | None, now: float) -> list[Effect]:
        """What waits to know where `uid` lives goes there."""
        self._asked.pop(uid, None)
        effects: list[Effect] = []
        came = host == self.here and self.roster.knows(uid)
        for asker, request, stream in self._questions.pop(uid, ()):
            if came and request is None:
                effects.append(Admit(asker, uid, stream))
            elif came:
                effects += self.autopsy(asker, uid, now)
            elif host == self.here and request is None and not stream:
                self._keep(asker, uid, now)
            elif host == self.here or host is None or host in self._lost:
                if request is None:
                    effects.append(Refuse(asker, uid, stream))
                else:
                    verdict = self._lost.get(host or "", Verdict(FAILED, _UNKNOWN))
                    effects += self._tell_gone(asker, uid, verdict)
            elif request is None:
                self._goes(asker, host)
                effects.append(Tunnel(host, asker, uid, first=False, stream=stream))
            else:
                effects += self._ask(asker, host, request)
        return effects

    def _on_notice(self, to: int, notice: dict[str, Any]) -> list[Effect]:
        if notice["op"] == "gone":
            if self.here != HOME:  # (each host informs home)
                self._forget([uid for uid, *_ in notice["procs"]])
            for uid, *_ in notice["procs"]:
                self._children.pop(uid, None)
                for asked in self._open.values():
                    asked.discard((to, uid))
        elif notice["op"] == "away":
            for asked in self._open.values():
                asked.discard((to, notice["uid"]))
        return [Tell(to, notice)] if self.roster.alive(to) else []

    def _route(self, effects: Iterable[rosters.Effect]) -> list[Effect]:
        routed: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Tell) and not self._here(effect):
                host = self._guests[effect.to]
                notice = {"op": "notice", "to": effect.to, "notice": effect.notice}
                if host not in self._lost:
                    routed.append(Send(host, notice))
            else:
                routed.append(effect)
        return routed

    def _here(self, effect: Tell) -> bool:
        return effect.to not in self._guests
