"""Leases: the permission to use memory by routes that do not involve the owner, and its revocation.

A peer that has the key of some memory (of a network card), or has mapped it (of a GPU), reads and
writes without the owner. The owner cannot end that by ending its own registration: on one host NIXL
copies with the kernel, for a card it caches registrations, and mapped memory stays mapped.

So the owner grants leases. Before its first transfer a peer requests the *lease* of a registration,
over the message links, which are authenticated; the reply has the key. When the registration ends,
the owner revokes the leases of all peers. The drop waits until each has replied that it begins no
further slice and that none is under way. A peer that has exited holds no lease. While a lease is
valid transfers are one-sided: they send no messages.

Rejected: a request before and after every transfer, which costs a round trip and the owner's
interpreter.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from monarch import _spi
from monarch.actor import Future
from monarch.rdma import registry
from monarch.rdma.errors import RdmaBufferDropped, RdmaError, RdmaOwnerLost, RdmaPermissionError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory
from monarch.rdma.registry import Registration
from monarch.rdma.routes import Unavailable

__all__ = ["Lease", "Lender", "Lessee", "Peer", "answer_of", "answered", "claim", "claimed"]

Run = Callable[[Callable[[], None]], None]
"""Runs a task later, on another thread."""

_CLAIM = struct.Struct("=Q16s16sQQ?")  # number, identity, token, address, size, writable
_KEY = struct.Struct("=Q16s")  # number, identity
_OK, _DROPPED, _FORBIDDEN, _LOST, _FAILED, _UNAVAILABLE = range(6)

P = TypeVar("P", bound="Peer")


# -- requests about a registration ---------------------------------------------------------------


def claim(handle: Handle) -> bytes:
    """Return the description of a registration, which begins each request to its owner."""
    return _CLAIM.pack(
        handle.number,
        handle.identity,
        handle.token,
        handle.address,
        handle.size,
        handle.writable,
    )


def claimed(body: bytes, kind: str) -> tuple[Registration, bytes]:
    """At the owner: check a `claim`; return the registration and the rest of the request.

    Raises RdmaError if the description is not true, or that kind of route is not offered.
    """
    number, identity, token, address, size, writable = _CLAIM.unpack_from(body)
    own = registry.own_registry()
    if identity != own.identity:
        raise RdmaOwnerLost
    found = own.find(number, token)
    handle = found.handle
    if (address, size, writable) != (handle.address, handle.size, handle.writable):
        raise RdmaPermissionError(registry.forged_text(number))
    registry.check_offered(found, kind)
    if found.memory.stale:
        raise RdmaError(registry.moved_text(handle))
    return found, body[_CLAIM.size :]


def answered(work: Callable[[], bytes]) -> bytes:
    """Return the reply to a request: the result of `work`, or why it failed."""
    try:
        return bytes([_OK]) + work()
    except RdmaBufferDropped as error:
        status, text = _DROPPED, str(error)
    except RdmaPermissionError as error:
        status, text = _FORBIDDEN, str(error)
    except RdmaOwnerLost as error:
        status, text = _LOST, str(error)
    except RdmaError as error:
        status, text = _FAILED, str(error)
    except Unavailable as error:
        status, text = _UNAVAILABLE, f"in the owner: {error.reason}\n{error.remedy}"
    return bytes([status]) + text.encode()


def answer_of(future: Future[bytes], handle: Handle) -> bytes:
    """Return the result of the owner's `work`. Raises RdmaError, or Unavailable."""
    try:
        answer = future.get(0)
    except _spi.Unreachable:
        raise registry.lost_error(handle) from None
    except _spi.Refused as error:
        raise Unavailable(f"the owner does not know this way: {error}") from None
    status, rest = answer[0], answer[1:]
    if status == _OK:
        return rest
    text = rest.decode()
    if status == _DROPPED:
        raise RdmaBufferDropped(text)
    if status == _FORBIDDEN:
        raise RdmaPermissionError(text)
    if status == _LOST:
        raise registry.lost_error(handle)
    if status == _UNAVAILABLE:
        reason, _, remedy = text.partition("\n")
        raise Unavailable(reason, remedy)
    raise RdmaError(text)


