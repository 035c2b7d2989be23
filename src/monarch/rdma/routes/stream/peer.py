"""The initiator's side: the transfers and connections of this process with one owner.

Transfers are cut into chunks, each of which is one request. Chunks of the waiting transfers are
dealt out to connections in turn: enough to keep each connection busy, and no more, so that a later
transfer does not wait for long. A `Lane` is a connection with its unanswered requests.

The first lane is a side stream. It exists as soon as it is opened, and closes only when the owner
or its host is lost. So the loss of this lane is the loss of the owner (`RdmaOwnerLost`). If the
owner is on another host, agents carry the side stream; this process then requests a ticket
from the owner, and the direct connection takes over. A direct connection may break. Then the owner
is asked to close it, and after the owner's reply the unanswered requests are sent again. (Except
atomic operations: it is unknown whether they were carried out.)

When its time is over, a transfer ends at once. Replies that still arrive are discarded. A chunk to
be written whose sending has begun is sent completely.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.identity import own_host
from monarch.rdma.routes.stream.chunk import CHUNK, Chunk, Job
from monarch.rdma.routes.stream.connection import Item
from monarch.rdma.routes.stream.driver import data_reactor
from monarch.rdma.routes.stream.lane import Lane
from monarch.rdma.routes.stream.message import GONE, INVITE, RECALL
from monarch.rdma.routes.stream.server import PURPOSE
from monarch.rdma.transfer import ADD, WRITE, Transfer

__all__ = ["Peer"]

_WINDOW = 8 * CHUNK  # most bytes of a lane that are requested or sent, and unanswered
_UNANSWERED = 1024  # most unanswered requests of a lane
_BIG = 64 << 10  # bytes after which the next transfer has its turn
_DIAL = 3.0  # seconds until a direct connection counts as impossible
_SILENCE = 2.0  # seconds without a byte until a lane is closed on which a transfer timed out
_AGAIN = 1.0  # seconds until a direct connection that broke is replaced
_RETRY = 10.0  # seconds until another attempt, after the replacement has failed


class Peer:
    """An owner. `ended` is called once, when its last connection closes; see `Stream._ended`."""

    def __init__(self, handle: Handle, ended: Callable[[Peer, str | None], None]) -> None:
        self.identity = handle.identity
        self.handle = handle
        self._ended = ended
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()  # jobs with chunks that are not requested yet
        self._open: dict[Job, None] = {}  # jobs that have not ended
        self._again: deque[Chunk] = deque()  # chunks to be requested once more
        self._loss: Callable[[Handle], RdmaError] | None = None  # makes the error once it is lost
        self._wanted = max(1, _spi.settings.rdma_tcp_fallback_parallelism)
        self._lanes: list[Lane] = []  # all open lanes
        self._direct: list[Lane] = []
        self._dials = 0  # attempts under way
        self._broke = False  # whether a direct connection has broken
        self._near = handle.host == own_host()  # a guess, until the owner reports it
        self.how = "a socket"
        """How the bytes are carried, as a text for people."""
        self._first = self._side_stream()
        self._dealt: tuple[Lane, ...] = (self._first,)  # the lanes that chunks are dealt out to
        self._invite()
        self._first.connection.start()
        if handle.uid != _spi.own_uid():
            _spi.when_gone(handle.uid, lambda _: data_reactor().call_soon(self._gone))

    def _side_stream(self) -> Lane:
        stream = _spi.open_stream(self.handle.uid, PURPOSE)
        lane = Lane(self, stream, 0, self._side_stream_ended)
        self._lanes.append(lane)
        return lane

    # -- transfers -------------------------------------------------------------------------------

    def start(self, transfer: Transfer) -> None:
        """Begin a transfer; callable on any thread."""
        job = Job(transfer)
        if not transfer.begin(lambda: data_reactor().call_soon(self._abort, job)):
            return
        with self._lock:
            loss = self._loss
            if loss is None:
                self._open[job] = None
                self._jobs.append(job)
        if loss is not None:
            transfer.fail(loss(transfer.ops[0].handle))
            return
        for lane in self._dealt:
            lane.connection.flush()

    def more_for(self, lane: Lane) -> list[Item]:
        """Return the next requests for this lane, if there is room for any."""
        items: list[Item] = []
        if not (self._jobs or self._again):
            return items  # read without the lock: each thread that adds a job flushes afterwards
        outgoing = 0
        with self._lock:
            if lane not in self._dealt:
                return items
            while lane.load < _WINDOW and len(lane.chunks) < _UNANSWERED and outgoing < CHUNK:
                chunk = self._take()
                if chunk is None:
                    break
                try:
                    items += lane.request(chunk)
                except RdmaError as error:  # the device does not read its memory
                    data_reactor().call_soon(self._not_asked, lane, chunk, error)
                if chunk.op.kind == WRITE:
                    outgoing += chunk.count
        return items

    def _not_asked(self, lane: Lane, chunk: Chunk, error: RdmaError) -> None:
        """Fail a chunk that could not be requested.

        Runs later, since a user's callback may use the very lane that was about to send.
        """
        self.answered(lane, chunk, error)
        lane.connection.flush()

    def _take(self) -> Chunk | None:
        while self._again:
            chunk = self._again.popleft()
            if not chunk.job.over:
                return chunk
        while self._jobs:
            job = self._jobs[0]
            taken = job.take()
            if taken is None:
                self._jobs.popleft()
                continue
            if job.turn >= _BIG:
                job.turn = 0
                self._jobs.rotate(-1)
            return taken
        return None

    def answered(self, lane: Lane, chunk: Chunk, error: RdmaError | None) -> None:
        """Note that a chunk is complete, or refused with `error`; on the data thread."""
        job = chunk.job
        with self._lock:
            if lane.chunks.pop(chunk.ident, None) is None:
                return  # the chunk was requested again, on another lane
            lane.load -= chunk.count
            chunk.abandon()
            job.left -= 1
            if error is not None:
                job.fail(error)
            finished = self._finished(job)
        if finished:
            job.finish()

    def _finished(self, job: Job) -> bool:
        """Whether the job ends now; if so, it is marked as over."""
        if job.over or job.left or job.next is not None:
            return False
        job.over = True
        del self._open[job]
        return True

    def _abort(self, job: Job) -> None:
        """End a job whose time is over; on the data thread, so that no byte arrives meanwhile."""
        with self._lock:
            if job.over:
                return
            job.over = True
            job.next = None
            del self._open[job]
            silent: list[Lane] = []
            for lane in self._lanes:
                mine = [chunk for chunk in lane.chunks.values() if chunk.job is job]
                for chunk in mine:
                    chunk.abandon()
                if mine and lane.number and time.monotonic() - lane.heard > _SILENCE:
                    silent.append(lane)
        job.transfer.fail_late()
        for lane in silent:
            lane.connection.close("nothing came for too long")

    # -- connections -----------------------------------------------------------------------------

    def _invite(self) -> None:
        """Request tickets for direct connections."""
        if self._loss is None:
            for _ in range(self._wanted - len(self._direct) - self._dials):
                self._dials += 1
                self._first.ask(INVITE, 0, self._invited)

    def _invited(self, body: bytes) -> None:
        said: dict[str, Any] = json.loads(body)
        self._near = "near" in said
        if self._near:
            self.how = "a socket within this host"
            while len(self._dealt) < self._wanted:
                with self._lock:
                    lane = self._side_stream()
                    self._dealt += (lane,)
                lane.connection.start()
        elif "reason" in said:
            self._not_joined(said["reason"])
        else:
            invitation = _spi.Ticket(
                said["address"],
                said["port"],
                bytes.fromhex(said["key"]),
                bytes.fromhex(said["certificate"]),
            )
            number = said["number"]
            _spi.start_thread("monarch-rdma-dial", lambda: self._come(invitation, number))
            self._carried("a direct connection is being made")

    def _come(self, invitation: _spi.Ticket, number: int) -> None:
        reactor = data_reactor()
        try:
            wire = _spi.come(invitation, _DIAL)
        except (OSError, _spi.HandshakeError, _spi.SecretError) as error:
            where = f"{invitation.address}, port {invitation.port}"
            why = getattr(error, "strerror", None) or str(error)
            reactor.call_soon(self._not_joined, f"no direct connection to {where}: {why}")
        else:
            secured = bool(invitation.certificate)
            reactor.call_soon(self._joined, wire, number, invitation.address, secured)

    def _carried(self, reason: str) -> None:
        if not self._direct:
            self.how = f"carried by the agents of the two hosts ({reason})"

    def _not_joined(self, reason: str) -> None:
        self._dials -= 1
        self._carried(reason)
        if self._broke:  # a direct connection existed before, so one may be possible again
            data_reactor().call_later(_RETRY, self._invite)

    def _joined(self, wire: _spi.Wire, number: int, address: str, secured: bool) -> None:
        self._dials -= 1
        if self._loss is not None:
            wire.close()
            return
        _notice_silence(wire)
        lane = Lane(self, wire, number, self._direct_ended)
        with self._lock:
            self._lanes.append(lane)
            self._direct.append(lane)
            self._dealt = tuple(self._direct)
        self.how = f"TCP to {address}" + (", TLS 1.3" if secured else "")
        if len(self._direct) > 1:
            self.how += f", {len(self._direct)} connections"
        lane.connection.start()
        lane.connection.flush()

    def _direct_ended(self, lane: Lane) -> None:
        """Replace a direct connection that broke."""
        self._broke = True
        with self._lock:
            self._lanes.remove(lane)
            self._direct.remove(lane)
            self._dealt = tuple(self._direct) or (self._first,)
            over = self._loss is not None
        self._carried(f"a direct connection broke: {lane.reason}")
        if not over:
            self._first.ask(RECALL, lane.number, lambda _: self._recalled(lane))
            data_reactor().call_later(_AGAIN, self._invite)

    def _recalled(self, lane: Lane) -> None:
        """Request again what was unanswered on a lane that the owner has closed, too."""
        ended: list[Job] = []
        with self._lock:
            for chunk in lane.chunks.values():
                if chunk.op.kind >= ADD:
                    text = f"the connection broke, {lane.reason}: whether the atomic operation "
                    chunk.job.fail(RdmaError(text + "was carried out is not known"))
                    chunk.job.left -= 1
                    if self._finished(chunk.job):
                        ended.append(chunk.job)
                elif not chunk.job.over:
                    self._again.append(chunk)
            lane.chunks.clear()
        for job in ended:
            job.finish()
        for other in self._dealt:
            other.connection.flush()

    def _gone(self) -> None:
        """Close the side stream: supervision reports that the owner has exited."""
        self._first.connection.close("the process has ended")

    def _side_stream_ended(self, lane: Lane) -> None:
        """Fail all transfers: the owner is lost, or refuses this process's requests."""
        status, text = lane.farewell or (GONE, "")
        lost = text if status == GONE else None
        if lost == "" and not self._near:
            lost = "its process has exited, or its host can no longer be reached"

        def loss(handle: Handle) -> RdmaError:
            if lost is None:
                return RdmaError(f"the owner of buffer {handle.number}: {text}")
            return registry.lost_error(handle, lost)

        with self._lock:
            if self._loss is not None:
                return
            self._loss = loss
            jobs, self._open = list(self._open), {}
            for job in jobs:
                job.over = True
            lanes = list(self._lanes)
            for other in lanes:
                for chunk in other.chunks.values():
                    chunk.abandon()
        self._ended(self, lost)
        for other in lanes:
            other.connection.close("the owner is lost")
        for job in jobs:
            job.transfer.fail(loss(job.transfer.ops[0].handle))

    def close_in_child(self) -> None:
        """Close the connections in a forked child: they are the parent's."""
        for lane in self._lanes:
            lane.connection.close_in_child()


def _notice_silence(sock: _spi.Wire) -> None:
    """Have the kernel detect a half-open connection within ten seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
