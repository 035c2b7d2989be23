"""Tickets: a direct connection between procs of different hosts, after both have agreed.

Procs do not listen. A proc that wants a certain peer to connect invites it, over a side stream or
their link, which are as private as the connection between the two hosts. The ticket means:
connect to this address within `PATIENCE`, and prove that you know this key of 32 random bytes. The
`Door`, a listening socket opened for that, is closed as soon as no ticket is pending. So in a
quiet cluster no port of a proc is open, and there is no long-lived secret to guard.

A peer goes through the handshake of `protocol.session.handshake`, with the key as the secret, and
sends nothing before it that is parsed. A key admits one connection, and only one door knows it, so
the connection cannot be passed on to another. All later bytes are authenticated as between hosts.

Where the hosts use TLS, the door does, too: TLS 1.3, with certificates of both sides signed by the
CA. The dialer checks no name. It checks that the certificate is the very one whose digest is in the
ticket, so a member of the cluster with a certificate of its own cannot stand in between.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._engine.protocol.session.handshake import HandshakeError, key_name
from monarch._engine.runtime.admission.handshake_io import (
    PATIENCE,
    Arrival,
    Greeting,
    Wire,
    authentic,
    introduce,
)
from monarch._engine.runtime.admission.host_identity import INVITATION, as_invited
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.listener import Entrance
from monarch._engine.runtime.io.reactor import Reactor, Timer

if TYPE_CHECKING:
    import ssl

__all__ = ["Door", "Ticket", "come"]

_MOST_STRANGERS = 64  # handshakes in progress


class Ticket(NamedTuple):
    """Where to connect, and what to prove there."""

    address: str
    port: int
    key: bytes
    certificate: bytes
    """The SHA-256 digest of the host's TLS certificate; empty without TLS."""

    def __repr__(self) -> str:
        return f"Ticket({self.address!r}, {self.port})"  # the key is a secret


class Door:
    """A listening socket for invited peers. Everything happens on the thread of `reactor`.

    Args:
        reactor: watches the socket.
        address: the only IP address of this host to listen at.
        tls: whether connections use TLS.
        report: called for each connection with the peer, its certificate, and why it was refused
            ("" if it was not).
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str,
        tls: bool,
        report: Callable[[str, str, str], None],
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._tls = tls
        self._report = report
        self._context: ssl.SSLContext | None = None
        self._sock: socket.socket | None = None
        self._entrance: Entrance | None = None
        self._expected: dict[bytes, tuple[bytes, Callable[[Wire], None], Timer]] = {}
        self._strangers = 0

    def invite(self, arrived: Callable[[Wire], None]) -> Ticket:
        """Invite a peer; `arrived(connection)` is called when the peer has connected, if it does.

        Raises OSError if this host cannot be listened at, SecretError if TLS is wanted and this
        process has no usable certificates.
        """
        certificate = b""
        if self._tls:
            from monarch._engine.runtime.admission import tls

            self._context = tls.server_context()
            certificate = tls.own_digest()
        if self._sock is None:
            self._sock = environments.current.listen(self._address)
            self._entrance = Entrance(self._reactor, self._sock, self._came)
        key = os.urandom(32)  # noqa: TID251 - must not repeat in any universe
        name = key_name(key)
        timer = self._reactor.call_later(PATIENCE, lambda: self._forget(name))
        self._expected[name] = (key, arrived, timer)
        return Ticket(self._address, self._sock.getsockname()[1], key, certificate)

    def withdraw(self, key: bytes) -> None:
        """Withdraw a ticket: its key admits no connection from now on."""
        self._forget(key_name(key))

    def close_in_child(self) -> None:
        """In a forked child, close the socket: it belongs to the parent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = self._entrance = None

    def _forget(self, name: bytes) -> None:
        found = self._expected.pop(name, None)
        if found is not None:
            found[2].cancel()
        if not self._expected and self._entrance is not None:
            self._entrance.close()
            self._sock = self._entrance = None

    def _came(self, sock: socket.socket, address: Any) -> None:
        peer = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        if self._strangers >= _MOST_STRANGERS:
            sock.close()
            self._report(peer, "", "too many connections are in the middle of a handshake")
            return
        named: list[bytes] = []

        def key_of(name: bytes) -> bytes | None:
            named.append(name)
            found = self._expected.get(name)
            return None if found is None else found[0]

        def accepted(arrival: Arrival) -> None:
            self._strangers -= 1
            name = named[0]
            found = self._expected.get(name)
            if found is None:  # the key was used or withdrawn during the handshake
                arrival.sock.close()
                self._report(
                    peer, arrival.certificate, "its ticket was used or withdrawn meanwhile"
                )
                return
            self._forget(name)
            self._report(peer, arrival.certificate, "")
            found[1](arrival.wire)

        def refused(why: str) -> None:
            self._strangers -= 1
            self._report(peer, "", why)

        self._strangers += 1
        Greeting(
            self._reactor,
            sock,
            key_of,
            accepted,
            refused,
            as_invited,
            tls=self._context,
            steps_aside=False,
        )


def come(ticket: Ticket, timeout: float) -> Wire:
    """Follow a ticket; return a non-blocking connection.

    Blocks. Raises OSError, HandshakeError, or SecretError for certificates that cannot be used.
    """
    address, port, key, certificate = ticket
    sock = environments.current.connect((address, port), timeout)
    try:
        sock.settimeout(PATIENCE)
        if not certificate:
            side = introduce(sock, key, {}, INVITATION)
            sock.setblocking(False)
            return authentic(sock, side)
        from monarch._engine.runtime.admission import tls

        with tls.in_words():
            context = tls.client_context()
            context.check_hostname = False  # the digest is checked instead
            secured = tls.TlsSocket.dial(sock, context, "")
            if hashlib.sha256(secured.certificate).digest() != certificate:
                raise HandshakeError("its TLS certificate is not the one that was announced")
            introduce(secured, key, {}, INVITATION)
            sock.setblocking(False)
            return secured
    except BaseException:
        sock.close()
        raise
