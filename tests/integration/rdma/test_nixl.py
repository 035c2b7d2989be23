"""Transfers with NIXL, forced, since a test machine lacks the hardware: NIXL copies in the host.

Both ends are separate processes, one pair for all tests: starting NIXL takes a second, and what
it starts remains until the process exits.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaOwnerLost,
    RdmaPermissionError,
    RdmaTimeout,
    RdmaUnavailable,
    explain,
)
from monarch.rdma.routes.nixl.library import installed
from tests.stopped import stop_process

from .conftest import WAIT, Owner

pytestmark = pytest.mark.skipif(not installed(), reason="NIXL is not installed (pymonarch[rdma])")


class Initiator(Actor):
    @endpoint
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Pair:
    """An owner and an initiator that know no route but NIXL."""

    def __init__(self, owner: Any, initiator: Any) -> None:
        self.owner = owner
        self.initiator = initiator
        self.count = 0

    def make(self, content: bytes, **options: Any) -> tuple[RDMABuffer, Callable[[], bytes]]:
        self.count += 1
        name = str(self.count)
        buffer = self.owner.make.call_one(name, content, **options).get(timeout=WAIT)
        return buffer, lambda: self.owner.look.call_one(name).get(timeout=WAIT)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.initiator.run.call_one(function, *args).get(timeout=WAIT)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with configured(rdma_routes="nixl"):
        mesh = this_host().spawn_procs({"gpus": 2})
    yield Pair(
        mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("initiator", Initiator)
    )
    mesh.stop().get(timeout=WAIT)


def read(buffer: RDMABuffer) -> bytes:
    into = bytearray(buffer.size())
    buffer.read_into(into, timeout=WAIT).get(timeout=WAIT)
    return bytes(into)


def write(buffer: RDMABuffer, content: bytes) -> None:
    buffer.write_from(content, timeout=WAIT).get(timeout=WAIT)


def error_of(function: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("size", [1, 8, (1 << 16) + 1, (33 << 20) + 7])
def test_of_any_size(pair: Pair, size: int) -> None:
    """The transfer is posted by the caller, by the thread, and in several slices."""
    content = os.urandom(1 << 16) * (size // (1 << 16) + 1)
    buffer, look = pair.make(content[:size])
    assert pair.run(read, buffer) == content[:size]
    pair.run(write, buffer, content[:size][::-1])
    assert look() == content[:size][::-1]
    buffer.drop().get(timeout=WAIT)


def test_it_is_the_way_that_is_taken(pair: Pair) -> None:
    buffer, _ = pair.make(bytes(8))

    def ways() -> dict[str, str]:
        return {way.kind: way.state for way in explain(buffer).ways}

    assert pair.run(ways)["nixl"] == "taken"
    assert pair.run(ways)["process-vm"] == "no"


def test_many_at_once_and_parts(pair: Pair) -> None:
    buffers = [pair.make(bytes([i]) * 4096)[0] for i in range(16)]
    target, look = pair.make(bytes(16))

    def all_of_them() -> list[bytes]:
        action = RDMAAction()
        into = [bytearray(10) for _ in buffers]
        for buffer, place in zip(buffers, into, strict=True):
            action.read_remote(place, buffer[100:110])
        action.write_remote(target[4:8], b"abcd")
        for _ in range(2):
            action.submit(timeout=WAIT).get(timeout=WAIT)
        return [bytes(place) for place in into]

    assert pair.run(all_of_them) == [bytes([i]) * 10 for i in range(16)]
    assert look() == bytes(4) + b"abcd" + bytes(8)


def test_futures_are_awaited(pair: Pair) -> None:
    buffer, _ = pair.make(bytes(1 << 20))

    class Async(Actor):
        @endpoint
        async def read(self, buffer: RDMABuffer) -> int:
            into = bytearray(b"x") * buffer.size()
            await buffer.read_into(into, timeout=WAIT)
            return into.count(0)

    with configured(rdma_routes="nixl"):
        mesh = this_host().spawn_procs({"gpus": 1})
    reader = mesh.spawn("reader", Async)
    assert reader.read.call_one(buffer).get(timeout=WAIT) == 1 << 20
    mesh.stop().get(timeout=WAIT)


def test_after_a_drop_nothing_is_read_or_written(pair: Pair) -> None:
    buffer, look = pair.make(b"01234567")
    other, _ = pair.make(b"other")
    assert pair.run(read, buffer) == b"01234567"
    buffer.drop().get(timeout=WAIT)
    for transfer in (read, lambda buffer: write(buffer, b"x")):
        error = pair.run(error_of, transfer, buffer)
        assert isinstance(error, RdmaBufferDropped)
        assert "not found" in str(error)
    assert look() == b"01234567"
    assert pair.run(read, other) == b"other"


def test_a_drop_waits_for_what_is_under_way(pair: Pair) -> None:
    """Writers run without pause; after a drop has returned, no byte changes."""
    size = 8 << 20
    buffer, look = pair.make(bytes(size))

    def write_until_dropped() -> str:
        content = 0
        while True:
            content = (content + 1) % 256
            try:
                write(buffer, bytes([content]) * size)
            except RdmaBufferDropped:
                return "dropped"

    pair.run(write, buffer, b"\1" * size)
    under_way = pair.initiator.run.call_one(write_until_dropped)
    while look()[0] == 1:
        pass
    buffer.drop().get(timeout=WAIT)
    left = look()
    assert under_way.get(timeout=WAIT) == "dropped"
    assert look() == left


def test_forged_handles_are_refused(pair: Pair) -> None:
    buffer, look = pair.make(b"frozen!!", read_only=True)

    def forge() -> list[BaseException]:
        handle = buffer._handle
        handle.token, token = bytes(16), handle.token
        errors = [error_of(read, buffer)]
        handle.token, handle.writable = token, True
        return [*errors, error_of(write, buffer, b"x")]

    assert [type(error) for error in pair.run(forge)] == [RdmaPermissionError] * 2
    assert look() == b"frozen!!"


def test_atomics_are_done_by_the_owner(pair: Pair) -> None:
    buffer, look = pair.make(struct.pack("=QQ", 40, 0))

    def both() -> list[int]:
        old = [bytearray(8) for _ in range(3)]
        RDMAAction().fetch_add(buffer, old[0], 2).submit().get(timeout=WAIT)
        RDMAAction().compare_and_swap(buffer, old[1], 1, 9).submit().get(timeout=WAIT)
        RDMAAction().compare_and_swap(buffer, old[2], 42, 7).submit().get(timeout=WAIT)
        return [struct.unpack("=Q", each)[0] for each in old]

    assert pair.run(both) == [40, 42, 42]
    assert struct.unpack("=QQ", look()) == (7, 0)


@pytest.mark.failures
def test_a_killed_owner_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(rdma_routes="nixl"):
        mesh = this_host().spawn_procs({"gpus": 1})
    owner = mesh.spawn("owner", Owner)
    buffer = owner.make.call_one("doomed", bytes(1 << 20)).get(timeout=WAIT)
    pid = owner.pid.call_one().get(timeout=WAIT)

    def read_until_lost() -> BaseException:
        os.kill(pid, signal.SIGKILL)
        while True:
            try:
                read(buffer)
            except Exception as error:
                return error

    pair.run(read, buffer)
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    error = pair.run(read_until_lost)
    assert isinstance(error, RdmaOwnerLost)
    assert f"process {pid}" in str(error)


def test_a_timeout_while_the_owner_does_not_answer(pair: Pair) -> None:
    """The owner cannot give a lease; with a lease, the owner need not act."""
    known, _ = pair.make(b"known")
    unknown, _ = pair.make(b"unknown")
    pid = pair.owner.pid.call_one().get(timeout=WAIT)
    assert pair.run(read, known) == b"known"

    def while_stopped() -> tuple[bytes, BaseException]:
        stop_process(pid)
        try:
            error = error_of(unknown.read_into(bytearray(7), timeout=0.05).get)
            return read(known), error
        finally:
            os.kill(pid, signal.SIGCONT)

    content, error = pair.run(while_stopped)
    assert content == b"known"
    assert isinstance(error, RdmaTimeout)
    assert pair.run(read, unknown) == b"unknown"


def test_nothing_arrives_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the owner has to take part: it is stopped until the time limit has passed."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with configured(rdma_routes="nixl"):
        mesh = this_host().spawn_procs({"gpus": 2})
    pair = Pair(
        mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("initiator", Initiator)
    )
    size = 40 << 20  # two slices
    buffer, _ = pair.make(bytes(size))
    pid = pair.owner.pid.call_one().get(timeout=WAIT)

    def late() -> tuple[BaseException | None, int]:
        into = bytearray(size)
        buffer.read_into(into).get(timeout=WAIT)
        stop_process(pid)
        future = buffer.read_into(into, timeout=0.05)
        with pytest.raises(TimeoutError):
            future.get(timeout=1.5)
        os.kill(pid, signal.SIGCONT)
        error = future.exception(timeout=WAIT)
        into[:] = b"x" * size
        read(buffer[:8])
        return error, into.count(b"x")

    error, left = pair.run(late)
    assert isinstance(error, RdmaTimeout)
    assert left == size
    mesh.stop().get(timeout=WAIT)


def test_the_program_keeps_its_log_handlers_and_signal_handlers(pair: Pair) -> None:
    buffer, _ = pair.make(b"quiet")

    class Fresh(Actor):
        @endpoint
        def look(self) -> tuple[bool, list[str]]:
            closed: list[bool] = []
            handler = logging.StreamHandler()
            handler.close = lambda: closed.append(True)  # type: ignore[method-assign]
            caught = _caught()
            content = read(buffer)
            assert content == b"quiet"
            kept = _caught() == caught and not closed and logging.raiseExceptions
            return kept, [name for name in os.environ if name.startswith(("UCX", "NIXL"))]

    def _caught() -> int:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("SigCgt"))
        return int(line.split()[1], 16) & (1 << 31) - 1  # without the real-time signals

    with configured(rdma_routes="nixl"):
        mesh = this_host().spawn_procs({"gpus": 1})
    fresh = mesh.spawn("fresh", Fresh)
    assert fresh.look.call_one().get(timeout=WAIT) == (True, [])
    mesh.stop().get(timeout=WAIT)


def test_a_forked_child_ends_and_leaves_its_parent_alone(pair: Pair) -> None:
    buffer, _ = pair.make(b"before")

    def fork() -> tuple[int, bytes]:
        content = read(buffer)
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), content + read(buffer)

    assert pair.run(fork) == (0, b"beforebefore")


def test_without_a_card_it_is_not_offered() -> None:
    with RDMABuffer(bytearray(8)) as buffer:
        assert "nixl" not in buffer._handle.offers
        reasons = {way.kind: way.reason for way in explain(buffer).ways}
        assert reasons["nixl"] == ""


def test_the_remedy_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch.rdma.routes.nixl import library

    buffer, _ = pair.make(bytes(8))
    monkeypatch.setattr("monarch.rdma.routes.nixl.installed", lambda: None)
    assert library.REMEDY == "pip install 'pymonarch[rdma]'"
    with configured(rdma_routes="nixl"), pytest.raises(RdmaUnavailable, match=r"pymonarch\[rdma\]"):
        read(buffer)


@pytest.mark.parametrize("status", [0, 7])
def test_a_script_that_has_used_it_exits_with_its_status(status: int) -> None:
    """Although a library of the wheels crashes at the exit; what is printed arrives."""
    source = (
        "import sys; from monarch.rdma.routes.nixl.library import Agent; Agent('me')\n"
        f"print('done'); sys.exit({status})"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=WAIT
    )
    assert (done.returncode, done.stdout) == (status, "done\n"), done.stderr
