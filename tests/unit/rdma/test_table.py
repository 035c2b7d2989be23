"""A published entry is found until it is revoked, and no write outlives a revocation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from monarch.rdma.table import SLOTS, PeerTable, Table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open file description locks")

IDENTITY = b"identity of ours"
TOKEN = b"a token of sixtn"


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(IDENTITY)
    yield made
    made.close()


def peer_of(table: Table, identity: bytes = IDENTITY) -> PeerTable:
    """Return another process's view of `table`, with its own descriptor."""
    return PeerTable(os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR), identity)


def test_what_is_published_is_found_until_it_is_revoked(table: Table) -> None:
    peer = peer_of(table)
    slot = table.publish(7, TOKEN, 0x1000, 64, True)
    assert peer.holds(slot, 7)
    assert not peer.holds(slot, 8)
    assert peer.admits(slot, 7, TOKEN, 0x1000, 64, True)
    for wrong in (
        (8, TOKEN, 0x1000, 64, True),
        (7, bytes(16), 0x1000, 64, True),
        (7, TOKEN, 0x1008, 64, True),
        (7, TOKEN, 0x1000, 65, True),
        (7, TOKEN, 0x1000, 64, False),
    ):
        assert not peer.admits(slot, *wrong)
    assert table.revoke(slot)
    assert not peer.holds(slot, 7)
    assert table.publish(9, TOKEN, 0, 1, True) == slot
    assert not peer.holds(slot, 7)


@pytest.mark.parametrize("slot", [-1, 0, SLOTS, SLOTS + 1, 1 << 40, -(1 << 40)])
def test_a_slot_that_cannot_be_holds_nothing(table: Table, slot: int) -> None:
    """A handle may have been forged."""
    last = 0
    for _ in range(SLOTS - 1):
        last = table.publish(7, TOKEN, 0, 1, True)
    peer = peer_of(table)
    assert peer.holds(last, 7)
    assert not peer.holds(slot, 7)
    assert not peer.admits(slot, 7, TOKEN, 0, 1, True)


def test_a_revocation_waits_for_writers(table: Table) -> None:
    peer, other = peer_of(table), peer_of(table)
    slot = table.publish(1, TOKEN, 0, 1, True)
    assert peer.enter(slot)
    assert peer.enter(slot)
    assert other.enter(slot)
    assert not table.revoke(slot)
    assert not peer.holds(slot, 1)
    waited = threading.Thread(target=table.wait, args=(slot,))
    waited.start()
    peer.leave(slot)
    other.leave(slot)
    assert waited.is_alive()
    peer.leave(slot)
    waited.join(60)
    assert not waited.is_alive()
    assert table.publish(2, TOKEN, 0, 1, True) == slot
    assert peer.enter(slot)
    peer.leave(slot)


def test_a_writer_that_dies_holds_nothing(table: Table) -> None:
    slot = table.publish(1, TOKEN, 0, 1, True)
    program = f"""
import os
from monarch.rdma.table import PeerTable
peer = PeerTable(os.open("/proc/{os.getpid()}/fd/{table.fd}", os.O_RDWR), {IDENTITY!r})
assert peer.enter({slot})
print("entered", flush=True)
os.read(0, 1)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"entered\n"
        assert not table.revoke(slot)
        writer.kill()
        table.wait(slot)


def test_atomic_operations_exclude_each_other_but_not_writers(table: Table) -> None:
    peer, other = peer_of(table), peer_of(table)
    slot = table.publish(1, TOKEN, 0, 1, True)
    assert peer.try_exclusive(slot)
    assert not other.try_exclusive(slot)
    assert not table.try_exclusive(slot)
    assert other.enter(slot)
    other.leave(slot)
    peer.end_exclusive(slot)
    assert table.try_exclusive(slot)
    table.end_exclusive(slot)


def test_the_table_of_another_process_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="of this process"):
        peer_of(table, b"identity another")
    with pytest.raises(ValueError, match="no table"):
        PeerTable(os.open(os.devnull, os.O_RDWR), IDENTITY)


def test_slots_are_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.rdma.table.SLOTS", 4)
    slots = [table.publish(number, TOKEN, 0, 1, True) for number in (1, 2, 3)]
    with pytest.raises(OverflowError, match="3 buffers are registered"):
        table.publish(4, TOKEN, 0, 1, True)
    assert table.revoke(slots[1])
    assert table.publish(5, TOKEN, 0, 1, True) == slots[1]
