"""A direct connection beside a tunnel keeps one order, whichever carries a message or breaks."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.path_switch import CONNECTION, TUNNEL, PathSwitch, Unconfirmed
from monarch._engine.runtime.admission.authenticated import AuthenticSocket
from monarch._engine.runtime.direct import link as direct
from monarch._engine.runtime.direct.link import BROKEN, REST, Direct, DirectLink, FarLink
from monarch._engine.runtime.direct.manager import INVITE, READY, Directs
from monarch._engine.runtime.io.reactor import READ, WRITE
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import (
    CALL,
    DIRECT,
    FLOW,
    MARK,
    POST,
    PROBE,
    RELEASE,
    TURN,
    Frame,
    pack,
)

LIMIT = 1 << 30
WAIT = 20.0


class Loop:
    """A reactor that the test drives by hand."""

    def __init__(self) -> None:
        self.ready: dict[int, Callable[[int], None]] = {}
        self.held: set[int] = set()
        self.scratch = memoryview(bytearray(16384))
        self.soon: list[tuple[Any, ...]] = []
        self.timers: list[Any] = []

    def register(self, fd: int, callback: Callable[[int], None]) -> None:
        self.ready[fd] = callback

    def unregister(self, fd: int) -> None:
        del self.ready[fd]
        self.held.discard(fd)

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        """Record whether reads are held; writing is tried in each round."""
        (self.held.discard if reads else self.held.add)(fd)

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.soon.append((callback, *args))

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        self.timers.append(callback)
        return type("Timer", (), {"cancel": lambda self: None})()


class Side:
    """A reduced proc: a link, and the messages that it delivered."""

    def __init__(self, uid: int, sock: socket.socket) -> None:
        self.uid = uid
        self.reactor = Loop()
        self.notices: dict[str, Any] = {}
        self.told: list[dict[str, Any]] = []
        self.got: list[int] = []
        self.released: list[int] = []
        self.directs = Directs(self)  # type: ignore[arg-type]
        self.link = Link(sock, f"proc {1 - uid}", lambda link, on: None, LIMIT, LIMIT)
        self.link.uid = 1 - uid

    def tell_agent(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def handle(self, link: Link, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind == TURN:
                self.directs.on_turn(link, frame)
            elif frame.kind == DIRECT:
                self.directs.on_direct(link, frame)
            elif frame.kind == RELEASE:
                self.released.append(frame.dest)
            elif frame.kind != MARK:
                if frame.nfd:
                    (fd,) = link.take_fds(frame.nfd)
                    os.close(fd)
                self.got.append(frame.dest)

    def lose(self, link: Link, reason: str) -> None:
        link.lose(reason)

    def step(self) -> None:
        """Run one round of the reactor."""
        self.step_tunnel()
        self.step_connection()
        self.run_soon()

    def step_tunnel(self) -> None:
        self.link.flush()
        self.handle(self.link, self.link.receive(self.reactor.scratch))

    def step_connection(self) -> None:
        for fd, callback in list(self.reactor.ready.items()):
            callback(WRITE if fd in self.reactor.held else READ | WRITE)

    def run_soon(self) -> None:
        while self.reactor.soon:
            function, *args = self.reactor.soon.pop(0)
            function(*args)

    @property
    def direct(self) -> Direct:
        assert isinstance(self.link, DirectLink)
        return self.link.direct

    def close(self) -> None:
        self.directs.forget(self.link)
        self.link.close("as a test")


@contextmanager
def pair() -> Iterator[tuple[Side, Side]]:
    """Yield two procs and the tunnel between them."""
    left, right = (Side(uid, sock) for uid, sock in enumerate(socket.socketpair()))
    with ExitStack() as stack:
        stack.callback(left.close)
        stack.callback(right.close)
        yield left, right


def connect(left: Side, right: Side, number: int = 2) -> None:
    """Put both sides into the state that follows the handshake."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    right.directs._begin(right.link, theirs, number, first=False)
    left.directs._begin(left.link, ours, number, first=True)


def settle(*sides: Side) -> None:
    """Run rounds until no message is in transit."""
    quiet = 0
    while quiet < 100:
        before = [(len(side.got), side.link.queued, type(side.link)) for side in sides]
        for side in sides:
            side.step()
        after = [(len(side.got), side.link.queued, type(side.link)) for side in sides]
        quiet = quiet + 1 if before == after else 0


def call(number: int, size: int = 0, kind: int = CALL) -> bytes:
    return pack(kind, number, 0, 0, b"", bytes(size))


