"""The registrations of this process: memory that is kept alive, published, and released again.

A registration ends once: by `drop` (called here, or requested by another process), when the actor
that made it exits, or, if its handles are counted, with the last handle (`holders`). It ends in two
steps. First it is revoked: no route begins another read or write. When no write is under way, the
memory is released; the future of the drop resolves then.

Registering memory neither copies it nor locks its pages: it writes one entry to the table.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import struct
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from monarch import _spi
from monarch.actor import Future
from monarch.rdma.errors import RdmaBufferDropped, RdmaError, RdmaOwnerLost, RdmaPermissionError
from monarch.rdma.handle import Handle
from monarch.rdma.identity import own_host, start_of
from monarch.rdma.memory import Memory
from monarch.rdma.table import Contended, Table

__all__ = [
    "Registration",
    "Registry",
    "at_end",
    "drop",
    "own_registry",
    "owned_here",
    "services",
]

_DROP = "rdma.drop"
_KEY = struct.Struct("=Q16s16s")  # number, identity, token
_DROP_TIMEOUT = 60.0
_LET_GO = Memory(0, 0, False, None)


class Registration:
    """Memory of this process that other processes may read or write."""

    __slots__ = ("_withdraw", "ended", "handle", "lock", "memory")

    def __init__(self, handle: Handle, memory: Memory) -> None:
        self.handle = handle
        self.memory = memory
        self.ended = False
        self.lock = threading.Lock()
        """Held by a writer of this process during a slice, and by the drop after the revocation."""
        self._withdraw: Callable[[], Any] | None = None

    @contextlib.contextmanager
    def writing(self) -> Generator[None, None, None]:
        """Hold off a drop while a thread of this process writes one slice to the memory.

        Raises RdmaPermissionError, or RdmaBufferDropped.
        """
        if not self.handle.writable:
            raise RdmaPermissionError(read_only_text(self.handle))
        with self.lock:
            if self.ended:
                raise RdmaBufferDropped(dropped_text(self.handle.number))
            yield


class Registry:
    """All registrations of this process, see the module. Made on first use, by `own_registry`.

    `published` registrations are entered in a table, so that other processes reach the memory with
    the help of the kernel alone. The simulator needs no table: all of its processes are in this
    one, and share one registry.
    """

    def __init__(self, *, published: bool) -> None:
        self.identity = secrets.token_bytes(16)
        self.pid = os.getpid()
        self.live: dict[int, Registration] = {}
        self._numbers = itertools.count(1)
        self.table: Table | None = Table(self.identity) if published else None
        self._start = start_of(self.pid) if published else 0
        self._served: int | None = None

    def add(
        self, memory: Memory, *, writable: bool, grace: float | None, offers: dict[str, bytes]
    ) -> Registration:
        """Register memory, and keep it alive until the registration ends."""
        uid = _spi.own_uid()
        if self._served != uid:
            for name, handler in services.items():
                _spi.serve(name, handler)
            self._served = uid
        number = next(self._numbers)
        token = secrets.token_bytes(16)
        slot = -1
        if self.table is not None:
            try:
                entry = (number, token, memory.address, memory.nbytes, writable)
                slot = self.table.publish(*entry)
            except OverflowError as error:
                raise RdmaError(f"{error}: drop what is no longer used") from None
        handle = Handle(
            number,
            self.identity,
            uid,
            own_host(),
            self.pid,
            self._start,
            -1 if self.table is None else self.table.fd,
            slot,
            token,
            memory.address,
            memory.nbytes,
            writable,
            memory.device,
            grace,
            offers,
        )
        registration = self.live[number] = Registration(handle, memory)
        registration._withdraw = _spi.at_actor_end(lambda: self._end(registration))
        return registration

    def find(self, number: int, token: bytes) -> Registration:
        """Return the live registration with that number.

        Raises RdmaBufferDropped if there is none, RdmaPermissionError if the token is wrong.
        """
        registration = self.live.get(number)
        if registration is None:
            raise RdmaBufferDropped(dropped_text(number))
        if not hmac.compare_digest(registration.handle.token, token):
            raise RdmaPermissionError(forged_text(number))
        return registration

    @contextlib.contextmanager
    def alone(self, registration: Registration) -> Generator[None, None, None]:
        """Exclude the atomic operations of other processes; raise Contended if one is under way.

        (`writing` excludes those of this process.)
        """
        if self.table is None:
            yield
            return
        slot = registration.handle.slot
        if not self.table.try_exclusive(slot):
            raise Contended
        try:
            yield
        finally:
            self.table.end_exclusive(slot)

    def end(self, registration: Registration) -> Future[None]:
        """Revoke a registration at once, and release its memory when no write is under way.

        The future resolves when the memory is released. Ending a registration that has already
        ended is not an error.
        """
        withdraw = registration._withdraw
        if withdraw is not None:
            registration._withdraw = None
            withdraw()
        return self._end(registration)

    def _end(self, registration: Registration) -> Future[None]:
        done = _spi.Promise[None].pending()
        handle = registration.handle
        if self.live.pop(handle.number, None) is None:
            done.resolve(None)
            return done
        registration.ended = True
        waits = [each for callback in at_end if (each := callback(handle)) is not None]
        table = self.table
        quiet = table is None or table.revoke(handle.slot)
        if quiet and not waits and registration.lock.acquire(blocking=False):
            registration.memory = _LET_GO
            registration.lock.release()
            done.resolve(None)
            return done

        # A slice is under way: it takes milliseconds, unless its process is stopped by a signal.
        def wait() -> None:
            if table is not None and not quiet:
                table.wait(handle.slot)
            for each in waits:
                each()
            with registration.lock:
                registration.memory = _LET_GO
            done.resolve(None)

        _spi.start_thread("monarch-rdma-drop", wait)
        return done

    def close_in_child(self) -> None:
        """Release what is the parent's, in a forked child."""
        if self.table is not None:
            self.table.close()


