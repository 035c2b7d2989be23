"""A lease is revoked between two slices, and is given for what the owner offers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch.config import configured
from monarch.rdma import RDMABuffer, RdmaError, RdmaOwnerLost, RdmaPermissionError
from monarch.rdma.memory import Memory
from monarch.rdma.routes.lease import Lease, claim, claimed


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
