"""The events that end a registration, and the errors that its users then get."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch._spi import settings
from monarch.actor import Actor, current_rank, endpoint
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaError,
    RdmaOwnerLost,
    explain,
)
from monarch.rdma.executor import spread
from monarch.rdma.registry import own_registry

from .conftest import WAIT, Owner

Procs = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_fault_ends_the_run() -> Iterator[None]:
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    yield
    monarch.actor.unhandled_fault_hook = before


def until(condition: Callable[[], Any]) -> Any:
    """Poll for a condition that has no event."""
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


class Holder(Actor):
    """Holds its GIL, and sets a byte of its memory before and after."""

    def __init__(self) -> None:
        self.memory = bytearray(64)

    @endpoint
    def give(self) -> RDMABuffer:
        return RDMABuffer(self.memory)

    @endpoint
    def hold_the_interpreter(self, fifo: str) -> bytes:
        """Hold the GIL until the other end of the FIFO is opened."""
        self.memory[0] = 1
        opened = -1
        while opened < 0:  # (interrupted by a signal)
            opened = ctypes.PyDLL(None).open(fifo.encode(), os.O_RDONLY)  # a PyDLL keeps the GIL
        os.close(opened)
        seen = bytes(self.memory[8:16])
        self.memory[0] = 2
        return seen


def test_the_owner_takes_no_part(procs: Procs, tmp_path: Path) -> None:
    holder = procs(1).spawn("holder", Holder)
    buffer = holder.give.call_one().get(timeout=WAIT)
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    held = holder.hold_the_interpreter.call_one(fifo)
    state = bytearray(1)
    until(lambda: buffer[:1].read_into(state).get(timeout=WAIT) or state[0])
    for number in range(100):
        buffer[8:16].write_from(number.to_bytes(8, "little")).get(timeout=WAIT)
        into = bytearray(64)
        buffer.read_into(into).get(timeout=WAIT)
        assert into[8] == number
    assert into[0] == 1, "all of that happened while the owner's interpreter was held"
    os.close(os.open(fifo, os.O_WRONLY))
    assert held.get(timeout=WAIT) == (99).to_bytes(8, "little")


def test_memory_is_released_with_its_actor(procs: Procs) -> None:
    mesh = procs(1)
    owner = mesh.spawn("owner", Owner)
    other = mesh.spawn("other", Owner)
    buffer = owner.make.call_one("a", b"content").get(timeout=WAIT)
    kept = other.make.call_one("b", b"content").get(timeout=WAIT)
    into = bytearray(7)
    buffer.read_into(into).get(timeout=WAIT)

    owner.stop().get(timeout=WAIT)

    with pytest.raises(RdmaBufferDropped, match="the actor that registered it has ended"):
        buffer.read_into(into).get(timeout=WAIT)
    kept.read_into(into).get(timeout=WAIT)


@pytest.mark.failures
def test_a_killed_owner_is_lost_at_once(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", bytes(64 << 20)).get(timeout=WAIT)
    other = owner.make.call_one("b", b"never used").get(timeout=WAIT)
    pid = owner.pid.call_one().get(timeout=WAIT)
    into = bytearray(64 << 20)
    buffer.read_into(into).get(timeout=WAIT)
    under_way = [buffer.read_into(into) for _ in range(30)]

    os.kill(pid, signal.SIGKILL)

    ends = [future.exception(timeout=WAIT) for future in under_way]
    # The kernel may need a moment to end the killed process.
    ends.append(until(lambda: buffer.read_into(into).exception(timeout=WAIT)))
    assert [end for end in ends if end is not None and not isinstance(end, RdmaOwnerLost)] == []
    assert f"process {pid}" in str(ends[-1])
    for lost in (buffer, other):
        with pytest.raises(RdmaOwnerLost, match=r"RdmaAction\.submit failed"):
            lost[:1].read_into(into).get(timeout=WAIT)
        with pytest.raises(RdmaOwnerLost):
            lost.write_from(b"x").get(timeout=WAIT)
        assert lost.drop().get(timeout=WAIT) is None
        assert explain(lost).route is None


class Builder(Actor):
    """Registers in its constructor, and still has the buffer in its clean-up."""

    def __init__(self, into: RDMABuffer) -> None:
        self.into = into
        self.memory = bytearray(b"built")
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def give(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def fail(self) -> None:
        raise SystemExit

    def __cleanup__(self, error: Exception | None) -> None:
        last = bytearray(5)
        self.buffer.read_into(last).get(timeout=WAIT)
        self.into.write_from(last).get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("how", ["stop", "failure"])
def test_what_a_constructor_registered_ends_after_the_last_act(procs: Procs, how: str) -> None:
    mesh = procs(1)
    memory = bytearray(5)
    with RDMABuffer(memory) as into:
        builder = mesh.spawn("builder", Builder, into)
        buffer = builder.give.call_one().get(timeout=WAIT)
        if how == "stop":
            builder.stop().get(timeout=WAIT)
        else:
            builder.fail.call_one().exception(timeout=WAIT)
            until(lambda: buffer.read_into(bytearray(5)).exception(timeout=WAIT))
        with pytest.raises(RdmaBufferDropped):
            buffer.read_into(bytearray(5)).get(timeout=WAIT)
    assert memory == b"built"


class Writer(Actor):
    @endpoint
    def write_until_it_ends(self, buffer: RDMABuffer, size: int) -> tuple[int, str]:
        source = b"\xff" * size
        count = 0
        while True:
            try:
                buffer.write_from(source).get(timeout=WAIT)
            except RdmaError as error:
                return count, type(error).__name__
            count += 1


@pytest.mark.parametrize("size", [64, 4096, 24 << 20])
def test_nothing_is_written_after_a_drop(procs: Procs, size: int) -> None:
    writers = procs(2).spawn("writers", Writer)
    for _ in range(5):
        memory = bytearray(size)
        buffer = RDMABuffer(memory)
        ends = writers.write_until_it_ends.call(buffer, size)
        until(lambda seen=memory: seen[-1])

        buffer.drop().get(timeout=WAIT)
        memory[:] = bytes(size)

        assert {kind for _, kind in ends.get(timeout=WAIT).values()} == {"RdmaBufferDropped"}
        assert memory == bytes(size)


class Counter(Actor):
    @endpoint
    def count(self, buffer: RDMABuffer, times: int) -> list[int]:
        old = bytearray(8)
        seen = []
        action = RDMAAction().fetch_add(buffer, old, 1)
        for _ in range(times):
            action.submit().get(timeout=WAIT)
            seen.append(int.from_bytes(old, "little"))
        return seen


def test_atomic_operations_of_many_processes(procs: Procs) -> None:
    memory = bytearray(8)
    with RDMABuffer(memory) as buffer:
        counted = procs(3).spawn("counters", Counter).count.call(buffer, 200)
        old, own = bytearray(8), []
        for _ in range(200):
            RDMAAction().fetch_add(buffer, old, 1).submit().get(timeout=WAIT)
            own.append(int.from_bytes(old, "little"))
        seen = [own, *counted.get(timeout=WAIT).values()]
    assert int.from_bytes(memory, "little") == 800
    assert sorted(n for part in seen for n in part) == list(range(800))
    assert all(part == sorted(part) for part in seen)


class Keeper(Actor):
    """Keeps handles of other actors' memory."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def keep(self, *buffers: RDMABuffer) -> None:
        self.kept += buffers

    @endpoint
    def give(self) -> Any:
        return self.kept[0]

    @endpoint
    def lose(self) -> None:
        self.kept.clear()
        gc.collect()