def test_small_messages_go_by_the_connection() -> None:
    with pair() as (left, right):
        connect(left, right)
        left.link.send(call(1))
        left.link.send(call(2))
        right.step()
        right.link.send(call(3))
        left.step()
        assert (left.got, right.got) == ([3], [1, 2])
        assert left.direct.speaks
        assert right.direct.speaks
        assert left.direct.unconfirmed.end == 2 * len(call(1))


def test_what_agents_must_see_goes_by_the_tunnel() -> None:
    """Segments, probes and casts' marks use the tunnel; then the peer does so, too."""
    for force in (
        lambda link: link.send(pack(CALL, 5, 0, 0, b"", b"", 0, 1), [0]),
        lambda link: link.send(call(5, kind=PROBE)),
        lambda link: (link.mark(1), link.send(call(5))),
    ):
        with pair() as (left, right):
            connect(left, right)
            left.link.send(call(1))
            right.step()
            right.link.send(call(2))
            force(left.link)
            assert not left.direct.speaks
            right.step()
            assert right.got == [1, 5]
            assert not right.direct.speaks
            left.link.send(call(6))
            assert not left.direct.speaks  # some messages must pass by the tunnel first
            for number in range(100):
                left.link.send(call(7 + number))
            assert left.direct.speaks
            settle(left, right)
            assert right.got == [1, 5, *range(6, 107)]
            assert left.got == [2]


def test_a_release_is_out_of_turn() -> None:
    """The agent at this end of the tunnel sends the release."""
    with pair() as (left, right):
        connect(left, right)
        left.link.send(call(1))
        right.step()
        Link._send(left.link, call(9, kind=RELEASE), None)
        right.step()
        assert right.released == [9]
        assert left.link.send(call(10, kind=RELEASE))
        assert left.direct.speaks


def test_what_a_broken_connection_has_lost_follows() -> None:
    with pair() as (left, right):
        connect(left, right)
        for number in range(100):
            left.link.send(call(number, 1000))
        right.direct.sock.shutdown(socket.SHUT_RDWR)
        for number in range(100, 110):
            left.link.send(call(number))
        right.link.send(call(7))
        settle(left, right)
        assert right.got == list(range(110))
        assert left.got == [7]
        assert type(left.link) is not DirectLink
        assert type(right.link) is not DirectLink
        assert left.link.queued == right.link.queued == 0
        connect(left, right, 4)
        left.link.send(call(110))
        settle(left, right)
        assert right.got[-1] == 110
        assert left.direct.speaks


def test_messages_that_waited_share_records() -> None:
    with pair() as (left, right):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        near = AuthenticSocket(ours, bytes(32), dialer=True)
        far = AuthenticSocket(theirs, bytes(32), dialer=False)
        right.directs._begin(right.link, far, 2, first=False)
        left.directs._begin(left.link, near, 2, first=True)
        for number in range(1000):
            left.link.send(call(number))
        waiting, before = len(left.direct._queue), near._sealer._number
        assert waiting > 500
        settle(left, right)
        assert right.got == list(range(1000))
        assert near._sealer._number - before < waiting / 10


def test_a_connection_that_only_one_side_has() -> None:
    with pair() as (left, right):
        ours, theirs = socket.socketpair()
        right.directs._begin(right.link, theirs, 2, first=False)
        right.link.send(call(1))
        ours.close()
        settle(left, right)
        right.link.send(call(2))
        settle(left, right)
        assert left.got == [1, 2]
        assert not isinstance(right.link, DirectLink)


def test_the_news_of_an_end_waits_for_last_words() -> None:
    with pair() as (left, right):
        connect(left, right)
        left.link.send(call(1))
        settle(left, right)
        right.link.send(call(2))
        right.direct.sock.close()
        news: list[int] = []
        assert left.directs.last_words(left.link, lambda: news.append(len(left.got)))
        # The side that lost the tunnel asks once more; the wait does not get shorter.
        assert left.directs.last_words(left.link, lambda: news.append(-1))
        settle(left)
        assert news == [1]
        assert not left.directs.last_words(left.link, lambda: news.append(-1))


def test_last_words_are_not_waited_for_long() -> None:
    with pair() as (left, right):
        connect(left, right)
        news: list[str] = []
        assert left.directs.last_words(left.link, lambda: news.append("gone"))
        right.direct.sock.send(call(1))
        left.step_connection()
        left.reactor.timers.pop()()  # data has arrived since, so the wait continues
        left.run_soon()
        assert news == []
        left.reactor.timers.pop()()
        left.run_soon()
        assert news == ["gone"]


