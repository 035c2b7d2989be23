"""The gateway: a worker through which a client reaches other workers that it cannot dial itself.

The client's agent connects to the gateway's worker, proves the secret, and sends the address that
it wants to reach (`Gateway.open`). The worker passes the connection to a process of its own for
that client (`relay_main`). That process connects to the other worker, reports where its connection
led (`host_identity`), and from then on carries bytes without looking at them. Handshake, TLS and
the authentication of all that follows are between the client's host and the other worker, end to
end. A gateway does not encrypt what passes, so a gateway that was reached by TLS leads to TLS
addresses only.

Relays are processes of their own, as agents are, so that one client's traffic delays neither the
worker nor another client. A relay exits when its connections are closed, or the worker exits.
(Rejected: to relay in the client's agent on that host. Then the host has an agent even if the
client wants no processes there, and detaching that host cuts off all others.)
"""

from __future__ import annotations

import functools
import hmac
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch._engine.base.address import ChannelAddr
from monarch._engine.launch import helper
from monarch._engine.protocol.session.handshake import HandshakeError
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission.handshake_io import (
    PATIENCE,
    connect,
    direct_way,
    introduce,
    uses_tls,
    why_unreachable,
)
from monarch._engine.runtime.admission.host_identity import far_end, meant
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import READ, WRITE, Reactor
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CONTROL, pack

__all__ = ["RELAY", "Gateway", "GatewayLost", "Gateways", "Relay", "Relays", "relay_main"]

RELAY = "relay"
"""The purpose of a connection through this worker to another one; the value is the address."""

_LENGTH = struct.Struct("<H")
_TAG = 32
_CHUNK = 1 << 18
_MOST_CHUNKS = 16  # at a time, per connection
_IDLE = 5.0  # seconds that a relay without connections stays
_LIMIT = 1 << 20
_NOTHING = memoryview(b"")


class GatewayLost(ConnectionError):
    """No gateway was reached, so nothing is known of the worker behind."""


class Gateway(NamedTuple):
    """A worker as a route to other workers; see the module."""

    address: ChannelAddr
    key: bytes
    client: int
    trusting: bool = False

    def __repr__(self) -> str:
        return f"Gateway({self.address!r})"  # the key is a secret

    def open(self, target: ChannelAddr, timeout: float) -> tuple[socket.socket, str]:
        """Return a fresh connection to `target`, and where that connection leads.

        Blocks. Raises GatewayLost when the gateway cannot be reached, OSError when the target
        cannot, HandshakeError when the gateway refuses, ValueError for a target that a gateway must
        not lead to.
        """
        if target == self.address:
            return direct_way(target, timeout)
        if uses_tls(self.address) and not uses_tls(target):
            raise ValueError(
                f"the gateway {self.address} is reached by TLS, {target} is not, and what passes "
                "through would not be encrypted: use a tls:// address"
            )
        try:
            sock, end = direct_way(self.address, timeout)
        except OSError as error:
            why = why_unreachable(error, timeout)
            raise GatewayLost(f"the gateway {self.address} is not reached: {why}") from error
        try:
            sock.settimeout(timeout + PATIENCE)  # the gateway needs time to connect as well
            try:
                sock, session, came = self._introduce(sock, target, meant(self.address, end))
            except HandshakeError as error:
                raise HandshakeError(f"the gateway {self.address}: {error}") from error
            answer = _read_answer(sock, session, bytearray(came))
            if answer["error"] is not None:
                text = f"the gateway {self.address} cannot connect to it: {answer['error']}"
                raise ConnectionError(text)
        except BaseException:
            sock.close()
            raise
        return sock, str(answer["end"])

    def _introduce(
        self, sock: socket.socket, target: ChannelAddr, whom: str
    ) -> tuple[socket.socket, bytes, bytes]:
        """Return the bare connection, the session key, and what was already read of the answer."""
        purpose = {RELAY: target.url, "client": self.client}
        if not uses_tls(self.address):
            side = introduce(sock, self.key, purpose, whom, trusting=self.trusting)
            return sock, side.session, b""
        from monarch._engine.runtime.admission import tls

        with tls.in_words():
            outer = tls.TlsSocket.dial(sock, tls.client_context(), self.address.host)
            side = introduce(outer, self.key, purpose, whom, trusting=self.trusting)
            sock, came = outer.part()  # the gateway sends next
            return sock, side.session, came


