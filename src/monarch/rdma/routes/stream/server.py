"""The owner's side: carries out the requests of initiators on the registered memory.

Everything runs on the data thread, and no user code takes part. The thread needs the interpreter
lock for the moments between two system calls. Each request is checked on its own: the token, the
bounds, and whether the registration is live, offers this route and may be written. A refused
request fails at its initiator. An invalid request (an unknown operation, a stream that does not
begin with HELLO) makes the owner close the connection.

A drop takes effect between two slices. While the data thread sends or receives a slice, it holds
the registration's lock, for which the drop waits; a drop never waits for a peer. After a drop, the
rest of a reply is zeros, followed by the refusal; the rest of a write is discarded.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaBufferDropped, RdmaError, RdmaPermissionError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory
from monarch.rdma.registry import Registration
from monarch.rdma.routes.copying import atomic_result
from monarch.rdma.routes.stream.connection import Connection
from monarch.rdma.routes.stream.driver import data_reactor
from monarch.rdma.routes.stream.landing import TRASH, Text, Trash
from monarch.rdma.routes.stream.message import (
    ADD,
    CHUNK_LIMIT,
    DATA,
    END,
    FAILED,
    FORBIDDEN,
    GONE,
    HELLO,
    INVITE,
    MAGIC,
    NOT_FOUND,
    OK,
    READ,
    RECALL,
    REPLY,
    REQUEST,
    SWAP,
    TEXT_LIMIT,
    VALUE,
    VERSION,
    WRITE,
    Landing,
    Reader,
)
from monarch.rdma.table import Contended
from monarch.rdma.transfer import Op
from monarch.rdma.views import landed, source, target

__all__ = ["KIND", "PURPOSE", "Server"]

KIND = "stream"
"""The name of this kind of route: a registration that does not offer it is not served."""

PURPOSE = "rdma"
"""The purpose of the side streams that this server accepts."""

_SMALL = 16 << 10  # most bytes that are copied, instead of sent and received in place
_ZEROS = memoryview(bytes(1 << 20))
_WORD = 8
_RETRY = 0.0002  # seconds until an atomic operation that another one excludes is tried again
_RETRY_MOST = 0.05
_RETRIES = 1000

_STATUS: dict[type[RdmaError], int] = {RdmaBufferDropped: NOT_FOUND, RdmaPermissionError: FORBIDDEN}


class Server:
    """Serves this process's registrations. One per process."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}  # by the number of the session
        self.doors: dict[tuple[str, bool], _spi.Door] = {}
        self.in_use: dict[int, dict[_Slice, None]] = {}  # slices in progress, by registration
        self.number = itertools.count(1).__next__

    def accept(self, sock: Any, caller: _spi.Caller) -> None:
        """Serve a side stream that a peer has opened; on the reactor's thread."""
        data_reactor().call_soon(self.serve, sock, caller, self.number())

    def serve(self, wire: _spi.Wire, caller: _spi.Caller, number: int) -> None:
        """Serve the peer at the other end of `wire`; on the data thread."""
        session = self.sessions[number] = Session(self, wire, caller, number)
        session.connection.start()

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """Release the memory of a registration that has ended.

        Returns None if that is done. If a slice is being copied at the moment, returns a function
        that blocks until the slice is complete, and then releases the memory.
        """
        slices = list(self.in_use.get(handle.number, ()))
        if not slices:
            return None
        lock = slices[0].lock  # all slices have the lock of the registration

        def let_go() -> None:
            with lock:
                for slice_ in slices:
                    slice_.let_go()

        if lock.locked():  # a slice is being copied right now
            return let_go
        let_go()
        return None

    def close_in_child(self) -> None:
        """Close all sockets in a forked child: they are the parent's."""
        for session in self.sessions.values():
            session.connection.close_in_child()
        for door in self.doors.values():
            door.close_in_child()


