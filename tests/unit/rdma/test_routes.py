"""Which route is chosen, which is tried after a failure, and how a submit ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from monarch import _spi
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaError,
    RdmaOwnerLost,
    RdmaPermissionError,
    RdmaTimeout,
    RdmaUnavailable,
    executor,
    explain,
    routes,
)
from monarch.rdma.errors import joined
from monarch.rdma.executor import Pool, spread
from monarch.rdma.memory import CPU
from monarch.rdma.routes import Unavailable, process_vm, staged
from monarch.rdma.routes.copying import CopyRoute, Piece, atomic_result, slices
from monarch.rdma.routes.local import Local
from monarch.rdma.routes.process_vm import ProcessVm, yama_scope
from monarch.rdma.routes.stream import Stream
from monarch.rdma.transfer import ADD, READ, WRITE, Op

WAIT = 60.0


class Fake:
    """A kind of route and its only route, which behave as the test demands."""

    about: ClassVar[str] = "it does as it is told"
    needs: ClassVar[str] = "luck"

    def __init__(self, name: str, start: Callable[[Any], None] | None = None) -> None:
        self.name: Any = name
        self.kind = name
        self.inline = -1
        self.opened = 0
        self.reason: Exception | None = None
        self.start: Any = start
        self.offers: bytes | None = b""

    def offer(self, memory: Any) -> bytes | None:
        return self.offers

    def withdrawn(self, handle: Any) -> None:
        pass

    def open(self, handle: Any, device: str) -> Any:
        self.opened += 1
        if self.reason is not None:
            raise self.reason
        return self

    def run(self, ops: Any) -> None:
        raise AssertionError("nothing is done in the caller's thread")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RDMABuffer]]:
    """Yield a function that sets the kinds of routes, and returns memory that offers them."""
    routes.kinds()

    with contextlib.ExitStack() as made:

        def use(*kinds: Any) -> RDMABuffer:
            routes._choices.clear()
            monkeypatch.setattr(routes, "_kinds", kinds)
            monkeypatch.setattr(routes, "_left_in_by", {})
            return made.enter_context(RDMABuffer(bytearray(16)))

        yield use
    routes._choices.clear()


def test_the_first_that_leads_there_is_taken_and_remembered(use: Any) -> None:
    first, second, third = Fake("first"), Fake("second", lambda t: t.done()), Fake("third")
    first.reason = Unavailable("the bridge is down", "build it")
    buffer = use(first, second, third)
    for _ in range(3):
        buffer.read_into(bytearray(16)).get(timeout=WAIT)
    assert (first.opened, second.opened, third.opened) == (1, 1, 0)
    assert str(explain(buffer)).splitlines()[1:] == [
        "  first   no: the bridge is down",
        "          remedy: build it",
        "> second  taken: it does as it is told",
        "  third   not needed",
    ]


def test_no_route_tells_all_reasons(use: Any) -> None:
    first, second = Fake("first"), Fake("second")
    first.reason = Unavailable("the bridge is down", "build it")
    second.reason = Unavailable("there is no tunnel")
    buffer = use(first, second)
    with pytest.raises(RdmaUnavailable, match="no compatible RDMA backend for buffer") as caught:
        buffer.read_into(bytearray(16)).get(timeout=WAIT)
    assert "first: the bridge is down; build it" in str(caught.value)
    assert "second: there is no tunnel" in str(caught.value)
    assert explain(buffer).route is None


def test_a_kind_that_the_owner_does_not_offer_is_not_opened(use: Any) -> None:
    """The setting of the owner and its `offer` decide, for each buffer by itself."""
    first, second = Fake("first"), Fake("second", lambda t: t.done())
    offered = use(first, second)
    first.offers = None
    with RDMABuffer(bytearray(16)) as not_offered:
        first.offers = b""
        with configured(rdma_routes="second"):
            left_out = use(first, second)
        for buffer in not_offered, left_out:
            buffer.read_into(bytearray(16)).get(timeout=WAIT)
            assert first.opened == 0
            ways = {way.kind: way for way in explain(buffer).ways}
            assert ways["first"].reason == "the owner does not offer it for this memory"
            assert ways["first"].remedy == (
                "it needs luck, and the setting rdma_routes there to leave it in"
            )
    assert explain(offered).route == "first"
    assert explain(left_out).route == "second"


def test_the_setting_keeps_copies_within_a_process_and_no_other_kind(use: Any) -> None:
    """The place of a kind among the others has no influence on that."""
    first = Fake("first")
    with configured(rdma_routes="second"):
        buffer = use(first, Fake("second"), Local())
        assert list(buffer._handle.offers) == ["second", "local"]
    with configured(rdma_routes="first"):
        assert explain(buffer).route == "local"


def test_a_route_that_leads_nowhere_after_all_is_replaced(use: Any) -> None:
    first = Fake("first", lambda t: t.reroute(Unavailable("it broke")))
    second = Fake("second", lambda t: t.done())
    buffer = use(first, second)
    buffer.read_into(bytearray(16)).get(timeout=WAIT)
    first.start = None
    buffer.read_into(bytearray(16)).get(timeout=WAIT)
    assert explain(buffer).route == "second"
    second.start = lambda t: t.reroute(Unavailable("it broke, too"))
    with pytest.raises(RdmaUnavailable, match="it broke, too"):
        buffer.read_into(bytearray(16)).get(timeout=WAIT)


def test_a_failure_is_not_tried_again(use: Any) -> None:
    buffer = use(
        Fake("first", lambda t: t.fail(RdmaBufferDropped("buffer 1 not found"))), Fake("second")
    )
    with pytest.raises(RdmaBufferDropped, match=r"submit failed: .*\n\(first\) buffer 1 not found"):
        buffer.read_into(bytearray(16)).get(timeout=WAIT)


def expire_after(monkeypatch: pytest.MonkeyPatch, event: threading.Event) -> None:
    """Make every time limit expire no earlier than `event` is set."""
    call_later = _spi.call_later

    def when_set(seconds: float, expire: Callable[[], None]) -> Any:
        return call_later(seconds, lambda: event.wait(WAIT) and expire())

    monkeypatch.setattr(_spi, "call_later", when_set)


def test_what_has_not_begun_ends_in_time(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    expire_after(monkeypatch, taken)
    seen: list[Any] = []
    buffer = use(Fake("idle", lambda transfer: seen.append(transfer) or taken.set()))
    with pytest.raises(RdmaTimeout, match=r"timed out after 0.01 s"):
        buffer.read_into(bytearray(16), timeout=0.01).get(timeout=WAIT)
    (transfer,) = seen
    assert transfer.ended
    assert not transfer.begin(), "nothing may touch the memory any more"
    transfer.done()


def test_what_has_begun_is_aborted_by_its_route(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, aborted = threading.Event(), threading.Event()
    expire_after(monkeypatch, begun)

    def start(transfer: Any) -> None:
        assert transfer.begin(aborted.set)
        started.append(transfer)
        begun.set()

    started: list[Any] = []
    buffer = use(Fake("slow", start))
    future = buffer.read_into(bytearray(16), timeout=0.01)
    assert aborted.wait(WAIT)
    assert not started[0].ended
    assert started[0].late
    started[0].fail_late()
    with pytest.raises(RdmaTimeout):
        future.get(timeout=WAIT)


def test_transfers_by_several_routes_are_one_submit(use: Any) -> None:
    ours = use(Local(), Fake("failing", lambda t: t.fail(RdmaOwnerLost("gone"))))
    theirs = pickle.loads(pickle.dumps(ours))
    theirs._handle.identity = bytes(16)
    into = bytearray(16)
    action = RDMAAction().read_remote(into, ours).read_remote(bytearray(16), theirs)
    with pytest.raises(RdmaOwnerLost, match=r"on 1 backend\(s\):\n\(failing\) gone"):
        action.submit().get(timeout=WAIT)


def test_failures_are_joined() -> None:
    lost, dropped = RdmaOwnerLost("gone"), RdmaBufferDropped("buffer 1 not found")
    assert type(joined([("a", lost), ("b", lost)])) is RdmaOwnerLost
    both = joined([("a", lost), ("b", dropped)])
    assert type(both) is RdmaError
    assert str(both).splitlines()[1:] == ["(a) gone", "(b) buffer 1 not found"]


@pytest.mark.parametrize(
    "kind", [RdmaError, RdmaOwnerLost, RdmaPermissionError, RdmaTimeout, RdmaUnavailable]
)
def test_errors_travel(kind: Any) -> None:
    error = pickle.loads(pickle.dumps(kind("why\nand how")))
    assert type(error) is kind
    assert str(error) == "why\nand how"


def test_the_other_host_and_the_other_container_are_told_apart(use: Any) -> None:
    use(ProcessVm())
    with RDMABuffer(bytearray(16)) as ours:
        theirs = pickle.loads(pickle.dumps(ours))
        theirs._handle.host = theirs._handle.host._replace(boot="another")
        assert explain(theirs).ways[0].reason == "the owner is on another host"
        theirs._handle.identity = bytes(16)
        theirs._handle.host = ours._handle.host._replace(namespace=1)
        assert "another container" in explain(theirs).ways[0].reason
        assert "shareProcessNamespace" in explain(theirs).ways[0].remedy


def test_a_number_that_is_used_again_is_not_the_owner(use: Any) -> None:
    use(ProcessVm())
    with RDMABuffer(bytearray(16)) as ours:
        for change in ({"start": 1}, {"identity": bytes(16)}, {"pid": 1 << 22}):
            theirs = pickle.loads(pickle.dumps(ours))
            theirs._handle.identity = b"somebody else..."
            for name, value in change.items():
                setattr(theirs._handle, name, value)
            with pytest.raises(RdmaOwnerLost):
                theirs.read_into(bytearray(16)).get(timeout=WAIT)


def test_yama(tmp_path: Any) -> None:
    assert yama_scope(str(tmp_path / "none")) == 0
    (tmp_path / "scope").write_text("2\n")
    assert yama_scope(str(tmp_path / "scope")) == 2


def test_jobs_run_on_as_many_threads_as_asked() -> None:
    meeting = threading.Barrier(3)
    for _ in range(3):
        spread(lambda: meeting.wait(WAIT), 2)
        meeting.wait(WAIT)


def test_a_job_that_a_thread_has_just_taken_is_counted() -> None:
    """With one idle thread and two jobs, the thread takes one job before the jobs are counted."""
    caller = threading.current_thread()
    asked, counted = threading.Semaphore(0), threading.Event()

    class Jobs(queue.SimpleQueue[Callable[[], None]]):
        def get(self) -> Callable[[], None]:
            asked.release()
            return super().get()

    class Lock:
        """Gives the lock to the caller once the thread took a job, then to the thread."""

        lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is caller:
                while jobs.qsize() == 2:
                    time.sleep(0)
            elif jobs.qsize() == 1:
                counted.wait(WAIT)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if threading.current_thread() is caller and jobs.qsize() == 1:
                counted.set()

    pool = Pool()
    pool.jobs = jobs = Jobs()
    pool.lock = Lock()
    pool.spread(lambda: None, 1)
    asked.acquire()
    asked.acquire()  # the thread is idle
    counted.clear()
    meeting = threading.Barrier(3)
    pool.spread(lambda: meeting.wait(WAIT), 2)
    meeting.wait(WAIT)


def test_a_thread_of_a_forgotten_pool_does_not_count_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a thread ends its job later, and the next pool still starts a thread for each job."""
    monkeypatch.setattr(executor, "_pool", executor._pool)
    busy, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Jobs(queue.SimpleQueue[Callable[[], None]]):
        def get(self) -> Callable[[], None]:
            if go_on.is_set():
                ended.set()
            return super().get()

    def job() -> None:
        busy.set()
        go_on.wait(WAIT)

    executor._forget()
    executor._pool.jobs = Jobs()
    spread(job, 1)
    assert busy.wait(WAIT)
    executor._forget()
    go_on.set()
    assert ended.wait(WAIT)
    ran = threading.Event()
    spread(ran.set, 1)
    assert ran.wait(WAIT)


