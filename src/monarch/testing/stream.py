"""Streams in memory: the sockets of a simulation, on which the engine's own links run.

A `MemorySocket` is a `socket.socket` without a descriptor of the kernel, with the calls that the
engine makes on a socket that does not block. Its bytes pass to the other end of a pair within the
process that simulates. As for a real stream, a buffer of limited size is at the receiver's end, a
write is taken in part when the buffer is nearly full, data in the buffer outlives its sender, and a
closed end is an EOF after the data. Some writes arrive in two parts, as the seed decides.

Descriptors are numbers, as real ones, so that they can be duplicated, closed and passed on; the
`Streams` of a simulation know the end that each stands for. The numbers are larger than those of
the kernel. An end is closed when no number is left for it, and no message that carries one.

The simulated reactor (`driver.SimReactor`) watches an end as the real one does with epoll: as long
as there is something to read, or room to write if that is asked for, a step calls it back.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from monarch.testing.scheduler import Place, Scheduler, Wait

__all__ = ["CAPACITY", "FIRST_DESCRIPTOR", "MemorySocket", "StreamEnd", "Streams"]

FIRST_DESCRIPTOR = 1 << 30
"""The smallest number of a simulated descriptor; the kernel's are smaller."""

CAPACITY = 212_992
"""The number of bytes that are buffered for a process of the same host that does not read."""

LATENCY = 10e-6
"""The average time until a process of the same host is notified of data, in seconds."""

_SPLIT = 1 / 32
"""The share of writes that arrive in two parts."""

_SCRATCH = 256 << 10
_READ = select.POLLIN
_WRITE = select.POLLOUT
_HANG_UP = select.POLLHUP


