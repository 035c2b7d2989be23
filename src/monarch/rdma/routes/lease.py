"""Leases: how an owner lets others at its memory by ways that ask nobody, and takes that back.

Once a peer has the key of some memory (of a network card), or has mapped it (of a GPU), it reads
and writes without the owner; and what the owner does to its own registration does not end that. On
one host NIXL copies with the kernel, for a card it keeps registrations for the next time, and what
was mapped stays mapped. So the owner lends. Before its first transfer a peer asks for the *lease*
of a registration, over the links of messages, which are authenticated; with it comes the key. When
the registration ends the owner tells all who have one, and the drop waits until each has said that
it begins no slice any more and that none is under way. A peer that is gone has none. In between
nothing is asked: transfers are one-sided.

Rejected: to ask before and after every transfer, which costs a round trip and the owner's Python.
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
"""Runs a task, later and elsewhere."""

_CLAIM = struct.Struct("=Q16s16sQQ?")  # number, identity, token, address, size, writable
_KEY = struct.Struct("=Q16s")  # number, identity
_OK, _DROPPED, _FORBIDDEN, _LOST, _FAILED, _UNAVAILABLE = range(6)

P = TypeVar("P", bound="Peer")


# -- requests about a registration ---------------------------------------------------------------


def claim(handle: Handle) -> bytes:
    """What a request to the owner says of the registration that it is about."""
    return _CLAIM.pack(
        handle.number,
        handle.identity,
        handle.token,
        handle.address,
        handle.size,
        handle.writable,
    )


def claimed(body: bytes) -> tuple[Registration, bytes]:
    """At the owner: the registration, if what is said of it is true; and the rest of the request.

    Raises RdmaError.
    """
    number, identity, token, address, size, writable = _CLAIM.unpack_from(body)
    own = registry.own_registry()
    if identity != own.identity:
        raise RdmaOwnerLost
    found = own.find(number, token)
    handle = found.handle
    if (address, size, writable) != (handle.address, handle.size, handle.writable):
        raise RdmaPermissionError(registry.forged_text(number))
    if found.memory.stale:
        raise RdmaError(registry.moved_text(handle))
    return found, body[_CLAIM.size :]


def answered(work: Callable[[], bytes]) -> bytes:
    """An answer: what `work` gives, or why it fails."""
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
    """What the owner's `work` gave. Raises RdmaError, or Unavailable."""
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
    """A registration that others have a lease of."""

    __slots__ = ("key", "lessees", "memory")

    def __init__(self, memory: Memory, key: bytes) -> None:
        self.memory = memory
        self.key = key
        self.lessees: set[int] = set()


class Lender:
    """Lends registrations of this process, for one kind of route.

    Args:
        name: of the kind.
        run: runs what may take long, one after the other.
        lend: what others need to reach the memory. Raises Unavailable.
        take_back: the same memory is not lent any more; on any thread.
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
            found, _ = claimed(request.body)
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
        if not lent.lessees:  # else `withdrawn` has it
            self._take_back(lent.memory)
        raise RdmaBufferDropped(registry.dropped_text(number))

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """A registration has ended: take all leases of it back. What returns waits for that."""
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
        """In a forked child: what is lent is the parent's."""
        self._lock = threading.Lock()
        self._lent = {}


# -- at the initiator ----------------------------------------------------------------------------


class Lease:
    """Of one registration. `value` is what was made of its key; `error` why there is none."""

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
        """It has come, or will not."""
        with self._lock:
            self.value, self.error, self.settled = value, error, True
            waiting, self._when_settled = self._when_settled, []
        for each in waiting:
            each()

    def when_settled(self, callback: Callable[[], None]) -> bool:
        """Call it then; False, and it is not called, if that has been."""
        with self._lock:
            if not self.settled:
                self._when_settled.append(callback)
            return not self.settled

    def enter(self) -> bool:
        """A slice is about to begin; False if the lease was revoked. Each needs a `leave`."""
        with self._lock:
            if not self._revoked:
                self._under_way += 1
            return not self._revoked

    def leave(self) -> None:
        """It is no longer under way."""
        with self._lock:
            self._under_way -= 1
            if self._under_way or self._when_quiet is None:
                return
            quiet, self._when_quiet = self._when_quiet, None
            self.value = None
        quiet()

    def revoke(self, quiet: Callable[[], None]) -> None:
        """No slice begins any more; call `quiet()` when none is under way."""
        with self._lock:
            self._revoked = True
            if self._under_way:
                self._when_quiet = quiet
                return
            self.value = None
        quiet()


class Peer:
    """An owner, and the leases that this process has of it."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.leases: dict[int, Lease] = {}
        self.gone = False

    def ended(self) -> None:
        """Its process is gone; on the reactor thread."""
        self.gone = True
        self.leases.clear()


class Lessee(Generic[P]):
    """Has leases of registrations of other processes, for one kind of route.

    Args:
        name: of the kind.
        run: runs `accept`.
        accept: makes of a key what the `value` of a lease is. Raises RdmaError or Unavailable.
        peer: makes a peer.
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
        """The owner of a registration."""
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
        """Of these registrations, there or asked for."""
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
        """Ask for a lease that only shows whether there is one; see `answer_of`."""
        return _spi.ask(handle.uid, f"rdma.{self._name}.lease", claim(handle))

    def _ask(self, peer: P, handle: Handle, lease: Lease) -> None:
        answer = self.ask(handle)

        def accept() -> None:
            try:
                value = self._accept(peer, handle, answer_of(answer, handle))
            except (RdmaError, Unavailable) as error:
                with self._lock:  # whoever comes later asks anew
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
        """In a forked child: leases are the parent's."""
        self._lock = threading.Lock()
        self._peers = {}
        self._served = 0
