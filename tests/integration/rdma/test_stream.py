"""The socket within a host: lost peers, drops, fairness, and the server's answers to each peer."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import monarch.actor
from monarch import _spi
from monarch.actor import Actor, endpoint
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaOwnerLost,
    RDMATcpFallbackWarning,
    RdmaTimeout,
    RdmaUnavailable,
    explain,
    routes,
)
from monarch.rdma.identity import Host
from monarch.rdma.routes.stream import Stream, message
from monarch.rdma.routes.stream.message import REPLY, REQUEST, hello
from tests.stopped import stop_process

from .conftest import WAIT, Owner

if TYPE_CHECKING:
    from typing_extensions import Self

Procs = Callable[..., Any]


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with configured(rdma_routes="stream"):
        yield
    monarch.actor.unhandled_fault_hook = before


def until(condition: Callable[[], Any]) -> Any:
    """Poll for a condition that has no event."""
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_explain_says_what_moves_the_bytes(shared_owner: Any) -> None:
    buffer = shared_owner.make.call_one("explained", b"x").get(timeout=WAIT)
    buffer.read_into(bytearray(1)).get(timeout=WAIT)
    until(lambda: explain(buffer).ways[-1].reason == "a socket within this host")


def test_it_is_taken_where_nothing_else_leads_and_says_so_once(
    procs: Procs, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", b"content").get(timeout=WAIT)
    buffer._handle.host = Host("another kernel", 1)
    (kind,) = [kind for kind in routes.kinds() if isinstance(kind, Stream)]
    monkeypatch.setattr(kind, "_warned", False)
    into = bytearray(7)
    with configured(rdma_routes=""):
        with pytest.warns(RDMATcpFallbackWarning, match="over a socket"):
            buffer.read_into(into).get(timeout=WAIT)
        buffer.write_from(b"CONTENT").get(timeout=WAIT)  # a warning would be an error here
        ways = {way.kind: way for way in explain(buffer).ways}
    assert into == b"content"
    assert owner.look.call_one("a").get(timeout=WAIT) == b"CONTENT"
    assert (ways["process-vm"].state, ways["stream"].state) == ("no", "taken")


def test_sockets_can_be_forbidden(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", b"content").get(timeout=WAIT)
    forbidden = pytest.raises(RdmaUnavailable, match="sockets are not allowed")
    with configured(rdma_allow_tcp_fallback=False), forbidden:
        buffer.read_into(bytearray(7)).get(timeout=WAIT)


def test_an_owner_that_leaves_it_out_is_no_way(procs: Procs) -> None:
    with configured(rdma_routes="local,process-vm"):
        owner = procs(1).spawn("owner", Owner)
        buffer = owner.make.call_one("a", b"x").get(timeout=WAIT)
    found = explain(buffer)
    assert found.route is None
    assert "does not offer" in found.ways[-1].reason


@pytest.mark.failures
def test_a_killed_owner_is_lost(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", bytes(32 << 20)).get(timeout=WAIT)
    pid = owner.pid.call_one().get(timeout=WAIT)
    into = [bytearray(32 << 20) for _ in range(4)]
    buffer.read_into(into[0]).get(timeout=WAIT)
    stop_process(pid)  # so that no transfer is done before the kill
    under_way = [buffer.read_into(place) for place in into]
    os.kill(pid, signal.SIGKILL)
    for future in under_way:
        with pytest.raises(RdmaOwnerLost, match=f"process {pid}"):
            future.get(timeout=WAIT)
    with pytest.raises(RdmaOwnerLost):
        buffer.write_from(b"x").get(timeout=WAIT)
    assert explain(buffer).route is None
    assert buffer.drop().get(timeout=WAIT) is None


@pytest.mark.parametrize("connections", [1, 3])
def test_after_its_time_nothing_arrives_any_more(procs: Procs, connections: int) -> None:
    owner = procs(1).spawn("owner", Owner)
    size = 64 << 20
    with configured(rdma_tcp_fallback_parallelism=connections):
        nothing_arrives_after_its_time(owner, size)


def nothing_arrives_after_its_time(owner: Any, size: int) -> None:
    buffer = owner.make.call_one("a", b"\xff" * size).get(timeout=WAIT)
    other = owner.make.call_one("b", b"later").get(timeout=WAIT)
    pid = owner.pid.call_one().get(timeout=WAIT)
    into = bytearray(size)
    reading = buffer.read_into(into, timeout=1)
    over = time.monotonic() + 1
    while not into[0] and time.monotonic() < over:
        pass
    stop_process(pid)
    try:
        if reading.exception(timeout=WAIT) is None:
            pytest.skip("it was done before it could be stopped")
        with pytest.raises(RdmaTimeout):
            reading.get(timeout=WAIT)
        into[:] = bytes(size)
    finally:
        os.kill(pid, signal.SIGCONT)
    place = bytearray(5)
    other.read_into(place).get(timeout=WAIT)  # the answers to earlier requests have arrived by now
    assert place == b"later"
    assert not any(into)


def test_a_write_whose_time_is_over_is_not_continued(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    size = 64 << 20
    buffer = owner.make.call_one("a", bytes(size)).get(timeout=WAIT)
    pid = owner.pid.call_one().get(timeout=WAIT)
    stop_process(pid)
    try:
        with pytest.raises(RdmaTimeout):
            buffer.write_from(b"\xff" * size, timeout=0.2).get(timeout=WAIT)
    finally:
        os.kill(pid, signal.SIGCONT)
    buffer[:1].write_from(b"\1").get(timeout=WAIT)
    seen = owner.look.call_one("a").get(timeout=WAIT)
    assert seen[0] == 1
    assert not any(seen[16 << 20 :]), "only what was on its way has arrived"


def test_small_transfers_do_not_wait_for_large_ones(shared_owner: Any) -> None:
    big = shared_owner.make.call_one("big", bytes(128 << 20)).get(timeout=WAIT)
    small = shared_owner.make.call_one("small", b"12345678").get(timeout=WAIT)
    into, place = bytearray(128 << 20), bytearray(8)
    small.read_into(place).get(timeout=WAIT)

    def overtakes() -> bool:
        reading = big.read_into(into)
        small.read_into(place).get(timeout=WAIT)
        try:
            reading.get(timeout=0)
        except TimeoutError:
            reading.get(timeout=WAIT)
            return True
        return False

    # A thread that gets no CPU time for long enough finds both done, but not in each attempt.
    assert any(overtakes() for _ in range(50))
    big.drop().get(timeout=WAIT)


def test_several_connections(procs: Procs) -> None:
    content = os.urandom(1 << 20) * 24
    with configured(rdma_tcp_fallback_parallelism=3):
        owner = procs(1).spawn("owner", Owner)
        buffer = owner.make.call_one("a", content).get(timeout=WAIT)
        into = bytearray(len(content))
        for _ in range(3):
            into[:] = bytes(len(content))
            buffer.read_into(into).get(timeout=WAIT)
            assert into == content
        buffer.write_from(into[::-1]).get(timeout=WAIT)
        assert owner.look.call_one("a").get(timeout=WAIT) == content[::-1]


def test_atomics_of_many_add_up(procs: Procs) -> None:
    with configured(rdma_routes=""):
        owner = procs(1).spawn("owner", Owner)
        buffer = owner.make.call_one("a", bytes(8)).get(timeout=WAIT)
    adders = procs(2).spawn("adders", Adder)
    adding = adders.add.call(buffer, 100)
    with configured(rdma_routes="process-vm"):
        add(buffer, 100)
    adding.get(timeout=WAIT)
    seen = owner.look.call_one("a").get(timeout=WAIT)
    assert int.from_bytes(seen, "little") == 300


def add(buffer: RDMABuffer, times: int) -> None:
    old = bytearray(8)
    for _ in range(times):
        RDMAAction().fetch_add(buffer, old, 1).submit().get(timeout=WAIT)


class Adder(Actor):
    @endpoint
    def add(self, buffer: RDMABuffer, times: int) -> None:
        add(buffer, times)


# -- the server, with frames made by hand ----------------------------------------------------------


class Stranger:
    """A side stream, and the frames sent on it."""

    def __init__(self, buffer: RDMABuffer, greets: bool = True) -> None:
        self.handle = buffer._handle
        self.sock = _spi.open_stream(self.handle.uid, "rdma")
        self.sock.settimeout(WAIT)
        if greets:
            self.sock.sendall(hello(self.handle.identity))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def ask(self, operation: int, offset: int = 0, length: int = 0, **changes: Any) -> None:
        fields = {"number": self.handle.number, "token": self.handle.token, "first": 0}
        fields.update(changes)
        number, token, first = fields["number"], fields["token"], fields["first"]
        self.sock.sendall(REQUEST.pack(9, operation, 0, number, token, offset, length, first, 0))

    def take(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            data = self.sock.recv(count - len(found))
            if not data:
                raise EOFError
            found += data
        return found

    def answer(self) -> tuple[int, int, bytes]:
        ident, kind, status, length = REPLY.unpack(self.take(REPLY.size))
        assert ident in (0, 9)
        return kind, status, self.take(length)

    def is_over(self) -> bool:
        try:
            self.answer()
        except (EOFError, ConnectionResetError):
            return True
        return False


@pytest.fixture(scope="module")
def memory(shared_owner: Any) -> RDMABuffer:
    buffer: RDMABuffer = shared_owner.make.call_one("served", bytes(range(64))).get(timeout=WAIT)
    return buffer


@pytest.fixture
def stranger(memory: RDMABuffer) -> Iterator[Stranger]:
    with Stranger(memory) as made:
        yield made


VALUE, END = message.VALUE, message.END


def test_the_answers(stranger: Stranger) -> None:
    stranger.ask(message.READ, 4, 3)
    assert stranger.answer() == (VALUE, 0, b"\4\5\6")
    stranger.ask(message.WRITE, 4, 3)
    stranger.sock.sendall(b"\4\5\6")
    assert stranger.answer() == (END, 0, b"")
    stranger.ask(message.ADD, 0, 0, first=0)
    assert stranger.answer() == (VALUE, 0, bytes(range(8)))
    stranger.ask(message.INVITE)
    kind, status, body = stranger.answer()
    assert (kind, status, json.loads(body)) == (VALUE, 0, {"near": True})
    stranger.ask(message.RECALL, number=12345)
    assert stranger.answer() == (END, 0, b"")


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"number": 1 << 40, "length": 1}, message.NOT_FOUND, "not found"),
        ({"token": bytes(16), "length": 1}, message.FORBIDDEN, "token"),
        ({"offset": 60, "length": 5}, message.FAILED, "exceeds region size 64"),
        ({"offset": 64, "length": 1}, message.FAILED, "exceeds region size 64"),
        ({"offset": (1 << 64) - 1, "length": 2}, message.FAILED, "exceeds region size 64"),
        ({"offset": 0, "length": 65}, message.FAILED, "exceeds region size 64"),
    ],
)
def test_what_is_refused(stranger: Stranger, asked: dict[str, Any], status: int, text: str) -> None:
    stranger.ask(message.READ, **asked)
    kind, found, body = stranger.answer()
    assert (kind, found) == (END, status)
    assert text in body.decode()
    stranger.ask(message.WRITE, **asked)
    stranger.sock.sendall(bytes(asked["length"]))  # the server discards these bytes
    assert stranger.answer()[:2] == (END, status)
    stranger.ask(message.READ, 4, 3)
    assert stranger.answer() == (VALUE, 0, b"\4\5\6")


def test_an_atomic_operation_on_no_word_is_refused(stranger: Stranger) -> None:
    for offset in (1, 4, 57, 64):
        stranger.ask(message.ADD, offset, first=1)
        assert stranger.answer()[:2] == (END, message.FAILED)


def test_read_only_memory_is_not_written(shared_owner: Any) -> None:
    buffer = shared_owner.make_frozen.call_one(b"frozen!!").get(timeout=WAIT)
    with Stranger(buffer) as stranger:
        stranger.ask(message.WRITE, 0, 3)
        stranger.sock.sendall(b"xxx")
        assert stranger.answer()[:2] == (END, message.FORBIDDEN)
        stranger.ask(message.ADD, 0, first=1)
        assert stranger.answer()[:2] == (END, message.FORBIDDEN)
        stranger.ask(message.READ, 0, 8)
        assert stranger.answer() == (VALUE, 0, b"frozen!!")


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (hello(bytes(16)), message.GONE),
        (REQUEST.pack(0, message.HELLO, 0, 0, bytes(16), message.MAGIC, 99, 0, 0), message.FAILED),
    ],
)
def test_who_looks_for_another_is_told(memory: RDMABuffer, first: bytes, status: int) -> None:
    with Stranger(memory, greets=False) as stranger:
        stranger.sock.sendall(first)
        assert stranger.answer()[:2] == (END, status)
        assert stranger.is_over()


@pytest.mark.parametrize(
    "said",
    [
        REQUEST.pack(1, message.READ, 0, 1, bytes(16), 0, 1, 0, 0),
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        hello(bytes(16))[:-8] + b"\xff" * 72,
    ],
)
def test_what_does_not_begin_as_it_must_ends(memory: RDMABuffer, said: bytes) -> None:
    with Stranger(memory, greets=False) as stranger:
        stranger.sock.sendall(said)
        stranger.sock.shutdown(socket.SHUT_WR)
        until(stranger.is_over)


@pytest.mark.parametrize(
    "asked",
    [
        {"operation": 0},
        {"operation": message.HELLO},
        {"operation": message.READ, "length": 1 << 40},
        {"operation": message.WRITE, "length": 1 << 40},
    ],
)
def test_what_cannot_be_ends_the_connection(stranger: Stranger, asked: dict[str, Any]) -> None:
    stranger.ask(**asked)
    assert stranger.is_over()


def test_whatever_strangers_say_others_are_served(memory: RDMABuffer) -> None:
    chance = random.Random(20)
    operations = [*range(6), 16, 17, 18, 99]
    for _ in range(150):
        with Stranger(memory, greets=chance.random() < 0.8) as stranger:
            said = bytearray()
            for _ in range(chance.randrange(1, 6)):
                number = chance.choice([stranger.handle.number, chance.getrandbits(64)])
                token = chance.choice([stranger.handle.token, chance.randbytes(16)])
                length = chance.choice([0, 1, 64, 65, chance.getrandbits(64)])
                offset = chance.choice([0, 64, chance.getrandbits(64)])
                said += REQUEST.pack(
                    9, chance.choice(operations), 0, number, token, offset, length, 0, 0
                )
                said += chance.randbytes(chance.randrange(80))
            stranger.sock.sendall(said[: chance.randrange(len(said) + 1)])
    with Stranger(memory) as stranger:
        stranger.ask(message.READ, 0, 4)
        assert stranger.answer()[0] == VALUE


def test_a_drop_does_not_wait_for_a_reader_that_sleeps(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    size = 16 << 20
    buffer = owner.make.call_one("a", b"\xff" * size).get(timeout=WAIT)
    with Stranger(buffer) as stranger:
        stranger.ask(message.READ, 0, size)
        begin = stranger.take(REPLY.size)
        buffer.drop().get(timeout=WAIT)
        assert owner.grow.call_one("a").get(timeout=WAIT) == size + 1
        assert REPLY.unpack(begin) == (9, message.DATA, 0, size)
        data = stranger.take(size)
        kept = len(data.rstrip(b"\0"))
        assert data == b"\xff" * kept + bytes(size - kept)
        assert kept < size
        assert stranger.answer()[:2] == (END, message.NOT_FOUND)


def test_a_drop_does_not_wait_for_a_writer_that_sleeps(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    size = 1 << 20
    buffer = owner.make.call_one("a", bytes(size)).get(timeout=WAIT)
    with Stranger(buffer) as stranger:
        stranger.ask(message.WRITE, 0, size)
        stranger.sock.sendall(b"\xff" * (size // 2))
        byte = bytearray(1)
        until(lambda: buffer[size // 4 :][:1].read_into(byte).get(timeout=WAIT) or byte[0])
        buffer.drop().get(timeout=WAIT)
        assert owner.grow.call_one("a").get(timeout=WAIT) == size + 1
        before = owner.look.call_one("a").get(timeout=WAIT)
        stranger.sock.sendall(b"\xff" * (size // 2))
        assert stranger.answer()[:2] == (END, message.NOT_FOUND)
        assert owner.look.call_one("a").get(timeout=WAIT) == before
    with pytest.raises(RdmaBufferDropped):
        buffer.read_into(bytearray(size)).get(timeout=WAIT)


def test_a_handle_from_before_a_restart_is_refused(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", b"01234567").get(timeout=WAIT)
    buffer._handle.identity = bytes(16)
    with pytest.raises(RdmaOwnerLost, match="another process is in its place"):
        buffer.read_into(bytearray(8)).get(timeout=WAIT)


class Forker(Actor):
    @endpoint
    def in_a_child(self, buffer: RDMABuffer) -> str:
        """Fork between two transfers; return the number of sockets that the child has."""
        into = bytearray(len(buffer))
        buffer.read_into(into).get(timeout=WAIT)
        read, write = os.pipe()
        if not os.fork():
            sockets = [
                target
                for fd in os.listdir("/proc/self/fd")
                if (target := link_of(fd)).startswith("socket:")
            ]
            os.write(write, f"{len(sockets)} sockets".encode())
            os._exit(0)
        os.close(write)
        told = os.read(read, 1000).decode()
        os.close(read)
        buffer.read_into(into).get(timeout=WAIT)
        return told


def link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_forked_child_has_no_connections(procs: Procs, memory: RDMABuffer) -> None:
    forker = procs(1).spawn("forker", Forker)
    assert forker.in_a_child.call_one(memory).get(timeout=WAIT) == "0 sockets"
