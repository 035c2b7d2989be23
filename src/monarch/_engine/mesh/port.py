"""Ports and channels: one-way messages to whoever holds the receiver.

A `Port` names a port number in one process. It can be sent anywhere; `send` goes over the link to
that process. Explicit response ports of endpoints are the same class, bound to the link the call
came in on.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.mesh.context import context
from monarch._engine.mesh.future import PENDING, RAW, Future
from monarch._engine.mesh.reply import RAISE
from monarch._engine.runtime.body import decode_body
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.dispatch import rebuild_error
from monarch._engine.runtime.ends import Verdict
from monarch._engine.runtime.gauge import Gauge
from monarch._engine.wire.frame import FAILURE, POST

if TYPE_CHECKING:
    from monarch._engine.runtime.cell import Cell
    from monarch._engine.runtime.proc import Proc

__all__ = ["Channel", "Port", "PortReceiver", "RankedPortReceiver"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
NO_RANK = 0xFFFFFFFF


class PortRef(NamedTuple):
    """A port's place: the process and its number there."""

    uid: int
    port: int

    def local_id(self) -> int:
        """This port's number in the current process, forwarding if it lives elsewhere."""
        proc = client_proc()
        if self.uid == proc.uid:
            return self.port
        port = proc.forwards.get(self)
        if port is None:
            link = proc.link_to(self.uid)
            port = proc.forwards[self] = proc.open_port(_Forward(proc, link, self.port))
        return port


class Port(Generic[T]):
    """Where messages for one `PortReceiver`, or one waiting caller, are sent. Picklable."""

    def __init__(self, port_ref: PortRef, instance: Any, rank: int | None = None) -> None:
        self._port_ref = port_ref
        self._instance = instance
        self._rank = NO_RANK if rank is None else rank
        self._once = False
        self._link: Any = None
        self._cell: Cell | None = None
        self._return_undeliverable = True

    @classmethod
    def _answering(cls, cell: Cell, link: Any, port: int, rank: int, *, once: bool) -> Port[Any]:
        """The explicit response port of one call; the actor's end answers it if nobody does."""
        self: Port[Any] = cls(PortRef(link.uid, port), None, rank)
        self._link = link
        self._once = once
        self._cell = cell
        if port:
            cell.open_ports[(link, port)] = rank
        return self

    @property
    def return_undeliverable(self) -> bool:
        """Accepted for programs that set it. This release drops what cannot be delivered."""
        return self._return_undeliverable

    @return_undeliverable.setter
    def return_undeliverable(self, value: bool) -> None:
        self._return_undeliverable = value

    def send(self, obj: T) -> None:
        """Send without waiting, from any thread; in order per sender.

        A port that takes one answer raises RuntimeError for the second.
        """
        self._post(obj, 0)

    def exception(self, exc: BaseException) -> None:
        """Make the receiver raise `exc`."""
        self._post(exc, RAISE)

    def _post(self, obj: Any, flags: int) -> None:
        uid, port = self._port_ref
        cell = self._cell
        if cell is not None:
            proc = cell.proc
            answered = cell.open_ports.pop((self._link, port), None) is None
            if self._once and answered:
                raise RuntimeError("OncePortRef already used: this call has had its answer")
        else:
            proc = client_proc()
        if not port:
            return  # the caller wanted no answer
        link = self._link
        if link is None:
            link = self._link = proc.link_to(uid)
        if link.paused and port in link.paused:
            proc.wait_for_gate(link, port, "Port.send")
        payload = proc.encode(obj)
        proc.send(link, POST, port, 0, self._rank, b"", payload, flags)
        proc.sent(payload)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_port, (self._port_ref, self._rank, self._once)


def _rebuild_port(port_ref: PortRef, rank: int, once: bool) -> Port[Any]:
    instance = context().actor_instance
    port: Port[Any] = _OncePort(port_ref, instance) if once else Port(port_ref, instance)
    port._rank = rank
    return port


class _Forward:
    """A port here that passes what arrives on to a port elsewhere, undecoded."""

    def __init__(self, proc: Proc, link: Any, port: int) -> None:
        self._proc = proc
        self._link = link
        self._port = port

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if isinstance(body, (bytes, bytearray)):
            self._proc.say(self._link, POST, self._port, 0, rank, bytes(body), flags)
            return
        # A segment belongs to the link it came on: copied once more, off the hot path.
        payload = body.copy(self._proc.threshold)
        self._proc.send(self._link, POST, self._port, 0, rank, b"", payload, flags)
        self._proc.sent(payload)

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        """The receiver hears of lost senders from its own links."""


