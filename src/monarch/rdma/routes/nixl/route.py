"""Transfers with NIXL: posted by the initiator, moved by the hardware, polled by `progress`.

A small transfer whose leases have been granted is posted by the calling thread, and is usually
complete after one or two polls there. Everything else runs on the thread of `progress`. A long
transfer is posted slice by slice, and checks the time in between. A posted slice cannot be
cancelled: the library forgets it, and its bytes arrive all the same. So a transfer ends only after
its bytes have arrived, or NIXL reports that they will not. This wait has a limit only if the owner
has exited.

NIXL has no atomic operations, so they are requests to the owner.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaBufferDropped, RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory, memory_of
from monarch.rdma.routes import Unavailable, forget
from monarch.rdma.routes.copying import Piece, slices
from monarch.rdma.routes.lease import (
    Lease,
    Lender,
    Lessee,
    Peer,
    answer_of,
    answered,
    claim,
    claimed,
)
from monarch.rdma.routes.local import LocalRoute
from monarch.rdma.routes.nixl.library import Agent, Disconnected, Failed
from monarch.rdma.routes.nixl.progress import progress
from monarch.rdma.table import Contended
from monarch.rdma.transfer import WRITE, Op, Transfer

__all__ = ["NixlRoute", "lender"]

_SLICE = 32 << 20  # takes a fast card less than a millisecond
_AT_ONCE = 64 << 10  # most bytes that the caller's thread posts
_LOOKS = 3  # polls of that thread, before `progress` takes over
_PATIENCE = 1.0  # seconds to wait for a lost owner's bytes, or for another atomic operation
_ATOMICALLY = "rdma.nixl.atomic"
_ATOMIC = struct.Struct("=QiQQ")  # offset, kind, operands
_WORD = 8


class _Peer(Peer):
    """An owner, with its name in NIXL and the state of the connection to it."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self.name = f"monarch-{handle.identity.hex()}"
        self.connection = 0  # the number of the present connection
        self.given_up = 0.0  # after the owner's exit: when a slice under way counts as lost

    def ended(self) -> None:
        """Close the connection: the owner's process has exited. Called on the reactor thread."""
        self.given_up = time.monotonic() + _PATIENCE
        super().ended()
        progress().do(self._forget)

    def _forget(self) -> None:
        agent = progress().ready
        if agent is not None:
            with agent.lock:
                agent.part(self.name)

    def part(self, agent: Agent) -> None:
        """Close the connection, and abort what is under way; the next transfer connects again."""
        agent.part(self.name)
        self.connection += 1


class _Key:
    """The value of a lease of NIXL: the metadata of the owner's registration."""

    __slots__ = ("_connection", "_metadata")

    def __init__(self, metadata: bytes) -> None:
        self._metadata = metadata
        self._connection = -1

    def meet(self, agent: Agent, peer: _Peer) -> None:
        """Load the metadata for the present connection. Called with the agent's lock held."""
        if self._connection != peer.connection:
            agent.meet(self._metadata)
            self._connection = peer.connection


def _accept(peer: _Peer, _: Handle, metadata: bytes) -> _Key:
    """Make the value of a lease, on the thread of `progress`.

    The first lease starts the agent; the first lease of an owner connects to that owner.
    """
    agent = progress().agent()
    key = _Key(metadata)
    try:
        with agent.lock:
            key.meet(agent, peer)
    except (Failed, Disconnected) as error:
        raise Unavailable(f"NIXL cannot connect to the owner: {error}") from None
    return key


def _lend(memory: Memory) -> bytes:
    agent = progress().agent()
    try:
        with agent.lock:
            agent.register(memory)
            return agent.metadata(memory)
    except Failed as error:
        raise Unavailable(f"NIXL cannot register memory of {memory.device}: {error}") from None


def _take_back(memory: Memory) -> None:
    agent = progress().ready
    if agent is not None:
        with agent.lock:
            agent.unregister(memory)


def _on_atomic(request: _spi.Request) -> None:
    """Carry out an atomic operation for an initiator, at the owner."""

    def work() -> bytes:
        found, rest = claimed(request.body, NixlRoute.kind)
        offset, kind, first, second = _ATOMIC.unpack(rest)
        old = bytearray(_WORD)
        op = Op(kind, found.handle, offset, memory_of(old), _WORD, (first, second))
        try:
            LocalRoute().atomically(op, time.monotonic() + _PATIENCE, os.sched_yield)
        except Contended:
            raise RdmaError("another process does not end its atomic operation") from None
        return bytes(old)

    progress().do(lambda: request.answer(answered(work)))