def test_of_a_lost_link_nothing_is_left() -> None:
    """The link is cleaned up even if the reason of its loss is never reported."""
    with pair() as (left, right):
        connect(left, right)
        sock = left.direct.sock
        left.link.lose("as a test")
        left.directs.lost(left.link)
        right.direct.sock.send(call(1))
        assert not left.got
        left.reactor.timers.pop()()
        assert not left.directs._open
        assert not left.reactor.ready
        assert sock.fileno() < 0


def test_a_closed_connection_is_not_watched_again() -> None:
    """The number of its socket may be that of another one by then."""
    watched: list[int] = []
    with pair() as (left, right):
        connect(left, right)
        left.direct._watch = lambda fd, reads, writes: watched.append(fd)
        left.link.flush_direct()
        assert watched == [left.direct.fileno]
        left.direct.close()
        left.link.flush_direct()
        assert watched == [left.direct.fileno]


def test_a_mailbox_behind_a_lost_link_holds_nobody_back() -> None:
    """The last message may be that the mailbox is full; no later one can revoke it."""
    ours, theirs = socket.socketpair()
    proc = Proc(1, "test", lambda proc, link, frame: None, lambda proc, frame: None, client=False)
    link = proc.adopt(ours, 2)
    proc.lose(link, "as a test")
    proc.handle(link, [Frame(FLOW, 1, 7, 0, 0, 0, b"", b"")])
    assert not link.paused
    theirs.close()
    proc.reactor.close()


def test_what_came_by_a_tunnel_that_is_lost_counts() -> None:
    """A sending thread found the tunnel closed; the connection is then the first to be read."""
    ours, theirs = socket.socketpair()
    proc = Proc(1, "test", lambda proc, link, frame: None, lambda proc, frame: None, client=False)
    link = proc.adopt(ours, 2)
    got: list[int] = []
    sink: Any = SimpleNamespace(
        deliver=lambda rank, flags, body, link: got.append(rank), peer_lost=lambda *_: None
    )
    port = proc.open_port(sink)
    theirs.send(pack(POST, port, 0, 1, b"", b""))
    theirs.close()
    link.lose("as a test")
    proc.handle(link, [Frame(POST, 0, port, 0, 0, 0, b"", b"")])
    proc._read(link)
    assert got == [0, 1]
    proc.reactor.close()


def test_a_connection_that_was_worth_it_is_made_again() -> None:
    with pair() as (left, right):
        for number in range(2, 20):
            connect(left, right, number)
            left.link.send(call(number, 2 << 20 if number > 4 else 0))
            settle(left, right)
            left.direct.sock.shutdown(socket.SHUT_RDWR)
            settle(left, right)
        assert right.got == list(range(2, 20))
        assert isinstance(left.link, FarLink)
        assert isinstance(right.link, FarLink)


def test_a_connection_that_breaks_again_and_again_is_given_up() -> None:
    """Each that carried little counts as a failed attempt, after which no message is counted."""
    with pair() as (left, right):
        for number in range(2, 6):
            connect(left, right, number)
            left.link.send(call(number))
            settle(left, right)
            left.direct.sock.shutdown(socket.SHUT_RDWR)
            settle(left, right)
        assert right.got == list(range(2, 6))
        assert not isinstance(left.link, FarLink)
        assert not isinstance(right.link, FarLink)


def test_whoever_looked_at_the_link_before_it_changed() -> None:
    """A casting thread waits for the lock while the reactor changes the class of the link."""
    with pair() as (left, right):
        mark = left.link.mark
        connect(left, right)
        mark(1)
        assert isinstance(left.link, DirectLink)
        left.link.send(call(1))
        turn_back = left.link.turn_back
        right.direct.sock.shutdown(socket.SHUT_RDWR)
        settle(left, right)
        assert not isinstance(left.link, DirectLink)
        turn_back()
        left.link.turn_back()
        assert right.got == [1]


def test_senders_wait_for_the_connection_as_for_the_tunnel() -> None:
    with pair() as (left, right):
        connect(left, right)
        for number in range(100):
            left.link.send(call(number, 10_000))
        taken = left.link._taken
        left.step()
        right.step()
        left.step()
        assert left.link._taken > taken


