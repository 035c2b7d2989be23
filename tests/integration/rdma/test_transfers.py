"""Transfers as programs for the reference make them, in one process and between two."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaPermissionError,
    RdmaTimeout,
)
from monarch.testing import simulate

from .conftest import WAIT

Make = Any


def test_a_read_takes_all_and_leaves_the_rest_of_the_destination(make: Make) -> None:
    buffer, _ = make(b"weights")
    into = bytearray(b"-" * 10)
    assert buffer.read_into(into, timeout=60).get() is None
    assert into == b"weights---"
    assert buffer.size() == len(buffer) == 7


def test_a_write_is_there_when_it_is_done(make: Make) -> None:
    buffer, look = make(b"0123456789")
    assert buffer.write_from(memoryview(b"abc")).get(timeout=WAIT) is None
    assert look() == b"abc3456789"
    buffer.write_from(b"").get(timeout=WAIT)
    assert look() == b"abc3456789"


@pytest.mark.parametrize("size", [1 << 16, (1 << 20) + 1, (20 << 20) + 7])
def test_of_any_size(make: Make, size: int) -> None:
    content = os.urandom(1 << 16) * (size // (1 << 16) + 1)
    buffer, look = make(content[:size])
    into = bytearray(size)
    buffer.read_into(into).get(timeout=WAIT)
    assert into == content[:size]
    buffer.write_from(into[::-1]).get(timeout=WAIT)
    assert look() == into[::-1]
    buffer.drop().get(timeout=WAIT)


async def _read(buffer: RDMABuffer, into: Any) -> None:
    await buffer.read_into(into)


def test_sizes_are_checked_at_the_call(make: Make) -> None:
    buffer, look = make(bytes(64))
    text = r"destination local memory size \(10\) must be >= remote buffer size \(64\)"
    with pytest.raises(ValueError, match=text):
        buffer.read_into(bytearray(10))
    text = r"source local memory size \(100\) must be <= remote buffer size \(64\)"
    with pytest.raises(ValueError, match=text):
        buffer.write_from(bytearray(100))
    with pytest.raises(ValueError, match="read-only"):
        buffer.read_into(bytes(64))
    with pytest.raises(ValueError, match="read-only"):
        buffer.read_into(memoryview(bytearray(64)).toreadonly())
    assert look() == bytes(64)


def test_timeouts_are_checked_at_the_call(make: Make) -> None:
    buffer, _ = make(bytes(64))
    into = bytearray(64)
    for wrong in (-1, -0.5, 2**64, float("nan"), float("inf")):
        with pytest.raises(OverflowError, match="must fit in an unsigned 64-bit integer"):
            buffer.read_into(into, timeout=wrong)
    with pytest.raises(TypeError):
        buffer.read_into(into, timeout="5")
    with pytest.raises(TypeError):
        buffer.read_into(into, 5)
    buffer.read_into(into, timeout=60.5).get()
    buffer.read_into(into, timeout=2**64 - 2**12).get()


def test_no_time_at_all_is_a_timeout(make: Make) -> None:
    buffer, _ = make(bytes(64))
    future = buffer.read_into(bytearray(64), timeout=0)
    with pytest.raises(RdmaTimeout, match=r"(?s)RdmaAction.submit failed: .*timed out"):
        future.get(timeout=WAIT)
    with pytest.raises(TimeoutError):
        future.get(timeout=WAIT)


def test_after_a_drop_nothing_is_found(make: Make) -> None:
    buffer, look = make(b"01234567")
    assert buffer.drop().get(timeout=WAIT) is None
    with pytest.raises(
        RdmaBufferDropped, match=r"(?s)^RdmaAction.submit failed: .*buffer \d+ not found"
    ):
        buffer.read_into(bytearray(8)).get(timeout=WAIT)
    with pytest.raises(RdmaBufferDropped, match=r"buffer \d+ not found"):
        buffer.write_from(b"x").get(timeout=WAIT)
    assert look() == b"01234567"
    assert buffer.drop().get(timeout=WAIT) is None


def test_a_dropped_buffer_is_not_the_next_one(make: Make) -> None:
    first, _ = make(b"first!!!")
    first.drop().get(timeout=WAIT)
    second, look = make(b"second!!")
    with pytest.raises(RdmaBufferDropped):
        first.write_from(b"x").get(timeout=WAIT)
    assert look() == b"second!!"
    second.drop().get(timeout=WAIT)


def test_parts(make: Make) -> None:
    buffer, look = make(b"0123456789")
    part = buffer[2:8]
    assert (part.size(), part.slice(1, 2).size()) == (6, 2)
    part[1:3].write_from(b"ab").get(timeout=WAIT)
    assert look() == b"012ab56789"
    into = bytearray(3)
    pickle.loads(pickle.dumps(buffer[-3:])).read_into(into).get(timeout=WAIT)
    assert into == b"789"
    for offset, length in ((-1, 2), (5, 6), (10, 1)):
        with pytest.raises(ValueError, match="exceeds region size 10"):
            buffer.slice(offset, length)
    for empty in (lambda: buffer.slice(2, 0), lambda: buffer[5:5], lambda: buffer[10:]):
        with pytest.raises(ValueError, match="size 0"):
            empty()
    with pytest.raises(ValueError, match="without a step"):
        buffer[::2]
    with pytest.raises(TypeError):
        buffer[0]
    with pytest.raises(TypeError):
        iter(buffer)


def test_read_only(make: Make) -> None:
    buffer, look = make(b"frozen", read_only=True)
    assert buffer.read_only
    with pytest.raises(RdmaPermissionError, match="read-only") as caught:
        buffer.write_from(b"x")
    assert isinstance(caught.value, PermissionError)
    with pytest.raises(RdmaPermissionError):
        RDMAAction().write_remote(buffer, b"x")
    assert look() == b"frozen"


def test_a_forged_handle_is_refused(make: Make) -> None:
    buffer, look = make(b"frozen!!", read_only=True)
    into = bytearray(8)
    buffer.read_into(into).get(timeout=WAIT)

    wrong_token = pickle.loads(pickle.dumps(buffer))
    wrong_token._handle.token = bytes(16)
    with pytest.raises(RdmaPermissionError, match="was not given out with this token"):
        wrong_token.read_into(into).get(timeout=WAIT)
    writable = pickle.loads(pickle.dumps(buffer))
    writable._handle.writable = True
    with pytest.raises(RdmaPermissionError):
        writable.write_from(b"x").get(timeout=WAIT)
    with pytest.raises(RdmaPermissionError, match="Failed to drop buffer"):
        wrong_token.drop().get(timeout=WAIT)
    assert look() == b"frozen!!"


def test_many_at_once(make: Make) -> None:
    buffers = [make(bytes([i]) * 4096)[0] for i in range(32)]
    into = [bytearray(4096) for _ in buffers]
    action = RDMAAction()
    for buffer, place in zip(buffers, into, strict=True):
        assert action.read_remote(place, buffer) is action
    for _ in range(2):
        assert action.submit(timeout=5).get(timeout=WAIT) is None
        assert into == [bytes([i]) * 4096 for i in range(32)]
        for place in into:
            place[:] = bytes(4096)
    buffers[7].drop().get(timeout=WAIT)
    with pytest.raises(RdmaBufferDropped, match=r"RdmaAction.submit failed"):
        action.submit().get(timeout=WAIT)


def test_an_empty_action_is_done() -> None:
    assert RDMAAction().submit().get(timeout=WAIT) is None


def test_reads_and_writes_in_one_action(make: Make) -> None:
    buffer, look = make(b"0123456789")
    into = bytearray(4)
    RDMAAction().read_remote(into, buffer[:4]).write_remote(buffer[6:], b"abcd").submit().get()
    assert (into, look()) == (b"0123", b"012345abcd")


def test_atomics(make: Make) -> None:
    buffer, look = make((40).to_bytes(8, "little") + bytes(8))
    old = bytearray(8)
    RDMAAction().fetch_add(buffer, old, 2).submit().get(timeout=WAIT)
    assert (int.from_bytes(old, "little"), look()[0]) == (40, 42)
    RDMAAction().fetch_add(buffer, old, -43).submit().get(timeout=WAIT)
    assert look() == b"\xff" * 8 + bytes(8)
    RDMAAction().compare_and_swap(buffer, old, 1, 2).submit().get(timeout=WAIT)
    assert old == b"\xff" * 8
    assert look() == b"\xff" * 8 + bytes(8)
    RDMAAction().compare_and_swap(buffer, old, 2**64 - 1, 7).submit().get(timeout=WAIT)
    assert old == b"\xff" * 8
    assert look()[:8] == (7).to_bytes(8, "little")
    with pytest.raises(ValueError, match="divisible by 8"):
        RDMAAction().fetch_add(buffer[1:9], old, 1)
    with pytest.raises(ValueError, match="8 bytes"):
        RDMAAction().fetch_add(buffer[:7], old, 1)
    with pytest.raises(OverflowError):
        RDMAAction().fetch_add(buffer, old, 2**64)


def test_strided_and_empty_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"RDMABuffer only supports 1d contiguous"):
        RDMABuffer(memoryview(bytearray(8))[::2])
    with pytest.raises(ValueError, match=r"Cannot create RDMABuffer with size 0\."):
        RDMABuffer(bytearray())


def test_registered_memory_cannot_be_resized() -> None:
    memory = bytearray(8)
    with RDMABuffer(memory), pytest.raises(BufferError, match="cannot be re-sized"):
        memory.append(1)
    memory.append(1)


class Simulated(Actor):
    def __init__(self) -> None:
        self.memory = bytearray(b"0") * (4 << 20)

    @endpoint
    def give(self) -> RDMABuffer:
        return RDMABuffer(self.memory)


def test_in_the_simulator() -> None:
    def main() -> bytes:
        procs = this_host().spawn_procs({"gpus": 2})
        buffer = procs.spawn("owners", Simulated).slice(gpus=1).give.call_one().get()
        buffer.write_from(b"1" * (3 << 20)).get()
        into = bytearray(4 << 20)
        buffer.read_into(into).get()
        procs.stop().get()
        with pytest.raises(RdmaBufferDropped):
            buffer.read_into(into).get()
        return bytes(into[:: 1 << 20])

    assert simulate(main, seed=1).value == b"1110"
