"""Host links over socket pairs: which of several connections is used, and when it is written to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from monarch._engine.protocol.session.channel import Channel
from monarch._engine.runtime.admission.authenticated import AuthenticSocket
from monarch._engine.runtime.admission.handshake_io import Wire
from monarch._engine.runtime.hosts.host_link import HostLink, Receiver
from monarch._engine.runtime.io.environment import current
from monarch._engine.runtime.io.reactor import Reactor

KEY = bytes(range(32))
LANE = 3
Pair = tuple[Wire, Wire]


class Agent(Receiver):
    """One side: a host link, and the events that it reported."""

    def __init__(self, reactor: Reactor, *, dials: bool) -> None:
        self.reactor = reactor
        self.messages: list[bytes] = []
        self.connections = 0
        self.altered_count = 0
        channel = Channel(1 + dials, dials=dials, now=current.now())
        self.link = HostLink(reactor, "the peer", self, channel)

    def delivered(self, lane: int, data: bytes | bytearray | memoryview) -> None:
        assert lane == LANE
        self.messages.append(bytes(data))
        self.reactor.stop()

    def connected(self, *, again: bool) -> None:
        assert again is (self.connections > 0)
        self.connections += 1

    def altered(self) -> None:
        self.altered_count += 1

    def ended(self, reason: str, *, farewell: bool) -> None:
        self.reactor.stop()


class World:
    """Two agents on one reactor."""

    def __init__(self, make: Callable[[], Pair]) -> None:
        self.make = make
        self.reactor = Reactor()
        self.dialer = Agent(self.reactor, dials=True)
        self.listener = Agent(self.reactor, dials=False)

    def connect(self) -> Pair:
        near, far = self.make()
        self.dialer.link.adopt(near)
        self.listener.link.offer(far)
        return near, far

    def send(self, sender: Agent, data: bytes) -> None:
        """Send a message; return once the other side has it."""
        receiver = self.listener if sender is self.dialer else self.dialer
        sender.link.send(LANE, [data])
        self.reactor.run()
        assert receiver.messages.pop() == data
        assert not receiver.messages


def plain() -> Pair:
    return socket.socketpair()


def authentic() -> Pair:
    near, far = socket.socketpair()
    return AuthenticSocket(near, KEY, dialer=True), AuthenticSocket(far, KEY, dialer=False)


@pytest.fixture(params=[plain, authentic])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    for agent in (made.dialer, made.listener):
        agent.link.end("the test is over")
    made.reactor.close()


def test_a_connection_that_the_dialer_does_not_use_replaces_none(world: World) -> None:
    """A dialer that suspects its connection tries others, and closes them when it hears again."""
    world.connect()
    world.send(world.dialer, b"one")
    near, far = world.make()
    world.listener.link.offer(far)
    near.close()
    for sender in (world.listener, world.dialer):
        world.send(sender, b"two")
    assert world.listener.connections == world.dialer.connections == 1
    assert far.fileno() == -1


def test_a_connection_on_which_the_dialer_sends_replaces_the_present_one(world: World) -> None:
    _, old = world.connect()
    watched = old.fileno()
    world.send(world.dialer, b"one")
    world.connect()
    for sender in (world.dialer, world.listener):
        world.send(sender, b"two")
    assert world.listener.connections == world.dialer.connections == 2
    assert old.fileno() == -1
    assert watched not in world.reactor._callbacks


def test_a_connection_that_waits_to_be_used_is_closed_with_the_session(world: World) -> None:
    world.connect()
    world.send(world.dialer, b"one")
    near, far = world.make()
    world.listener.link.offer(far)
    world.listener.link.end("enough")
    assert far.fileno() == -1
    near.close()


def test_an_altered_greeting_is_reported() -> None:
    world = World(authentic)
    world.connect()
    world.send(world.dialer, b"one")
    near, far = socket.socketpair()
    offered = AuthenticSocket(far, KEY, dialer=False)
    world.listener.link.offer(offered)
    near.send(b"not a record at all")
    world.send(world.dialer, b"two")
    world.send(world.listener, b"three")
    assert world.listener.altered_count == 1
    assert offered.fileno() == -1
    near.close()
    for agent in (world.dialer, world.listener):
        agent.link.end("the test is over")
    world.reactor.close()


def test_a_dialer_that_waits_with_its_use_of_a_connection_holds_up_no_message() -> None:
    world = World(authentic)
    world.connect()
    world.send(world.dialer, b"one")
    near, far = socket.socketpair()
    far.settimeout(0.1)  # of a read that would block
    world.listener.link.offer(AuthenticSocket(far, KEY, dialer=False))
    world.send(world.dialer, b"two")
    assert far.fileno() != -1, "a read has ended by its time limit"
    for agent in (world.dialer, world.listener):
        agent.link.end("the test is over")
    near.close()
    world.reactor.close()


def test_a_message_goes_on_whenever_the_connection_has_room() -> None:
    """Nothing comes from the peer meanwhile, so only the room itself wakes the sender."""

    def narrow() -> Pair:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return near, far

    world = World(narrow)
    _, far = world.connect()
    world.send(world.dialer, b"one")
    world.reactor.watch(far.fileno(), reads=False, writes=False)
    world.dialer.link.send(LANE, [bytes(1 << 20)])
    for _ in range(4):
        world.reactor.call_soon(world.reactor.stop)
        world.reactor.run()
        came = 0
        with contextlib.suppress(BlockingIOError):
            while got := far.recv(1 << 16):
                came += len(got)
        assert came
    for agent in (world.dialer, world.listener):
        agent.link.end("the test is over")
    world.reactor.close()


@pytest.mark.internal_errors
def test_a_message_that_fails_takes_none_of_its_packets_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages that arrive together are all handled, and the error is reported."""
    got: list[bytes] = []

    def delivered(lane: int, data: bytes | bytearray | memoryview) -> None:
        got.append(bytes(data))
        if got[-1] == b"last":
            world.reactor.stop()
        elif got[-1] == b"bad":
            raise ValueError("this message cannot be handled")

    monkeypatch.setattr(world.listener, "delivered", delivered)
    world.connect()
    messages = [b"one", b"bad", b"two", b"bad", b"last"]
    for message in messages:
        world.dialer.link.send(LANE, [message])
    world.reactor.call_later(20.0, world.reactor.stop)  # if the last one never comes
    world.reactor.run()
    assert got == messages
    assert "this message cannot be handled" in capsys.readouterr().err


def test_the_peer_hears_of_a_pause_though_nothing_else_is_sent(world: World) -> None:
    world.connect()
    world.send(world.dialer, b"one")
    world.send(world.listener, b"one")
    world.listener.link.pause(LANE)
    for _ in range(3):  # rounds: it is sent, and it arrives
        world.reactor.call_soon(world.reactor.stop)
        world.reactor.run()
    assert world.dialer.link._channel._lanes._lane(LANE).paused