class StreamEnd:
    """One end of a stream; the engine holds `MemorySocket`s that refer to it.

    This class connects two processes of one host. A subclass carries the bytes over a network.
    """

    __slots__ = (
        "_callback",
        "_eof",
        "_held",
        "_hung_up",
        "_inbox",
        "_late",
        "_noticed",
        "_place",
        "_reads",
        "_rights",
        "_starved",
        "_writes",
        "capacity",
        "closed",
        "other",
        "references",
        "scheduler",
    )

    other: StreamEnd
    socket_type: ClassVar[type[MemorySocket]]

    def __init__(self, scheduler: Scheduler, capacity: int) -> None:
        self.scheduler = scheduler
        self.capacity = capacity
        self.references = 0
        self.closed = False
        self._inbox: deque[bytes | memoryview] = deque()  # bytes that have arrived
        self._held = 0  # bytes that the other end has sent, and this one has not read
        self._rights: deque[StreamEnd] = deque()  # descriptors that have arrived
        self._late: deque[bytes | None] = deque()  # the rest of a split write; None: the end
        self._eof = False  # whether no more data will arrive
        self._hung_up = False  # whether the other end is closed, in both directions
        self._starved = False  # whether a write of this end found no room
        self._callback: Callable[[int], None] | None = None
        self._place: Place | None = None
        self._reads = True
        self._writes = False
        self._noticed = False  # whether a step that calls back is scheduled

    # -- for the reactor -------------------------------------------------------------------------

    def watch(self, place: Place, callback: Callable[[int], None]) -> None:
        """Call `callback(event mask)` in steps of `place` while there is something to do."""
        self._place = place
        self._callback = callback
        place.ends[self] = None
        self._reads, self._writes = True, False
        self._notice()

    def interest(self, *, reads: bool, writes: bool) -> None:
        """Set the events that call back; a hang-up always does."""
        self._reads, self._writes = reads, writes
        self._notice()

    def unwatch(self) -> None:
        """Call back no longer."""
        self._callback = None
        if self._place is not None:
            self._place.ends.pop(self, None)

    def _mask(self) -> int:
        mask = 0
        if self._reads and (self._inbox or self._eof):
            mask = _READ
        if self._hung_up:
            mask |= _HANG_UP
        if self._writes and (self._hung_up or self._room() > 0):
            mask |= _WRITE
        return mask

    def _room(self) -> int:
        return self.capacity - self.other._held

    def _notice(self) -> None:
        """Schedule a step that calls back, after the latency of the stream, if there is a cause."""
        place = self._place
        if self._noticed or self._callback is None or place is None or not self._mask():
            return
        self._noticed = True
        self._schedule(LATENCY, place)

    def _schedule(self, latency: float, place: Place) -> None:
        scheduler = self.scheduler
        when = scheduler.now + latency * (0.5 + scheduler.random.random()) + place.lag
        scheduler.at(when, place, self._ready)

    def _ready(self) -> None:
        self._noticed = False
        callback = self._callback
        if callback is not None and (mask := self._mask()):
            callback(mask)
            self._notice()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview, rights: Sequence[StreamEnd] = ()) -> int:
        """Take the first of these bytes, with descriptors; return how many. Raises as a socket."""
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._hung_up or self._is_refused():
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        count = len(data)
        if not count:
            return 0
        room = self._room()
        if room <= 0:
            self._starved = True
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if count > room:
            data = data[:room]
            count = room
        other = self.other
        other._held += count
        for end in rights:
            end.references += 1
            other._rights.append(end)
        self._carry(bytes(data))
        return count

    def _is_refused(self) -> bool:
        """Whether this end knows already that the other one is closed."""
        return self.other.closed

    def _cut(self, data: bytes) -> int:
        """Return after how many bytes a write is split in two; 0: it is not."""
        chance = self.scheduler.random
        return chance.randrange(len(data)) if chance.random() < _SPLIT else 0

    def _carry(self, data: bytes) -> None:
        """Bring bytes to the other end, after those that were sent before."""
        if self._late:
            self._late.append(data)
            return
        cut = self._cut(data)
        if cut:
            self._late.append(data[cut:])
            data = data[:cut]
            self.scheduler.at(self.scheduler.now + 3 * LATENCY, None, self._carry_late)
        self.other.arrive(data)

    def _carry_late(self) -> None:
        late = list(self._late)
        self._late.clear()
        for data in late:
            if data is None:
                self.other.end(hung_up=self.closed)
            else:
                self.other.arrive(data)

    def _carry_end(self) -> None:
        """Let the other end learn that this one sends no more, after all that it has sent."""
        if self._late:
            self._late.append(None)
        else:
            self.other.end(hung_up=self.closed)

    # -- receiving -------------------------------------------------------------------------------

    def arrive(self, data: bytes) -> None:
        """Accept bytes."""
        if not self.closed:
            self._inbox.append(data)
            if not self._noticed:
                self._notice()

    def end(self, *, hung_up: bool) -> None:
        """Accept the end of the data; `hung_up`: the other end is closed."""
        self._eof = True
        self._hung_up |= hung_up
        self._notice()

    def receive_into(self, target: memoryview) -> int:
        """Fill `target` with what has arrived; return the size, 0 at EOF. Raises as a socket."""
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        inbox = self._inbox
        if not inbox:
            if self._eof:
                return 0
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        at, size = 0, len(target)
        while inbox and at < size:
            data = inbox[0]
            count = len(data)
            if count > size - at:
                count = size - at
                target[at:] = data[:count]
                inbox[0] = memoryview(data)[count:]
            else:
                target[at : at + count] = data
                inbox.popleft()
            at += count
        self._held -= at
        other = self.other
        if other._starved or other._writes:
            self._make_room()
        return at

    def _make_room(self) -> None:
        """Notify the other end, which waits for room, once half of the buffer is free."""
        if self._held <= self.other.capacity // 2:
            self.other._starved = False
            self.other._notice()

    def take_rights(self) -> list[StreamEnd]:
        """Return the descriptors that have arrived; each counts as a reference."""
        taken = list(self._rights)
        self._rights.clear()
        return taken

    # -- closing ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Give up one reference; the last one closes this end."""
        self.references -= 1
        if not self.references and not self.closed:
            self.closed = True
            self.unwatch()
            self._inbox.clear()
            for end in self.take_rights():
                end.release()
            self._carry_end()

    def shutdown(self, how: int) -> None:
        """End one direction, or both."""
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self._carry_end()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self.end(hung_up=how == socket.SHUT_RDWR)


