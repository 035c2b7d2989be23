"""Transfers with NIXL: posted by the initiator, carried out by the hardware, watched by `progress`.

A small transfer of a registration whose lease is there is posted by the thread that wants it, and
mostly done when that has looked once or twice; all else happens on the thread of `progress`. What
is longer than a slice is posted slice by slice, and in between looks at the time.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from monarch import _spi
from monarch.actor import Future
from monarch.rdma import registry
from monarch.rdma.errors import RdmaBufferDropped, RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory
from monarch.rdma.routes import Unavailable, forget
from monarch.rdma.routes.copying import Piece, slices
from monarch.rdma.routes.nixl.lease import (
    REVOKE,
    answer_of,
    ask_for_atomic,
    ask_for_lease,
    revoked_key,
)
from monarch.rdma.routes.nixl.library import Agent, Disconnected, Failed
from monarch.rdma.routes.nixl.progress import progress
from monarch.rdma.transfer import WRITE, Op, Transfer

__all__ = ["NixlRoute"]

_SLICE = 32 << 20  # under a millisecond for a fast card
_AT_ONCE = 64 << 10  # bytes that the caller's thread may post
_LOOKS = 3  # of that thread, before it leaves the rest to `progress`
_PATIENCE = 1.0  # seconds after the end of its time in which a posted slice may still arrive


class _Peer:
    """An owner, as far as NIXL knows it."""

    def __init__(self, handle: Handle) -> None:
        self.name = f"monarch-{handle.identity.hex()}"
        self.leases: dict[int, _Lease] = {}
        self.connection = 0  # counts them
        self.gone = False
        _spi.when_gone(handle.uid, lambda _: self._lost(handle))

    def _lost(self, handle: Handle) -> None:
        self.gone = True
        with _lock:
            _peers.pop(handle.identity, None)

    def part(self, agent: Agent) -> None:
        """End the connection and all that is under way on it; the next transfer makes another."""
        agent.part(self.name)
        self.connection += 1


class _Lease:
    """Of one registration; see `lease`."""

    def __init__(self) -> None:
        self.metadata = b""
        self.error: RdmaError | Unavailable | None = None
        self._connection = -1
        self._revoked = False
        self._under_way = 0
        self._when_settled: list[Callable[[], None]] = []
        self._when_quiet: list[Callable[[], None]] = []

    def settle(self, metadata: bytes, error: RdmaError | Unavailable | None = None) -> None:
        """It has come, or will not."""
        with _lock:
            self.metadata = metadata
            self.error = error
            waiting, self._when_settled = self._when_settled, []
        for each in waiting:
            each()

    def when_settled(self, callback: Callable[[], None]) -> bool:
        """Call it then; False if that has been."""
        with _lock:
            if self.metadata or self.error is not None:
                return False
            self._when_settled.append(callback)
        return True

    def meet(self, agent: Agent, peer: _Peer) -> None:
        """Have the agent know the memory, on the present connection. Raises Failed."""
        if self._connection != peer.connection:
            agent.meet(self.metadata)
            self._connection = peer.connection

    def enter(self) -> bool:
        """A slice is about to be posted; False if the lease was revoked."""
        with _lock:
            if self._revoked:
                return False
            self._under_way += 1
        return True

    def leave(self) -> None:
        """It is no longer under way."""
        with _lock:
            self._under_way -= 1
            if self._under_way:
                return
            quiet, self._when_quiet = self._when_quiet, []
        for each in quiet:
            each()

    def revoke(self, quiet: Callable[[], None]) -> None:
        """No slice begins any more; call `quiet()` when none is under way."""
        with _lock:
            self._revoked = True
            if self._under_way:
                self._when_quiet.append(quiet)
                return
        quiet()


_peers: dict[bytes, _Peer] = {}
_lock = threading.Lock()
_served: set[int] = set()


def _peer_of(handle: Handle) -> _Peer:
    with _lock:
        known = _peers.get(handle.identity)
    if known is not None:
        return known
    uid = _spi.own_uid()
    if uid not in _served:
        _served.add(uid)
        _spi.serve(REVOKE, _on_revoke)
    made = _Peer(handle)
    with _lock:
        return _peers.setdefault(handle.identity, made)


def _on_revoke(request: _spi.Request) -> None:
    identity, number = revoked_key(request)
    with _lock:
        peer = _peers.get(identity)
        lease = None if peer is None else peer.leases.pop(number, None)
    if lease is None:
        request.answer()
    else:
        lease.revoke(request.answer)


class NixlRoute:
    """A `Route`."""

    kind = "nixl"
    about = "NIXL, on a network card or what it finds"
    inline = -1

    def __init__(self, handle: Handle) -> None:
        self._peer = _peer_of(handle)
        watch = progress()
        watch.do(watch.warm)  # while the owner starts its own

    def run(self, ops: list[Op]) -> None:
        """Never asked for: no transfer has a bound on its time here."""
        raise Unavailable("nothing is done in the caller's thread")

    def start(self, transfer: Transfer) -> None:
        """Ask for leases that are missing, then post."""
        job = _Job(self._peer, transfer)
        for handle in job.handles:
            self._lease(handle)
        self._proceed(job, calling=True)

    def _proceed(self, job: _Job, *, calling: bool) -> None:
        """Go on if all leases are there, else when they are; `calling`: in the user's thread."""
        for handle in job.handles:
            lease = self._lease(handle)
            if lease.when_settled(lambda: self._proceed(job, calling=False)):
                return
            if lease.error is not None:
                with _lock:
                    if self._peer.leases.get(handle.number) is lease:
                        del self._peer.leases[handle.number]
                if isinstance(lease.error, Unavailable):
                    job.transfer.reroute(lease.error)
                else:
                    job.transfer.fail(lease.error)
                return
            job.leases[handle.number] = lease
        watch = progress()
        agent = watch.ready
        if calling and agent is not None and job.small and agent.lock.acquire(blocking=False):
            if not job.begin(agent, _LOOKS):
                watch.do(lambda: watch.follow(job))
        else:
            watch.do(lambda: self._begin(job))

    def _begin(self, job: _Job) -> None:
        """On the thread of `progress`."""
        watch = progress()
        agent = watch.agent()
        agent.lock.acquire()
        if not job.begin(agent, 1):
            watch.follow(job)

    def _lease(self, handle: Handle) -> _Lease:
        with _lock:
            lease = self._peer.leases.get(handle.number)
            if lease is not None:
                return lease
            lease = self._peer.leases[handle.number] = _Lease()
        answer = ask_for_lease(handle)
        answer._notify(lambda: progress().do(lambda: self._on_lease(handle, lease, answer)))
        return lease

    def _on_lease(self, handle: Handle, lease: _Lease, answer: Future[bytes]) -> None:
        """On the thread of `progress`: the first lease of a peer starts the agent and connects."""
        try:
            metadata = answer_of(answer, handle)
            agent = progress().agent()
            with agent.lock:
                agent.meet(metadata)
        except (RdmaError, Unavailable) as error:
            lease.settle(b"", error)
        except (Failed, Disconnected) as error:
            lease.settle(b"", Unavailable(f"NIXL cannot connect to the owner: {error}"))
        else:
            lease.settle(metadata)