class Gateways:
    """Several gateways to the same workers, as a route: the next one is for when one is lost.

    Args:
        gateways: in the order of their use.
        first: the number of the one to begin with.
    """

    def __init__(self, gateways: Sequence[Gateway], first: int) -> None:
        self._gateways = gateways
        self.used = first
        """The number of the gateway that was reached last."""

    def open(self, target: ChannelAddr, timeout: float) -> tuple[socket.socket, str]:
        """Return a connection to `target` through the first gateway that is reached.

        See `Gateway.open`. Blocks for `timeout` with each gateway that does not answer.
        """
        problems: list[str] = []
        count = len(self._gateways)
        for number in range(self.used, self.used + count):
            try:
                opened = self._gateways[number % count].open(target, timeout)
            except GatewayLost as error:
                problems.append(str(error))
            else:
                self.used = number % count
                return opened
        raise GatewayLost("; ".join(problems))


def _read_answer(sock: socket.socket, session: bytes, came: bytearray) -> dict[str, Any]:
    """Return the gateway's answer; `came` are the bytes of it that were already read."""
    head = _read(sock, _LENGTH.size, came)
    said = head + _read(sock, _LENGTH.unpack(head)[0], came)
    tag = _read(sock, _TAG, came)
    if came or not hmac.compare_digest(tag, purpose_tag(session, said)):
        raise ConnectionError("the answer of the gateway was altered on the way")
    answer: dict[str, Any] = json.loads(said[_LENGTH.size :])
    return answer


def _read(sock: socket.socket, size: int, came: bytearray) -> bytes:
    """Return the next `size` bytes: first those in `came`, then those of the socket."""
    while len(came) < size:
        more = sock.recv(size - len(came))
        if not more:
            raise ConnectionError("the gateway closed the connection")
        came += more
    data = bytes(came[:size])
    del came[:size]
    return data


class Relays:
    """The relays of a worker: one process for each client that connects through this host.

    Args:
        reactor: the worker's reactor.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._links: dict[int, tuple[Link, subprocess.Popen[bytes]]] = {}

    def take(self, client: int, target: str, sock: socket.socket, session: bytes) -> None:
        """Connect `sock`, whose handshake is done, to the worker at `target`."""
        if client not in self._links:
            self._start(client)
        link, _ = self._links[client]
        body = json.dumps({"to": target, "session": session.hex()}).encode()
        link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=1), [sock.fileno()])

    def close(self) -> None:
        """End all relays; return when they have exited."""
        for link, process in self._links.values():
            self._reactor.unregister(link.fileno)
            link.close("the worker exits")
            process.wait()
        self._links.clear()

    def _launch(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Return a new relay: the socket to it, and its process."""
        return helper.start(f"{__name__}:relay_main", path=sys.path, start_new_session=True)

    def _start(self, client: int) -> None:
        sock, process = self._launch()
        link = Link(sock, "a relay", None, _LIMIT, _LIMIT)
        self._links[client] = link, process

        def read(link: Link) -> None:
            link.receive(self._reactor.scratch)
            if link.lost is not None:
                self._reactor.unregister(link.fileno)
                link.close(link.lost)
                del self._links[client]
                process.wait()

        link.serve(self._reactor, read)


def relay_main(fd: int) -> None:
    """Run a relay, which carries one client's connections. Returns when there are none left."""
    reactor = Reactor()
    relay = Relay(reactor, socket.socket(fileno=fd))
    reactor.run()
    relay.close()


