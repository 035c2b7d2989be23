"""The table in which an owner publishes its registrations, so that a drop revokes at once.

A process that copies from or into another process's memory sends the owner no request. So the owner
keeps a small memory file that initiators map. The file has one slot per registration, which holds
the registration's number; the owner clears the number to end the registration. Numbers are never
reused. Two rules follow:

* **Reads** check the number before and after the copy. If a read succeeds, the memory was
  registered during the whole copy.
* **Writes** hold a lock on the slot while they check the number and copy one slice. `revoke` clears
  the number and then waits for the lock, so no byte is written after a drop has completed. The lock
  is of the *open file description* kind, on one byte of the file; the kernel releases it when its
  process exits. Each initiator opens the file itself (through ``/proc/<pid>/fd``), and so has a
  description, and locks, of its own. Its threads share the description, so they count writers.

Atomic operations exclude each other by a lock on another byte of the slot.

Layout, 64 bytes per entry: a header (magic, address of the identity in the owner's private memory,
the identity), then the slots (number, token, address, size, whether it may be written). Only a
process that may read the owner's memory anyway can open the file, so the table holds no secrets
from it. The token serves to refuse a forged handle.

Rejected: a lock in the shared memory itself (pure Python has no atomic compare-and-swap, and a
process that is killed would never release it); a message to the owner for each write (that is not
one-sided).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import struct
import threading
from typing import Any

from monarch import _spi

__all__ = ["SLOTS", "Contended", "PeerTable", "Table"]

SLOTS = 1 << 16  # registrations at a time; pages of unused slots are never touched
_SLOT = 64
_MAGIC = 0x6D6F6E6172636801
_HEADER = struct.Struct("=QQ16s")
_ENTRY = struct.Struct("=Q16sQQQ")
_LOCK = struct.Struct("hhqqi4x" if struct.calcsize("q") == 8 else "hhqqi")  # struct flock
_SET: int = getattr(fcntl, "F_OFD_SETLK", 37)
_SET_AND_WAIT: int = getattr(fcntl, "F_OFD_SETLKW", 38)


def _lock(kind: int, at: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, at, 1, 0)


class Contended(Exception):
    """Another process is carrying out an atomic operation on the same registration."""


class _Locks:
    """Locks on slots, held by one open file description."""

    fd: int

    def try_exclusive(self, slot: int) -> bool:
        """Exclude atomic operations of other descriptions; return False if one is under way."""
        return self._try(_lock(fcntl.F_WRLCK, slot * _SLOT + 8))

    def end_exclusive(self, slot: int) -> None:
        """Release the lock of `try_exclusive`."""
        fcntl.fcntl(self.fd, _SET, _lock(fcntl.F_UNLCK, slot * _SLOT + 8))

    def _try(self, lock: bytes) -> bool:
        try:
            fcntl.fcntl(self.fd, _SET, lock)
        except BlockingIOError:
            return False
        return True


class Table(_Locks):
    """The table as its owner has it: publishes and revokes."""

    def __init__(self, identity: bytes) -> None:
        self.fd = _spi.memory_file(SLOTS * _SLOT)
        self._map = mmap.mmap(self.fd, SLOTS * _SLOT)
        # In private memory: an initiator that reads it there has the right process, and may.
        self._cookie = ctypes.create_string_buffer(identity, len(identity))
        _HEADER.pack_into(self._map, 0, _MAGIC, ctypes.addressof(self._cookie), identity)
        self._free: list[int] = []
        self._used = 0
        self._lock = threading.Lock()

    def publish(self, number: int, token: bytes, address: int, size: int, writable: bool) -> int:
        """Publish a registration; return its slot. Raises OverflowError if the table is full."""
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif self._used == SLOTS - 1:
                raise OverflowError(
                    f"{self._used} buffers are registered in this process, the most"
                )
            else:
                self._used = slot = self._used + 1
        _ENTRY.pack_into(self._map, slot * _SLOT, number, token, address, size, writable)
        return slot

    def revoke(self, slot: int) -> bool:
        """End a registration: no read succeeds after this, and no write begins.

        Return False if a write is under way; then call `wait`. Afterwards the slot is reused.
        """
        at = slot * _SLOT
        _ENTRY.pack_into(self._map, at, 0, bytes(16), 0, 0, 0)
        if not self._try(_lock(fcntl.F_WRLCK, at)):
            return False
        self._freed(slot)
        return True

    def wait(self, slot: int) -> None:
        """Block until no write to a revoked slot is under way; then free the slot."""
        fcntl.fcntl(self.fd, _SET_AND_WAIT, _lock(fcntl.F_WRLCK, slot * _SLOT))
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        fcntl.fcntl(self.fd, _SET, _lock(fcntl.F_UNLCK, slot * _SLOT))
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Close the file in a forked child: the table is the parent's."""
        self._map.close()
        os.close(self.fd)


class PeerTable(_Locks):
    """The table as an initiator maps it.

    Takes ownership of `fd`. Raises ValueError if the file is not a table of registrations, or is
    the table of another process.
    """

    def __init__(self, fd: int, identity: bytes) -> None:
        self.fd = fd
        self._map: Any = None
        self._guard = threading.Lock()
        self._writers: dict[int, int] = {}
        self._commands: dict[int, tuple[bytes, bytes]] = {}
        self.atomics = threading.Lock()
        if os.fstat(fd).st_size != SLOTS * _SLOT:
            raise ValueError("no table of registrations")
        self._map = mmap.mmap(fd, SLOTS * _SLOT, prot=mmap.PROT_READ)
        magic, self.cookie, found = _HEADER.unpack_from(self._map, 0)
        if magic != _MAGIC or not hmac.compare_digest(found, identity):
            raise ValueError("no table of registrations of this process")
        self._numbers = memoryview(self._map).cast("Q")

    def holds(self, slot: int, number: int) -> bool:
        """Whether `slot` exists and still holds registration `number`."""
        return 0 < slot < SLOTS and bool(self._numbers[slot * 8] == number)

    def admits(
        self, slot: int, number: int, token: bytes, address: int, size: int, writable: bool
    ) -> bool:
        """Whether the owner's entry in `slot` has exactly these values."""
        at = slot * _SLOT
        claimed = _ENTRY.pack(number, token, address, size, writable)
        return 0 < slot < SLOTS and hmac.compare_digest(self._map[at : at + _ENTRY.size], claimed)

    def enter(self, slot: int) -> bool:
        """Begin a write; return False if the slot is being revoked. Each True needs a `leave`."""
        with self._guard:
            count = self._writers.get(slot, 0)
            if not count and not self._try(self._command(slot)[0]):
                return False
            self._writers[slot] = count + 1
        return True

    def leave(self, slot: int) -> None:
        """End a write."""
        with self._guard:
            count = self._writers[slot] - 1
            if count:
                self._writers[slot] = count
            else:
                del self._writers[slot]
                fcntl.fcntl(self.fd, _SET, self._command(slot)[1])

    def _command(self, slot: int) -> tuple[bytes, bytes]:
        known = self._commands.get(slot)
        if known is None:
            at = slot * _SLOT
            known = self._commands[slot] = (
                _lock(fcntl.F_RDLCK, at),
                _lock(fcntl.F_UNLCK, at),
            )
        return known

    def __del__(self, _close: Any = os.close) -> None:
        _close(self.fd)

    def close_in_child(self) -> None:
        """Replace the file in a forked child: the inherited description holds the parent's locks.

        An inherited descriptor would keep those locks after the parent has exited.
        """
        self._guard = threading.Lock()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