at_end: list[Callable[[Handle], Callable[[], None] | None]] = []
"""Called when a registration of this process is revoked: no route may begin a slice after it.

The function must not block. The function that it returns may: it returns when no slice is in
progress, and the drop waits for that.
"""


def _on_drop(request: _spi.Request) -> None:
    number, identity, token = _KEY.unpack(request.body)
    registry = own_registry()
    if identity != registry.identity:
        request.answer()  # that registration ended with the process that this one replaced
        return
    try:
        registration = registry.find(number, token)
    except RdmaBufferDropped:
        request.answer()
    except RdmaPermissionError as error:
        request.refuse(str(error))
    else:
        registry.end(registration)._notify(request.answer)


services: dict[str, Callable[[_spi.Request], None]] = {_DROP: _on_drop}
"""The requests that an owner answers, by name. It serves them after its first registration."""

_registries: dict[bool, Registry] = {}  # the key: whether it is the simulator's
_making = threading.Lock()


def own_registry() -> Registry:
    """Return the registry of this process."""
    simulated = _spi.is_simulated()
    known = _registries.get(simulated)
    if known is None:
        with _making:
            known = _registries.get(simulated)
            if known is None:
                known = Registry(published=sys.platform == "linux" and not simulated)
                _registries[simulated] = known
    return known


def owned_here(handle: Handle) -> bool:
    """Whether the registration belongs to this process."""
    known = _registries.get(_spi.is_simulated())
    return known is not None and known.identity == handle.identity


def drop(handle: Handle) -> Future[None]:
    """End a registration of any process; does not block.

    The future resolves to None, also if the registration or its owner has already ended. It raises
    RdmaPermissionError for a wrong token, RdmaError if the owner does not answer.
    """
    if owned_here(handle):
        registry = own_registry()
        try:
            return registry.end(registry.find(handle.number, handle.token))
        except RdmaBufferDropped:
            return _spi.resolved(None)
        except RdmaPermissionError as error:
            return _spi.failed(RdmaPermissionError(f"Failed to drop buffer: {error}"))
    if _spi.successor_of(handle.uid) != handle.uid:
        return _spi.resolved(None)
    done = _spi.Promise[None].pending()
    body = _KEY.pack(handle.number, handle.identity, handle.token)
    answer = _spi.ask(handle.uid, _DROP, body, _DROP_TIMEOUT)
    answer._notify(lambda: _on_dropped(answer, done))
    return done


def _on_dropped(answer: Future[bytes], done: _spi.Promise[None]) -> None:
    try:
        answer.get(0)
    except _spi.Unreachable:
        done.resolve(None)  # the registration ended with its process
    except _spi.Refused as error:
        done.fail(RdmaPermissionError(f"Failed to drop buffer: {error}"))
    except TimeoutError:
        done.fail(RdmaError("Failed to drop buffer: its owner did not answer in time"))
    else:
        done.resolve(None)


def dropped_text(number: int) -> str:
    """Return the error text for a registration that does not exist, or no longer exists."""
    return f"buffer {number} not found: it was dropped, or the actor that registered it has ended"


def check_offered(registration: Registration, kind: str) -> None:
    """Raise RdmaPermissionError unless the registration offers that kind of route.

    An initiator asks for such a kind only if it has changed the handle.
    """
    if kind not in registration.handle.offers:
        raise RdmaPermissionError(
            f"buffer {registration.handle.number} is not offered for the route {kind}: "
            "the setting rdma_routes of its owner leaves it out"
        )


def forged_text(number: int) -> str:
    """Return the error text for a handle whose token is not the owner's."""
    return f"buffer {number} was not given out with this token: the handle is not the owner's"


def moved_text(handle: Handle) -> str:
    """Return the error text for registered memory that is no longer at its address."""
    return (
        f"the memory of buffer {handle.number} was resized or freed by its owner, {handle.owner}, "
        "while it was registered: drop it, and register it anew"
    )


def read_only_text(handle: Handle) -> str:
    """Return the error text for a write to a read-only registration."""
    return (
        f"buffer {handle.number} of {handle.owner} is read-only: "
        "its memory is, or it was registered so"
    )


def lost_error(handle: Handle, how: str = "") -> RdmaOwnerLost:
    """Return the error for a transfer whose owner has exited or was replaced.

    `how` is the reason, if one is known.
    """
    if _spi.successor_of(handle.uid) != handle.uid:
        how = "it was restarted, and this handle is from before: ask the new one for a buffer"
    reason = how or "its process has exited"
    return RdmaOwnerLost(f"the owner of buffer {handle.number}, {handle.owner}, is lost: {reason}")


def _forget() -> None:
    global _making
    _making = threading.Lock()
    for registry in _registries.values():
        registry.close_in_child()
    _registries.clear()


_spi.when_forked(_forget)
