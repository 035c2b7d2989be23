"""A lease is revoked between two slices, and is given for what the owner offers only."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch import _spi
from monarch.config import configured
from monarch.rdma import RDMABuffer, RdmaError, RdmaOwnerLost, RdmaPermissionError
from monarch.rdma.memory import Memory
from monarch.rdma.routes.lease import Lease, Lessee, Peer, claim, claimed
from monarch.rdma.routes.nixl.route import _Job


def test_a_revocation_waits_for_the_slices_that_are_under_way() -> None:
    lease, quiet = Lease(), []
    lease.settle("key")
    assert lease.enter()
    assert lease.enter()
    lease.revoke(lambda: quiet.append(True))
    assert not lease.enter()
    lease.leave()
    assert (quiet, lease.value) == ([], "key")
    lease.leave()
    assert (quiet, lease.value) == ([True], None)


def test_a_lease_that_is_not_in_use_is_revoked_at_once() -> None:
    lease, quiet = Lease(), []
    lease.settle("key")
    assert lease.enter()
    lease.leave()
    lease.revoke(lambda: quiet.append(True))
    assert (quiet, lease.value, lease.enter()) == ([True], None, False)


def test_who_waits_for_a_lease_is_told_once() -> None:
    lease, told = Lease(), []
    assert lease.when_settled(lambda: told.append("first"))
    lease.settle("key")
    assert told == ["first"]
    assert not lease.when_settled(lambda: told.append("second"))
    assert told == ["first"]


@pytest.fixture
def buffer() -> Iterator[RDMABuffer]:
    """Return a buffer of this process that is offered for sockets, and for no card."""
    with configured(rdma_routes="stream"), RDMABuffer(bytearray(16)) as made:
        yield made


def test_a_request_is_granted_for_the_routes_that_are_offered(buffer: RDMABuffer) -> None:
    found, rest = claimed(claim(buffer._handle) + b"rest", "stream")
    assert (found.handle, rest) == (buffer._handle, b"rest")
    with pytest.raises(RdmaPermissionError, match="the setting rdma_routes of its owner leaves it"):
        claimed(claim(buffer._handle), "nixl")


def test_a_request_for_memory_that_was_moved_is_refused(buffer: RDMABuffer) -> None:
    class Moved(Memory):
        stale = True

    found, _ = claimed(claim(buffer._handle), "stream")
    found.memory = Moved(0, 16, True, found.memory)
    with pytest.raises(RdmaError, match="was resized or freed by its owner"):
        claimed(claim(buffer._handle), "stream")


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("identity", bytes(16), RdmaOwnerLost),
        ("number", 1 << 40, RdmaError),
        ("token", bytes(16), RdmaPermissionError),
        ("address", 4096, RdmaPermissionError),
        ("size", 17, RdmaPermissionError),
        ("writable", False, RdmaPermissionError),
    ],
)
def test_a_request_for_what_is_not_registered_is_refused(
    buffer: RDMABuffer, field: str, value: Any, error: type[RdmaError]
) -> None:
    described = claim(buffer._handle)
    true = getattr(buffer._handle, field)
    setattr(buffer._handle, field, value)
    forged = claim(buffer._handle)
    setattr(buffer._handle, field, true)
    with pytest.raises(error):
        claimed(forged, "stream")
    claimed(described, "stream")


def test_who_begins_to_wait_while_a_lease_is_settled_is_told_once() -> None:
    lease, told = Lease(), []
    asked = threading.Event()  # whether the owner's thread has asked for the lock, or has ended

    class Lock:
        lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is owner:
                asked.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    class Waiting(list[Any]):
        def append(self, callback: Any) -> None:
            super().append(callback)
            owner.start()
            asked.wait()

    def settle() -> None:
        lease.settle("key")
        asked.set()

    owner = threading.Thread(target=settle)
    made: Any = lease
    made._lock, made._when_settled = Lock(), Waiting()
    assert lease.when_settled(lambda: told.append("told"))
    owner.join()
    assert told == ["told"]


def test_a_forked_child_forgets_its_parents_leases(
    buffer: RDMABuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_child: list[Callable[[], None]] = []
    monkeypatch.setattr(_spi, "when_forked", in_child.append)
    monkeypatch.setattr(_spi, "when_gone", lambda *_: None)
    lessee = Lessee("test", lambda work: work(), lambda *_: None, Peer)
    peer = lessee.peer(buffer._handle)
    assert lessee.peer(buffer._handle) is peer
    for forget in in_child:
        forget()
    assert lessee.peer(buffer._handle) is not peer


def test_a_transfer_by_nixl_that_waits_for_a_lease_ends_when_it_is_late() -> None:
    """Not before, and not once it has the lease."""
    job: Any = object.__new__(_Job)
    job._outcome = job._posted = None
    job._peer = types.SimpleNamespace(gone=False)
    ended: list[bool] = []
    job._end = lambda _, late: ended.append(late)
    for waits, late in [(True, False), (False, True), (False, False)]:
        job._waits, job.transfer = waits, types.SimpleNamespace(late=late)
        assert not job._look(None)
    assert ended == []
    job._waits, job.transfer.late = True, True
    assert job._look(None)
    assert ended == [True]
