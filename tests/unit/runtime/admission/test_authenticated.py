"""A socket with authenticated records returns exactly the bytes that were sent, or fails."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.protocol.session.records import MOST, AlteredError, Sealer
from monarch._engine.runtime.admission.authenticated import AuthenticSocket

SESSION = bytes(range(32))
Pair = tuple[AuthenticSocket, AuthenticSocket]


def filled(size: int, seed: int = 1) -> bytes:
    return (bytes(range(256)) * (size // 256 + 2))[seed : seed + size]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    made = AuthenticSocket(one, SESSION, dialer=True), AuthenticSocket(other, SESSION, dialer=False)
    for sock in made:
        sock.setblocking(False)
    yield made
    for sock in made:
        sock.close()


def carried(source: AuthenticSocket, target: AuthenticSocket, data: bytes, ask: int) -> bytes:
    """Return the part of `data` that arrives, read `ask` bytes at a time as an event loop reads."""
    left, came, room = memoryview(data), bytearray(), memoryview(bytearray(ask))
    while len(came) < len(data):
        if left:
            with contextlib.suppress(BlockingIOError):
                left = left[source.sendmsg([left[:1000], left[1000:]]) :]
        while True:
            try:
                count = target.recv_into(room)
            except BlockingIOError:
                break
            came += room[:count]
            if not target.pending():
                break
    return bytes(came)


@pytest.mark.parametrize("size", [1, 999, 4096, 4097, MOST - 1, MOST, MOST + 1, 3 * MOST + 17])
@pytest.mark.parametrize("ask", [7, 4096, 1 << 20])
def test_what_is_sent_arrives(pair: Pair, size: int, ask: int) -> None:
    if size > MOST and ask == 7:
        size = MOST + 1
    one, other = pair
    data = filled(size)
    assert data == carried(one, other, data, ask)
    assert data[:5000] == carried(other, one, data[:5000], ask)


def test_many_small_messages_in_one_read(pair: Pair) -> None:
    one, other = pair
    for number in range(100):
        assert one.send(b"%03d" % number) == 3
    assert not other.pending()  # `other` has received nothing
    room = memoryview(bytearray(150))
    assert other.recv_into(room) == 150
    assert other.pending()
    assert bytes(room[:6]) == b"000001"
    assert other.recv(1000) == b"".join(b"%03d" % number for number in range(50, 100))
    assert not other.pending()
    with pytest.raises(BlockingIOError):
        other.recv(1)


def test_byte_by_byte() -> None:
    near, far = socket.socketpair()
    with near, far:
        sock = AuthenticSocket(far, SESSION, dialer=False)
        sock.setblocking(False)
        sealer = Sealer(SESSION, dialer=True)
        said = b"".join(b"".join(sealer.seal([part])) for part in (b"one", b"twenty"))
        came = b""
        for byte in said:
            near.send(bytes([byte]))
            try:
                came += sock.recv(100)
            except BlockingIOError:
                assert not sock.pending()
        assert came == b"onetwenty"


def test_nothing_of_an_altered_record_is_given_out() -> None:
    record = b"".join(Sealer(SESSION, dialer=True).seal([b"run this"]))
    for position in range(len(record)):
        near, far = socket.socketpair()
        with near, far:
            sock = AuthenticSocket(far, SESSION, dialer=False)
            altered = bytearray(record)
            altered[position] ^= 1
            near.send(altered)
            target = memoryview(bytearray(100))
            with pytest.raises(AlteredError):
                sock.recv_into(target)
            assert not any(target)


def test_what_was_good_before_is_not_lost_and_nothing_follows() -> None:
    near, far = socket.socketpair()
    with near, far:
        sock = AuthenticSocket(far, SESSION, dialer=False)
        sealer = Sealer(SESSION, dialer=True)
        first, second, third = (b"".join(sealer.seal([part])) for part in (b"1", b"2", b"3"))
        near.send(first + third + second)
        assert sock.recv(1) == b"1"
        with pytest.raises(AlteredError):
            sock.recv(1)
        with pytest.raises(AlteredError):
            sock.recv(1)


def test_a_stream_that_ends_in_the_middle_of_a_record_is_at_its_end() -> None:
    near, far = socket.socketpair()
    with far:
        sock = AuthenticSocket(far, SESSION, dialer=False)
        near.send(b"".join(Sealer(SESSION, dialer=True).seal([b"run this"]))[:-1])
        near.close()
        assert sock.recv(100) == b""


def test_a_socket_that_blocks() -> None:
    near, far = socket.socketpair()
    one = AuthenticSocket(near, SESSION, dialer=True)
    other = AuthenticSocket(far, SESSION, dialer=False)
    one.sendall(b"x" * 10_000)
    assert other.recv(20_000) == b"x" * 10_000
    one.close()
    other.close()


class Narrow(SimpleNamespace):
    """A socket connected to itself that takes and gives few bytes at a time, and sometimes none."""

    def __init__(self, chances: list[int]) -> None:
        nothing: Any = None
        names = ("fileno", "getsockname", "setblocking", "setsockopt", "settimeout", "shutdown")
        super().__init__(family=socket.AF_UNIX, **dict.fromkeys(names, nothing))
        self.wire = bytearray()
        self.sent, self.received = (itertools.cycle([*chances, 5000]) for _ in range(2))

    def sendmsg(self, parts: Sequence[Any]) -> int:
        data = b"".join(parts)[: next(self.sent)]
        if not data:
            raise BlockingIOError
        self.wire += data
        return len(data)

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def recv_into(self, room: memoryview) -> int:
        assert len(room), "it would look like the end"
        size = min(len(room), len(self.wire), next(self.received))
        if not size:
            raise BlockingIOError
        room[:size] = self.wire[:size]
        del self.wire[:size]
        return size


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 30, 4096, 4097, 20_000]), min_size=1, max_size=6),
    chances=st.lists(st.sampled_from([0, 1, 7, 50, 4200]), max_size=8),
    ask=st.sampled_from([1, 50, 6000]),
    split=st.sampled_from([0, 1, 2000]),
)
def test_every_byte_arrives_once_however_few_go_at_a_time(
    sizes: list[int], chances: list[int], ask: int, split: int
) -> None:
    sock: Any = Narrow(chances)
    source = AuthenticSocket(sock, SESSION, dialer=True)
    target = AuthenticSocket(sock, SESSION, dialer=False)
    left = [memoryview(filled(size, seed)) for seed, size in enumerate(sizes, 1)]
    said = b"".join(left)
    room, came = memoryview(bytearray(ask)), bytearray()
    while left or len(came) < len(said):
        if left:
            with contextlib.suppress(BlockingIOError):
                first = left[0]
                parts = [first[:split], first[split:]]
                sent = source.sendmsg(parts) if split else source.send(first)
                assert 0 <= sent <= len(first)
                left[0] = first[sent:]
                if not left[0]:
                    del left[0]
        with contextlib.suppress(BlockingIOError):
            came += room[: target.recv_into(room)]
    assert bytes(came) == said


def test_several_buffers_share_a_record() -> None:
    sock: Any = Narrow([1 << 20])
    source = AuthenticSocket(sock, SESSION, dialer=True)
    assert source.sendmsg([memoryview(b"a"), memoryview(b"b")]) == 2
    assert bytes(sock.wire) == b"".join(Sealer(SESSION, dialer=True).seal([b"ab"]))


def test_what_is_left_when_it_is_closed_is_dropped() -> None:
    near, far = socket.socketpair()
    with far:
        sock = AuthenticSocket(near, SESSION, dialer=True)
        assert not sock.secured
        sock.setblocking(False)
        assert sock.fileno() == near.fileno() >= 0
        assert sock.family == near.family
        assert sock.getsockname() == near.getsockname()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.settimeout(0.0)
        sock.shutdown(socket.SHUT_RD)
        with pytest.raises(BlockingIOError):
            sock.sendall(bytes(1 << 20))
        assert sock._leaving
        sock.close()
        assert not sock._leaving
        assert near.fileno() == -1


def test_records_may_be_cut_anywhere() -> None:
    sealer = Sealer(SESSION, dialer=True)
    wire = b"".join(b"".join(sealer.seal([part])) for part in (b"o", b"ne", b"two"))
    for cut in range(1, len(wire)):
        near, far = socket.socketpair()
        with near, far:
            sock = AuthenticSocket(far, SESSION, dialer=False)
            sock.setblocking(False)
            came = b""
            for part in (wire[:cut], wire[cut:]):
                near.send(part)
                with contextlib.suppress(BlockingIOError):
                    came += sock.recv(100)
            assert came == b"onetwo"


def test_what_is_read_may_end_within_a_record(pair: Pair) -> None:
    one, other = pair
    for seed in (1, 2):
        assert one.sendmsg([memoryview(filled(60, seed))]) == 60
    assert other.recv(100) == filled(60, 1) + filled(60, 2)[:40]
    assert other.pending()
    assert other.recv(100) == filled(60, 2)[40:]
    assert not other.pending()


def test_a_record_of_one_byte_is_pending(pair: Pair) -> None:
    one, other = pair
    for data in (b"1", b"2"):
        assert one.sendmsg([memoryview(data)]) == 1
    assert other.recv(1) == b"1"
    assert other.pending()
    assert other.recv(1) == b"2"
    assert not other.pending()
