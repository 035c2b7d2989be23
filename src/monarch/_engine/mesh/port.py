"""Ports and channels: one-way messages to whoever holds the receiver.

A `Port` names a port number in one process. It can be sent anywhere; `send` goes over the link to
that process. The port that an endpoint answers by itself is a `ResponsePort`.

A channel has no fixed senders, and one that is gone takes nothing away. But whoever calls
``send(endpoint, args, kwargs, port)`` is owed an answer of every rank: who owes is noted at the
port, and the loss of a process is delivered in place of the answers it owed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.mesh.context import context
from monarch._engine.mesh.future import PENDING, RAW, Future
from monarch._engine.mesh.reply import RAISE
from monarch._engine.mesh.undeliverable import give_back
from monarch._engine.runtime.body import decode_body
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.dispatch import rebuild_error, rebuild_raised
from monarch._engine.runtime.ends import Verdict
from monarch._engine.runtime.gauge import Gauge
from monarch._engine.wire.frame import FAILURE, POST

if TYPE_CHECKING:
    from monarch._engine.mesh.endpoint import ActorEndpoint
    from monarch._engine.runtime.proc import Proc

__all__ = ["Channel", "OncePort", "Port", "PortReceiver", "RankedPortReceiver", "forward"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
NO_RANK = 0xFFFFFFFF
NOTHING = 8  # flag of a POST: there will be no answer, on purpose; receivers do not see it


class PortRef(NamedTuple):
    """A port's place: the process and its number there."""

    uid: int
    port: int

    def inbox(self) -> Inbox | None:
        """What takes messages for it in this process; None if its receiver is gone."""
        proc = client_proc()
        if self.uid == proc.uid:
            known: Any = proc.ports.get(self.port)
            return known if isinstance(known, Inbox) else None
        inbox: Inbox | None = proc.forwards.get(self)
        if inbox is None:
            inbox = proc.forwards[self] = _Forward(proc, self)
        return inbox


class Port(Generic[T]):
    """Where messages for one `PortReceiver`, or one waiting caller, are sent. Picklable."""

    _once = False

    def __init__(self, port_ref: PortRef, instance: Any, rank: int | None = None) -> None:
        self._port_ref = port_ref
        self._instance = instance
        self._rank = NO_RANK if rank is None else rank
        self._link: Any = None
        self._return_undeliverable = True

    @property
    def return_undeliverable(self) -> bool:
        """Whether an actor that sends here is told if the receiver's process is gone.

        See `Actor._handle_undeliverable_message`. What is sent to a receiver that was dropped, in
        a process that lives, is dropped as well.
        """
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
        proc = client_proc()
        link = self._link
        if link is None:
            link = self._link = proc.link_to(uid)
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
        """A message is about to be sent; raises RuntimeError if it is one too many."""

    def _passed_on(self) -> PortRef:
        """Where others are to send what is for this port."""
        return self._port_ref

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_port, (OncePort if self._once else Port, self._passed_on(), self._rank)


def _rebuild_port(kind: type[Port[Any]], port_ref: PortRef, rank: int) -> Port[Any]:
    return kind(port_ref, context().actor_instance, rank)


class OncePort(Port[T]):
    """A port that takes one message."""

    _once = True
    _used = False

    def _spend(self) -> None:
        if self._used:
            raise RuntimeError("OncePortRef already used: this port delivers one message")
        self._used = True


