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
the agent of the client's host, which every agent that spawns beyond itself tells first. Others ask
home, and again for a moment if it does not know, since the news may be on the way to it. There is
no broadcast and no table of everything but home's, which has an entry per spawn, not per proc.

The news of a proc may be faster than the proc: who has heard of it asks its host for it, while the
order to start it is under way by another path. So a link for an unknown proc is kept for a while.

Messages between agents, all on the control lane and in order (JSON objects with an ``op``)::

    open      the other end of a tunnel, from `near` (there) to `far` (here); `first`: the link to
              the parent of a proc that the next `spawn` is about
    spawn     launch procs for a guest
    ask       what a guest asks its agent and does not concern descriptors
    notice    what a roster tells a guest
    left      a guest has ended
    where     on which host does this proc live?
    lives     the answer, or the news: these procs live there (or on a host that is not known)

Home may be lost, and another come in its place (`home_lost`, `home_found`; see
runtime.job_keeper). Meanwhile the client is away, as the roster says, and questions wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.protocol import roster as rosters
from monarch._engine.protocol.roster import Roster, Tell

__all__ = ["HOME", "Admit", "Effect", "Federation", "Keep", "Refuse", "Send", "Tunnel"]

HOME = ""
"""The name of the client's host, for all agents of its job."""

_ASK_AGAIN = 0.05
_ASK_FOR = 1.0
_KEEP_FOR = 5.0  # longer than the path between two hosts may be out, by default (`host_timeout`)
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


Effect: TypeAlias = rosters.Effect | Send | Tunnel | Refuse | Keep | Admit


class _Question(NamedTuple):
    """What waits for home to say where a proc lives."""

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
        # Members of our roster that live elsewhere, and where. Everywhere but at home the client
        # is one.
        self._guests: dict[int, str] = {} if here == HOME else {roster.client: HOME}
        self._abroad: dict[int, set[str]] = {}  # members here, and the hosts where they are guests
        self._children: dict[int, int] = {}  # procs on other hosts, and who here spawned them
        self._open: dict[str, set[tuple[int, int]]] = {}  # host -> who asked there, about whom
        self._lost: dict[str, Verdict] = {}
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
        verdict = self._lost.get(host)
        if verdict is not None:
            gone = [[uid, *verdict] for uid in uids]
            return [*(Refuse(asker, uid) for uid in uids), Tell(asker, rosters.gone(gone))]
        effects: list[Effect] = []
        for uid in uids:
            self._children[uid] = asker
            effects.append(Tunnel(host, asker, uid, first=True))
        self._goes(asker, host)
        request = {"op": "spawn", "parent": asker, "spec": spec, "procs": list(procs)}
        return [*effects, Send(host, request)]

    def spawned(self, uids: Sequence[int], hosts: Sequence[str]) -> list[Effect]:
        """These procs of one spawn are about to live on these hosts: remember, and tell home."""
        self._learn(uids, hosts)
        if self.here == HOME or HOME in self._lost:  # (another home is told by each host)
            return []
        return [Send(HOME, {"op": "lives", "uids": list(uids), "hosts": list(hosts)})]

    def introduce(self, asker: int, to: int, stream: str = "") -> list[Effect]:
        """Member `asker` sends the other end of a link for `to`, or of a stream for that."""
        host = self.host_of(to)
        refuse: list[Effect] = [Refuse(asker, to, stream)]
        if host == self.here:
            return list(self.roster.introduce(asker, to, stream=bool(stream))) or refuse
        if host is None:
            found = self._look_up(to, _Question(asker, None, stream))
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
            found = self._look_up(uid, _Question(asker, request))
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
        return [*effects, *self._farewells([uid for uid, _ in ends])]

    def route(self, effects: Iterable[rosters.Effect]) -> list[Effect]:
        """Effects of the roster, with what is for guests sent to where they live."""
        return self._route(effects)

    def host_found(self, host: str) -> None:
        """There is a way to `host` again; what was there is gone all the same."""
        self._lost.pop(host, None)

    def host_lost(self, host: str, verdict: Verdict) -> list[Effect]:
        """There is no way to `host` any more: its procs are gone, and its guests have left."""
        self._lost[host] = verdict
        effects: list[Effect] = []
        awaited = self.roster.client if self.roster.client_is_away else 0
        for guest in [uid for uid, home in self._guests.items() if home == host and uid != awaited]:
            effects += self._left(guest)
        for hosts in self._abroad.values():
            hosts.discard(host)
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
                bereaved.setdefault(hearer, []).append([uid, *verdict])
        effects += [
            Tell(parent, rosters.gone(ends))
            for parent, ends in bereaved.items()
            if self.roster.alive(parent)
        ]
        return effects

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
        self.host_found(HOME)
        effects = self._route(self.roster.client_returned())
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
        effects += [Send(HOME, {"op": "where", "uid": uid}) for uid in again]
        self._again.clear()
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
        """A `notice`, `left`, `where` or `lives` from the agent of `host`."""
        op = message["op"]
        if op == "notice":
            return self._on_notice(message["to"], message["notice"])
        if op == "left":
            return self._left(message["uid"]) if self._guests.get(message["uid"]) == host else []
        if op == "where":
            uid = message["uid"]
            found = self.host_of(uid)
            return [Send(host, {"op": "lives", "uids": [uid], "hosts": [found]})]
        if op == "lives" and message["hosts"] == [None]:
            return self._unknown(message["uids"][0], now)
        if op == "lives":
            self._learn(message["uids"], message["hosts"])
            return [
                effect
                for uid, known in zip(message["uids"], message["hosts"], strict=True)
                for effect in self._answer(uid, known, now)
            ]
        raise ValueError(f"unknown message between agents: {op!r}")

    # -- how it works ----------------------------------------------------------------------------

    def _learn(self, uids: Sequence[int], hosts: Sequence[str]) -> None:
        for uid, host in zip(uids, hosts, strict=True):
            if host != self.here and not self.roster.knows(uid):
                self._lives.setdefault(uid >> _RANKS, {})[uid] = host

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
        told = Tell(asker, rosters.gone([[uid, *verdict]]))
        return self._route([told]) if self.roster.alive(asker) else []

    def _look_up(self, uid: int, question: _Question) -> list[Effect] | None:
        """Ask home where `uid` lives; None if there is nobody to ask."""
        if self.here == HOME or (HOME in self._lost and not self.roster.client_is_away):
            return None
        if HOME in self._lost:  # it is asked when there is another
            self._questions.setdefault(uid, []).append(question)
            return []
        self._questions.setdefault(uid, []).append(question)
        if uid in self._asked:
            return []
        self._asked[uid] = None
        return [Send(HOME, {"op": "where", "uid": uid})]

    def _unknown(self, uid: int, now: float) -> list[Effect]:
        """Home does not know either. As long as it says nothing, nothing follows."""
        if uid not in self._asked:
            return []
        since = self._asked[uid]
        if since is None:
            self._asked[uid] = since = now
        if now - since >= _ASK_FOR:
            return self._answer(uid, None, now)
        self._again.add(uid)
        if self._ask_at is None:
            self._ask_at = now + _ASK_AGAIN
        return []

    def _keep(self, near: int, far: int, now: float) -> None:
        self._early.setdefault(far, []).append((near, now + _KEEP_FOR))

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
