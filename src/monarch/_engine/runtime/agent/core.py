"""The agent's core: the work of a host agent, without its sockets, processes and clocks.

The core takes requests of the procs of its host, messages of the agents of other hosts, exits and
losses. It asks the protocol cores, `Directory` (around the `Membership`) and `CastRelay`, and
performs their effects. The outside is three protocols: the `Members` of this host, the
`OtherHosts`, and the `Shell`, which has the clock. The real agent (`Agent`) and the simulated one
(monarch.testing.host) are shells of this core, so the simulator runs the agent's own decisions.

Invariants:

* An *end* is an open end of a socket pair: a descriptor, or in the simulator a link. The function
  that is given an end passes it on or closes it, so each end has one owner.
* An end that a proc sent for another is held until the directory decides what becomes of it, in
  the order of sending for each sender, receiver and purpose.
* Requests that a proc sent before its exit count: the shell reads them before it calls `exited`.
* Exits that occur together are announced together, as groups of procs often exit at once.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.protocol.directory import (
    RANKS,
    Admit,
    Attach,
    Directory,
    Effect,
    Keep,
    Order,
    Refuse,
    Send,
    Spread,
    Tunnel,
)
from monarch._engine.protocol.membership import Condemn, Hand, Membership, Tell
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.io.alarm import Alarm

if TYPE_CHECKING:
    from monarch._engine.protocol.agent_messages import AgentMessage
    from monarch._engine.protocol.agent_messages import Spawn as SpawnHere
    from monarch._engine.runtime.cast.tunnel_end import SpawnShare, Way
    from monarch._engine.runtime.io.reactor import Timer

__all__ = ["NO_WORKER", "AgentCore", "Members", "OtherHosts", "Shell"]

NO_WORKER = "its worker loop ended"
"""The trouble of an agent whose worker loop has exited, or has started another one in its place."""

_Fields = dict[str, Any]
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_SHELL_REQUESTS = ("census", "log_flush", "log_printed")

End = TypeVar("End")
_EndT_contra = TypeVar("_EndT_contra", contravariant=True)


class Members(Protocol[_EndT_contra]):
    """The processes of this host: the client, if it is here, and the procs."""

    def tell(self, uid: int, notice: _Fields) -> None:
        """Send a notice to a member of this host."""
        ...

    def hand(self, uid: int, notice: _Fields, end: _EndT_contra) -> None:
        """Send a notice and an end to a member of this host."""
        ...

    def send(self, uid: int, frame: bytes) -> None:
        """Send a frame to a member, unless it has exited."""
        ...

    def discard(self, end: _EndT_contra) -> None:
        """Close an end that no process takes."""
        ...

    def launcher(self, spec: _Fields) -> Hashable:
        """Return the launcher for procs with this specification."""
        ...

    def launch(
        self,
        launcher: Any,
        parent: int,
        spec: _Fields,
        procs: Sequence[_Fields],
        ends: Sequence[_EndT_contra],
    ) -> Verdict | None:
        """Start procs, with `ends` as their links to `parent`; return why that is impossible."""
        ...

    def localized(self, spec: _Fields) -> _Fields:
        """Return the specification, which comes from another host, for procs of this host."""
        ...

    def kill(self, uid: int) -> None:
        """Kill a proc."""
        ...

    def verdict(self, uid: int, kind: str, text: str, cause: str) -> Verdict:
        """Return a verdict on the exit of a proc that occurs now."""
        ...

    def forget(self, uid: int, verdict: Verdict) -> None:
        """Release all that the exited proc held."""
        ...

    def flush(self, uid: int, verdict: Verdict, then: Callable[[Verdict], None]) -> None:
        """Call `then`, with the verdict, once the output of the exited proc is passed on."""
        ...

    def set_output(self, request: _Fields, then: Callable[[set[int]], None]) -> None:
        """Stream the output of procs, or not; call `then` with those whose output is captured."""
        ...


class OtherHosts(Protocol[_EndT_contra]):
    """The agents of the other hosts."""

    def say(self, host: str, message: AgentMessage) -> None:
        """Send a message to the agent of `host`; begin a session if there is none."""
        ...

    def spread(self, message: AgentMessage) -> None:
        """Send a message to the agents of all other hosts."""
        ...

    def open(
        self, host: str, near: int, far: int, end: _EndT_contra, *, first: bool, stream: str
    ) -> bool:
        """Carry the link at `end`, of `near`, to `far` on `host`.

        Returns False, and leaves `end` to the caller, if the host was given up.
        """
        ...

    def order(
        self, host: str, order: SpawnHere, ends: Sequence[_EndT_contra]
    ) -> tuple[Way, SpawnShare]:
        """Carry the links at `ends` to procs on `host` that an order down the tree starts.

        Returns the way to the host, and its share of the order.
        """
        ...

    def way(self, host: str, *, dial: bool) -> Way | None:
        """See `Carrier.cast_way`."""
        ...

    def attach(self, host: str) -> None:
        """Begin a session with a host whose last one ended."""
        ...

    def rebind(self, asker: int, request: _Fields) -> None:
        """Serve a lost host by another worker; home only. The answer is a notice for `asker`."""
        ...

    def give_up(self, host: str, reason: str) -> bool:
        """End the session with `host`; return whether there was one."""
        ...

    def leave(self, host: str, done: Callable[[], None], *, shutdown: bool) -> None:
        """Make the agent of `host` exit; call `done` once it has the order, or is unreachable."""
        ...

    def end_sessions(self, reason: str, *, farewell: bool) -> None:
        """End the sessions with all other hosts; see `Channel.end`."""
        ...


class Shell(Protocol):
    """The agent's process and clock."""

    def now(self) -> float:
        """Return the present time in seconds."""
        ...

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action` after the present work."""
        ...

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` at the time `when`; processes may wait for what it does."""
        ...

    def aside(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` at the time `when`; no process waits for it."""
        ...

    def asked(self, asker: int, request: _Fields) -> None:
        """Carry out a guest's request: `census`, `log_flush` or `log_printed`."""
        ...

    def home_lost(self, reason: str) -> bool:
        """Handle the loss of the client's host; return whether to wait for another one."""
        ...

    def end(self, trouble: str = "") -> None:
        """End the agent and all procs of this host; `trouble`: why, unless the client has ended."""
        ...