# -- at the owner --------------------------------------------------------------------------------


class _Lent:
    """A registration of which other processes have leases."""

    __slots__ = ("key", "lessees", "memory")

    def __init__(self, memory: Memory, key: bytes) -> None:
        self.memory = memory
        self.key = key
        self.lessees: set[int] = set()


class Lender:
    """Grants leases of this process's registrations, for one kind of route.

    Args:
        name: of the kind.
        run: runs tasks that may take long, one after the other.
        lend: makes the key that others need to reach the memory. Raises Unavailable.
        take_back: undoes `lend`, when no lease of the memory is left; on any thread.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        lend: Callable[[Memory], bytes],
        take_back: Callable[[Memory], None],
    ) -> None:
        self._name = name
        self._run = run
        self._lend = lend
        self._take_back = take_back
        self._lent: dict[int, _Lent] = {}
        self._lock = threading.Lock()
        registry.services[f"rdma.{name}.lease"] = self._on_request
        _spi.when_forked(self._forget)

    def _on_request(self, request: _spi.Request) -> None:
        def work() -> bytes:
            found, _ = claimed(request.body, self._name)
            return self._lease(found, request.peer)

        self._run(lambda: request.answer(answered(work)))

    def _lease(self, found: Registration, peer: int) -> bytes:
        number = found.handle.number
        lent = self._lent.get(number)
        if lent is None:
            memory = found.memory
            lent = _Lent(memory, self._lend(memory))
        with self._lock:
            if not found.ended:
                lent.lessees.add(peer)
                self._lent[number] = lent
                return lent.key
        if not lent.lessees:  # otherwise `withdrawn` takes it back
            self._take_back(lent.memory)
        raise RdmaBufferDropped(registry.dropped_text(number))

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """Revoke all leases of a registration that has ended.

        Returns a function that blocks until all of them are revoked; None if there are none.
        """
        with self._lock:
            lent = self._lent.pop(handle.number, None)
        if lent is None:
            return None
        key = _KEY.pack(handle.number, handle.identity)
        answers = [_spi.ask(peer, f"rdma.{self._name}.revoke", key) for peer in lent.lessees]

        def wait() -> None:
            for answer in answers:
                with contextlib.suppress(_spi.Unreachable, _spi.Refused):
                    answer.get()
            self._take_back(lent.memory)

        return wait

    def _forget(self) -> None:
        """Forget the leases in a forked child: they are the parent's."""
        self._lock = threading.Lock()
        self._lent = {}


# -- at the initiator ----------------------------------------------------------------------------


