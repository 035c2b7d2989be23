"""Leases: how an owner lets others at its memory with NIXL, and how it takes that back.

A network card asks nobody. Once a peer has the key of some memory it can read and write it, and
that the owner deregisters the memory again does not end this: on one host the library copies with
the kernel, and for a card it keeps registrations for the next time. So the owner lends. Before its
first transfer a peer asks for the *lease* of a registration, over the links of messages, which are
authenticated; with it comes the key. When the registration ends the owner tells all who have one,
and the drop waits until each has said that it begins no transfer any more and that none is under
way. A peer that is gone has none. In between nothing is asked: transfers are one-sided.

Rejected: to ask before and after every transfer, which costs a round trip and the owner's Python.

Atomic operations, which the library does not have, are requests to the owner.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable

from monarch import _spi
from monarch.actor import Future
from monarch.rdma import registry
from monarch.rdma.errors import RdmaBufferDropped, RdmaError, RdmaOwnerLost, RdmaPermissionError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import CPU, Memory, memory_of
from monarch.rdma.registry import Registration
from monarch.rdma.routes import Unavailable
from monarch.rdma.routes.local import LocalRoute
from monarch.rdma.routes.nixl.library import Failed
from monarch.rdma.routes.nixl.progress import progress
from monarch.rdma.table import Contended
from monarch.rdma.transfer import Op

__all__ = [
    "REVOKE",
    "answer_of",
    "ask_for_atomic",
    "ask_for_lease",
    "revoked_key",
    "withdrawn",
]

_LEASE = "rdma.nixl.lease"
_ATOMIC = "rdma.nixl.atomic"
REVOKE = "rdma.nixl.revoke"
"""What an initiator answers when it has no lease of a registration any more."""

_CLAIM = struct.Struct("=Q16s16sQQ?")  # number, identity, token, address, size, writable
_OPERANDS = struct.Struct("=QiQQ")  # offset, kind, operands
_KEY = struct.Struct("=Q16s")  # number, identity
_WORD = 8
_CONTENDED = 1.0  # seconds to wait for another atomic operation

_OK, _DROPPED, _FORBIDDEN, _LOST, _FAILED, _UNAVAILABLE = range(6)


# -- at the owner --------------------------------------------------------------------------------


class _Lent:
    """A registration that others have a lease of."""

    __slots__ = ("lessees", "memory", "metadata")

    def __init__(self, memory: Memory, metadata: bytes) -> None:
        self.memory = memory
        self.metadata = metadata
        self.lessees: set[int] = set()


_lent: dict[int, _Lent] = {}
_lock = threading.Lock()


def _on_lease(request: _spi.Request) -> None:
    claim = _CLAIM.unpack(request.body)
    progress().do(lambda: request.answer(_answered(lambda: _lend(_claimed(*claim), request.peer))))


def _on_atomic(request: _spi.Request) -> None:
    claim = _CLAIM.unpack_from(request.body)
    offset, kind, *operands = _OPERANDS.unpack_from(request.body, _CLAIM.size)

    def carry_out() -> bytes:
        found = _claimed(*claim)
        old = memory_of(bytearray(_WORD))
        op = Op(kind, found.handle, offset, old, _WORD, (operands[0], operands[1]))
        try:
            LocalRoute().atomically(op, time.monotonic() + _CONTENDED, os.sched_yield)
        except Contended:
            raise RdmaError("another process does not end its atomic operation") from None
        return bytes(old.pin)

    progress().do(lambda: request.answer(_answered(carry_out)))


def _answered(work: Callable[[], bytes]) -> bytes:
    """What `work` gives, or why it fails."""
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
    except Failed as error:
        status, text = _UNAVAILABLE, f"NIXL cannot register the memory in its owner: {error}\n"
    except Unavailable as error:
        status, text = _UNAVAILABLE, f"{error.reason}, in the owner\n{error.remedy}"
    return bytes([status]) + text.encode()


def _claimed(
    number: int, identity: bytes, token: bytes, address: int, size: int, writable: bool
) -> Registration:
    """The registration that a handle is about, if it says of it what is true."""
    own = registry.own_registry()
    if identity != own.identity:
        raise RdmaOwnerLost
    found = own.find(number, token)
    handle = found.handle
    if (address, size, writable) != (handle.address, handle.size, handle.writable):
        raise RdmaPermissionError(registry.forged_text(number))
    if found.memory.stale:
        raise RdmaError(registry.moved_text(handle))
    return found


def _lend(found: Registration, peer: int) -> bytes:
    """On the thread of `progress`, which alone adds leases."""
    number = found.handle.number
    agent = progress().agent()
    lent = _lent.get(number)
    if lent is None:
        memory = found.memory
        with agent.lock:
            agent.register(memory)
            lent = _Lent(memory, agent.metadata(memory))
    with _lock:
        if not found.ended:
            lent.lessees.add(peer)
            _lent[number] = lent
            return lent.metadata
    if lent.lessees:  # `withdrawn` does the rest
        raise RdmaBufferDropped(registry.dropped_text(number))
    with agent.lock:
        agent.unregister(lent.memory)
    raise RdmaBufferDropped(registry.dropped_text(number))


def withdrawn(handle: Handle) -> Callable[[], None] | None:
    """A registration has ended: take all leases of it back. What returns waits for that."""
    with _lock:
        lent = _lent.pop(handle.number, None)
    if lent is None:
        return None
    key = _KEY.pack(handle.number, handle.identity)
    answers = [_spi.ask(peer, REVOKE, key) for peer in lent.lessees]

    def wait() -> None:
        for answer in answers:
            with contextlib.suppress(_spi.Unreachable, _spi.Refused):
                answer.get()
        agent = progress().ready
        if agent is not None:
            with agent.lock:
                agent.unregister(lent.memory)

    return wait


registry.services[_LEASE] = _on_lease
registry.services[_ATOMIC] = _on_atomic


# -- at the initiator ----------------------------------------------------------------------------


def ask_for_lease(handle: Handle) -> Future[bytes]:
    """The lease of a registration; see `answer_of`."""
    return _spi.ask(handle.uid, _LEASE, _claim(handle))


def ask_for_atomic(op: Op) -> Future[bytes]:
    """The eight bytes that were there before; see `answer_of`."""
    if op.handle.device != CPU:
        raise RdmaError(f"atomic operations are for main memory, not for {op.handle.device}")
    rest = _OPERANDS.pack(op.offset, op.kind, *op.operands)
    return _spi.ask(op.handle.uid, _ATOMIC, _claim(op.handle) + rest)


def _claim(handle: Handle) -> bytes:
    return _CLAIM.pack(
        handle.number,
        handle.identity,
        handle.token,
        handle.address,
        handle.size,
        handle.writable,
    )


def answer_of(future: Future[bytes], handle: Handle) -> bytes:
    """What the owner gives. Raises RdmaError, or Unavailable."""
    try:
        answer = future.get(0)
    except _spi.Unreachable:
        raise registry.lost_error(handle) from None
    except _spi.Refused as error:
        raise Unavailable(f"the owner does not know of NIXL: {error}") from None
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


def revoked_key(request: _spi.Request) -> tuple[bytes, int]:
    """The registration that a request for `REVOKE` is about: its owner's identity, its number."""
    number, identity = _KEY.unpack(request.body)
    return identity, number


def _forget() -> None:
    """In a forked child: what is lent is the parent's."""
    global _lock
    _lock = threading.Lock()
    _lent.clear()


_spi.when_forked(_forget)