class Relay:
    """Carries one client's connections; stops `reactor` when there are none left.

    Args:
        reactor: drives all connections.
        sock: a socket to the worker, which sends the connections.
    """

    def __init__(self, reactor: Reactor, sock: socket.socket) -> None:
        self.reactor = reactor
        self._link = Link(sock, "the worker", None, _LIMIT, _LIMIT)
        self._open = 0
        self.reactor.register(self._link.fileno, self._read)
        self.reactor.call_later(_IDLE, self._end_if_idle)

    def _read(self, _mask: int) -> None:
        for frame in self._link.receive(self.reactor.scratch):
            (fd,) = self._link.take_fds(frame.nfd)
            self._open += 1
            message = json.loads(frame.body)
            session = bytes.fromhex(message["session"])
            near = environments.current.socket_of(fd)
            self._connect(near, message["to"], session)
        if self._link.lost is not None:
            self.reactor.stop()

    def _connect(self, near: socket.socket, to: str, session: bytes) -> None:
        """Connect on another thread, since names may have to be looked up."""

        def run() -> None:
            far, end, error = None, "", None
            try:
                address = ChannelAddr.parse(to)
                far = connect(address, PATIENCE)
                end = far_end(far, address)
            except OSError as failed:
                error = failed.strerror or str(failed)
            except (ValueError, HandshakeError) as failed:
                error = str(failed)
            said = json.dumps({"error": error, "end": end}).encode()
            said = _LENGTH.pack(len(said)) + said
            try:
                near.settimeout(PATIENCE)
                near.sendall(said + purpose_tag(session, said))
            except OSError:
                error = error or "the client closed the connection"
            self.reactor.call_soon(self._connected, near, far, error)

        environments.current.start_thread("monarch-relay", run)

    def _connected(self, near: socket.socket, far: socket.socket | None, error: str | None) -> None:
        if far is not None and error is None:
            _join(self.reactor, near, far, self._closed)
            return
        near.close()
        if far is not None:
            far.close()
        self._closed()

    def _closed(self) -> None:
        self._open -= 1
        if not self._open:
            self.reactor.call_later(_IDLE, self._end_if_idle)

    def close(self) -> None:
        """Close the socket to the worker."""
        self.reactor.unregister(self._link.fileno)
        self._link.close("the relay exits")

    def _end_if_idle(self) -> None:
        if not self._open:
            self.reactor.stop()


class _Way:
    """One direction of a relayed connection: bytes from `source` to `target`.

    It holds at most one chunk, so TCP slows a sender that is faster than the reader. It holds no
    memory while everything is sent: all directions read into the same `scratch`.
    """

    __slots__ = ("ended", "scratch", "source", "target", "unsent")

    def __init__(self, source: socket.socket, target: socket.socket, scratch: memoryview) -> None:
        self.source = source
        self.target = target
        self.scratch = scratch
        self.unsent = _NOTHING
        self.ended = False

    def move(self) -> None:
        """Move what can be moved now, within limits. Raises OSError if either side is lost."""
        try:
            for _ in range(_MOST_CHUNKS):
                if self.ended:
                    return
                if self.unsent:
                    self.unsent = self.unsent[self.target.send(self.unsent) :] or _NOTHING
                    continue
                count = self.source.recv_into(self.scratch)
                if not count:
                    self.ended = True
                    self.target.shutdown(socket.SHUT_WR)
                    return
                sent = 0
                try:
                    sent = self.target.send(self.scratch[:count])
                finally:
                    self.unsent = memoryview(bytes(self.scratch[sent:count]))
        except BlockingIOError:
            return


def _join(
    reactor: Reactor, one: socket.socket, other: socket.socket, closed: Callable[[], None]
) -> None:
    """Carry bytes both ways until both sides have sent everything, or one of them is lost."""
    scratch = reactor.scratch[:_CHUNK]
    ways = _Way(one, other, scratch), _Way(other, one, scratch)

    def move(from_: _Way, mask: int) -> None:
        gone = from_.ended and mask & ~(READ | WRITE)  # it no longer reads, either
        try:
            for way in ways:
                way.move()
        except OSError:
            gone = True
        if gone:
            ways[0].ended = ways[1].ended = True
        if ways[0].ended and ways[1].ended:
            for sock in (one, other):
                reactor.unregister(sock.fileno())
                sock.close()
            closed()
            return
        for way, back in (ways, reversed(ways)):
            # A full direction waits for its target, an empty one for its source.
            reads = not way.unsent and not way.ended
            reactor.watch(way.source.fileno(), reads=reads, writes=bool(back.unsent))

    for way in ways:
        sock = way.source
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reactor.register(sock.fileno(), functools.partial(move, way))