class _Queue:
    """What a receiver shares with its ranked view: messages, and receives in line."""

    def __init__(self, proc: Proc, once: bool) -> None:
        self.lock = threading.RLock()  # a finaliser may send to a port here at any time
        self.messages: deque[Any] = deque()
        self.line: deque[_Receive] = deque()
        self.once = once
        self.used = False
        self.port = proc.open_port(self)
        self.gauge = Gauge(proc, self.port, self.messages.__len__)

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        with self.lock:
            message = (rank, flags, body)
            while self.line:
                receive = self.line.popleft()
                if receive._resolve(RAW, message):
                    return
            self.messages.append(message)
        self.gauge.put(link, _size(body), len(self.messages))

    def take(self) -> Any:
        """The next message; call it under the lock, and only if there is one."""
        message = self.messages.popleft()
        self.gauge.take(_size(message[2]))
        return message

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        """A channel has no fixed senders: one that is gone takes nothing away."""


def _size(body: Any) -> int:
    return 0 if body is None else len(body)


class _Receive(Future[Any]):
    """A receive: takes its place in line when first observed, gives it up with the observation."""

    __slots__ = ("_queue", "_ranked")

    _queue: _Queue
    _ranked: bool

    def _drive(self, timeout: float | None) -> None:
        queue = self._queue
        with queue.lock:
            if self._state != PENDING or self in queue.line:
                return
            if queue.messages:
                self._resolve(RAW, queue.take())
            else:
                queue.line.append(self)

    def _undrive(self) -> None:
        queue = self._queue
        with queue.lock:
            if self in queue.line:
                queue.line.remove(self)

    def _decode(self, content: Any) -> Any:
        rank, flags, body = content
        if flags & RAISE:
            raise decode_body(body)
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
    """The receiving end of a channel. Belongs to the process that opened it; not picklable."""

    _is_ranked = False

    def __init__(self, queue: _Queue, keep: Any) -> None:
        self._queue = queue
        self._keep = keep  # the port is open as long as a receiver exists

    def recv(self) -> Future[T_co]:
        """The next message; futures are served in the order they are first observed."""
        queue = self._queue
        if queue.once:
            if queue.used:
                raise ValueError("OncePort is already used: it delivers one message")
            queue.used = True
        receive: _Receive = _Receive._new()
        receive._queue = queue
        receive._ranked = self._is_ranked
        return receive

    def ranked(self) -> RankedPortReceiver[T_co]:
        """The same messages, each with the rank of the actor that answered."""
        return RankedPortReceiver(self._queue, self._keep)

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'PortReceiver' object; send the port, keep the receiver")


class RankedPortReceiver(PortReceiver[tuple[int, T_co]], Generic[T_co]):
    """Receives ``(rank, value)``: the row-major rank in the mesh that was addressed."""

    _is_ranked = True


class _OpenPort:
    """Closes the port when the last receiver is gone: later messages are dropped."""

    def __init__(self, proc: Proc, port: int) -> None:
        self._proc = proc
        self._port = port

    def __del__(self) -> None:
        self._proc.close_port(self._port)


class Channel(Generic[T]):
    """Makes pairs of a sendable port and its receiver.

    >>> port, receiver = Channel[int].open()
    >>> port.send(7)
    >>> receiver.recv().get(timeout=5)
    7
    """

    @staticmethod
    def open(once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """A port and its receiver, owned by the current actor or the client."""
        instance = context().actor_instance
        proc = client_proc()
        queue = _Queue(proc, once)
        number = queue.port
        ref = PortRef(proc.uid, number)
        port: Port[T] = _OncePort(ref, instance) if once else Port(ref, instance)
        return port, PortReceiver(queue, _OpenPort(proc, number))

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[T], RankedPortReceiver[T]]:
        """The same, with a receiver that yields ``(rank, value)``; `once` makes no difference."""
        port, receiver = Channel[T].open()
        return port, receiver.ranked()


class _OncePort(Port[T]):
    """A channel port that takes one message."""

    _used = False

    def _post(self, obj: Any, flags: int) -> None:
        if self._used:
            raise RuntimeError("OncePortRef already used: this port delivers one message")
        self._used = True
        super()._post(obj, flags)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_port, (self._port_ref, self._rank, True)


_public: type
for _public in (Port, PortReceiver, RankedPortReceiver, Channel):
    _public.__module__ = "monarch._src.actor.actor_mesh"
