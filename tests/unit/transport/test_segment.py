"""Segments: one copy on sending, none on receiving, and each is returned, even after a crash."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.runtime.proc.body import MappedBody
from monarch._engine.transport import segment as segments
from monarch._engine.transport.segment import SegmentPool, open_parts
from monarch._engine.wire.codec import Payload, decode, encode, encode_result

THRESHOLD = 65536
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(256 * MIB)
    yield pool
    empty(pool)


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    """Check that each test returns its opened segments; then drop the warm mappings."""
    gc.collect()
    before = len(segments._watches)
    yield
    gc.collect()
    assert len(segments._watches) == before
    segments._warm.clear()


def empty(pool: SegmentPool) -> None:
    """Give back what is unused: what was not used between two calls."""
    pool.trim()
    pool.trim()


class Peer:
    """A receiver: opens a stored segment and returns it as a RELEASE frame would."""

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.returned: list[int] = []

    def released(self, ident: int) -> None:
        self.returned.append(ident)
        self.pool.release(self, ident)

    def send(self, payload: Payload, *, last: bool = True) -> Any:
        stored = self.pool.store(payload)
        self.pool.hold(self, stored)
        if last:
            self.pool.release(None, stored.id)
        return stored

    def body(self, payload: Payload, *, last: bool = True) -> MappedBody:
        stored = self.send(payload, last=last)
        return MappedBody(stored.table, os.dup(stored.fd), self.released)

    def get(self, payload: Payload, *, last: bool = True) -> Any:
        return self.body(payload, last=last).load()


@pytest.fixture
def peer(pool: SegmentPool) -> Peer:
    return Peer(pool)


def numbers(count: int = 100_000, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.int64)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- arrival ---------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 300_000), max_size=6),
    st.integers(0, 200_000),
    st.sampled_from([1, THRESHOLD]),
)
def test_any_sizes_side_by_side(sizes: list[int], stream: int, threshold: int) -> None:
    pool = SegmentPool(64 * MIB)
    sent = ([np.full(size, n, np.uint8) for n, size in enumerate(sizes)], b"s" * stream)
    found, text = Peer(pool).get(encode(sent, threshold))
    assert text == sent[1]
    assert all(map(np.array_equal, found, sent[0]))
    del found
    gc.collect()
    assert pool.statistics[0] == 0
    empty(pool)


@pytest.mark.parametrize("size", [1, MIB, 5 * MIB, 17 * MIB])
@pytest.mark.parametrize("writable", [True, False])
def test_every_way_to_copy(peer: Peer, size: int, writable: bool) -> None:
    """Small and read-only ones by slices, big ones without the GIL, the biggest by two threads."""
    sent = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    sent.flags.writeable = writable
    assert np.array_equal(peer.get(encode((sent, b"x" * 100), 1))[0], sent)


def test_a_copy_where_no_thread_can_be_started(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sent = np.random.default_rng(0).integers(0, 255, 17 * MIB, np.uint8)
    assert np.array_equal(peer.get(encode(sent, 1)), sent)


@pytest.mark.parametrize("size", [MIB, 4 * MIB, 9 * MIB])
def test_large_bytes(peer: Peer, size: int) -> None:
    for number in range(3):
        sent = bytes([number]) * size
        assert peer.get(encode_result(sent, THRESHOLD)) == sent


def test_parts_are_aligned_for_vector_loads(peer: Peer) -> None:
    sent = [np.zeros(100_001, np.uint8), np.zeros(70_003, np.uint8)]
    assert [found.ctypes.data % 64 for found in peer.get(encode(sent, THRESHOLD))] == [0, 0]


def test_what_arrives_can_be_written_and_nobody_else_sees_it(pool: SegmentPool) -> None:
    sent = numbers()
    payload = encode(sent, THRESHOLD)
    peers = [Peer(pool) for _ in range(3)]
    found = [peer.get(payload, last=peer is peers[-1]) for peer in peers]
    for number, mine in enumerate(found):
        mine += number + 1
    for number, mine in enumerate(found):
        assert np.array_equal(mine, sent + number + 1)
    assert sent[0] == 0
    assert np.array_equal(pool.statistics[0], 1)


# -- life of a segment -----------------------------------------------------------------------------


def test_a_segment_comes_back_when_the_last_view_of_it_is_gone(
    pool: SegmentPool, peer: Peer
) -> None:
    found = peer.get(encode([numbers(), numbers()], THRESHOLD))
    tail = found[1][-10:]
    del found
    gc.collect()
    assert (pool.statistics[0], peer.returned) == (1, [])
    assert tail[-1] == 99_999
    del tail
    assert pool.statistics[:2] == (0, 1)
    assert len(peer.returned) == 1


def test_all_receivers_of_a_cast_share_one_segment(pool: SegmentPool) -> None:
    peers = [Peer(pool) for _ in range(4)]
    payload = encode(numbers(), THRESHOLD)
    found = [peer.get(payload, last=peer is peers[-1]) for peer in peers]
    assert pool.statistics[0] == 1
    while found:
        assert pool.statistics[0] == 1
        found.pop()
    assert pool.statistics[:2] == (0, 1)


def test_the_sender_keeps_it_until_its_last_send(pool: SegmentPool, peer: Peer) -> None:
    payload = encode(numbers(), THRESHOLD)
    found = peer.get(payload, last=False)
    del found
    assert pool.statistics[0] == 1
    assert np.array_equal(peer.get(payload), numbers())
    assert pool.statistics[:2] == (0, 1)


def test_a_body_that_nobody_looks_at_gives_its_segment_back(pool: SegmentPool, peer: Peer) -> None:
    body = peer.body(encode(numbers(), THRESHOLD))
    assert len(body) > 800_000
    del body
    assert pool.statistics[:2] == (0, 1)


def test_a_body_that_cannot_be_decoded_gives_its_segment_back(
    pool: SegmentPool, peer: Peer
) -> None:
    body = peer.body(Payload([b"this is no pickle" * 10_000], [], 1))
    with pytest.raises(pickle.UnpicklingError):
        body.load()
    del body
    gc.collect()
    assert pool.statistics[:2] == (0, 1)


def test_a_lost_link_releases_what_its_peer_held(pool: SegmentPool) -> None:
    dead, alive = Peer(pool), Peer(pool)
    shared, own = encode(numbers(), THRESHOLD), encode(numbers(), THRESHOLD)
    dead.send(shared, last=False)
    dead.send(own)
    dead.send(own, last=False)
    found = alive.get(shared)
    assert pool.statistics[0] == 2
    pool.drop_holder(dead)
    assert pool.statistics[:2] == (1, 1)
    pool.drop_holder(dead)
    del found
    assert pool.statistics[:2] == (0, 2)


def test_late_double_and_unknown_releases_change_nothing(pool: SegmentPool) -> None:
    one, other = Peer(pool), Peer(pool)
    payload = encode(numbers(), THRESHOLD)
    stored = one.send(payload, last=False)
    other.send(payload)
    for ident in (0, stored.id + 1, 1 << 64):
        pool.release(one, ident)
    for _ in range(3):
        pool.release(one, stored.id)
    assert pool.statistics[0] == 1
    pool.release(Peer(pool), stored.id)
    assert pool.statistics[0] == 1
    pool.release(other, stored.id)
    assert pool.statistics[:2] == (0, 1)
    pool.release(other, stored.id)
    assert pool.statistics[:2] == (0, 1)


def test_a_segment_is_used_again_for_what_fits_its_class(pool: SegmentPool, peer: Peer) -> None:
    first = peer.send(encode(numbers(100_000), THRESHOLD))
    peer.released(first.id)
    second = peer.send(encode(numbers(99_000), THRESHOLD))
    assert second is first
    third = peer.send(encode(numbers(99_000), THRESHOLD))
    assert third is not first
    assert pool.statistics[0] == 2


def test_a_segment_used_again_shows_nothing_of_before(pool: SegmentPool, peer: Peer) -> None:
    for first in range(0, 50, 10):
        found = peer.get(encode(numbers(100_000 - first, first), THRESHOLD))
        assert np.array_equal(found, numbers(100_000 - first, first))
        del found
    assert pool.statistics[:2] == (0, 1)


@pytest.mark.parametrize("size", [1, 4096, 4097, 70_000, 10**6, 3 << 20, (5 << 20) + 1, 10**9])
def test_size_classes_waste_little(size: int) -> None:
    got = segments._size_class(size)
    assert got % segments._PAGE == 0
    assert size <= got <= max(size * 1.25 + segments._PAGE, segments._PAGE)
    assert segments._size_class(got) == got


def test_the_pool_keeps_no_more_than_its_limit() -> None:
    pool = SegmentPool(2 * MIB)
    peer = Peer(pool)
    before = descriptors()
    stored = [peer.send(encode(numbers(), THRESHOLD)) for _ in range(10)]
    # Its own descriptor, and the one that Python's mapping keeps.
    each = (descriptors() - before) // 10
    assert each in (1, 2)
    for segment in stored:
        peer.released(segment.id)
    used, free, nbytes = pool.statistics
    assert (used, nbytes) == (0, free * stored[0].size)
    assert 0 < nbytes <= 2 * MIB
    assert descriptors() == before + free * each
    empty(pool)
    assert pool.statistics == (0, 0, 0)
    assert descriptors() == before


def test_the_pool_keeps_what_was_used_last() -> None:
    """After many small payloads, one big payload finds its segment warm at the next send."""
    pool = SegmentPool(2 * MIB)
    peer = Peer(pool)
    for size in (400_000, 300_000, 200_000, 1_900_000):
        peer.released(peer.send(encode(np.zeros(size, np.uint8), THRESHOLD)).id)
    used, free, nbytes = pool.statistics
    assert (used, free) == (0, 1)
    assert 1_900_000 <= nbytes <= 2 * MIB
    ident = peer.send(encode(np.zeros(1_900_001, np.uint8), THRESHOLD)).id
    assert peer.returned.count(ident) == 1
    peer.released(ident)
    empty(pool)


class Clock:
    """A clock whose only timer goes off when the test says so."""

    def __init__(self) -> None:
        self.due: Callable[[], None] | None = None

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        assert (seconds, self.due) == (30, None)
        self.due = action

    def turn(self) -> None:
        action, self.due = self.due, None
        assert action is not None
        action()


def test_memory_goes_back_to_the_system_after_a_burst() -> None:
    clock = Clock()
    pool = SegmentPool(256 * MIB, clock.call_later)
    peer = Peer(pool)
    assert clock.due is None
    burst = [peer.send(encode(np.ones(3 * MIB, np.uint8), THRESHOLD)) for _ in range(4)]
    held, rare, *often = burst
    for segment in (rare, *often):
        peer.released(segment.id)
    # A receiver keeps the segment mapped after it has released it, to copy the next payload faster.
    file = os.dup(rare.fd)
    mapped = mmap.mmap(file, rare.size, prot=mmap.PROT_READ)

    clock.turn()
    assert pool.statistics == (1, 3, 3 * rare.size), "it may be used again soon"
    for _ in range(2):
        peer.released(peer.send(encode(np.ones(3 * MIB, np.uint8), THRESHOLD)).id)
    assert os.fstat(file).st_blocks
    clock.turn()
    assert pool.statistics == (1, 1, rare.size), "one was enough in between"
    assert os.fstat(file).st_blocks == 0
    clock.turn()
    assert pool.statistics == (1, 0, 0)
    assert clock.due is not None, "a receiver may release the last one"
    peer.released(held.id)
    clock.turn()
    clock.turn()
    assert pool.statistics == (0, 0, 0)
    assert clock.due is None, "an idle process has nothing to do"
    peer.released(peer.send(encode(numbers(), THRESHOLD)).id)
    clock.turn()
    clock.turn()
    assert pool.statistics == (0, 0, 0)
    mapped.close()
    os.close(file)


def test_reserved_memory_is_held_as_long_as_it_is(pool: SegmentPool, peer: Peer) -> None:
    memory = pool.reserve(100_000)
    memory[:5] = b"hello"
    segment = pool.reserved(memory)
    assert segment is not None
    assert pool.reserved(memory[10:]) is segment
    assert pool.reserved(memoryview(b"hello")) is None
    assert os.pread(segment.fd, 5, 0) == b"hello"
    pool.hold(peer, segment)
    del memory
    assert pool.statistics[0] == 1
    pool.release(peer, segment.id)
    assert pool.statistics[0] == 0
    del segment
    assert pool.reserve(100_000)[:5] == b"hello"  # the same segment, warm


def test_reserved_memory_that_nobody_holds_goes_back(pool: SegmentPool) -> None:
    pool.reserve(100_000)
    assert pool.statistics[:2] == (0, 1)


def test_memory_that_is_looked_into_outlives_its_segment() -> None:
    pool = SegmentPool(0)
    memory = pool.reserve(100_000)
    part = memory[:3]
    part[:] = b"abc"
    del memory
    assert pool.statistics == (0, 0, 0)
    assert bytes(part) == b"abc"


def test_windows_show_what_is_written_later_and_are_kept() -> None:
    pool, windows = SegmentPool(256 * MIB), segments.Windows(8 * MIB)
    memory = pool.reserve(3 * MIB)
    segment = pool.reserved(memory)
    assert segment is not None
    for content in (b"one", b"two"):
        memory[:3] = content
        view = windows.open("owner", segment.fd, 3)
        assert bytes(view) == content
    with pytest.raises(ValueError, match="outside its segment"):
        windows.open("owner", segment.fd, segment.size + 1)
    assert len(windows._kept) == 1
    windows.drop("another")
    assert len(windows._kept) == 1
    windows.drop("owner")
    assert windows._bytes == len(windows._kept) == 0
    assert bytes(view) == b"two"  # an open view stays valid
    del memory, segment
    empty(pool)


def test_windows_keep_no_more_than_their_limit() -> None:
    pool, windows = SegmentPool(0), segments.Windows(5 * MIB)
    for size in (2 * MIB, 2 * MIB + 1, 40 * MIB, MIB):  # (a thread drops the big one)
        memory = pool.reserve(size)
        segment = pool.reserved(memory)
        assert segment is not None
        memory[-1:] = b"x"
        assert bytes(windows.open(pool, segment.fd, size)[-1:]) == b"x"
        kept = [len(mapping) for _, mapping in windows._kept.values()]
        assert sum(kept) == windows._bytes
        assert windows._bytes <= 5 * MIB or len(kept) == 1
    windows.drop(pool)
    for thread in threading.enumerate():
        if thread.name == "monarch-unmap":
            thread.join(60)


def test_idle_segments_cost_few_descriptors(pool: SegmentPool, peer: Peer) -> None:
    """A burst of payloads just above the threshold must not use up what the user may open."""
    payloads = [encode(np.zeros(THRESHOLD, np.uint8), THRESHOLD) for _ in range(600)]
    stored = [peer.send(payload) for payload in payloads]
    for segment in stored:
        peer.released(segment.id)
    assert pool.statistics[0] == 0
    assert pool.statistics[1] <= 256


def test_a_segment_that_cannot_be_had_leaves_nothing(
    pool: SegmentPool, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(segments, "memory_file", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        peer.send(encode(numbers(), THRESHOLD))
    assert pool.statistics == (0, 0, 0)


def test_many_threads_use_one_pool(pool: SegmentPool) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        peer = Peer(pool)
        for turn in range(50):
            sent = numbers(10_000 + 100 * turn, number)
            if not np.array_equal(peer.get(encode(sent, THRESHOLD)), sent):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.statistics[0] == 0


def test_a_payload_that_passes_through_is_the_same(pool: SegmentPool, peer: Peer) -> None:
    """A payload that a port forwards is copied once more and never decoded."""
    sent = {"array": numbers(), "bytes": b"x" * 100_000}
    forwarded = peer.body(encode(sent, THRESHOLD)).copy(THRESHOLD)
    onward = Peer(SegmentPool(0))
    found = onward.get(forwarded)
    assert np.array_equal(found["array"], sent["array"])
    assert found["bytes"] == sent["bytes"]


# -- segments that are reused ----------------------------------------------------------------------


class Reusing(Peer):
    """A peer whose segments are overwritten as soon as they are returned."""

    def released(self, ident: int) -> None:
        segment = self.pool._used[ident]
        super().released(ident)
        segment.map[: segment.size] = b"\xee" * segment.size


@pytest.mark.parametrize("mappings", [0, segments._MAX_MAPPINGS], ids=["copied", "mapped"])
@pytest.mark.parametrize("way", ["load", "copy"])
def test_nothing_is_read_from_a_segment_that_was_given_back(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, mappings: int, way: str
) -> None:
    monkeypatch.setattr(segments, "_MAX_MAPPINGS", mappings)
    cases = [
        encode_result(b"\x11" * 5 * MIB, THRESHOLD),
        encode_result(b"\x11" * 70_000, THRESHOLD),
        encode(np.full(5 * MIB, 0x11, np.uint8), THRESHOLD),
        encode([np.full(5 * MIB, 0x11, np.uint8)] * 2, THRESHOLD),
    ]
    for payload in cases:
        body = Reusing(pool).body(payload)
        found = body.load() if way == "load" else Peer(SegmentPool(0)).get(body.copy(THRESHOLD))
        while isinstance(found, list):
            found = found[-1]
        assert set(np.frombuffer(found, np.uint8).tolist()) == {0x11}
    del body, found
    gc.collect()
    assert pool.statistics[0] == 0


def test_above_so_many_mappings_payloads_are_copied(
    pool: SegmentPool, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MAX_MAPPINGS", len(segments._watches) + 3)
    found = [peer.get(encode(numbers(first=n), THRESHOLD)) for n in range(10)]
    assert (len(peer.returned), pool.statistics[0]) == (7, 3)
    for number, mine in enumerate(found):
        assert np.array_equal(mine, numbers(first=number))
        mine += 1
        assert mine[0] == number + 1
    del mine, found
    gc.collect()
    assert pool.statistics[0] == 0
    again = peer.get(encode(numbers(), THRESHOLD))
    assert pool.statistics[0] == 1, "mapped again, now that there is room"
    del again


def test_warm_mappings_are_bounded_and_die_with_use(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_WARM_LIMIT", 20 * MIB)
    peer = Peer(SegmentPool(0))
    for number in range(8):
        sent = bytes([number]) * (5 * MIB)
        assert peer.get(encode_result(sent, THRESHOLD)) == sent
    assert 0 < sum(view.nbytes for view in segments._warm.values()) <= 20 * MIB


def test_a_warm_mapping_shows_the_new_payload(pool: SegmentPool, peer: Peer) -> None:
    for number in range(4):
        sent = bytes([number]) * (5 * MIB - number)
        assert peer.get(encode_result(sent, THRESHOLD)) == sent
    assert len(segments._warm) == 1
    assert pool.statistics[:2] == (0, 1)


# -- invalid tables --------------------------------------------------------------------------------

HEAD, PART = struct.Struct("<QQI"), struct.Struct("<QQB")


def table(ident: int, used: int, *parts: tuple[int, int, int], count: int | None = None) -> bytes:
    count = len(parts) if count is None else count
    return HEAD.pack(ident, used, count) + b"".join(PART.pack(*part) for part in parts)


LIES = {
    "nothing": b"",
    "half a head": HEAD.pack(1, 4096, 1)[:10],
    "no parts": table(1, 4096),
    "fewer parts than claimed": table(1, 4096, (0, 4096, 0), count=2),
    "more parts than claimed": table(1, 4096, (0, 1, 0), (1, 1, 0), count=1),
    "four billion parts": table(1, 4096, (0, 1, 0), count=2**32 - 1),
    "half a part": table(1, 4096, (0, 4096, 0))[:-1],
    "used beyond the segment": table(1, 4097, (0, 4097, 0)),
    "used beyond all memory": table(1, 2**64 - 1, (0, 1, 0)),
    "a part beyond what is used": table(1, 100, (0, 101, 0)),
    "an offset beyond what is used": table(1, 4096, (5000, 1, 0)),
    "an offset that wraps": table(1, 4096, (2**64 - 1, 2, 0)),
    "a bulk part beyond": table(1, 4096, (0, 1, 0), (4000, 5 * MIB, 1)),
    "nothing used": table(1, 0, (0, 0, 0)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("size", [0, 4096])
def test_a_table_that_does_not_fit_is_refused(lie: str, size: int) -> None:
    fd = segments.memory_file(size)
    ident = os.fstat(fd).st_ino
    try:
        stream, buffers = open_parts(LIES[lie], fd, lambda ident: None)
    except ValueError:
        pass
    else:
        assert (bytes(stream), buffers) == (b"", [])
    with pytest.raises(OSError, match="Bad file descriptor"):
        assert os.fstat(fd).st_ino != ident


@given(st.binary(max_size=80), st.integers(0, 8192))
def test_random_tables(data: bytes, size: int) -> None:
    fd = segments.memory_file(size)
    try:
        stream, buffers = open_parts(data, fd, lambda ident: None)
    except ValueError:
        return
    assert len(stream) + sum(map(len, buffers)) <= size * (1 + len(buffers))


@given(st.data())
def test_true_tables_with_a_flipped_byte(data: st.DataObject) -> None:
    pool = SegmentPool(0)
    stored = Peer(pool).send(encode([np.zeros(5000, np.uint8)] * 2, 1))
    lie = bytearray(stored.table)
    lie[data.draw(st.integers(0, len(lie) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        stream, buffers = open_parts(lie, os.dup(stored.fd), lambda ident: None)
    except ValueError:
        return
    assert all(len(view) <= stored.size for view in (stream, *buffers))


@pytest.mark.parametrize("what", ["pipe", "folder", "write-only file", "text file"])
def test_descriptors_that_are_no_segments(what: str, tmp_path: Any) -> None:
    if what == "pipe":
        fd, other = os.pipe()
        os.close(other)
    elif what == "folder":
        fd = os.open(tmp_path, os.O_RDONLY)
    else:
        path = tmp_path / "file"
        path.write_bytes(b"x" * 4096)
        fd = os.open(path, os.O_WRONLY if what == "write-only file" else os.O_RDONLY)
    honest = table(1, 4096, (0, 4096, 0))
    try:
        stream, _ = open_parts(honest, fd, lambda ident: None)
    except (ValueError, OSError):
        pass
    else:
        assert bytes(stream) == b"x" * 4096
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("failing", ["mmap", "table"])
def test_a_mapping_that_fails_gives_the_segment_back(
    pool: SegmentPool, peer: Peer, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The sender must get its segment back even if the receiver has no memory to map it."""
    payload = encode(numbers(), THRESHOLD)
    body = peer.body(payload)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        if failing == "mmap":
            patch.setattr(segments.mmap, "mmap", refuse)
        else:
            body._table = body._table[:-1]
        with pytest.raises((OSError, ValueError)):
            body.load()
    del body
    gc.collect()
    assert pool.statistics[:2] == (0, 1)