@pytest.mark.parametrize(("setting", "largest"), [(0, 1), (3, 3), (64, 8)])
def test_a_transfer_is_cut_as_the_setting_says(setting: int, largest: int) -> None:
    """A part is never larger than what transfers well."""
    nbytes, step = 20 << 20, largest << 20
    with RDMABuffer(bytearray(1)) as memory, configured(rdma_max_chunk_size_mb=setting):
        parts = [
            (at, count)
            for _, pieces in slices([Op(READ, memory._handle, 0, bytearray(1), nbytes)])
            for _, at, count in pieces
        ]
    assert parts == [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


def test_a_bug_in_a_copy_fails_the_transfer(use: Any) -> None:
    class Broken(CopyRoute):
        def copy(self, kind: int, pieces: list[Piece]) -> None:
            raise KeyError("nobody expects this")

    buffer = use(Fake("first", Broken().start))
    with pytest.raises(RdmaError, match=r"internal error: KeyError\('nobody expects this'\)"):
        buffer.read_into(bytearray(16)).get(timeout=WAIT)


@pytest.mark.parametrize("nbytes", [16, 0])
def test_a_write_has_a_future(use: Any, nbytes: int) -> None:
    buffer = use(Fake("first", lambda transfer: transfer.done()))
    assert buffer.write_from(bytearray(nbytes)).get(timeout=WAIT) is None


@pytest.mark.parametrize("old", [0, 1, (1 << 64) - 2, (1 << 64) - 1])
def test_an_addition_wraps_around(old: int) -> None:
    with RDMABuffer(bytearray(8)) as word:
        new = atomic_result(
            Op(ADD, word._handle, 0, bytearray(8), 8, (1, 0)), old.to_bytes(8, sys.byteorder)
        )
    assert new == ((old + 1) % (1 << 64)).to_bytes(8, sys.byteorder)


def test_memory_of_a_device_is_copied_through_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """Its memory is the variable `memory`."""

        def main(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(nbytes))

        def store(self, _: Any, at: int, part: memoryview) -> None:
            memory[at : at + len(part)] = part

        def load(self, _: Any, at: int, part: memoryview) -> None:
            part[:] = memory[at : at + len(part)]

    class Route(CopyRoute):
        """Its other end is the variable `other`."""

        kind = about = "fake"

        def copy(self, kind: int, pieces: list[Piece]) -> None:
            for op, at, count in pieces:
                near = (ctypes.c_char * count).from_address(op.local.address + at)
                far = slice(op.offset + at, op.offset + at + count)
                if kind == READ:
                    near.raw = bytes(other[far])
                else:
                    other[far] = near.raw

    monkeypatch.setattr(staged, "device_of", lambda _: Device())
    memory, other = bytearray(8), bytearray(b"the rest")
    with RDMABuffer(bytearray(8)) as buffer:
        handle = buffer._handle
        route = staged.Staged(Route())
        local: Any = memory
        route.copy(READ, [(Op(READ, handle, 4, local, 4), 0, 4)])
        assert memory == b"rest\0\0\0\0"
        route.copy(WRITE, [(Op(WRITE, handle, 0, local, 4), 0, 4)])
    assert other == b"restrest"


def test_a_system_call_that_copies_nothing_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may answer the call with success, and do nothing."""
    monkeypatch.setattr(process_vm, "_calls", lambda: (lambda *_: 6, None))
    assert not process_vm.process_vm_works()


@pytest.mark.skipif(sys.platform != "linux", reason="it is a route of Linux")
def test_memory_that_is_dropped_before_a_write_is_not_written() -> None:
    """The slot may belong to another registration by the time that the write has entered it."""

    class Slots:
        left: ClassVar[list[int]] = []

        def enter(self, slot: int) -> bool:
            return True

        def holds(self, slot: int, number: int) -> bool:
            return False

        def leave(self, slot: int) -> None:
            self.left.append(slot)

    with RDMABuffer(bytearray(8)) as buffer:
        handle = buffer._handle
        route: Any = object.__new__(process_vm._VmRoute)
        route._table = Slots()
        route._alive = os.pidfd_open(os.getpid())  # the route closes it
        with pytest.raises(RdmaBufferDropped):
            route._write([(Op(WRITE, handle, 0, bytearray(8), 8), 0, 8)], b"", b"", 8)
    assert Slots.left == [handle.slot]


def test_sockets_are_used_only_if_allowed_and_while_the_owner_lives() -> None:
    kind = Stream()
    with RDMABuffer(bytearray(8)) as buffer:
        handle = buffer._handle
        refused = pytest.raises(Unavailable, match="sockets are not allowed")
        with configured(rdma_allow_tcp_fallback=False), refused:
            kind.open(handle, CPU)
        kind._over[handle.identity] = "its host is gone"
        with pytest.raises(RdmaOwnerLost, match="its host is gone"):
            kind.open(handle, CPU)
    assert kind._peers == {}
