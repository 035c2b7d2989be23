"""Messages, spawn orders and reports at a peer host: one that fails takes no other with it."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.session.lanes import CONTROL
from monarch._engine.protocol.spawn_orders import Orders
from monarch._engine.runtime.cast.tunnel_end import CASTS, SpawnShare
from monarch._engine.runtime.hosts.peer_host import PeerHost

Act = tuple[str, int, bool]


class Refused(Exception):
    """The agent cannot handle a message."""


class Reactor:
    """Calls at once, and goes on after an error, as a reactor does."""

    def call_soon(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(Refused):
            function(*args)

    def call_at(self, when: float, function: Any) -> None:
        """Never call: the test has no time."""


class Receiver:
    """An agent with one peer host; what that peer sent, and what arrived here."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.got: list[int] = []
        self.fails: set[int] = set()
        self.orders: Orders[dict[str, Any]] = Orders()
        self.tree: list[SpawnShare] = []
        self.parents: dict[int, int] = {}  # by the number of the order
        self.direct: list[bytes] = []
        agent: Any = SimpleNamespace(
            name="a",
            reactor=Reactor(),
            casts=SimpleNamespace(way=lambda name, peer: (name, peer)),
            next_number=lambda: 1,
            from_peer_host=self.take,
        )
        self.peer = PeerHost(agent, "b", None, 1, 60.0, 60.0, 1 << 20)

    def take(self, _peer: PeerHost, message: Any) -> None:
        number = message["uid"] if message["op"] == "left" else message["parent"]
        self.got.append(number)
        if number in self.fails:
            raise Refused(number)

    def say(self) -> None:
        self._copy(self.orders.say())
        self.direct.append(json.dumps({"op": "left", "uid": self._new()}).encode())

    def order(self) -> None:
        spawn = {"op": "spawn", "parent": self._new(), "spec": {}, "procs": [], "lanes": []}
        place = self.orders.send(spawn)
        spawn["number"] = place.number
        self.tree.append(SpawnShare(*place, [], []))
        self.parents[place.number] = spawn["parent"]

    def insist(self) -> None:
        self._copy(self.orders.copies())

    def _new(self) -> int:
        self.sent.append(len(self.sent))
        return self.sent[-1]

    def _copy(self, copies: list[tuple[int, Any]]) -> None:
        self.direct += [json.dumps(order).encode() for _, order in copies]

    def arrive(self) -> None:
        with contextlib.suppress(Refused):
            self.peer.delivered(CONTROL, self.direct.pop(0))

    def arrive_by_tree(self, index: int) -> None:
        share = self.tree.pop(index)
        parent = self.parents[share.number]
        self.peer.ordered(share, {"op": "spawn", "parent": parent, "spec": {}, "procs": []})
        self.orders.confirm(share.number)


