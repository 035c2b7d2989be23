"""The simulated network: connections between hosts, and what its faults do to them.

A connection is a stream (`monarch.testing.stream`) with the effects of a network as TCP shows them.
The bytes of one direction arrive in order, whatever becomes of single packets: a lost packet is
sent again, after a pause that doubles with each loss in a row, and what was sent after it has to
wait for it. Of a packet that arrives twice, TCP drops the second one. So a fault of the network
costs time, and a partition a silence, until the runtime gives the connection up and dials again.

A worker listens on each host, and processes listen at ports of their own while they invite others
(`Listener`). A port at which no process listens refuses the connection.

Simplified: the acknowledgements of TCP are never lost, and a write is one packet whatever its size.
A sender that sets TCP_USER_TIMEOUT loses the connection if a packet is lost for so long.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch.testing.faults import Delay, Drop, NetworkFault, Partition, Reorder
from monarch.testing.scheduler import Place, Wait
from monarch.testing.stream import MemorySocket, StreamEnd

if TYPE_CHECKING:
    from monarch.testing.world import World

__all__ = ["PORT", "Listener", "Machine", "Network", "NetworkEnd", "address_of"]

PORT = 26600
"""The port at which the worker of each host listens."""

_FREE_PORTS = 49152
"""The first port for processes that listen."""

_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)
_WINDOW = 4 << 20
"""The number of bytes of a connection that are on their way, or not read yet."""

_RETRY = 0.2
_SYN_RETRY = 1.0
_LONGEST_RETRY = 120.0
"""The seconds until a lost packet is sent again: at first, for the first packet, and at most."""


def address_of(ident: int) -> str:
    """Return the IP address of a host."""
    return f"10.{ident >> 16}.{ident >> 8 & 255}.{ident & 255}"


class Machine(Protocol):
    """A host, as its connections see it: the worker (monarch.testing.worker)."""

    ident: int
    place: Place
    listens: bool

    def accept(self, sock: MemorySocket, /) -> None:
        """Take over a connection that another host has dialed."""
        ...


class Network:
    """The network of one simulation.

    Args:
        world: has the hosts that the network connects.
        latency: the least and the most seconds that a packet takes.
    """

    def __init__(self, world: World, latency: tuple[float, float]) -> None:
        self._world = world
        self.scheduler = world.scheduler
        self._least, self._most = latency
        self._faults: list[NetworkFault] = []
        self._ports = itertools.count(_FREE_PORTS)
        self._listeners: dict[tuple[int, int], Listener] = {}

    def add(self, fault: NetworkFault) -> None:
        """Put `fault` in force for its duration."""
        self._faults.append(fault)
        until = self.scheduler.now + fault.seconds
        self.scheduler.at(until, None, self._faults.remove, fault)

    def delay(self, sender: int, receiver: int) -> float | None:
        """Return how many seconds a packet between two hosts takes; None if it is lost."""
        chance = self.scheduler.random.random
        delay = self._least + chance() * (self._most - self._least)
        for fault in self._faults:
            if not _concerns(fault, sender, receiver):
                continue
            if isinstance(fault, Partition):
                return None
            if isinstance(fault, Drop):
                if chance() < fault.probability:
                    return None
            elif isinstance(fault, Delay):
                delay += fault.by
            elif isinstance(fault, Reorder):
                delay += chance() * fault.by
        return delay

    def connect(self, here: Machine, address: tuple[str, int], timeout: float) -> MemorySocket:
        """Return a connection from a host to an address; blocks the strand.

        Raises TimeoutError, and ConnectionRefusedError if no process listens there.
        """
        there = self._world.workers[_ident(address[0])]
        dial = _Dial(self, here, there, address[1])
        if not dial.over.acquire(timeout=timeout):
            dial.given_up = True
            raise TimeoutError("timed out")
        if dial.sock is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return dial.sock

    def listen(self, here: Machine) -> ListeningSocket:
        """Return a socket that listens at a free port of a host."""
        streams = self._world.driver.streams
        listener = Listener(self, here, next(self._ports))
        self._listeners[here.ident, listener.port] = listener
        return ListeningSocket(streams, streams.open(listener))

    def accepts(self, there: Machine, port: int) -> Callable[[MemorySocket], None] | None:
        """Return the function that takes a connection to this port; None if it is refused."""
        if port == PORT:
            return there.accept if there.listens else None
        listener = self._listeners.get((there.ident, port))
        return None if listener is None else listener.come

    def close(self, listener: Listener) -> None:
        """Refuse connections to this listener from now on."""
        self._listeners.pop((listener.ident, listener.port), None)

    def pair(self, here: Machine, there: Machine) -> tuple[MemorySocket, MemorySocket]:
        """Return the two ends of a connection from `here` to `there`."""
        streams = self._world.driver.streams
        near, far = NetworkEnd(self, here, there), NetworkEnd(self, there, here)
        near.other, far.other = far, near
        return streams.socket(streams.open(near)), streams.socket(streams.open(far))


def _ident(address: str) -> int:
    _, high, middle, low = map(int, address.split("."))
    return high << 16 | middle << 8 | low


def _concerns(fault: NetworkFault, sender: int, receiver: int) -> bool:
    def matches(a: int, b: int) -> bool:
        return fault.a in (None, a) and fault.b in (None, b)

    return matches(sender, receiver) or (not fault.one_way and matches(receiver, sender))


class _Dial:
    """The first packets of a connection: one there, and one back."""

    def __init__(self, network: Network, here: Machine, there: Machine, port: int) -> None:
        self._network = network
        self._here = here
        self._there = there
        self._port = port
        self._pause = _SYN_RETRY
        self._arrived = False
        self.over = Wait(network.scheduler)
        self.sock: MemorySocket | None = None
        self.given_up = False
        self._knock()

    def _knock(self) -> None:
        scheduler = self._network.scheduler
        if self.given_up or self._arrived:
            return
        delay = self._network.delay(self._here.ident, self._there.ident)
        if delay is not None:
            scheduler.aside(scheduler.now + delay, self._there.place, self._reach)
        scheduler.aside(scheduler.now + self._pause, self._here.place, self._knock)
        self._pause *= 2

    def _reach(self) -> None:
        if self._arrived:
            return
        scheduler = self._network.scheduler
        delay = self._network.delay(self._there.ident, self._here.ident)
        if delay is None:
            return  # the dialer will knock again
        self._arrived = True
        accept = self._network.accepts(self._there, self._port)
        if accept is None:
            scheduler.aside(scheduler.now + delay, self._here.place, self.over.release)
            return
        near, far = self._network.pair(self._here, self._there)
        scheduler.aside(scheduler.now + delay, self._here.place, self._connected, near)
        accept(far)

    def _connected(self, sock: MemorySocket) -> None:
        if self.given_up:
            sock.close()
        else:
            self.sock = sock
            self.over.release()


class NetworkEnd(StreamEnd):
    """One end of a connection between two hosts; all of its steps are background steps."""

    __slots__ = (
        "_behind",
        "_here",
        "_latest",
        "_network",
        "_patience",
        "_pause",
        "_since",
        "_there",
    )

    def __init__(self, network: Network, here: Machine, there: Machine) -> None:
        super().__init__(network.scheduler, _WINDOW)
        self._network = network
        self._here = here
        self._there = there
        self._behind: list[bytes | None] = []  # a lost packet, and those that wait for it
        self._pause = 0.0  # until that packet is sent again
        self._latest = 0.0  # when the last packet arrives that is on its way
        self._patience = math.inf  # seconds that a packet may be lost
        self._since = 0.0  # when the first of `_behind` was lost

    @property
    def idents(self) -> tuple[int, int]:
        """The numbers of this host and of the other one."""
        return self._here.ident, self._there.ident

    def break_off(self) -> None:
        """Close this end, since the process that holds it has exited."""
        if not self.closed:
            self.closed = True
            self.unwatch()
            self._carry_end()

    def _schedule(self, latency: float, place: Place) -> None:
        scheduler = self.scheduler
        when = scheduler.now + latency * scheduler.random.random() + place.lag
        scheduler.aside(when, place, self._ready)

    def _is_refused(self) -> bool:
        return False  # it takes a packet to learn that

    def _carry(self, data: bytes) -> None:
        cut = self._cut(data)
        if cut:
            self._transmit(data[:cut])
            data = data[cut:]
        self._transmit(data)

    def _carry_end(self) -> None:
        self._transmit(None if self.closed else b"")

    def _transmit(self, data: bytes | None) -> None:
        if self._behind:
            self._behind.append(data)
            return
        delay = self._network.delay(self._here.ident, self._there.ident)
        if delay is not None:
            self._bring([data], delay)
        else:
            self._behind.append(data)
            self._pause = _RETRY
            self._since = self.scheduler.now
            self._wait()

    def be_patient(self, seconds: float) -> None:
        """Break the connection when a packet is lost for so long."""
        self._patience = seconds

    def _wait(self) -> None:
        scheduler = self.scheduler
        left = max(self._since + self._patience - scheduler.now, 0.0)
        pause = min(self._pause, left)
        scheduler.aside(scheduler.now + pause, self._here.place, self._transmit_again)

    def _transmit_again(self) -> None:
        delay = self._network.delay(self._here.ident, self._there.ident)
        # The same sum as in `_wait`: a difference may be rounded to less, again and again.
        if delay is None and self.scheduler.now >= self._since + self._patience:
            self._behind.clear()
            self.reset()
        elif delay is None:
            self._pause = min(2 * self._pause, _LONGEST_RETRY)
            self._wait()
        else:
            behind, self._behind = self._behind, []
            self._bring(behind, delay)

    def _bring(self, packets: list[bytes | None], delay: float) -> None:
        scheduler = self.scheduler
        when = self._latest = max(scheduler.now + delay, self._latest)
        other: Any = self.other
        scheduler.aside(when, self._there.place, other._land, packets)

    def _refuse(self) -> None:
        """Let the other end know that this one is closed, unless it knows."""
        delay = self._network.delay(self._here.ident, self._there.ident)
        other: Any = self.other
        if delay is not None and not other._hung_up:
            scheduler = self.scheduler
            scheduler.aside(scheduler.now + delay, self._there.place, other.reset)

    def reset(self) -> None:
        """Accept the message that the other end is closed."""
        self._eof = self._hung_up = True
        self._notice()

    def _land(self, packets: list[bytes | None]) -> None:
        """Accept packets; runs at this host."""
        if self.closed:
            self._refuse()
            return
        for data in packets:
            if data is None:
                self._eof = self._hung_up = True
            elif not data:  # the other end sends no more, and still reads
                self._eof = True
            else:
                self._inbox.append(data)
        place = self._place
        if place is None or place.dead or place.pauses or place.lag or self._noticed:
            self._notice()
        else:  # the same step serves the reader
            self._ready()


class NetworkSocket(MemorySocket):
    """The socket of a connection between two hosts, with addresses of the Internet Protocol."""

    __slots__ = ()

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        """Heed TCP_USER_TIMEOUT; the other options that the engine sets concern speed."""
        if (level, option) == (socket.IPPROTO_TCP, _USER_TIMEOUT):
            end: Any = self._end
            end.be_patient(value / 1000)

    def getsockname(self) -> tuple[str, int]:
        end: Any = self._end
        return address_of(end.idents[0]), PORT

    def getpeername(self) -> tuple[str, int]:
        end: Any = self._end
        return address_of(end.idents[1]), PORT


NetworkEnd.socket_type = NetworkSocket


class Listener(StreamEnd):
    """A port at which a process of a host listens; what arrives here are connections."""

    __slots__ = ("_arrived", "_network", "ident", "port")

    def __init__(self, network: Network, here: Machine, port: int) -> None:
        super().__init__(network.scheduler, 0)
        self._network = network
        self._arrived: deque[MemorySocket] = deque()
        self.ident = here.ident
        self.port = port

    def come(self, sock: MemorySocket) -> None:
        """Keep a connection until the process accepts it."""
        self._arrived.append(sock)
        self._notice()

    def take(self) -> MemorySocket:
        """Return the next connection. Raises BlockingIOError if there is none."""
        if not self._arrived:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._arrived.popleft()

    def break_off(self) -> None:
        """Stop listening, since the process has exited."""
        if not self.closed:
            self.closed = True
            self.unwatch()
            self._carry_end()

    def _mask(self) -> int:
        return select.POLLIN if self._arrived else 0

    def _schedule(self, latency: float, place: Place) -> None:
        scheduler = self.scheduler
        when = scheduler.now + latency * scheduler.random.random() + place.lag
        scheduler.aside(when, place, self._ready)

    def _carry_end(self) -> None:
        self._network.close(self)
        while self._arrived:
            self._arrived.popleft().close()


class ListeningSocket(NetworkSocket):
    """A socket that listens; see `Listener`."""

    __slots__ = ()

    def accept(self) -> tuple[MemorySocket, tuple[str, int]]:
        """See `socket.socket.accept`."""
        listener: Any = self._end
        sock: MemorySocket = listener.take()
        return sock, sock.getpeername()

    def getsockname(self) -> tuple[str, int]:
        listener: Any = self._end
        return address_of(listener.ident), listener.port


Listener.socket_type = ListeningSocket
