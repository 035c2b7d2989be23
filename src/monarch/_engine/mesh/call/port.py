"""Ports and channels: one-way messages to the holder of a receiver.

A `Port` names a port number in one process. It can be pickled and sent to any process; `send` uses
the link to the port's process. The port through which an endpoint answers is a `ResponsePort`.

A channel has no fixed senders, so the exit of a sender does not affect it. The exception is
``send(endpoint, args, kwargs, port)``, after which every rank owes an answer. These debts are
recorded at the port, and when a process is lost, its failure is delivered in place of the answers
that it owed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.mesh.call.context import context
from monarch._engine.mesh.call.undeliverable import give_back
from monarch._engine.mesh.results.future import PENDING, RAW, Future
from monarch._engine.mesh.results.reply import RAISE
from monarch._engine.runtime.actor.dispatch import rebuild_error, rebuild_raised
from monarch._engine.runtime.actor.flow_control import FlowControl
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.body import decode_body
from monarch._engine.runtime.proc.links import LocalLink
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import FAILURE, POST

if TYPE_CHECKING:
    from monarch._engine.mesh.call.endpoint import ActorEndpoint
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Channel", "OncePort", "Port", "PortReceiver", "RankedPortReceiver", "forward"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
NO_RANK = 0xFFFFFFFF
NOTHING = 8  # flag of a POST: deliberately no answer; settles a debt, and is not delivered


class PortRef(NamedTuple):
    """The address of a port: the uid of its process, and its number there."""

    uid: int
    port: int

    def inbox(self) -> Inbox | None:
        """Return the local inbox for messages to this port; None if its receiver was dropped.

        For a port of another process it is a port here that forwards.
        """
        proc = client_proc()
        if self.uid == proc.uid:
            known: Any = proc.ports.get(self.port)
            return known if isinstance(known, Inbox) else None
        inbox: Inbox | None = proc.forwards.get(self)
        if inbox is None:
            inbox = proc.forwards[self] = _Forward(proc, self)
        return inbox


class Port(Generic[T]):
    """The sending end of a channel, or of one waiting call; can be pickled."""

    _once = False

    def __init__(self, port_ref: PortRef, instance: Any, rank: int | None = None) -> None:
        self._port_ref = port_ref
        self._rank = NO_RANK if rank is None else rank
        self._link: FrameLink | None = None
        self._return_undeliverable = True

    @property
    def return_undeliverable(self) -> bool:
        """Whether an actor that sends here is notified if the receiver's process has exited.

        See `Actor._handle_undeliverable_message`. If the process runs but the receiver was dropped,
        messages are dropped without a notice.
        """
        return self._return_undeliverable

    @return_undeliverable.setter
    def return_undeliverable(self, value: bool) -> None:
        self._return_undeliverable = value

    def send(self, obj: T) -> None:
        """Send a message without waiting for it to be received; any thread may call this.

        Messages of one sender arrive in order. While the receiver's queue is above its limit,
        `send` blocks (back-pressure); it raises `BackpressureError` after `backpressure_timeout`.
        Raises RuntimeError for a second message to a port that takes one.
        """
        self._post(obj, 0)

    def resolve_and_send(self, obj: T) -> Future[None]:
        """Send a message as `send` does; return a future that is settled.

        In the reference it waits for the meshes in `obj`, which can be sent at once here.
        """
        self.send(obj)
        return Future._of(None)

    def exception(self, exc: BaseException) -> None:
        """Send an exception, which the receiver raises; otherwise as `send`."""
        self._post(exc, RAISE)

    def _post(self, obj: Any, flags: int) -> None:
        uid, port = self._port_ref
        proc = client_proc()
        link = self._link
        if link is None or (link.lost is not None and isinstance(link, LocalLink)):
            link = self._link = proc.link_to(uid)  # (a forked child is not the parent any longer)
        if link.paused and port in link.paused:
            proc.wait_for_gate(link, port, "Port.send")
        payload = proc.encode(obj)
        self._spend()
        sent = proc.send_one(link, POST, port, 0, self._rank, b"", payload, flags)
        if not sent and self._return_undeliverable:
            give_back(link, self._unreachable)

    def _unreachable(self, verdict: Verdict) -> Failure:
        uid, number = self._port_ref
        return Failure(f"<port {number} of proc {uid:x}>", verdict)

    def _spend(self) -> None:
        """Count a message that is about to be sent; RuntimeError if there is one too many."""

    def _passed_on(self) -> PortRef:
        """Return the address to which pickled copies of this port send."""
        return self._port_ref

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_port, (OncePort if self._once else Port, self._passed_on(), self._rank)


def _rebuild_port(kind: type[Port[Any]], port_ref: PortRef, rank: int) -> Port[Any]:
    return kind(port_ref, context().actor_instance, rank)


class OncePort(Port[T]):
    """A port that takes one message; the second `send` raises RuntimeError."""

    _once = True
    _used = False

    def _spend(self) -> None:
        if self._used:
            raise RuntimeError("OncePortRef already used: this port delivers one message")
        self._used = True


class Inbox:
    """The sink of a port of a channel, with the record of ranks that owe it an answer."""

    def __init__(self, proc: Proc) -> None:
        self.lock = threading.RLock()  # a finaliser may send to a port here at any time
        self._debts: dict[tuple[FrameLink, int], list[ActorEndpoint[Any, Any]]] = {}
        self.port = proc.open_port(self)

    def expect(
        self, endpoint: ActorEndpoint[Any, Any], links: list[FrameLink], ranks: Iterable[int]
    ) -> None:
        """Record that each of `ranks` of a mesh, behind their `links`, owes an answer here.

        To be called before the messages are sent.
        """
        with self.lock:
            for rank in ranks:
                self._debts.setdefault((links[rank], rank), []).append(endpoint)

    def expect_nothing(self, link: FrameLink, rank: int) -> None:
        """Cancel one answer that `rank` behind `link` owes, if it owes any."""
        with self.lock:
            owed = self._debts.get((link, rank))
            if owed is not None:
                owed.pop(0)
                if not owed:
                    del self._debts[link, rank]

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        if self._debts:
            self.expect_nothing(link, rank)
        if not flags & NOTHING:
            self._take(rank, flags, body, link)

    def peer_moved(self, rank: int, old: FrameLink, new: FrameLink) -> None:
        """Move the last debt of `rank` to a new process, which replaced the one that owed it."""
        with self.lock:
            owed = self._debts.get((old, rank))
            if owed is None:  # the loss of the old process has been delivered meanwhile
                return
            self._debts.setdefault((new, rank), []).append(owed.pop())
            if not owed:
                del self._debts[old, rank]

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        with self.lock:
            lost = [debt for debt in self._debts.items() if debt[0][0] is link]
        for (_, rank), owed in lost:
            for endpoint in list(owed):
                failure = endpoint.mesh.failure_of_rank(rank, verdict)
                self.deliver(rank, FAILURE, failure.to_bytes(), link)

    def _take(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        raise NotImplementedError


class _Forward(Inbox):
    """The sink of a local port that forwards to a port of another process, without decoding."""

    def __init__(self, proc: Proc, target: PortRef) -> None:
        self._proc = proc
        self._target = target
        self._link = proc.link_to(target.uid)
        super().__init__(proc)

    def _take(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        forward(self._proc, body, self._link, self._target.port, rank, flags)

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        super().peer_lost(link, verdict)
        if link is self._link:
            self._proc.close_port(self.port)
            self._proc.forwards.pop(self._target, None)


def forward(proc: Proc, body: Any, link: FrameLink, port: int, rank: int, flags: int) -> None:
    """Forward a received body to `port` behind `link`, without decoding."""
    if isinstance(body, (bytes, bytearray)):
        proc.say(link, POST, port, 0, rank, bytes(body), flags)
    else:  # a segment belongs to the link that it arrived on, so it is copied once more
        proc.send_one(link, POST, port, 0, rank, b"", body.copy(proc.threshold), flags)


class _Queue(Inbox):
    """The messages and the waiting receives of a channel; shared by a receiver and ranked views."""

    def __init__(self, proc: Proc, once: bool) -> None:
        super().__init__(proc)
        self.messages: deque[Any] = deque()
        self.line: deque[_Receive] = deque()
        self.once = once
        self.used = False
        self.flow_control = FlowControl(proc, self.port, self.messages.__len__)

    def _take(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        with self.lock:
            message = (rank, flags, body)
            if self._hand_out(message):
                return
            self.messages.append(message)
        self.flow_control.put(link, _size(body), len(self.messages))

    def put_back(self, message: Any) -> None:
        """Put a message that was taken but not read back to the front; needs the lock."""
        if not self._hand_out(message):
            self.messages.appendleft(message)
            self.flow_control.put_back(_size(message[2]))

    def _hand_out(self, message: Any) -> bool:
        while self.line:
            if self.line.popleft()._resolve(RAW, message):
                return True
        return False

    def take(self) -> Any:
        """Take the next message; needs the lock, and a message must be there."""
        message = self.messages.popleft()
        self.flow_control.take(_size(message[2]))
        return message


def _size(body: Any) -> int:
    return 0 if body is None else len(body)


class _Receive(Future[Any]):
    """The future of one message: it waits in line only while it is observed.

    A receive enters the line when it is first awaited or read, and leaves the line when the last
    wait is abandoned. If a message has been assigned to it by then, the message is put back:
    otherwise the message would be lost with a future that is never read again.
    """

    __slots__ = ("_observers", "_queue", "_ranked")

    _observers: int
    _queue: _Queue
    _ranked: bool

    def _drive(self, timeout: float | None) -> None:
        queue = self._queue
        with queue.lock:
            if self._phase != PENDING:
                return
            self._observers += 1
            if self._observers > 1:
                return
            if queue.messages:
                self._resolve(RAW, queue.take())
            else:
                queue.line.append(self)

    def _overdue(self, timeout: float) -> str:
        return f"no message within {timeout:g} s"

    def _undrive(self) -> None:
        queue = self._queue
        with queue.lock:
            self._observers -= 1
            if self._observers:
                return
            if self._phase == PENDING:
                queue.line.remove(self)
            elif (message := self._take_back()) is not None:
                queue.put_back(message)

    def _decode(self, content: Any) -> Any:
        rank, flags, body = content
        if flags & RAISE:
            raise rebuild_raised(body)
        if flags & FAILURE:
            raise SupervisionError.of(Failure.from_bytes(body))
        if flags:
            raise rebuild_error(body)
        value = decode_body(body)
        if not self._ranked:
            return value
        if rank == NO_RANK:
            raise ValueError(
                "RankedPort receiver got a message without a rank: it came from Port.send outside "
                "an endpoint's answer"
            )
        return rank, value


class PortReceiver(Generic[T_co]):
    """The receiving end of a channel; stays in the process that opened it, cannot be pickled."""

    _is_ranked = False

    def __init__(self, queue: _Queue, keep: Any) -> None:
        self._queue = queue
        self._keep = keep  # keeps the port open as long as a receiver exists

    def recv(self) -> Future[T_co]:
        """Return a future of the next message; does not block.

        Futures get messages in the order in which they are first awaited or read. A future raises
        the exception that was sent, and `SupervisionError` if an answer cannot come since its actor
        has failed. Any process may send to a port, so the end of one that would have sent ends no
        wait: limit it with ``get(timeout=...)``. Raises ValueError for the second receive from a
        channel of one message.
        """
        queue = self._queue
        if queue.once:
            if queue.used:
                raise ValueError("OncePort is already used: it delivers one message")
            queue.used = True
        receive: _Receive = _Receive._new()
        receive._observers = 0
        receive._queue = queue
        receive._ranked = self._is_ranked
        return receive

    def ranked(self) -> RankedPortReceiver[T_co]:
        """Return a receiver of the same messages, each with the rank of the answering actor."""
        return RankedPortReceiver(self._queue, self._keep)

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'PortReceiver' object; send the port, keep the receiver")


class RankedPortReceiver(PortReceiver[tuple[int, T_co]], Generic[T_co]):
    """Receives pairs ``(rank, value)`` with the row-major rank in the mesh that was called."""

    _is_ranked = True


class _OpenPort:
    """Closes the port when the last receiver is dropped; later messages are discarded."""

    def __init__(self, proc: Proc, port: int) -> None:
        self._proc = proc
        self._port = port

    def __del__(self) -> None:
        self._proc.close_port(self._port)


class Channel(Generic[T]):
    """Makes pairs of a port, which can be sent to other processes, and its receiver.

    >>> port, receiver = Channel[int].open()
    >>> port.send(7)
    >>> receiver.recv().get(timeout=5)
    7
    """

    @staticmethod
    def open(once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """Return a port and its receiver, owned by the current actor or by the client.

        With `once` the channel takes one message.
        """
        instance = context().actor_instance
        proc = client_proc()
        queue = _Queue(proc, once)
        number = queue.port
        ref = PortRef(proc.uid, number)
        port: Port[T] = OncePort(ref, instance) if once else Port(ref, instance)
        return port, PortReceiver(queue, _OpenPort(proc, number))

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[T], RankedPortReceiver[T]]:
        """As `open`, with a receiver of ``(rank, value)``; `once` has no effect."""
        port, receiver = Channel[T].open()
        return port, receiver.ranked()


_public: type
for _public in (Port, PortReceiver, RankedPortReceiver, Channel):
    _public.__module__ = "monarch._src.actor.actor_mesh"
