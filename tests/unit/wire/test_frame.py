"""Frames survive any cut of the stream, and other bytes are never read as a frame."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.base.errors import ProtocolError
from monarch._engine.wire import frame as wire
from monarch._engine.wire.frame import CALL, HEADER, POST, Frame, FrameReader, pack

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 8 << 20
BIG = 65536  # bodies above this size are received into their final memory

KINDS = st.integers(CALL, wire.PROBE)
CASES = [
    Frame(CALL, 0, 1, 2, 3, 0, b"", b""),
    Frame(CALL, 1, 1, 2, 3, 0, b"meta", b""),
    Frame(POST, 2, 2**64 - 1, 2**64 - 1, 2**32 - 1, 253, b"m" * 65535, b"body"),
    Frame(POST, 128, 7, 0, 0, 1, b"", b"b" * BIG),
    Frame(POST, 0, 7, 0, 0, 0, b"", b"b" * (BIG + 1)),
    Frame(CALL, 0, 7, 9, 0, 0, b"name", bytes(range(256)) * 1024),
]


def bytes_of(frame: Frame) -> bytes:
    kind, flags, dest, port, rank, nfd, meta, body = frame
    return pack(kind, dest, port, rank, meta, bytes(body), flags, nfd)


def read(reader: FrameReader, pieces: Iterable[bytes]) -> list[Frame]:
    """Drive a reader as a link does: into `target` while there is one, else `feed`."""
    frames: list[Frame] = []
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            target = reader.target()
            if target is None:
                frames += reader.feed(rest)
                break
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            target.release()
            frames += reader.filled(count)
            rest = rest[count:]
    return frames


def reader(limit: int = LIMIT) -> FrameReader:
    return FrameReader(limit, "proc 7f")


def test_each_kind_has_a_number_of_its_own() -> None:
    names = "CALL POST SPAWN STOP EVENT FLOW RELEASE CONTROL QUERY PROBE SERVICE CAST ANSWERS MARK "
    kinds = [getattr(wire, name) for name in f"{names}TURN DIRECT".split()]
    assert kinds == list(range(1, wire._LAST_KIND + 1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case.meta)}+{len(case.body)}")
@pytest.mark.parametrize("step", [1, 31, 32, 33, 4096, 1 << 30])
def test_cut_anywhere(case: Frame, step: int) -> None:
    data = bytes_of(case)
    if step == 1 and len(data) > 2 * BIG:
        step = 7
    cuts = [data[at : at + step] for at in range(0, len(data), step)]
    stream = reader()
    assert read(stream, cuts) == [case]
    assert stream.idle


def test_concatenated() -> None:
    stream = reader()
    assert read(stream, [b"".join(map(bytes_of, CASES)) * 3]) == CASES * 3
    assert stream.idle


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: f"{len(case.meta)}+{len(case.body)}")
def test_trailing_bytes_wait_for_more(case: Frame) -> None:
    data = bytes_of(case)
    stream = reader()
    assert read(stream, [data + data[:20]]) == [case]
    assert not stream.idle
    assert read(stream, [data[20:]]) == [case]
    assert stream.idle


def test_the_reader_keeps_nothing_of_the_buffer_it_was_fed_from() -> None:
    data = bytearray(bytes_of(CASES[1]) + bytes_of(CASES[2])[:40])
    stream = reader()
    (first,) = stream.feed(memoryview(data))
    data[:] = bytes(len(data))
    assert first == CASES[1]
    assert read(stream, [bytes_of(CASES[2])[40:]]) == [CASES[2]]


frames = st.builds(
    Frame,
    KINDS,
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 65535),
    st.binary(max_size=300),
    st.one_of(st.binary(max_size=300), st.integers(BIG - 10, BIG + 300).map(bytes)),
)


@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 100_000), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_frames_in_any_pieces(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(map(bytes_of, sent))
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    pieces.append(data[at:])
    assert read(reader(), pieces) == sent


@given(frames, st.data())
@settings(max_examples=100, deadline=None)
def test_a_truncated_frame_is_no_frame(sent: Frame, data: st.DataObject) -> None:
    whole = bytes_of(sent)
    cut = data.draw(st.integers(1, len(whole) - 1))
    stream = reader()
    assert read(stream, [whole[:cut]]) == []
    assert not stream.idle


@given(st.binary(min_size=HEADER.size, max_size=2000))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_and_the_peer_is_named(data: bytes) -> None:
    check = struct.unpack_from("<H", data, HEADER.size - 2)[0]
    if check == wire.CHECK:
        return
    with pytest.raises(ProtocolError, match="proc 7f"):
        read(reader(), [data])


def header(size: int, kind: int = CALL, meta_len: int = 0, check: int = wire.CHECK) -> bytes:
    return HEADER.pack(size, kind, 0, meta_len, 1, 2, 3, 0, check)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (header(0, check=0), "not contain frames"),
        (header(0, kind=0), "frame kind 0"),
        (header(0, kind=wire._LAST_KIND + 1), f"frame kind {wire._LAST_KIND + 1}"),
        (header(0, kind=255), "frame kind 255"),
        (header(3, meta_len=4), "meta of 4"),
        (header(LIMIT + 1), "codec_max_frame_length"),
        (header(2**32 - 1), "codec_max_frame_length"),
    ],
)
def test_bad_headers(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        reader().feed(memoryview(data))
    assert "proc 7f" in str(caught.value)


def test_a_frame_of_exactly_the_limit() -> None:
    case = Frame(CALL, 0, 1, 2, 3, 0, b"ab", bytes(998))
    assert read(reader(limit=1000), [bytes_of(case)]) == [case]


def test_a_refused_size_allocates_nothing() -> None:
    stream = reader()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            stream.feed(memoryview(header(2**32 - 1)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_claimed_size_costs_no_memory_before_the_bytes_arrive() -> None:
    """A header is 32 bytes from a peer that may be faulty: its claimed size must cost no memory."""
    stream = FrameReader(1 << 30, "proc 7f")
    tracemalloc.start()
    try:
        stream.feed(memoryview(header(512 << 20)))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_frames_before_the_bad_one_are_not_lost() -> None:
    """Frames before the violation count, however the kernel cuts the stream."""
    good = bytes_of(CASES[1])
    stream = reader()
    got: list[Frame] = []
    with contextlib.suppress(ProtocolError):
        got += read(stream, [good + header(0, check=0)])
    assert got == [CASES[1]]