def test_senders_wait_while_it_is_broken() -> None:
    with pair() as (left, right):
        left.link.queue_limit = 10_000
        connect(left, right)
        left.link.send(call(1))
        right.direct.sock.shutdown(socket.SHUT_RDWR)
        while not left.direct.broken:
            left.step()
        left.link.send(call(2, 20_000))
        assert left.link.queued > 20_000
        waiting = threading.Thread(target=left.link.wait_room, args=(WAIT,))
        waiting.start()
        while not left.link._waiters:
            waiting.join(0.001)
        right.step()  # reports how much it received
        left.step()  # the tunnel takes all of it at once
        waiting.join(WAIT)
        assert not waiting.is_alive()
        settle(left, right)
        assert right.got == [1, 2]
        assert left.link.queued == 0


def test_what_comes_too_early_does_not_pile_up() -> None:
    """The connection waits for the slow tunnel, and so do the senders on the connection."""
    with pair() as (left, right), patch.object(direct, "_EARLY", 50_000):
        connect(left, right)
        for number in range(500):
            left.link.send(call(number, 1000))
        for _ in range(100):
            left.step_connection()
            right.step_connection()
        assert right.direct.turns.early[CONNECTION] < 100_000
        assert left.link.queued > 100_000
        settle(left, right)
        assert right.got == list(range(500))
        assert right.direct.turns.early == [0, 0]
        assert not right.reactor.held


def test_much_that_is_lost_follows_in_pieces() -> None:
    """In one piece it would be a larger frame than a receiver accepts."""
    with pair() as (left, right):
        left.link.reader.limit = right.link.reader.limit = 5000
        connect(left, right)
        for number in range(100):
            left.link.send(call(number, 4000))
        left.direct.sock.shutdown(socket.SHUT_RDWR)
        settle(left, right)
        assert right.got == list(range(100))


def test_a_socket_that_fails_once() -> None:
    """No bytes may follow those that the socket did not take."""

    class Failing:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock
            self.failed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

        def send(self, data: bytes) -> int:
            if not self.failed:
                self.failed = True
                raise OSError(errno.ENOBUFS, "no buffers")
            return self.sock.send(data)

    with pair() as (left, right):
        connect(left, right)
        left.direct.sock = Failing(left.direct.sock)  # type: ignore[assignment]
        left.link.send(call(1))
        left.link.send(call(2))
        settle(left, right)
        assert right.got == [1, 2]


def test_a_connection_that_breaks_before_both_are_there() -> None:
    with pair() as (left, right):
        left.directs.count(left.link)
        for number in range(64):
            left.link.send(call(number))
        left.run_soon()
        settle(left, right)
        assert right.told  # the right side asked its agent for a connection
        tried = left.directs._tries[left.link]
        ours, theirs = socket.socketpair()
        right.directs._begin(right.link, theirs, tried.number, first=False)
        right.directs._say(right.link, READY, tried.number)
        right.direct.sock.shutdown(socket.SHUT_RDWR)
        settle(left, right)
        left.directs._came(left.link, tried, ours)
        left.link.send(call(64))
        settle(left, right)
        assert right.got == list(range(65))
        assert ours.fileno() < 0


def test_what_came_before_nonsense_counts() -> None:
    with pair() as (left, right):
        connect(left, right)
        left.link.send(call(1))
        settle(left, right)
        right.link.send(call(2))
        right.direct.sock.send(call(3) + bytes(64))
        settle(right)
        settle(left)
        assert left.got == [2, 3]
        assert left.link.lost is not None


def test_nonsense_is_refused() -> None:
    with pair() as (left, _):
        for kind in (DIRECT, TURN):
            with pytest.raises(ProtocolError):
                left.handle(left.link, [Frame(kind, 99, 0, 0, 0, 0, b"", b"")])


@pytest.mark.parametrize("what", [BROKEN, REST])
def test_a_connection_ends_once(what: int) -> None:
    with pair() as (left, right):
        connect(left, right)
        end = Frame(DIRECT, what, 2, 0, 0, 0, b"", b"")
        left.handle(left.link, [end])
        with pytest.raises(ProtocolError):
            left.handle(left.link, [end])


def test_what_was_lost_cannot_be_about_what_was_lost() -> None:
    """Otherwise the nesting of frames would decide the depth of the stack."""
    body = b""
    for _ in range(2000):
        body = pack(DIRECT, 2, 0, 0, b"", body, REST)
    with pair() as (left, right):
        connect(left, right)
        with pytest.raises(ProtocolError):
            left.handle(left.link, [Frame(DIRECT, REST, 2, 0, 0, 0, b"", body)])