# -- systems without memory files, and forks -------------------------------------------------------


def test_without_memory_files(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, pool: SegmentPool, peer: Peer
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    found = peer.get(encode(numbers(), THRESHOLD))
    assert np.array_equal(found, numbers())
    assert list(tmp_path.iterdir()) == []
    del found
    assert pool.statistics[:2] == (0, 1)


def test_what_a_forked_child_may_see_is_not_filled_anew(pool: SegmentPool, peer: Peer) -> None:
    before = peer.get(encode(numbers(), THRESHOLD))
    segments._keep_for_children()
    after = peer.get(encode(numbers(), THRESHOLD))
    del before, after
    assert pool.statistics[0] == 1
    pool.drop_holder(peer)
    assert pool.statistics[0] == 0


def test_a_finaliser_that_sends_while_the_pool_is_in_use(pool: SegmentPool, peer: Peer) -> None:
    """The collector may run the finaliser on the thread that holds the pool's lock."""
    done: list[int] = []

    class Sends:
        def __del__(self) -> None:
            done.append(peer.send(encode(numbers(), THRESHOLD)).id)

    with pool._lock:
        Sends()
    assert len(done) == 1
    assert pool.statistics[0] == 1


def test_decode_of_what_open_parts_gives(pool: SegmentPool, peer: Peer) -> None:
    stored = peer.send(encode([numbers(), "text"], THRESHOLD))
    stream, buffers = open_parts(stored.table, os.dup(stored.fd), peer.released)
    found = decode(stream, buffers)
    del stream, buffers
    assert found[1] == "text"
    assert peer.returned == []
    del found
    gc.collect()
    assert peer.returned == [stored.id]


def test_a_segment_that_cannot_be_mapped_costs_no_descriptor(pool: SegmentPool) -> None:
    """A mapping takes its own descriptor; with only one left, each attempt would leak it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    payload = encode(np.ones(MIB, np.uint8), THRESHOLD)
    first = os.open(os.devnull, os.O_RDONLY)
    os.close(first)  # the lowest free number
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            pool.store(payload)
        os.close(os.open(os.devnull, os.O_RDONLY))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