lender = Lender("nixl", lambda task: progress().do(task), _lend, _take_back)
_lessee = Lessee("nixl", lambda task: progress().do(task), _accept, _Peer)
registry.services[_ATOMICALLY] = _on_atomic


class NixlRoute:
    """The `Route` that transfers with NIXL."""

    kind = "nixl"
    about = "NIXL, on a network card or what it finds"
    inline = -1

    def __init__(self, handle: Handle) -> None:
        self._peer = _lessee.peer(handle)
        watch = progress()
        watch.do(watch.warm)  # meanwhile the owner starts its own agent

    def run(self, ops: list[Op]) -> None:
        """Raise Unavailable: `run` would have to return in time, which NIXL cannot promise."""
        raise Unavailable("nothing is done in the caller's thread")

    def start(self, transfer: Transfer) -> None:
        """Request the leases that are missing, then post."""
        self._proceed(_Job(self._peer, transfer), calling=True)

    def _proceed(self, job: _Job, *, calling: bool) -> None:
        """Begin the job if all leases are settled; otherwise continue when they are.

        `calling`: whether this is the thread of the user.
        """
        if not job.leases:
            found = _lessee.leases(self._peer, job.handles)
            job.leases = {
                handle.number: lease for handle, lease in zip(job.handles, found, strict=True)
            }
        for lease in job.leases.values():
            if lease.when_settled(lambda: self._proceed(job, calling=False)):
                return
            if isinstance(lease.error, Unavailable):
                job.transfer.reroute(lease.error)
                return
            if lease.error is not None:
                job.transfer.fail(lease.error)
                return
        watch = progress()
        agent = watch.ready
        if calling and agent is not None and job.small and agent.lock.acquire(blocking=False):
            if not job.begin(agent, _LOOKS):
                watch.do(lambda: watch.follow(job))
        else:
            watch.do(lambda: self._begin(job))

    def _begin(self, job: _Job) -> None:
        """Begin the job on the thread of `progress`."""
        watch = progress()
        agent = watch.agent()
        agent.lock.acquire()
        if not job.begin(agent, 1):
            watch.follow(job)