acts = st.lists(
    st.tuples(
        st.sampled_from(["say", "order", "order", "tree", "arrive", "insist"]),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=50,
)


@given(acts)
def test_a_failure_takes_no_message_and_no_order_with_it(program: list[Act]) -> None:
    """Some of them fail at the agent. Each has been tried once, in the order of sending."""
    here = Receiver()
    for act, number, fails in program:
        if act in ("say", "order"):
            (here.say if act == "say" else here.order)()
            if fails:
                here.fails.add(here.sent[-1])
        elif act == "tree" and here.tree:
            here.arrive_by_tree(number % len(here.tree))
        elif act == "arrive" and here.direct:
            here.arrive()
        elif act == "insist":
            here.insist()
        assert here.got == here.sent[: len(here.got)]
    while here.tree or here.direct:
        if here.direct:
            here.arrive()
        else:
            here.arrive_by_tree(len(here.tree) - 1)
    assert here.got == here.sent


def test_orders_behind_one_that_fails_are_carried_out() -> None:
    """The first of them lets all be carried out, in one step."""
    here = Receiver()
    here.fails.add(0)
    for _ in range(3):
        here.order()
    for index in (2, 1, 0):
        here.arrive_by_tree(index)
    assert here.got == [0, 1, 2]


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_copy_of_an_order_goes_before_the_next_message_unless_it_has_arrived(
    is_confirmed: bool,
) -> None:
    sent: list[str] = []
    peer = Receiver().peer
    peer.link = SimpleNamespace(  # type: ignore[assignment]
        send=lambda _, data, done=None: sent.append(json.loads(b"".join(data))["op"])
    )
    order: Any = {"op": "spawn", "parent": 1, "spec": {}, "procs": []}
    share = peer.order(order, [])
    if is_confirmed:
        peer.confirmed(share.number)
    peer.say({"op": "left", "uid": 2})
    peer.say({"op": "left", "uid": 3})
    assert sent == [*([] if is_confirmed else ["spawn"]), "left", "left"]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("near", "far", "waits"), [(1, 2, True), (1, 3, False), (4, 2, False), (2, 1, False)]
)
def test_a_report_of_an_exit_waits_for_the_last_words_of_that_process(
    near: int, far: int, waits: bool, ends: bool
) -> None:
    """It is for process 1 and about process 2, and waits for their tunnels alone.

    If a tunnel does not end, the report does not wait for ever.
    """
    here = Receiver()
    handled: list[str] = []
    here.peer._agent.from_peer_host = lambda _, message: handled.append(message["op"])  # type: ignore[method-assign]
    late: list[Any] = []
    here.peer._agent.reactor = SimpleNamespace(call_later=lambda _, call: late.append(call))  # type: ignore[assignment]
    tunnel: Any = SimpleNamespace(lane=7, near=near, far=far)
    here.peer.tunnels[7] = tunnel
    notice = {"op": "gone", "procs": [[2, "failed", "it died"]]}
    here.peer._handle({"op": "notice", "to": 1, "notice": notice})
    assert handled == ([] if waits else ["notice"])
    if ends:
        here.peer._tunnel_closed(tunnel)
    for call in late if waits else []:
        call()
    assert handled == ["notice"]


def test_room_on_a_lane_is_for_its_tunnel_or_for_casts() -> None:
    here = Receiver()
    told: list[Any] = []
    here.peer.tunnels[7] = SimpleNamespace(room=lambda: told.append("tunnel"))  # type: ignore[assignment]
    here.peer._agent.casts.room = lambda _way, lane: told.append(lane)  # type: ignore[method-assign]
    for lane in (7, 8, CASTS - 1, CASTS, CASTS + 1):  # two of these have been closed
        here.peer.room(lane)
    assert told == ["tunnel", CASTS, CASTS + 1]


@pytest.mark.parametrize("met", [False, True])
def test_a_change_of_the_patience_spares_the_time_limit_of_the_first_connection(met: bool) -> None:
    changes: list[float] = []
    here = Receiver()
    here.peer.channel = SimpleNamespace(met=met, be_patient=changes.append)  # type: ignore[assignment]
    here.peer.be_patient(77.0)
    assert changes == [77.0] * met


def test_a_silent_host_is_dialed_again_until_something_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []
    timers: list[Any] = []
    peer: Any = Receiver().peer
    peer._agent.reactor.call_later = lambda delay, action: timers.append(action)
    peer._agent.monitor = SimpleNamespace(heard=lambda host: None)
    monkeypatch.setattr(peer, "_try_once", lambda: tries.append(1))
    peer.suspect()
    timers.pop()()
    assert len(tries) == 2
    peer.heard()
    timers.pop()()
    assert len(tries) == 2
    assert timers == []


def test_a_heartbeat_goes_to_the_failure_detector() -> None:
    peer = Receiver().peer
    heard: list[Any] = []
    peer._agent.monitor = SimpleNamespace(on_heartbeat=lambda *args: heard.append(args))  # type: ignore[assignment]
    peer.heartbeat(b"beat")
    assert heard == [(peer, b"beat")]