def _is_released(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


def test_the_last_handle_releases(procs: Procs) -> None:
    keepers = procs(2).spawn("keepers", Keeper)
    first, second = keepers.slice(gpus=0), keepers.slice(gpus=1)
    memory = bytearray(b"content")
    live = len(own_registry().live)
    buffer = RDMABuffer(memory, release="last-handle", grace=0.001)
    first.keep.call_one(buffer, buffer[1:3], pickle.loads(pickle.dumps(buffer))).get(timeout=WAIT)
    del buffer
    gc.collect()
    into = bytearray(7)
    given = first.give.call_one().get(timeout=WAIT)
    second.keep.call_one(given).get(timeout=WAIT)
    del given
    first.lose.call_one().get(timeout=WAIT)
    held = second.give.call_one().get(timeout=WAIT)
    held.read_into(into).get(timeout=WAIT)
    assert into == b"content"
    assert not _is_released(memory)
    del held
    gc.collect()
    second.lose.call_one().get(timeout=WAIT)
    until(lambda: _is_released(memory))
    assert len(own_registry().live) == live


@pytest.mark.failures
def test_a_process_that_dies_holds_nothing(procs: Procs) -> None:
    keeper = procs(1).spawn("keeper", Keeper)
    memory = bytearray(b"content")
    buffer = RDMABuffer(memory, release="last-handle", grace=0.001)
    keeper.keep.call_one(buffer).get(timeout=WAIT)
    del buffer
    gc.collect()
    assert not _is_released(memory)
    os.kill(keeper.pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    until(lambda: _is_released(memory))


def test_cycles_leave_nothing() -> None:
    def virtual() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    RDMABuffer(mmap.mmap(-1, 64 << 20)).drop().get()
    gc.collect()
    before, descriptors = virtual(), len(os.listdir("/proc/self/fd"))
    live = len(own_registry().live)
    for _ in range(1000):
        RDMABuffer(mmap.mmap(-1, 64 << 20)).drop().get()
    for _ in range(100):
        RDMABuffer(mmap.mmap(-1, 64 << 20), release="last-handle")
    until(lambda: len(own_registry().live) == live)
    assert virtual() - before < 64 << 20
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_resized_tensor_is_noticed_by_its_own_process() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1024, dtype=torch.uint8)
    with RDMABuffer(tensor) as buffer:
        tensor.untyped_storage().resize_(0)
        with pytest.raises(RdmaError, match="was resized or freed"):
            buffer.read_into(bytearray(1024)).get(timeout=WAIT)


def test_unmapped_memory_is_noticed_from_elsewhere(procs: Procs) -> None:
    reader = procs(1).spawn("reader", Reader)
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(256 << 20, dtype=torch.uint8)  # large enough to be unmapped when freed
    with RDMABuffer(tensor) as buffer:
        assert reader.read.call_one(buffer[:8]).get(timeout=WAIT) == bytes(8)
        tensor.untyped_storage().resize_(0)
        assert "was resized or freed" in reader.read.call_one(buffer[:8]).get(timeout=WAIT)


class Reader(Actor):
    @endpoint
    def read(self, buffer: RDMABuffer) -> Any:
        into = bytearray(buffer.size())
        try:
            buffer.read_into(into).get(timeout=WAIT)
        except RdmaError as error:
            return str(error)
        return bytes(into)


class AsyncReader(Actor):
    @endpoint
    async def read(self, buffer: RDMABuffer) -> bytes:
        into = bytearray(buffer.size())
        await buffer.read_into(into, timeout=WAIT)
        await buffer[:1].write_from(bytes([65 + current_rank().rank]))
        return bytes(into[:8])


def test_async_actors_await_transfers(procs: Procs) -> None:
    readers = procs(2).spawn("readers", AsyncReader)
    memory = bytearray(b"x") * (8 << 20)
    with RDMABuffer(memory) as buffer:
        seen = readers.read.call(buffer).get(timeout=WAIT)
    assert {content[1:] for content in seen.values()} == {b"x" * 7}
    assert memory[:1] in (b"A", b"B")


def test_a_forked_child_reaches_its_parent_as_others_do() -> None:
    memory = bytearray(b"of the parent")
    with RDMABuffer(memory) as buffer:
        into = bytearray(13)
        buffer.read_into(into).get(timeout=WAIT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            status = 1
            try:
                found = bytearray(13)
                buffer.read_into(found).get(timeout=WAIT)
                buffer.write_from(b"to").get(timeout=WAIT)
                own = RDMABuffer(memory)
                own.read_into(found).get(timeout=WAIT)
                status = 0 if found == b"of the parent" and explain(own).route == "local" else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert memory == b"to the parent"


def test_drops_from_many_threads_are_one() -> None:
    memory = bytearray(8)
    buffer = RDMABuffer(memory)
    ends: list[Any] = []
    threads = [
        threading.Thread(target=lambda: ends.append(buffer.drop().get(timeout=WAIT)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [None] * 8
    memory.append(1)


def test_a_submit_under_way_is_not_changed(procs: Procs) -> None:
    owner = procs(1).spawn("owner", Owner)
    buffer = owner.make.call_one("a", bytes(64 << 20)).get(timeout=WAIT)
    into = bytearray(64 << 20)
    action = RDMAAction().read_remote(into, buffer)
    gate = threading.Event()
    for _ in range(settings.rdma_runtime_worker_threads):
        spread(lambda: gate.wait(WAIT), 1)
    first = action.submit()
    second = action.submit()
    with pytest.raises(RuntimeError, match="currently being submitted; await the in-flight"):
        action.read_remote(into, buffer)
    gate.set()
    assert (first.get(timeout=WAIT), second.get(timeout=WAIT)) == (None, None)
    action.read_remote(into, buffer).submit().get(timeout=WAIT)
    late = action.submit(timeout=0.001)
    with pytest.raises(TimeoutError, match="timed out"):
        late.get(timeout=WAIT)