class _Job:
    """One transfer.

    Private methods are called with the agent's lock held; the outcome is reported without it.
    """

    def __init__(self, peer: _Peer, transfer: Transfer) -> None:
        self.transfer = transfer
        self.handles = list({op.handle.number: op.handle for op in transfer.ops}.values())
        self.small = sum(op.nbytes for op in transfer.ops) <= _AT_ONCE
        self.leases: dict[int, Lease] = {}
        self._peer = peer
        self._slices = slices(transfer.ops, _SLICE)
        self._registered: list[Memory] = []
        self._posted: int | None = None
        self._entered: list[Lease] = []
        self._waits = False  # whether a reply of the owner is awaited
        self._outcome: Callable[[], None] | None = None

    # -- entry points ----------------------------------------------------------------------------

    def begin(self, agent: Agent, looks: int) -> bool:
        """Post the first slice and poll it `looks` times; return whether the transfer has ended.

        Called with the agent's lock held; releases it.
        """
        try:
            if not self.transfer.begin():
                return True
            if self._register(agent):
                self._next(agent)
            while looks and self._outcome is None:
                self._look(agent)
                looks -= 1
        finally:
            agent.lock.release()
        return self._told()

    def look(self) -> bool | None:
        """See `progress.Job`."""
        agent = progress().agent()
        with agent.lock:
            moved = self._look(agent)
        return self._told() or (False if moved else None)

    def _go_on(self, step: Callable[[Agent], None]) -> None:
        """Run `step` on the thread of `progress`: the awaited reply has arrived."""

        def go_on() -> None:
            agent = progress().agent()
            with agent.lock:
                self._waits = False
                if self._outcome is None:
                    step(agent)

        progress().do(go_on)

    def _told(self) -> bool:
        """Report the outcome, if there is one; return whether there is."""
        if self._outcome is None:
            return False
        self._outcome()
        return True

    # -- one step --------------------------------------------------------------------------------

    def _look(self, agent: Agent) -> bool:
        """Advance if possible; return whether the job advanced."""
        if self._outcome is not None:
            return True
        if self._posted is not None:
            try:
                if not agent.arrived(self._posted):
                    if not self._peer.gone or time.monotonic() < self._peer.given_up:
                        return False
                    self._end(agent, registry.lost_error(self.handles[0]))
                    return True
            except (Failed, Disconnected) as error:
                self._find_out(agent, error)
                return True
            self._retire(agent)
            self._next(agent)
        elif self._peer.gone:
            self._end(agent, registry.lost_error(self.handles[0]))
        elif self._waits and self.transfer.late:
            self._end(agent, late=True)
        else:
            return False
        return True

    def _register(self, agent: Agent) -> bool:
        """Register the local memory; return whether that succeeded."""
        for op in self.transfer.ops:
            if op.kind > WRITE:
                continue
            local = op.local
            part = Memory(local.address, op.nbytes, True, local.pin, local.device)
            try:
                agent.register(part)
            except Failed as error:
                text = f"NIXL cannot register memory of {part.device} in this process: {error}"
                self._end(agent, RdmaError(text))
                return False
            self._registered.append(part)
        return True

    def _next(self, agent: Agent) -> None:
        """Post the next slice, or end the transfer if none is left."""
        found = next(self._slices, None)
        if found is None:
            self._end(agent)
        elif self.transfer.late:
            self._end(agent, late=True)
        elif found[0] > WRITE:
            self._ask(found[1][0][0])
        else:
            self._post(agent, *found)

    def _post(self, agent: Agent, kind: int, pieces: list[Piece]) -> None:
        try:
            for number in {op.handle.number for op, _, _ in pieces}:
                lease = self.leases[number]
                if not lease.enter():
                    self._end(agent, RdmaBufferDropped(registry.dropped_text(number)))
                    return
                self._entered.append(lease)
                lease.value.meet(agent, self._peer)
            places = [(op.local, at, op.handle.address + op.offset + at, n) for op, at, n in pieces]
            self._posted = agent.post(kind, places, pieces[0][0].handle.device, self._peer.name)
        except (Failed, Disconnected) as error:
            self._find_out(agent, error)

    def _retire(self, agent: Agent) -> None:
        """Release the posted request and leave its leases: no slice is under way."""
        posted, self._posted = self._posted, None
        if posted is not None:
            agent.release(posted)
        while self._entered:
            self._entered.pop().leave()

    def _ask(self, op: Op) -> None:
        """Request an atomic operation from the owner."""
        self._waits = True
        rest = _ATOMIC.pack(op.offset, op.kind, *op.operands)
        answer = _spi.ask(op.handle.uid, _ATOMICALLY, claim(op.handle) + rest)

        def took_place(agent: Agent) -> None:
            try:
                old = answer_of(answer, op.handle)
            except RdmaError as error:
                self._end(agent, error)
            except Unavailable as error:
                self._end(agent, RdmaError(str(error)))
            else:
                ctypes.memmove(op.local.address, old, len(old))
                self._next(agent)

        answer._notify(lambda: self._go_on(took_place))

    def _find_out(self, agent: Agent, error: Failed | Disconnected) -> None:
        """Ask the owner why a slice failed: the reply, or its absence, gives the cause."""
        self._peer.part(agent)
        self._retire(agent)
        self._waits = True
        handle = self.handles[0]
        answer = _lessee.ask(handle)

        def heard(agent: Agent) -> None:
            try:
                answer_of(answer, handle)
            except RdmaError as cause:
                self._end(agent, cause)
            except Unavailable as cause:
                self._end(agent, RdmaError(f"NIXL says {error}; {cause}"))
            else:
                text = f"the connection to {handle.owner} broke: NIXL says {error}"
                self._end(agent, RdmaError(text))

        answer._notify(lambda: self._go_on(heard))

    # -- the end of a transfer -------------------------------------------------------------------

    def _end(self, agent: Agent, error: RdmaError | None = None, *, late: bool = False) -> None:
        self._retire(agent)
        for memory in self._registered:
            agent.unregister(memory)
        self._registered = []
        transfer = self.transfer
        if late:
            self._outcome = transfer.fail_late
        elif error is None:
            self._outcome = transfer.done
        else:
            if self._peer.gone:
                forget(self.handles[0])
            self._outcome = lambda: transfer.fail(error)