class Session:
    """One connection of a peer. `number` is unique among all sessions of the process."""

    def __init__(self, server: Server, wire: _spi.Wire, caller: _spi.Caller, number: int) -> None:
        self.server = server
        self._caller = caller
        self._number = number
        self._greeted = False
        self._invited: dict[int, tuple[_spi.Door, bytes]] = {}  # unused tickets, by number
        self.connection = Connection(
            data_reactor(), wire, Reader(REQUEST, self._begin), self._ended
        )

    def _ended(self, _reason: str) -> None:
        self.server.sessions.pop(self._number, None)
        for slices in list(self.server.in_use.values()):
            for slice_ in [slice_ for slice_ in slices if slice_.session is self]:
                slice_.forget()

    def _begin(
        self,
        ident: int,
        operation: int,
        _: int,
        number: int,
        token: bytes,
        offset: int,
        length: int,
        first: int,
        second: int,
    ) -> Landing | None:
        """Process the header of a request; see `message`."""
        if not self._greeted:
            self._on_hello(operation, token, offset, length)
        elif operation == READ:
            self._on_read(ident, number, token, offset, length)
        elif operation == WRITE:
            return self._on_write(ident, number, token, offset, length)
        elif operation in (ADD, SWAP):
            self._on_atomic(ident, number, token, offset, operation, (first, second))
        elif operation == INVITE:
            self._on_invite(ident)
        elif operation == RECALL:
            self._on_recall(ident, number)
        else:
            raise ValueError(f"unknown operation {operation}")
        return None

    def _on_hello(self, operation: int, identity: bytes, magic: int, version: int) -> None:
        if operation != HELLO or magic != MAGIC:
            raise ValueError("it does not speak this protocol")
        if version != VERSION:
            text = f"it speaks version {version} of the data plane, this process {VERSION}"
            self._farewell(FAILED, f"{text}: install the same release of pymonarch for both")
        elif identity != registry.own_registry().identity:
            self._farewell(GONE, "another process is in its place")
        else:
            self._greeted = True

    def _farewell(self, status: int, text: str) -> None:
        """Send the reason, and close the connection."""
        said = text.encode()
        self.connection.send(REPLY.pack(0, END, status, len(said)) + said)
        raise ValueError(text)

    # -- reading and writing ---------------------------------------------------------------------

    def _find(self, number: int, token: bytes, offset: int, length: int) -> Registration:
        """Return the registration, if the range is within it. Raises RdmaError."""
        found = registry.own_registry().find(number, token)
        registry.check_offered(found, KIND)
        size = found.handle.size
        if length > size or offset > size - length:
            raise RdmaError(
                f"access at offset {offset} with length {length} exceeds region size {size}"
            )
        if found.memory.stale:
            raise RdmaError(registry.moved_text(found.handle))
        return found

    def _on_read(self, ident: int, number: int, token: bytes, offset: int, length: int) -> None:
        if length > CHUNK_LIMIT:
            raise ValueError(f"{length} bytes in one request")
        try:
            found = self._find(number, token, offset, length)
            memory = found.memory  # keeps the memory alive, also after a drop
            if length <= _SMALL:
                data = bytes(source(memory, offset, length))
                if found.ended:
                    raise RdmaBufferDropped(registry.dropped_text(number))
                self.connection.queue((REPLY.pack(ident, VALUE, OK, length) + data,))
                return
            lent = _Lent(self, ident, found, memory, offset, length)
        except RdmaError as error:
            self.connection.queue((_end(ident, error),))
            return
        self.connection.queue((REPLY.pack(ident, DATA, OK, length), lent))

    def _on_write(self, ident: int, number: int, token: bytes, offset: int, length: int) -> Landing:
        if length > CHUNK_LIMIT:
            raise ValueError(f"{length} bytes in one request")
        try:
            found = self._find(number, token, offset, length)
            if length <= _SMALL:
                return Text(length, lambda data: self._store(ident, found, offset, data))
            with found.writing():
                return _Stored(self, ident, found, found.memory, offset, length)
        except RdmaError as error:
            refusal = _end(ident, error)
            return Trash(length, lambda: self.connection.queue((refusal,)))

    def _store(self, ident: int, found: Registration, offset: int, data: bytes) -> None:
        """Store the few bytes of a small write."""
        try:
            with found.writing():
                view = target(found.memory, offset, len(data))
                view[:] = data
                landed(found.memory, offset, view)
        except RdmaError as error:
            self.connection.queue((_end(ident, error),))
        else:
            self.connection.queue((_end(ident),))

    def _on_atomic(
        self,
        ident: int,
        number: int,
        token: bytes,
        offset: int,
        operation: int,
        operands: tuple[int, int],
        tries: int = 0,
    ) -> None:
        if self.connection.over:
            return
        own = registry.own_registry()
        try:
            found = self._find(number, token, offset, _WORD)
            if (found.handle.address + offset) % _WORD:
                raise RdmaError(f"an atomic operation needs an address divisible by {_WORD}")
            with found.writing(), own.alone(found):
                memory = found.memory
                old = bytes(source(memory, offset, _WORD))
                new = atomic_result(
                    Op(operation, found.handle, offset, memory, _WORD, operands), old
                )
                if new is not None:
                    view = target(memory, offset, _WORD)
                    view[:] = new
                    landed(memory, offset, view)
        except RdmaError as error:
            self.connection.queue((_end(ident, error),))
        except Contended:
            if tries >= _RETRIES:
                text = "another process does not end its atomic operation on the same buffer"
                self.connection.send(_end(ident, RdmaError(text)))
                return
            again = (ident, number, token, offset, operation, operands, tries + 1)
            delay = min(_RETRY_MOST, _RETRY * 2 ** min(tries, 10))
            data_reactor().call_later(delay, lambda: self._again(again))
        else:
            self.connection.queue((REPLY.pack(ident, VALUE, OK, _WORD) + old,))

    def _again(self, request: tuple[Any, ...]) -> None:
        self._on_atomic(*request)
        self.connection.flush()

    # -- about connections -----------------------------------------------------------------------

    def _on_invite(self, ident: int) -> None:
        said = json.dumps(self._invitation()).encode()
        self.connection.queue((REPLY.pack(ident, VALUE, OK, len(said)) + said,))

    def _invitation(self) -> dict[str, Any]:
        """Return a ticket for a direct connection, or the reason why there is none."""
        server, caller, via = self.server, self._caller, self._caller.via
        if via is None:
            return {"near": True}
        if not via.here:
            return {"reason": "the connection between the two hosts has no IP address"}
        door = server.doors.get(via)
        if door is None:
            door = server.doors[via] = _spi.open_door(data_reactor(), *via)
        number = server.number()

        def arrived(wire: _spi.Wire) -> None:
            self._invited.pop(number, None)
            server.serve(wire, caller, number)

        try:
            invitation = door.invite(arrived)
        except (OSError, _spi.SecretError) as error:
            return {"reason": f"the owner cannot be connected to directly: {error}"}
        self._invited[number] = (door, invitation.key)
        return {
            "number": number,
            "address": invitation.address,
            "port": invitation.port,
            "key": invitation.key.hex(),
            "certificate": invitation.certificate.hex(),
        }

    def _on_recall(self, ident: int, number: int) -> None:
        invited = self._invited.pop(number, None)
        if invited is not None:
            door, key = invited
            door.withdraw(key)
        session = self.server.sessions.get(number)
        if session is not None and session._caller.uid == self._caller.uid:
            session.connection.close("the peer has given it up")
        self.connection.queue((_end(ident),))