class AgentCore(Generic[End]):
    """The core of a host agent; see the module.

    Args:
        members: the processes of this host.
        hosts: the agents of the other hosts.
        shell: the agent's process and clock.
        client: the uid of the client.
        here: the name of this host in the client's job.
    """

    def __init__(
        self, members: Members[End], hosts: OtherHosts[End], shell: Shell, client: int, here: str
    ) -> None:
        self.here = here
        self.membership = Membership(client)
        self.directory = Directory(self.membership, here)
        self.casts = CastRelay(self, here)
        self._members = members
        self._hosts = hosts
        self._shell = shell
        # Ends that wait for their receiver, by sender, receiver, and stream ("" for a link).
        self._held: dict[tuple[int, int, str], deque[End]] = {}
        # The beginnings of spawns that come in several messages, by member and spawn.
        self._coming: dict[tuple[int, int], tuple[list[_Fields], list[End]]] = {}
        self._given_up: dict[str, Verdict] = {}  # by host: why home gave it up
        self._exits: list[tuple[int, Verdict]] = []  # to announce, in one batch
        self._alarm = Alarm(shell.at, self._tick)
        self.requests = self._handlers()
        self._ended = False

    # -- requests of members ---------------------------------------------------------------------

    def _handlers(self) -> dict[str, Callable[[int, Any, list[End]], None]]:
        """Return the handlers of requests (`control`) that real and simulated agents share.

        A handler takes the sender's uid, the message, and the ends that came with it, and takes the
        ends that it keeps out of the list.
        """
        return {
            "autopsy": lambda asker, message, ends: self.autopsy(asker, message["uid"]),
            "cast_over": lambda asker, message, ends: self.casts.over(asker, message["number"]),
            "introduce": self._on_introduce,
            "kill": lambda asker, message, ends: self.kill(message["uids"]),
            "logging": lambda asker, message, ends: self.set_output(asker, message),
            "rebind": lambda asker, message, ends: self.rebind(asker, message),
            "spawn": self._on_spawn,
        }

    def _on_spawn(self, asker: int, message: Any, ends: list[End]) -> None:
        taken, ends[:] = ends[:], []
        procs = message["procs"]
        if procs and ("more" in message or self._coming):
            key = asker, procs[0]["uid"] >> RANKS
            begun, begun_ends = self._coming.pop(key, ([], []))
            procs, taken = [*begun, *procs], [*begun_ends, *taken]
            if message.get("more"):
                self._coming[key] = procs, taken
                return
        self.spawn(asker, message["spec"], procs, taken, message.get("fanout"))

    def _drop_coming(self, key: tuple[int, int]) -> None:
        """Drop the beginning of a spawn whose rest will not come."""
        self._discard(self._coming.pop(key)[1])

    def _on_introduce(self, asker: int, message: Any, ends: list[End]) -> None:
        self.introduce(asker, message["to"], ends.pop(0), message.get("for", ""))

    def spawn(
        self,
        asker: int,
        spec: _Fields,
        procs: Sequence[_Fields],
        ends: Sequence[End],
        fanout: int | None = None,
    ) -> None:
        """Spawn procs for a member, on whichever hosts; `ends` are their links to the member.

        If these are more other hosts than `fanout`, the order to spawn goes down the tree of hosts.
        """
        if len(ends) != len(procs):
            self._discard(ends)
            raise ValueError(f"{len(procs)} procs to spawn, {len(ends)} links for them")
        by_host: dict[str, list[int]] = {}
        for index, proc in enumerate(procs):
            host = proc.get("host")
            by_host.setdefault(self.here if host is None else host, []).append(index)
        there: dict[str, list[_Fields]] = {}
        for host, those in by_host.items():
            theirs = [procs[index] for index in those]
            links = [ends[index] for index in those]
            if host == self.here:
                self._spawn_here(asker, spec, theirs, links)
                continue
            for proc, end in zip(theirs, links, strict=True):
                self._hold(end, asker, proc["uid"])
            there[host] = theirs
        if fanout is not None and len(there) > fanout:
            self.perform(self.directory.spawn_down(asker, spec, there, max(1, fanout)))
            return
        for host, theirs in there.items():
            self.perform(self.directory.spawn_there(asker, host, spec, theirs))

    def _spawn_here(
        self, parent: int, spec: _Fields, procs: Sequence[_Fields], ends: Sequence[End]
    ) -> None:
        now = self._shell.now()
        ready, unresponsive = spec["ready_timeout"], spec["unresponsive_timeout"] or math.inf
        try:
            launcher = self._members.launcher(spec)
            effects = self.directory.spawn_here(parent, procs, launcher, now, ready, unresponsive)
        except (OSError, ValueError):
            self._discard(ends)
            raise
        self.perform(effects)
        refused = self._members.launch(launcher, parent, spec, procs, ends)
        uids = [proc["uid"] for proc in procs]
        if refused is not None:
            self.perform(self.directory.ended([(uid, refused) for uid in uids]))
            return
        self.perform(self.directory.started(uids, now))

    def join(self, asker: int, uid: int) -> None:
        """Admit a proc that a member has started by itself. Raises ValueError for a known uid."""
        self.perform(self.directory.join(uid, asker, self._shell.now()))

    def introduce(self, asker: int, to: int, end: End, stream: str = "") -> None:
        """Pass the other end of a link, or of a `stream`, from a member to `to`.

        If no proc takes the end it closes, and the asker asks for the reason.
        """
        effects = self.directory.introduce(asker, to, self._shell.now(), stream)
        if any(isinstance(effect, Hand) for effect in effects):
            self.perform(effects, end, {"for": stream} if stream else _NO_FIELDS)
        else:
            self._hold(end, asker, to, stream)
            self.perform(effects)

    def autopsy(self, asker: int, uid: int) -> None:
        """Answer a member, or a guest, why a proc exited, once the reason is known."""
        self.perform(self.directory.autopsy(asker, uid, self._shell.now()))

    def kill(self, uids: Sequence[int]) -> None:
        """Kill procs, on whichever hosts they live."""
        for key, (procs, _) in list(self._coming.items()):
            if any(proc["uid"] in uids for proc in procs):
                self._drop_coming(key)
        self.perform(self.directory.kill(uids))

    def kill_member(self, uid: int) -> None:
        """Kill a proc of this host."""
        self.perform(self.membership.kill([uid]))

    def ask_there(self, asker: int, host: str, request: Mapping[str, Any]) -> None:
        """Pass a request of a member on to the agent of another host."""
        self.perform(self.directory.ask_there(asker, host, request))

    def rebind(self, asker: int, request: _Fields) -> None:
        """Serve a lost host by another worker; home does that, for all hosts."""
        if self.here == HOME:
            self._hosts.rebind(asker, request)
        else:
            self.ask_there(asker, HOME, request)

    def set_output(self, asker: int, request: _Fields) -> None:
        """Stream the output of procs to the client, or not, and set the procs' log level."""
        mine, asks = self.directory.split(asker, request)
        self.perform(asks)
        self._members.set_output(mine, functools.partial(self._set_levels, asker, mine))

    def _set_levels(self, asker: int, request: _Fields, captured: set[int]) -> None:
        for uid, rank in zip(request["uids"], request["ranks"], strict=True):
            if self.membership.alive(uid):
                notice = {
                    "op": "log_level",
                    "level": request["level"],
                    "captured": uid in captured,
                    "from": asker,
                    "port": request["port"],
                    "rank": rank,
                }
                self._members.tell(uid, notice)

    def detach(self, hosts: Sequence[str], done: Callable[[], None], *, shutdown: bool) -> None:
        """Leave hosts that the client no longer needs; `shutdown`: end their workers, too.

        Calls `done` once each host has received the order, or its session is over.
        """
        missing = len(hosts)

        def one_less() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                done()

        how = "shut down" if shutdown else "released"
        for host in hosts:
            self._hosts.leave(host, one_less, shutdown=shutdown)
            self.perform(self.directory.host_left(host, f"host {host} was {how}"))

    # -- exits -----------------------------------------------------------------------------------

    def exited(self, uid: int) -> None:
        """Record that a proc has exited; `left` follows with the reason."""
        self.perform(self.directory.exited([uid]))

    def left(self, uid: int, verdict: Verdict) -> None:
        """Release what an exited proc held; announce its exit once its output is flushed."""
        self._members.forget(uid, verdict)
        self._drop_spawns_of(uid)
        self.casts.caller_gone(uid, for_good=True)
        self._members.flush(uid, verdict, functools.partial(self._announce, uid))

    def _drop_spawns_of(self, uid: int) -> None:
        for key in [key for key in self._coming if key[0] == uid]:
            self._drop_coming(key)

    def _announce(self, uid: int, verdict: Verdict) -> None:
        if not self._exits:
            self._shell.soon(self._announce_all)
        self._exits.append((uid, verdict))

    def _announce_all(self) -> None:
        exits, self._exits = self._exits, []
        self.perform(self.directory.ended(exits))

    def launcher_lost(self, launcher: Hashable) -> None:
        """Give up the procs of a launcher that has exited."""
        self.perform(self.directory.route(self.membership.launcher_lost(launcher)))

    def stopped(self, uid: int, signal: str) -> None:
        """Record that a proc was stopped by a signal of that name."""
        self.membership.stopped(uid, signal, self._shell.now())
        self._alarm.set(self.directory.deadline)

    def client_left(self) -> None:
        """Record that the client has exited, and that another may replace it."""
        self._drop_spawns_of(self.membership.client)
        self.casts.caller_gone(self.membership.client, for_good=False)
        self.perform(self.directory.route(self.membership.client_left()))

    def client_returned(self) -> None:
        """Record that there is a client again."""
        self.perform(self.directory.route(self.membership.client_returned()))

    def end(self, trouble: str = "") -> None:
        """End the sessions with other hosts and kill all procs of this host.

        `trouble`: why, unless the client has ended. Then other hosts treat this one as lost.
        """
        self._ended = True
        self._hosts.end_sessions(trouble or "the client has ended", farewell=not trouble)
        self.perform(self.membership.client_lost())

    # -- other agents ----------------------------------------------------------------------------

    def heard(self, host: str, way: Way, message: AgentMessage) -> None:
        """Handle a message of the agent of `host`. Raises ProtocolError, ValueError, LookupError.

        `way` is that of the session by which the message came.
        """
        if message["op"] == "spawn":
            self._spawn_for_guest(host, message)
        elif message["op"] == "ask":
            asker = message.get("from", 0)
            if asker:
                self.directory.admit(asker, host)
            self._asked(asker, message["request"])
        elif message["op"] == "lost":
            self._give_up(message["host"], Verdict.from_fields(message["end"]))
        else:
            if message["op"] == "left":
                self.casts.caller_left(way, message["uid"])
            self.perform(self.directory.heard(host, message, self._shell.now()))

    def _spawn_for_guest(self, host: str, message: SpawnHere) -> None:
        parent, procs = message["parent"], message["procs"]
        self.directory.admit(parent, host)
        ends = [self._take(parent, proc["uid"]) for proc in procs]
        if self.membership.alive(parent):
            self._spawn_here(parent, self._members.localized(message["spec"]), procs, ends)
        else:
            self._discard(ends)

    def _asked(self, asker: int, request: _Fields) -> None:
        op = request["op"]
        if op == "autopsy":
            self.autopsy(asker, request["uid"])
        elif op == "kill":
            self.kill(request["uids"])
        elif op == "logging":
            self.set_output(asker, request)
        elif op == "rebind":
            self.rebind(asker, request)
        elif op in _SHELL_REQUESTS:
            self._shell.asked(asker, request)
        else:
            raise ProtocolError(f"a guest may not ask for {op!r}")

    def answer(self, asker: int, message: _Fields) -> None:
        """Send the answer to a request of a member or guest."""
        self.perform(self.directory.route([Tell(asker, message)]))

    def opened(
        self,
        host: str,
        near: int,
        far: int,
        end: End,
        *,
        first: bool,
        stream: str = "",
        fields: Mapping[str, Any] = _NO_FIELDS,
    ) -> None:
        """Connect a link, or a `stream`, that `host` carries from its `near` to `far` here.

        `first`: the next message starts the proc `far`. `fields` go to the receiver of a stream.
        """
        if first:
            self.directory.admit(near, host)
            self._hold(end, near, far)
            return
        now = self._shell.now()
        effects = self.directory.opened(host, near, far, now, stream=bool(stream))
        self.perform(effects, end, fields)

    def session_lost(self, host: str, reason: str, *, farewell: bool) -> None:
        """Handle the end of the session with `host`, which cannot be reached any longer.

        `farewell`: it ends with the client, or the client has detached it.
        """
        if self._ended:
            return  # this host ended the session, and no process is left to be notified
        if host == HOME:
            if farewell:
                self._shell.end()
            elif not self._shell.home_lost(reason):
                self._shell.end(f"the client's host is unreachable: {reason}")
            return
        known = self._given_up.pop(host, None)
        if known is not None:
            self.perform(self.directory.host_lost(host, known))
        elif farewell:
            self.perform(self.directory.host_left(host, f"host {host} was released"))
        else:
            text = f"host {host} is unreachable: {reason}"
            verdict = Verdict(FAILED, text, INFRASTRUCTURE)
            self.perform(self.directory.host_lost(host, verdict))

    def _give_up(self, host: str, verdict: Verdict) -> None:
        """End the session with a host that home has given up: its part of the job ends."""
        self._given_up[host] = verdict
        if not self._hosts.give_up(host, verdict.error):
            del self._given_up[host]
            if host != self.here:
                self.perform(self.directory.host_lost(host, verdict))

    # -- effects ---------------------------------------------------------------------------------

    def perform(
        self,
        effects: Sequence[Effect],
        end: End | None = None,
        fields: Mapping[str, Any] = _NO_FIELDS,
    ) -> None:
        """Perform effects. A `Hand` passes on `end`, and `fields` with its notice.

        If no effect takes `end`, it is closed.
        """
        for effect in effects:
            if isinstance(effect, Tell):
                self._members.tell(effect.to, effect.notice)
            elif isinstance(effect, Hand):
                assert end is not None, "an introduction brings an end, for one receiver"
                notice = {"op": "peer", "uid": effect.sender, **fields}
                self._members.hand(effect.to, notice, end)
                end = None
            elif isinstance(effect, Condemn):
                self._members.kill(effect.uid)
                verdict = self._members.verdict(effect.uid, FAILED, effect.error, INFRASTRUCTURE)
                self.left(effect.uid, verdict._replace(code=effect.code))
            elif isinstance(effect, Send):
                self._hosts.say(effect.host, effect.message)
            elif isinstance(effect, Tunnel):
                self._open(*effect)
            elif isinstance(effect, Order):
                self._order(effect)
            elif isinstance(effect, Refuse):
                self._members.discard(self._take(*effect))
                self.casts.settled(effect.near)
            elif isinstance(effect, Keep):
                assert end is not None, "a link that another host carries has an end here"
                self._hold(end, effect.near, effect.far)
                end = None
            elif isinstance(effect, Admit):
                self._admit(*effect)
            elif isinstance(effect, Attach):
                self._hosts.attach(effect.host)
            elif isinstance(effect, Spread):
                self._hosts.spread(effect.message)
            else:
                for uid in effect.uids:
                    self._members.kill(uid)
        if end is not None:
            self._members.discard(end)
        self._alarm.set(self.directory.deadline)

    def _open(self, host: str, near: int, far: int, first: bool, stream: str) -> None:
        end = self._take(near, far, stream)
        if not self._hosts.open(host, near, far, end, first=first, stream=stream):
            self._members.discard(end)
            self.casts.settled(near)

    def _order(self, effect: Order) -> None:
        asker, spec, parts, fanout = effect
        shares: list[tuple[Way, SpawnShare]] = []
        for host, _ in parts:  # first, as a new session is reported to the hosts of the others
            self._hosts.attach(host)
        for host, procs in parts:
            ends = [self._take(asker, proc["uid"]) for proc in procs]
            order: SpawnHere = {"op": "spawn", "parent": asker, "spec": spec, "procs": procs}
            shares.append(self._hosts.order(host, order, ends))
        self.casts.order(asker, spec, shares, fanout)

    def _admit(self, near: int, far: int, stream: str) -> None:
        """Hand a held end to its receiver, which is known here by now."""
        end = self._take(near, far, stream)
        effects = self.directory.introduce_here(near, far, stream=bool(stream))
        self.perform(effects, end, {"for": stream} if stream else _NO_FIELDS)

    def _hold(self, end: End, near: int, far: int, stream: str = "") -> None:
        """Keep the end that `near` sent for `far` until the destination is known."""
        self._held.setdefault((near, far, stream), deque()).append(end)

    def _take(self, near: int, far: int, stream: str = "") -> End:
        held = self._held[near, far, stream]
        end = held.popleft()
        if not held:
            del self._held[near, far, stream]
        return end

    def _discard(self, ends: Sequence[End]) -> None:
        for end in ends:
            self._members.discard(end)

    def _tick(self) -> None:
        self.perform(self.directory.tick(self._shell.now()))

    # -- what `CastRelay` needs (see `Carrier`) --------------------------------------------------

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        """See `Carrier`."""
        return self._hosts.way(host, dial=dial)

    def cast_comes(self, near: int, far: int) -> bool:
        """See `Carrier`."""
        return (near, far, "") in self._held

    def cast_tell(self, proc: int, frame: bytes) -> None:
        """See `Carrier`."""
        self._members.send(proc, frame)

    def cast_at(self, when: float, action: Callable[[], None]) -> Timer:
        """See `Carrier`."""
        return self._shell.aside(when, action)

    def cast_now(self) -> float:
        """See `Carrier`."""
        return self._shell.now()
