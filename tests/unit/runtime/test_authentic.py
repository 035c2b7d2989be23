"""A socket with authenticated records: what it gives out is what was sent, or it gives up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from monarch._engine.protocol.records import MOST, AlteredError, Sealer
from monarch._engine.runtime.authentic import AuthenticSocket

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
    """The bytes that arrive of it, read `ask` at a time, as an event loop would do it."""
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
    assert not other.pending()  # nothing has been received
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