def _end(ident: int, error: RdmaError | None = None) -> bytes:
    if error is None:
        return REPLY.pack(ident, END, OK, 0)
    text = str(error).encode()[:TEXT_LIMIT]
    return REPLY.pack(ident, END, _STATUS.get(type(error), FAILED), len(text)) + text


class _Slice:
    """Registered memory that is being sent or received, until complete or released."""

    opened: Callable[[Memory, int, int], memoryview]

    def __init__(
        self,
        session: Session,
        ident: int,
        registration: Registration,
        memory: Memory,
        offset: int,
        length: int,
    ) -> None:
        self.lock: threading.Lock = registration.lock
        self.left: int = length
        self.session = session
        self._ident = ident
        self._registration = registration
        self._offset = offset
        self._at: int = 0
        self._memory: Memory | None = memory
        self._view: memoryview | None = self.opened(memory, offset, length)
        number = registration.handle.number
        self._in_use = session.server.in_use
        self._in_use.setdefault(number, {})[self] = None
        if registration.ended:
            self.let_go()

    def let_go(self) -> None:
        """Release the memory. Called with `lock` held, or before other threads know this slice."""
        self._view = None
        self._memory = None

    def forget(self) -> None:
        """Release the memory of a slice that will not be completed, or is complete."""
        number = self._registration.handle.number
        others = self._in_use.get(number)
        if others is not None:
            others.pop(self, None)
            if not others:
                del self._in_use[number]
        self.let_go()

    def _passed(self, error: RdmaError | None = None) -> bytes:
        """Finish the slice; return the END that reports its outcome."""
        if self._view is None or self._registration.ended:
            error = RdmaBufferDropped(registry.dropped_text(self._registration.handle.number))
        self.forget()
        return _end(self._ident, error)


class _Lent(_Slice):
    """Memory that a peer reads; see `connection.Lent`."""

    opened = staticmethod(source)

    def view(self) -> memoryview:
        if self._view is None or self._registration.ended:
            return _ZEROS[: self.left]
        return self._view[self._at :]

    def advance(self, count: int) -> None:
        self._at += count
        self.left -= count

    def verdict(self) -> bytes:
        return self._passed()


class _Stored(_Slice):
    """Memory that a peer writes; a `Landing`."""

    opened = staticmethod(target)

    def put(self, data: memoryview) -> None:
        def copy(room: memoryview) -> int:
            room[: len(data)] = data
            return len(data)

        if self._view is None:
            self.left -= len(data)
        else:
            self.fill(copy)

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        with self.lock:
            if self._registration.ended:
                self.let_go()
            view = self._view
            room = TRASH[: self.left] if view is None else view[self._at :]
            count = receive(room)
        self._at += count
        self.left -= count
        return count

    def done(self) -> None:
        refused: RdmaError | None = None
        with self.lock:
            if self._registration.ended:
                self.let_go()
            if self._view is not None and self._memory is not None:
                try:
                    landed(self._memory, self._offset, self._view)
                except RdmaError as error:
                    refused = error
        self.session.connection.queue((self._passed(refused),))