class Streams:
    """The descriptors of one simulation: the stream ends that its processes have open.

    >>> from monarch.testing.scheduler import Scheduler
    >>> streams = Streams(Scheduler(0, 1.0, 1.0))
    >>> left, right = streams.pair()
    >>> left.send(b"hello")
    5
    >>> copy = streams.socket(streams.duplicate(right.fileno()))
    >>> right.close()
    >>> into = bytearray(9)
    >>> copy.recv_into(into), bytes(into[:5])
    (5, b'hello')
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.scratch = memoryview(bytearray(_SCRATCH))  # for all reactors, as steps do not overlap
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._ends: dict[int, StreamEnd] = {}

    def pair(self) -> tuple[MemorySocket, MemorySocket]:
        """Return two connected sockets, for two processes of one host."""
        scheduler = self.scheduler
        left, right = StreamEnd(scheduler, CAPACITY), StreamEnd(scheduler, CAPACITY)
        left.other, right.other = right, left
        return self.socket(self.open(left)), self.socket(self.open(right))

    def open(self, end: StreamEnd) -> int:
        """Return a new descriptor for `end`."""
        end.references += 1
        number = next(self._numbers)
        self._ends[number] = end
        return number

    def adopt(self, end: StreamEnd) -> int:
        """Return a descriptor for an end that came with a message, whose reference it takes."""
        number = self.open(end)
        end.references -= 1
        return number

    def socket(self, descriptor: int) -> MemorySocket:
        """Return the socket of a descriptor, which it owns."""
        return self.end(descriptor).socket_type(self, descriptor)

    def find(self, descriptor: int) -> StreamEnd | None:
        """Return the end that a descriptor stands for; None if it is closed."""
        return self._ends.get(descriptor)

    def end(self, descriptor: int) -> StreamEnd:
        """Return the end that a descriptor stands for. Raises OSError for a closed one."""
        end = self._ends.get(descriptor)
        if end is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return end

    def duplicate(self, descriptor: int) -> int:
        """Return another descriptor for the same end, as `os.dup`."""
        return self.open(self.end(descriptor))

    def close(self, descriptor: int) -> None:
        """Close a descriptor, as `os.close`."""
        end = self.end(descriptor)
        del self._ends[descriptor]
        end.release()


class MemorySocket(socket.socket):
    """A socket in memory; see the module. Of its calls only `recv` can block, for a strand."""

    __slots__ = ("_descriptor", "_end", "_timeout", "streams")

    def __init__(self, streams: Streams, descriptor: int) -> None:
        # The base class would open a real socket. It is there for `isinstance` only.
        self.streams = streams
        self._descriptor = descriptor
        self._end = streams.end(descriptor)
        self._timeout: float | None = None

    def __repr__(self) -> str:
        return f"<MemorySocket {self._descriptor}>"

    @property
    def family(self) -> socket.AddressFamily:
        """That of a socket within a machine, without an IP address."""
        return socket.AF_UNIX

    def fileno(self) -> int:
        """See `socket.socket.fileno`."""
        return self._descriptor

    def setblocking(self, flag: bool, /) -> None:
        """See `socket.socket.setblocking`."""
        self._timeout = None if flag else 0.0

    def settimeout(self, value: float | None, /) -> None:
        """See `socket.socket.settimeout`."""
        self._timeout = value

    def send(self, data: Any, flags: int = 0, /) -> int:
        """See `socket.socket.send`."""
        return self._end.send(data)

    def sendmsg(self, buffers: Any, ancillary: Any = (), /, *_: Any) -> int:
        """See `socket.socket.sendmsg`."""
        rights: list[StreamEnd] = []
        for _, _, data in ancillary:
            rights += map(self.streams.end, array.array("i", data))
        [data] = buffers if len(buffers) == 1 else [b"".join(buffers)]
        return self._end.send(data, rights)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """See `socket.socket.recv_into`."""
        return self._end.receive_into(memoryview(buffer))

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """See `socket.socket.sendall`."""
        sent = self._end.send(data)
        assert sent == len(data), "only a handshake writes so, and it fits into the buffer"

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """See `socket.socket.recv`."""
        data = bytearray(size)
        try:
            count = self._end.receive_into(memoryview(data))
        except BlockingIOError:
            if self._timeout == 0.0:
                raise
            self._wait()
            count = self._end.receive_into(memoryview(data))
        return bytes(data[:count])

    def _wait(self) -> None:
        """Suspend the strand until there is something to read. Raises TimeoutError."""
        end, scheduler = self._end, self.streams.scheduler
        strand = scheduler.strand
        assert strand is not None, "this would block a reactor"
        wait = Wait(scheduler)

        def ready(_mask: int) -> None:
            end.unwatch()
            wait.release()

        end.watch(strand.place, ready)
        if not wait.acquire(timeout=-1 if self._timeout is None else self._timeout):
            end.unwatch()
            raise TimeoutError("timed out")

    def recvmsg_into(
        self, buffers: Any, ancillary_size: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """See `socket.socket.recvmsg_into`."""
        end = self._end
        count = end.receive_into(buffers[0])
        if not end._rights:
            return count, [], 0, None
        numbers = array.array("i", map(self.streams.adopt, end.take_rights()))
        return count, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())], 0, None

    def shutdown(self, how: int, /) -> None:
        """See `socket.socket.shutdown`."""
        self._end.shutdown(how)

    def detach(self) -> int:
        """See `socket.socket.detach`."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """See `socket.socket.close`."""
        if self._descriptor >= 0:
            self.streams.close(self.detach())


StreamEnd.socket_type = MemorySocket