class _Job:
    """One transfer. What is private happens with the agent's lock; its end is told without."""

    def __init__(self, peer: _Peer, transfer: Transfer) -> None:
        self.transfer = transfer
        self.handles = list({op.handle.number: op.handle for op in transfer.ops}.values())
        self.small = sum(op.nbytes for op in transfer.ops) <= _AT_ONCE
        self.leases: dict[int, _Lease] = {}
        self._peer = peer
        self._slices = slices(transfer.ops, _SLICE)
        self._registered: list[Memory] = []
        self._posted: int | None = None
        self._entered: list[_Lease] = []
        self._waits = False  # for an answer of the owner
        self._outcome: Callable[[], None] | None = None

    # -- from outside ----------------------------------------------------------------------------

    def begin(self, agent: Agent, looks: int) -> bool:
        """Post the first slice and look so often how it does; whether all is over.

        Called with the agent's lock, which it releases.
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
        """Do `step` on the thread of `progress`, and no longer wait."""

        def go_on() -> None:
            agent = progress().agent()
            with agent.lock:
                self._waits = False
                if self._outcome is None:
                    step(agent)

        progress().do(go_on)

    def _told(self) -> bool:
        """Tell the outcome, if there is one; whether there is."""
        if self._outcome is None:
            return False
        self._outcome()
        return True

    # -- one step --------------------------------------------------------------------------------

    def _look(self, agent: Agent) -> bool:
        """Go on if that is possible; whether it was."""
        if self._outcome is not None:
            return True
        if self._peer.gone:
            self._give_up(agent, registry.lost_error(self.handles[0]))
        elif self._posted is None:
            if not self._waits or not self.transfer.late:
                return False
            self._end(agent, late=True)
        else:
            try:
                if not agent.arrived(self._posted):
                    if time.monotonic() < self.transfer.deadline + _PATIENCE:
                        return False
                    self._give_up(agent, None)
                    return True
            except (Failed, Disconnected) as error:
                self._find_out(agent, error)
                return True
            self._retire(agent)
            self._next(agent)
        return True

    def _register(self, agent: Agent) -> bool:
        """Register the local memory; whether that works."""
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
        """Post the next slice."""
        found = next(self._slices, None)
        if found is None:
            self._end(agent)
        elif self.transfer.late:
            self._end(agent, late=True)
        elif found[0] > WRITE:
            self._ask(agent, found[1][0][0])
        else:
            self._post(agent, *found)

    def _post(self, agent: Agent, kind: int, pieces: list[Piece]) -> None:
        try:
            for number in {op.handle.number for op, _, _ in pieces}:
                lease = self.leases[number]
                lease.meet(agent, self._peer)
                if not lease.enter():
                    self._end(agent, RdmaBufferDropped(registry.dropped_text(number)))
                    return
                self._entered.append(lease)
            places = [(op.local, at, op.handle.address + op.offset + at, n) for op, at, n in pieces]
            self._posted = agent.post(kind, places, pieces[0][0].handle.device, self._peer.name)
        except (Failed, Disconnected) as error:
            self._find_out(agent, error)

    def _retire(self, agent: Agent) -> None:
        """Nothing is under way any more."""
        posted, self._posted = self._posted, None
        if posted is not None:
            agent.release(posted)
        while self._entered:
            self._entered.pop().leave()

    def _ask(self, agent: Agent, op: Op) -> None:
        """Have the owner do an atomic operation."""
        try:
            answer = ask_for_atomic(op)
        except RdmaError as error:
            self._end(agent, error)
            return
        self._waits = True

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
        """A slice failed: what that means the owner knows, or its end tells."""
        self._peer.part(agent)
        self._retire(agent)
        self._waits = True
        handle = self.handles[0]
        answer = ask_for_lease(handle)

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

    # -- ends ------------------------------------------------------------------------------------

    def _give_up(self, agent: Agent, error: RdmaError | None) -> None:
        """What is posted must not arrive any more: end the connection."""
        self._peer.part(agent)
        self._end(agent, error, late=error is None)

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


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _peers.clear()
    _served.clear()


_spi.when_forked(_forget)