@pytest.mark.parametrize(
    "said",
    [{"port": 0}, {"port": 1 << 16}, {"port": []}, {"port": math.inf}, {"key": 1}, {"key": "x"}],
)
def test_a_ticket_to_nowhere(said: dict[str, Any]) -> None:
    with pair() as (left, _):
        left.directs._ask(left.link)
        number = left.directs._tries[left.link].number
        body = json.dumps({"address": "127.0.0.1", "port": 1, "key": "00", **said}).encode()
        # The link is lost on each of these errors.
        with pytest.raises((ProtocolError, ValueError, TypeError)):
            left.handle(left.link, [Frame(DIRECT, INVITE, number, 0, 0, 0, b"", body)])


def test_both_ask_at_once() -> None:
    """The proc with the greater uid gets the connection that it asked for."""
    with pair() as (left, right):
        for side in (left, right):
            side.directs.count(side.link)
            for number in range(64):
                side.link.send(call(number, kind=POST))
            assert isinstance(side.link, CastLink)
        for side in (left, right):
            side.run_soon()
        settle(left, right)
        assert [message["op"] for message in left.told] == ["way"]
        assert right.told == []
        left.notices["way"]({"to": 1, "here": "", "tls": False})
        settle(left, right)
        assert not right.directs._tries
        assert right.got == left.got == list(range(64))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *("small", "small", "large", "segment", "mark"),
                    *("connect", "break", "step", "step tunnel", "step connection"),
                ]
            ),
            st.integers(0, 1),
            st.integers(1, 8),
        ),
        max_size=60,
    )
)
def test_whatever_happens_the_order_is_kept(plan: list[tuple[str, int, int]]) -> None:
    with pair() as sides, patch.multiple(direct, _AFTER_TURN=2, _EARLY=30_000):
        sent: list[list[int]] = [[], []]
        connections = marks = 0
        for what, who, times in plan:
            side = sides[who]
            for _ in range(times):
                number = len(sent[who]) + 1
                if what == "step":
                    side.step()
                elif what == "step tunnel":
                    side.step_tunnel()
                elif what == "step connection":
                    side.step_connection()
                elif what == "mark":
                    marks += 1
                    side.link.casts = marks
                    side.link.mark(marks)
                elif what == "connect":
                    if not any(isinstance(each.link, DirectLink) for each in sides):
                        connections += 1
                        connect(side, sides[1 - who], connections)
                elif what == "break":
                    if isinstance(side.link, DirectLink) and not side.direct.broken:
                        side.direct.sock.shutdown(socket.SHUT_RDWR)
                else:
                    sent[who].append(number)
                    fds = [0] if what == "segment" else None
                    size = 20_000 if what == "large" else 0
                    data = pack(CALL, number, 0, 0, b"", bytes(size), 0, len(fds or ()))
                    assert side.link.send(data, fds)
        settle(*sides)
        assert [sides[1].got, sides[0].got] == sent


def test_turns_one_by_one() -> None:
    turns = PathSwitch()
    one, two, turn = (
        Frame(kind, 0, dest, 0, 0, 0, b"", b"") for kind, dest in ((1, 1), (1, 2), (TURN, 0))
    )
    assert turns.came(CONNECTION, [one, turn]) == []
    assert not turns.idle
    assert turns.came(TUNNEL, [turn, two]) == [turn, one, turn, two]
    assert turns.idle


def test_what_cannot_have_been_confirmed() -> None:
    sent = Unconfirmed()
    sent.add(b"abc")
    with pytest.raises(ProtocolError):
        sent.confirmed(4)
    sent.confirmed(3)
    assert sent.rest(3) == b""
    with pytest.raises(ProtocolError):
        sent.rest(2)


def test_data_that_a_socket_has_read_ahead_is_read_without_an_event() -> None:
    """It is no longer in the kernel, so the reactor would wait for ever."""
    with pair() as (left, right):
        connect(left, right)
        direct = left.direct
        assert not direct.pending(), "a plain socket reads nothing ahead"
        direct._ahead = SimpleNamespace(pending=lambda: True)  # type: ignore[assignment]
        assert direct.pending()
        direct.held = True
        assert not direct.pending()
        direct.held = False
        left.step_connection()
        assert left.directs._read in [function for function, *_ in left.reactor.soon]
        left.reactor.soon.clear()