class Lease:
    """A lease of one registration: requested, then settled, later revoked.

    `value` is what `accept` made of the key. `error` is the reason if there is no lease.
    """

    def __init__(self) -> None:
        self.settled = False
        self.value: Any = None
        self.error: RdmaError | Unavailable | None = None
        self._lock = threading.Lock()
        self._revoked = False
        self._under_way = 0
        self._when_settled: list[Callable[[], None]] = []
        self._when_quiet: Callable[[], None] | None = None

    def settle(self, value: Any, error: RdmaError | Unavailable | None = None) -> None:
        """Note the owner's reply: the value, or why there is no lease."""
        with self._lock:
            self.value, self.error, self.settled = value, error, True
            waiting, self._when_settled = self._when_settled, []
        for each in waiting:
            each()

    def when_settled(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the lease is settled.

        Return False, without calling it, if the lease is settled already.
        """
        with self._lock:
            if not self.settled:
                self._when_settled.append(callback)
            return not self.settled

    def enter(self) -> bool:
        """Begin a slice; return False if the lease was revoked. Each True needs a `leave`."""
        with self._lock:
            if not self._revoked:
                self._under_way += 1
            return not self._revoked

    def leave(self) -> None:
        """End a slice."""
        with self._lock:
            self._under_way -= 1
            if self._under_way or self._when_quiet is None:
                return
            quiet, self._when_quiet = self._when_quiet, None
            self.value = None
        quiet()

    def revoke(self, quiet: Callable[[], None]) -> None:
        """Let no further slice begin; call `quiet()` when none is under way."""
        with self._lock:
            self._revoked = True
            if self._under_way:
                self._when_quiet = quiet
                return
            self.value = None
        quiet()


class Peer:
    """An owner, and the leases that this process has of its registrations."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.leases: dict[int, Lease] = {}
        self.gone = False

    def ended(self) -> None:
        """Drop all leases: the owner's process has exited. Called on the reactor thread."""
        self.gone = True
        self.leases.clear()


class Lessee(Generic[P]):
    """Holds leases of other processes' registrations, for one kind of route.

    Args:
        name: of the kind.
        run: runs `accept`.
        accept: makes the `value` of a lease from its key. Raises RdmaError or Unavailable.
        peer: makes a `Peer` for an owner.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        accept: Callable[[P, Handle, bytes], Any],
        peer: Callable[[Handle], P],
    ) -> None:
        self._name = name
        self._run = run
        self._accept = accept
        self._make = peer
        self._peers: dict[bytes, P] = {}
        self._served = 0
        self._lock = threading.Lock()
        _spi.when_forked(self._forget)

    def peer(self, handle: Handle) -> P:
        """Return the owner of a registration, made on first use."""
        uid = _spi.own_uid()
        with self._lock:
            known = self._peers.get(handle.identity)
            if known is not None:
                return known
            made = self._peers[handle.identity] = self._make(handle)
            serves, self._served = self._served == uid, uid
        if not serves:
            _spi.serve(f"rdma.{self._name}.revoke", self._on_revoke)
        _spi.when_gone(handle.uid, lambda _: self._on_end(made))
        return made

    def leases(self, peer: P, handles: list[Handle]) -> list[Lease]:
        """Return the leases of these registrations; request those that are missing."""
        found: list[Lease] = []
        for handle in handles:
            with self._lock:
                lease = peer.leases.get(handle.number)
                new = lease is None
                if lease is None:
                    lease = peer.leases[handle.number] = Lease()
            found.append(lease)
            if new:
                self._ask(peer, handle, lease)
        return found

    def ask(self, handle: Handle) -> Future[bytes]:
        """Request a lease only to find out whether the owner grants it; see `answer_of`."""
        return _spi.ask(handle.uid, f"rdma.{self._name}.lease", claim(handle))

    def _ask(self, peer: P, handle: Handle, lease: Lease) -> None:
        answer = self.ask(handle)

        def accept() -> None:
            try:
                value = self._accept(peer, handle, answer_of(answer, handle))
            except (RdmaError, Unavailable) as error:
                with self._lock:  # a later transfer requests the lease again
                    if peer.leases.get(handle.number) is lease:
                        del peer.leases[handle.number]
                lease.settle(None, error)
            else:
                lease.settle(value)

        answer._notify(lambda: self._run(accept))

    def _on_revoke(self, request: _spi.Request) -> None:
        number, identity = _KEY.unpack(request.body)
        with self._lock:
            peer = self._peers.get(identity)
            lease = None if peer is None else peer.leases.pop(number, None)
        if lease is None:
            request.answer()
        else:
            lease.revoke(request.answer)

    def _on_end(self, peer: P) -> None:
        peer.ended()
        with self._lock:
            if self._peers.get(peer.handle.identity) is peer:
                del self._peers[peer.handle.identity]

    def _forget(self) -> None:
        """Forget the leases in a forked child: they are the parent's."""
        self._lock = threading.Lock()
        self._peers = {}
        self._served = 0