class Inbox:
    """Where messages of a channel arrive, and who owes it an answer."""

    def __init__(self, proc: Proc) -> None:
        self.lock = threading.RLock()  # a finaliser may send to a port here at any time
        self._debts: dict[tuple[Any, int], list[ActorEndpoint[Any, Any]]] = {}
        self.port = proc.open_port(self)

    def expect(
        self, endpoint: ActorEndpoint[Any, Any], links: list[Any], ranks: Iterable[int]
    ) -> None:
        """`ranks` of a mesh, behind their `links`, are about to be sent what is answered here."""
        with self.lock:
            for rank in ranks:
                self._debts.setdefault((links[rank], rank), []).append(endpoint)

    def expect_nothing(self, link: Any, rank: int) -> None:
        """One answer less is owed by `rank` behind `link`."""
        with self.lock:
            owed = self._debts.get((link, rank))
            if owed is not None:
                owed.pop(0)
                if not owed:
                    del self._debts[link, rank]

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if self._debts:
            self.expect_nothing(link, rank)
        if not flags & NOTHING:
            self._take(rank, flags, body, link)

    def peer_moved(self, rank: int, old: Any, new: Any) -> None:
        """Another process is in the place of the one that owed the last answer of `rank`."""
        with self.lock:
            owed = self._debts.get((old, rank))
            if owed is None:  # its loss has been delivered meanwhile
                return
            self._debts.setdefault((new, rank), []).append(owed.pop())
            if not owed:
                del self._debts[old, rank]

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        with self.lock:
            lost = [debt for debt in self._debts.items() if debt[0][0] is link]
        for (_, rank), owed in lost:
            for endpoint in list(owed):
                failure = endpoint.mesh.failure_of_rank(rank, verdict)
                self.deliver(rank, FAILURE, failure.to_bytes(), link)

    def _take(self, rank: int, flags: int, body: Any, link: Any) -> None:
        raise NotImplementedError


class _Forward(Inbox):
    """A port here that passes what arrives on to a port elsewhere, undecoded."""

    def __init__(self, proc: Proc, target: PortRef) -> None:
        self._proc = proc
        self._target = target
        self._link = proc.link_to(target.uid)
        super().__init__(proc)

    def _take(self, rank: int, flags: int, body: Any, link: Any) -> None:
        forward(self._proc, body, self._link, self._target.port, rank, flags)

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        super().peer_lost(link, verdict)
        if link is self._link:
            self._proc.close_port(self.port)
            self._proc.forwards.pop(self._target, None)


def forward(proc: Proc, body: Any, link: Any, port: int, rank: int, flags: int) -> None:
    """Send a body that arrived here on to `port` behind `link`, undecoded."""
    if isinstance(body, (bytes, bytearray)):
        proc.say(link, POST, port, 0, rank, bytes(body), flags)
    else:  # a segment belongs to the link it came on: copied once more, off the hot path
        proc.send_one(link, POST, port, 0, rank, b"", body.copy(proc.threshold), flags)


class _Queue(Inbox):
    """What a receiver shares with its ranked view: messages, and receives in line."""

    def __init__(self, proc: Proc, once: bool) -> None:
        super().__init__(proc)
        self.messages: deque[Any] = deque()
        self.line: deque[_Receive] = deque()
        self.once = once
        self.used = False
        self.gauge = Gauge(proc, self.port, self.messages.__len__)

    def _take(self, rank: int, flags: int, body: Any, link: Any) -> None:
        with self.lock:
            message = (rank, flags, body)
            if self._hand_out(message):
                return
            self.messages.append(message)
        self.gauge.put(link, _size(body), len(self.messages))

    def put_back(self, message: Any) -> None:
        """A message was taken and not looked at: it is the next again; call it under the lock."""
        if not self._hand_out(message):
            self.messages.appendleft(message)
            self.gauge.put_back(_size(message[2]))

    def _hand_out(self, message: Any) -> bool:
        while self.line:
            if self.line.popleft()._resolve(RAW, message):
                return True
        return False

    def take(self) -> Any:
        """The next message; call it under the lock, and only if there is one."""
        message = self.messages.popleft()
        self.gauge.take(_size(message[2]))
        return message


def _size(body: Any) -> int:
    return 0 if body is None else len(body)


class _Receive(Future[Any]):
    """A receive: takes its place in line when first observed, gives it up with the observation.

    A message that came to an observation that was given up goes back: it is not lost with a future
    that nobody looks at again.
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
        receive._observers = 0
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
        port: Port[T] = OncePort(ref, instance) if once else Port(ref, instance)
        return port, PortReceiver(queue, _OpenPort(proc, number))

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[T], RankedPortReceiver[T]]:
        """The same, with a receiver that yields ``(rank, value)``; `once` makes no difference."""
        port, receiver = Channel[T].open()
        return port, receiver.ranked()


_public: type
for _public in (Port, PortReceiver, RankedPortReceiver, Channel):
    _public.__module__ = "monarch._src.actor.actor_mesh"
