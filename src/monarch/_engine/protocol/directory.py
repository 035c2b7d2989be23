"""The directory: makes the agents of several hosts act as one agent for the procs of a job.

Every agent keeps the membership of its own host (`Membership`). The directory adds the rest: on
which host a proc lives, which procs of other hosts (*guests*) interact with procs here, and what
must be forwarded. It wraps the membership: the driver calls the directory instead, and performs its
effects.

The procs are not aware of this. A proc that spawns or calls beyond its host makes a socket pair and
passes one end to its agent, as it does for a proc of its own host. The agent keeps that end and
carries the traffic to the agent of the other host, which passes an end of its own to the proc there
(a *tunnel*). Questions about an exited proc, their answers, and kill requests are messages between
agents on the control lane.

A request is recorded at the host that it concerns. There the asking proc is a guest: a member of
that host's membership, so all promises of the membership hold for it. It is notified when its
children exit, and when it exits its children are killed. When a host is lost, its guests leave the
memberships of the other hosts, and its procs count as exited.

The location of a proc is known to the agent of its parent, to the agent of its own host, and to
*home*, the agent of the client's host. The parent's agent reports the location to home before it
spawns, also for procs on its own host, since their handles travel. Other agents ask home, and ask
again for a while if home does not know, since the report may still be on its way. Home waits in the
same way for what its own members ask. There is no broadcast, and only home has a complete table.

A handle to a proc may arrive before the proc exists: its receiver asks the proc's host for a link
while the order to start the proc is still in transit on another path. So a link for an unknown proc
is kept for a while.

The messages between agents are in `agent_messages`.

A host is lost together with its session and all procs of that session. Home notifies the other
agents, so that all of them see the ends and beginnings of sessions in one order. A spawn on a lost
host asks for a new session (`Attach`), since the worker of the host may be healthy and then starts
a new agent. The procs of the old session stay lost: they are recorded under a name that belongs to
no host. If one of them is replaced, the order to spawn gives its record to the new agent, which
answers all questions about it from then on. Its former peers are notified by the agents that have
reported its exit to them.

Home may be lost and replaced by another (`home_lost`, `home_found`; see `monarch._failover`).
In between the membership reports the client as away, and questions wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, Verdict
from monarch._engine.protocol import membership as memberships
from monarch._engine.protocol.membership import Membership, Tell

if TYPE_CHECKING:
    from monarch._engine.protocol.agent_messages import AgentMessage, Lives

__all__ = [
    "RANKS",
    "Admit",
    "Attach",
    "Directory",
    "Effect",
    "Keep",
    "Order",
    "Refuse",
    "Send",
    "Spread",
    "Tunnel",
]

_ASK_AGAIN = 0.05
# By default longer than the connection between two hosts may be down (`host_timeout`).
_WAIT_FOR = 5.0

RANKS = 20
"""The number of low bits of a uid that count the procs of one spawn."""

_UNKNOWN = "the process does not exist, exited long ago, or belongs to another program"


class Send(NamedTuple):
    """Effect: send `message` to the agent of `host`."""

    host: str
    message: AgentMessage


class Tunnel(NamedTuple):
    """Effect: carry the link whose end came with a request of member `near` to `far` on `host`."""

    host: str
    near: int
    far: int
    first: bool
    stream: str = ""  # its purpose if it is a stream, not a link: see runtime.proc.side_stream


class Order(NamedTuple):
    """Effect: carry the links of new procs of member `asker`, and order the procs down the tree.

    `parts` has each host with its procs; each end came with the request. No host passes the order
    on to more than `fanout` others.
    """

    asker: int
    spec: dict[str, Any]
    parts: list[tuple[str, list[dict[str, Any]]]]
    fanout: int


class Refuse(NamedTuple):
    """Effect: close the end that `near` sent for `far`, which cannot be delivered."""

    near: int
    far: int
    stream: str = ""


class Keep(NamedTuple):
    """Effect: keep the end that `near` sent for `far`; `Admit` or `Refuse` follows."""

    near: int
    far: int


class Admit(NamedTuple):
    """Effect: call `introduce_here` with the end that `near` sent for `far`, which has started."""

    near: int
    far: int
    stream: str = ""


class Attach(NamedTuple):
    """Effect: begin a new session with `host`, whose last one ended; its worker may still run."""

    host: str


class Spread(NamedTuple):
    """Effect: send `message` to the agents of all other hosts."""

    message: AgentMessage


Effect: TypeAlias = (
    memberships.Effect | Send | Tunnel | Order | Refuse | Keep | Admit | Attach | Spread
)


class _Question(NamedTuple):
    """A request that waits until home knows where a proc lives."""

    asker: int
    request: dict[str, Any] | None  # None for an introduction
    stream: str = ""


class Directory:
    """The directory as one agent sees it. See the module.

    Args:
        membership: the membership of this host.
        here: the name of this host.
    """

    def __init__(self, membership: Membership, here: str) -> None:
        self.membership = membership
        self.here = here
        self._lives: dict[int, dict[int, str]] = {}  # spawn -> its procs -> host
        self._ended: deque[int] = deque()  # the latest of them that have exited
        # Members of this membership that live on other hosts, and where. The client is one of them,
        # except at home.
        self._guests: dict[int, str] = {} if here == HOME else {membership.client: HOME}
        self._abroad: dict[int, set[str]] = {}  # members here -> hosts where they are guests
        self._children: dict[int, int] = {}  # procs on other hosts -> their parents here
        # host -> open questions there: (asker, subject)
        self._open: dict[str, set[tuple[int, int]]] = {}
        self._lost: dict[str, Verdict] = {}
        self._former: set[str] = set()  # names of lost sessions with hosts that were attached anew
        self._bereft: dict[int, dict[int, None]] = {}  # lost procs -> members that were notified
        self._questions: dict[int, list[_Question]] = {}
        self._asked: dict[int, float | None] = {}  # questions to home; since when it does not know
        self._again: set[int] = set()  # procs to ask home about again at `_ask_at`
        self._ask_at: float | None = None
        self._early: dict[int, list[tuple[int, float]]] = {}  # unknown procs: (asker, deadline)

    # -- requests of members of this host ----------------------------------------------------------

    def host_of(self, uid: int) -> str | None:
        """Return the host where proc `uid` lives, which may be this one; None if not known here."""
        if uid in self._guests:
            return self._guests[uid]
        if self.membership.knows(uid):
            return self.here
        return self._lives.get(uid >> RANKS, {}).get(uid)

    def spawn_there(
        self, asker: int, host: str, spec: dict[str, Any], procs: Sequence[Mapping[str, Any]]
    ) -> list[Effect]:
        """Spawn `procs` of member `asker` on another host; the ends of their links came with it."""
        effects, parts = self._placed(asker, {host: procs})
        for _, ours in parts:
            effects += [Tunnel(host, asker, proc["uid"], first=True) for proc in ours]
            effects.append(
                Send(host, {"op": "spawn", "parent": asker, "spec": spec, "procs": ours})
            )
        return effects

    def spawn_down(
        self,
        asker: int,
        spec: dict[str, Any],
        procs: Mapping[str, Sequence[Mapping[str, Any]]],
        fanout: int,
    ) -> list[Effect]:
        """Spawn procs, given by host, as `spawn_there`, but down the tree of hosts."""
        effects, parts = self._placed(asker, procs)
        return [*effects, Order(asker, spec, parts, fanout)] if parts else effects

    def _placed(
        self, asker: int, procs: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> tuple[list[Effect], list[tuple[str, list[dict[str, Any]]]]]:
        """Record that `procs`, by host, are about to start; return those that can.

        The effects notify home and the peers of predecessors, and refuse procs on lost hosts.
        """
        effects = [effect for host in procs for effect in self._attach(host)]
        uids = [proc["uid"] for those in procs.values() for proc in those]
        effects += self._publish(uids, [host for host, those in procs.items() for _ in those])
        parts: list[tuple[str, list[dict[str, Any]]]] = []
        refused: list[list[Any]] = []
        for host, those in procs.items():
            verdict = self._lost.get(host)
            if verdict is not None:
                # if the client released the host, these failed to start
                failed = verdict._replace(kind=FAILED)
                refused += [[proc["uid"], *failed] for proc in those]
                effects += [Refuse(asker, proc["uid"]) for proc in those]
                continue
            ours = [self._with_predecessors(proc) for proc in those]
            parts.append((host, ours))
            for proc in ours:
                for old, *_ in proc.get("lost", ()):
                    new = proc["uid"]
                    effects += self._moved(old, new, host)
                    if self.here != HOME and HOME not in self._lost:
                        effects.append(
                            Send(HOME, {"op": "moved", "uid": old, "to": new, "host": host})
                        )
                self._children[proc["uid"]] = asker
            self._goes(asker, host)
        if refused:
            effects.append(Tell(asker, memberships.gone(refused)))
        return effects, parts

    def spawn_here(
        self,
        asker: int,
        procs: Sequence[Mapping[str, Any]],
        launcher: Any,
        now: float,
        ready_timeout: float = math.inf,
        unresponsive_timeout: float = math.inf,
    ) -> list[Effect]:
        """Spawn `procs` of `asker`, a member or a guest, on this host; see `Membership.spawn`."""
        effects = self._route(
            self.membership.spawn(asker, procs, launcher, now, ready_timeout, unresponsive_timeout)
        )
        if asker in self._guests:  # the agent of its host has notified home
            return effects
        return [*self._publish([proc["uid"] for proc in procs], [self.here] * len(procs)), *effects]

    def join(self, uid: int, parent: int, now: float) -> list[Effect]:
        """Add a proc that a member of this host has started by itself; see `Membership.join`."""
        self.membership.join(uid, parent)
        return [*self._publish([uid], [self.here]), *self.started([uid], now)]

    def introduce(self, asker: int, to: int, now: float, stream: str = "") -> list[Effect]:
        """Pass the other end of a link, or of a `stream`, from member `asker` to `to`."""
        host = self.host_of(to)
        refuse: list[Effect] = [Refuse(asker, to, stream)]
        if host == self.here:
            return list(self.membership.introduce(asker, to, stream=bool(stream))) or refuse
        if host is None:
            found = self._look_up(to, _Question(asker, None, stream), now)
            return refuse if found is None else found
        if host in self._lost:
            return refuse
        self._goes(asker, host)
        return [Tunnel(host, asker, to, first=False, stream=stream)]

    def introduce_here(self, near: int, far: int, *, stream: bool) -> list[Effect]:
        """Pass the end that `near` sent to `far`, a proc of this host.

        No effect if it cannot be passed.
        """
        return self._route(self.membership.introduce(near, far, stream=stream))

    def autopsy(self, asker: int, uid: int, now: float) -> list[Effect]:
        """Answer member `asker`, which lost its link to `uid`, why that proc exited."""
        host = self.host_of(uid)
        if host == self.here or (uid == self.membership.client and self.membership.client_is_away):
            return self._route(self.membership.autopsy(asker, uid, now))
        request = {"op": "autopsy", "uid": uid}
        if host is None:
            found = self._look_up(uid, _Question(asker, request), now)
            if found is None:
                return self._tell_gone(asker, uid, Verdict(FAILED, _UNKNOWN))
            return found
        return self._ask(asker, host, request)

    def kill(self, uids: Iterable[int]) -> list[Effect]:
        """Kill these procs, on whichever hosts they live."""
        here: list[int] = []
        there: dict[str, list[int]] = {}
        for uid in uids:
            host = self.host_of(uid)
            if host == self.here:
                here.append(uid)
            elif host is not None and host not in self._lost:
                there.setdefault(host, []).append(uid)
        effects: list[Effect] = list(self.membership.kill(here))
        for host, those in there.items():
            effects.append(Send(host, {"op": "ask", "request": {"op": "kill", "uids": those}}))
        return effects

    def split(self, asker: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[Effect]]:
        """Split a request about procs, with their `uids`, `ranks` and `hosts`, by host.

        Return the part for this host; the effects send the other parts to the other hosts.
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
        """Send a request of member `asker` to the agent of another host."""
        if host in self._lost:
            return []
        self._goes(asker, host)
        return [Send(host, {"op": "ask", "from": asker, "request": dict(request)})]

    # -- events that the driver observes -----------------------------------------------------------

    def started(self, uids: Iterable[int], now: float) -> list[Effect]:
        """Report that these procs are in this host's membership now; waiting links are admitted."""
        effects: list[Effect] = []
        for uid in uids:
            effects += [Admit(near, uid) for near, _ in self._early.pop(uid, ())]
            if uid in self._questions:
                effects += self._answer(uid, self.here, now)
        return effects

    def exited(self, uids: Iterable[int]) -> list[Effect]:
        """Report that these processes of this host have exited; see `Membership.exited`."""
        uids = list(uids)
        return [*self._route(self.membership.exited(uids)), *self._farewells(uids)]

    def ended(self, ends: Iterable[tuple[int, Verdict]]) -> list[Effect]:
        """Report why these procs of this host have exited; see `Membership.ended`."""
        ends = list(ends)
        effects = self._route(self.membership.ended(ends))
        uids = [uid for uid, _ in ends]
        if self.here != HOME and HOME not in self._lost:
            effects.append(Send(HOME, {"op": "ended", "uids": uids}))
        return [*effects, *self._farewells(uids)]

    def route(self, effects: Iterable[memberships.Effect]) -> list[Effect]:
        """Return the membership's effects, with notices for guests sent to the guests' hosts."""
        return self._route(effects)

    def host_found(self, host: str) -> list[Effect]:
        """Report a new session with `host`; the procs of the last session stay lost."""
        verdict = self._lost.pop(host, None)
        if verdict is None:
            return []
        former = f"{host}#{self.here}{len(self._former)}"
        for procs in (*self._lives.values(), self._guests):
            for uid, at in procs.items():
                if at == host and uid != self.membership.client:
                    procs[uid] = former
                    self._former.add(former)
                    self._lost[former] = verdict
        return self._spread({"op": "found", "host": host})

    def host_left(self, host: str, text: str) -> list[Effect]:
        """Report that the client released `host`: its procs have stopped as asked, not failed.

        The host decides that, not the handle by which a proc was spawned, nor its owner.
        """
        return self.host_lost(host, Verdict(STOPPED, text, INFRASTRUCTURE))

    def host_lost(self, host: str, verdict: Verdict) -> list[Effect]:
        """Report that `host` was lost: its procs count as exited, and its guests leave."""
        self._lost[host] = verdict
        effects: list[Effect] = []
        awaited = self.membership.client if self.membership.client_is_away else 0
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
                effects += self._route(self.membership.autopsy(hearer, uid, 0.0))
            else:
                self._bereave(hearer, uid)
                bereaved.setdefault(hearer, []).append([uid, *verdict])
        effects += [
            Tell(parent, memberships.gone(ends))
            for parent, ends in bereaved.items()
            if self.membership.alive(parent)
        ]
        return [*effects, *self._spread({"op": "lost", "host": host, "end": [*verdict]})]

    # -- another home ------------------------------------------------------------------------------

    def home_lost(self, verdict: Verdict) -> list[Effect]:
        """Report that home was lost, and that another home is expected.

        Questions to home wait until then.
        """
        effects = self._route(self.membership.client_left())
        self._asked.clear()
        return [*effects, *self.host_lost(HOME, verdict)]

    def home_found(self) -> list[Effect]:
        """Report that there is another home, which has received the reports of the hosts."""
        effects = self.host_found(HOME)
        effects += self._route(self.membership.client_returned())
        for uid in self._questions:
            self._asked[uid] = None
            effects.append(Send(HOME, {"op": "where", "uid": uid}))
        return effects

    def resumed(self, host: str, procs: Sequence[Sequence[int]]) -> None:
        """Record, at another home, that these procs live on `host`, each with its parent."""
        for uid, parent in procs:
            self._learn([uid], [host])
            if parent == self.membership.client:
                self._children[uid] = parent
        self._goes(self.membership.client, host)

    @property
    def deadline(self) -> float:
        """The time at which `tick` is due; infinity if nothing waits."""
        deadline = self.membership.deadline
        if self._early:
            deadline = min(deadline, *(at for kept in self._early.values() for _, at in kept))
        return deadline if self._ask_at is None else min(deadline, self._ask_at)

    def tick(self, now: float) -> list[Effect]:
        """Perform what is due by `now`."""
        effects = self._route(self.membership.tick(now))
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

    # -- messages of other agents ------------------------------------------------------------------

    def admit(self, uid: int, host: str) -> None:
        """Make a proc of `host` a guest: it interacts with procs here from now on."""
        if not self.membership.knows(uid):
            self._guests[uid] = host
            self.membership.admit(uid)

    def opened(
        self, host: str, near: int, far: int, now: float, *, stream: bool = False
    ) -> list[Effect]:
        """Accept a tunnel from `near` on `host` to `far` here. No effect if it cannot be delivered.

        Only a link may wait for a proc that is not known yet. A stream is requested by a process
        that holds an object of `far`, so `far` has been here before.
        """
        self.admit(near, host)
        where = self.host_of(far)
        if where is None and not stream:
            self._keep(near, far, now)
            return [Keep(near, far)]
        return self.introduce_here(near, far, stream=stream) if where == self.here else []

    def heard(self, host: str, message: AgentMessage, now: float) -> list[Effect]:
        """Handle a message from the agent of `host`.

        Raises ValueError for a message that is not for the directory.
        """
        if message["op"] == "notice":
            return self._on_notice(message["to"], message["notice"])
        if message["op"] == "ended":
            self._forget(message["uids"])
            return []
        if message["op"] == "left":
            return self._left(message["uid"]) if self._guests.get(message["uid"]) == host else []
        if message["op"] == "where":
            return self._where(host, message["uid"])
        if message["op"] == "attach":
            return self._attach(message["host"])
        if message["op"] == "found":
            return self.host_found(message["host"])
        if message["op"] == "moved":
            return self._moved(message["uid"], message["to"], message["host"])
        if message["op"] == "lives":
            return self._on_lives(message, now)
        raise ValueError(f"unknown message between agents: {message['op']!r}")

    def _on_lives(self, message: Lives, now: float) -> list[Effect]:
        uids = message["uids"]
        hosts = [host for host in message["hosts"] if host is not None]
        if not hosts:
            return self._unknown(uids[0], now)
        if "lost" in message:
            self._former.update(hosts)
            self._lost[hosts[0]] = Verdict.from_fields(message["lost"])
        self._learn(uids, hosts)
        return [
            effect
            for uid, known in zip(uids, hosts, strict=True)
            for effect in self._answer(uid, known, now)
        ]

    # -- internals ---------------------------------------------------------------------------------

    def _publish(self, uids: Sequence[int], hosts: Sequence[str]) -> list[Effect]:
        """Record that a member's procs are about to live on these hosts, and report it to home."""
        self._learn(uids, hosts)
        if self.here == HOME or HOME in self._lost:  # each host reports its procs to another home
            return []
        return [Send(HOME, {"op": "lives", "uids": uids, "hosts": hosts})]

    def _learn(self, uids: Sequence[int], hosts: Sequence[str]) -> None:
        for uid, host in zip(uids, hosts, strict=True):
            if host != self.here and not self.membership.knows(uid):
                self._lives.setdefault(uid >> RANKS, {})[uid] = host

    def _forget(self, uids: Iterable[int]) -> None:
        """Record that these exited. Only the latest exited procs keep their location."""
        self._ended.extend(uids)
        while len(self._ended) > memberships.REMEMBERED:
            uid = self._ended.popleft()
            procs = self._lives.get(uid >> RANKS, {})
            procs.pop(uid, None)
            if not procs:
                self._lives.pop(uid >> RANKS, None)

    def _goes(self, uid: int, host: str) -> None:
        """Record that a member of this host becomes a guest on another."""
        self._abroad.setdefault(uid, set()).add(host)

    def _left(self, guest: int) -> list[Effect]:
        """Handle the exit of a guest.

        Its location is kept as long as the membership remembers the guest.
        """
        effects = self._route(self.membership.left(guest))
        if len(self._guests) > memberships.REMEMBERED:
            self._guests = {
                uid: at for uid, at in self._guests.items() if self.membership.knows(uid)
            }
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
        if not self.membership.alive(asker):
            return []
        self._bereave(asker, uid)
        return self._route([Tell(asker, memberships.gone([[uid, *verdict]]))])

    # -- hosts that are attached anew --------------------------------------------------------------

    def _attach(self, host: str) -> list[Effect]:
        """Begin a new session with `host`, on which a member wants to spawn, if it was lost."""
        verdict = self._lost.get(host)
        if verdict is None or verdict.kind != FAILED or HOME in self._lost:
            return []
        found = self.host_found(host)
        if self.here != HOME:  # the worker accepts other hosts of a job once home has connected
            found.append(Send(HOME, {"op": "attach", "host": host}))
        return [*found, Attach(host)]

    def _bereave(self, member: int, uid: int) -> None:
        """Record that a member here is about to be notified that `uid` was lost with its host."""
        self._bereft.setdefault(uid, {})[member] = None
        while len(self._bereft) > memberships.REMEMBERED:
            del self._bereft[next(iter(self._bereft))]

    def _with_predecessors(self, proc: Mapping[str, Any]) -> dict[str, Any]:
        """Return a proc to spawn, with its predecessors that were lost with its host, and why."""
        lost = [
            [old, *self._lost[former]]
            for old in proc.get("former", ())
            if (former := self.host_of(old) or "") in self._former
        ]
        return {**proc, "lost": lost} if lost else dict(proc)

    def _moved(self, old: int, new: int, host: str) -> list[Effect]:
        """Replace `old`, lost with its host, by `new` on `host`, whose membership knows both."""
        if host == self.here or self.host_of(old) == host:
            return []
        self._learn([old], [host])
        if old in self._guests:
            self._guests[old] = host
        effects = self._route(
            Tell(member, memberships.moved(old, new))
            for member in self._bereft.pop(old, ())
            if self.membership.alive(member)
        )
        return [*effects, *self._spread({"op": "moved", "uid": old, "to": new, "host": host})]

    def _spread(self, message: AgentMessage) -> list[Effect]:
        return [Spread(message)] if self.here == HOME else []

    def _where(self, host: str, uid: int) -> list[Effect]:
        """Answer the agent of `host`, which asks where `uid` lives or lived."""
        found = self.host_of(uid)
        answer: Lives = {"op": "lives", "uids": [uid], "hosts": [found]}
        if found in self._former:
            answer["lost"] = [*self._lost[found]]
        return [Send(host, answer)]

    def _look_up(self, uid: int, question: _Question, now: float) -> list[Effect] | None:
        """Ask home where `uid` lives; return None if there is no home to ask.

        Home itself looks again later.
        """
        if HOME in self._lost and not self.membership.client_is_away:
            return None
        self._questions.setdefault(uid, []).append(question)
        if HOME in self._lost or uid in self._asked:  # another home is asked when there is one
            return []
        self._asked[uid] = None
        if self.here == HOME:
            return self._unknown(uid, now)
        return [Send(HOME, {"op": "where", "uid": uid})]

    def _unknown(self, uid: int, now: float) -> list[Effect]:
        """Handle that home does not know `uid`: ask again later, or give up after `_WAIT_FOR`.

        As long as home does not answer at all, the question stays open.
        """
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
        """Resolve the questions about `uid`, whose host is now known, or is not found."""
        self._asked.pop(uid, None)
        effects: list[Effect] = []
        came = host == self.here and self.membership.knows(uid)
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
            if self.here != HOME:  # each host reports to home
                self._forget([uid for uid, *_ in notice["procs"]])
            for uid, *_ in notice["procs"]:
                if self._children.get(uid) == to:  # (another's answer is none for the parent)
                    del self._children[uid]
                for asked in self._open.values():
                    asked.discard((to, uid))
        elif notice["op"] == "away":
            for asked in self._open.values():
                asked.discard((to, notice["uid"]))
        return [Tell(to, notice)] if self.membership.alive(to) else []

    def _route(self, effects: Iterable[memberships.Effect]) -> list[Effect]:
        routed: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Tell) and not self._here(effect):
                host = self._guests[effect.to]
                if host not in self._lost:
                    routed.append(
                        Send(host, {"op": "notice", "to": effect.to, "notice": effect.notice})
                    )
            else:
                routed.append(effect)
        return routed

    def _here(self, effect: Tell) -> bool:
        return effect.to not in self._guests
