"""The table in which an owner publishes its registrations, so that a drop revokes at once.

Whoever copies from or into another process's memory asks nobody there. So the owner keeps a small
memory file that initiators map: a slot per registration with its number, which the owner clears to
end it. Numbers are never used again. Two rules make that a promise:

* **Reads** look at the number before and after the copy. What a read returns was registered memory
  all the time; if it was not, the read fails.
* **Writes** hold a lock on the slot while they look at the number and copy one slice; `revoke`
  clears the number and then waits for the lock. So nothing is written once a drop is done. The lock
  is one on a byte of the file, of the *open file description* kind, which the kernel takes back
  from a process that dies. Each initiator opens the file anew (through ``/proc/<pid>/fd``), hence
  has a description, and locks, of its own; its threads share it, so they count.

Atomic operations exclude each other by a second byte of the slot.

The layout, of 64 bytes each: a header (magic, address of the identity in the owner's private
memory, the identity) and the slots (number, token, address, size, whether it may be written). Only
who may look into the owner's memory anyway can open the file, so it keeps no secret from those; the
token is there so that a handle that was made up is refused.

Rejected: a lock in the shared memory itself (pure Python has no atomic compare-and-swap, and a
process killed inside would keep it); a message to the owner per write (that is not one-sided).
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

SLOTS = 1 << 16  # registrations at a time; the pages of unused ones are never touched
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
    """Another process is in the middle of an atomic operation on the same registration."""


class _Locks:
    """Locks of one description of the file."""

    fd: int

    def try_exclusive(self, slot: int) -> bool:
        """Exclude atomic operations of other descriptions; False if one is under way."""
        return self._try(_lock(fcntl.F_WRLCK, slot * _SLOT + 8))

    def end_exclusive(self, slot: int) -> None:
        """The operation is done."""
        fcntl.fcntl(self.fd, _SET, _lock(fcntl.F_UNLCK, slot * _SLOT + 8))

    def _try(self, lock: bytes) -> bool:
        try:
            fcntl.fcntl(self.fd, _SET, lock)
        except BlockingIOError:
            return False
        return True


class Table(_Locks):
    """The owner's side."""

    def __init__(self, identity: bytes) -> None:
        self.fd = _spi.memory_file(SLOTS * _SLOT)
        self._map = mmap.mmap(self.fd, SLOTS * _SLOT)
        # In private memory: who can read it can read all of ours, and reads it from the right one.
        self._cookie = ctypes.create_string_buffer(identity, len(identity))
        _HEADER.pack_into(self._map, 0, _MAGIC, ctypes.addressof(self._cookie), identity)
        self._free: list[int] = []
        self._used = 0
        self._lock = threading.Lock()

    def publish(self, number: int, token: bytes, address: int, size: int, writable: bool) -> int:
        """Announce a registration; its slot. Raises OverflowError if there are too many."""
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
        """End a registration: no read succeeds any more, and no write begins.

        False if one is under way; then `wait` for it. The slot is used again after it.
        """
        at = slot * _SLOT
        _ENTRY.pack_into(self._map, at, 0, bytes(16), 0, 0, 0)
        if not self._try(_lock(fcntl.F_WRLCK, at)):
            return False
        self._freed(slot)
        return True

    def wait(self, slot: int) -> None:
        """Block until no write to a revoked slot is under way."""
        fcntl.fcntl(self.fd, _SET_AND_WAIT, _lock(fcntl.F_WRLCK, slot * _SLOT))
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        fcntl.fcntl(self.fd, _SET, _lock(fcntl.F_UNLCK, slot * _SLOT))
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """In a forked child: leave it to the owner."""
        self._map.close()
        os.close(self.fd)


class PeerTable(_Locks):
    """The table of another process, or of this one as others see it.

    Takes over `fd`. Raises ValueError if the file is no such table, or another process's.
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
        """Whether registration `number` is (still) in `slot`, if there is such a slot."""
        return 0 < slot < SLOTS and bool(self._numbers[slot * 8] == number)

    def admits(
        self, slot: int, number: int, token: bytes, address: int, size: int, writable: bool
    ) -> bool:
        """Whether this is what the owner says of the registration in `slot`."""
        at = slot * _SLOT
        claimed = _ENTRY.pack(number, token, address, size, writable)
        return 0 < slot < SLOTS and hmac.compare_digest(self._map[at : at + _ENTRY.size], claimed)

    def enter(self, slot: int) -> bool:
        """Begin to write; False if the slot is being revoked. Each `enter` needs a `leave`."""
        with self._guard:
            count = self._writers.get(slot, 0)
            if not count and not self._try(self._command(slot)[0]):
                return False
            self._writers[slot] = count + 1
        return True

    def leave(self, slot: int) -> None:
        """The write is done."""
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
        """In a forked child: an inherited description would keep the parent's locks."""
        self._guard = threading.Lock()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
