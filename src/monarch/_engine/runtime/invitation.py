"""Invitations: a direct connection from proc to proc of different hosts, once both have agreed.

Procs do not listen. One that wants to be reached by a certain peer invites it, over a side stream
or their link, which are as private as the connection between the two hosts: come to this address
within `PATIENCE`, and prove that you know this key of 32 random bytes. The `Door` that is opened
for it is closed as soon as nobody is expected any more. So in a quiet cluster no port of a proc is
open, and there is no long-lived secret to guard.

Who comes goes through the handshake of `protocol.handshake`, with the key as the secret; it says
nothing that is parsed before that. A key lets in one connection, and only one door knows it, so it
cannot be passed on to another; what follows is authenticated as between hosts. Where the hosts talk
by TLS, the door does too: TLS 1.3, and the certificates of both have to be signed by the CA.
Instead of a name the dialer checks that the certificate is the very one whose digest stands in the
invitation, so a member of the cluster with a certificate of its own cannot stand in between.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._engine.protocol.handshake import HandshakeError, key_name
from monarch._engine.runtime.entrance import Entrance
from monarch._engine.runtime.greeting import (
    PATIENCE,
    Arrival,
    Greeting,
    Wire,
    authentic,
    introduce,
)
from monarch._engine.runtime.reactor import Reactor, Timer
from monarch._engine.runtime.whereabouts import INVITATION, as_invited

if TYPE_CHECKING:
    import ssl

__all__ = ["Door", "Invitation", "come"]

_MOST_STRANGERS = 64  # in the middle of a handshake


class Invitation(NamedTuple):
    """Where to come, and what to prove there."""

    address: str
    port: int
    key: bytes
    certificate: bytes
    """SHA-256 of the certificate that the host shows; empty: no TLS."""

    def __repr__(self) -> str:
        return f"Invitation({self.address!r}, {self.port})"  # the key is a secret


class Door:
    """Where invited peers come in. Everything happens on the thread of `reactor`.

    Args:
        reactor: drives it.
        address: the IP address of this host at which to listen; others are not listened at.
        tls: whether connections are by TLS.
        report: is told (peer, certificate, why it was refused or "") of each who came.
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

    def invite(self, arrived: Callable[[Wire], None]) -> Invitation:
        """Expect somebody: `arrived(connection)` is called when it has come, if it does.

        Raises OSError if this host cannot be listened at, SecretError if certificates are wanted
        and this process has none that can be used.
        """
        certificate = b""
        if self._tls:
            from monarch._engine.runtime import tls

            self._context = tls.server_context()
            certificate = tls.own_digest()
        if self._sock is None:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            self._sock = socket.create_server((self._address, 0), family=family)
            self._entrance = Entrance(self._reactor, self._sock, self._came)
        key = os.urandom(32)  # noqa: TID251 - must not repeat in any universe
        name = key_name(key)
        timer = self._reactor.call_later(PATIENCE, lambda: self._forget(name))
        self._expected[name] = (key, arrived, timer)
        return Invitation(self._address, self._sock.getsockname()[1], key, certificate)

    def withdraw(self, key: bytes) -> None:
        """Who was invited with this key is not let in any more."""
        self._forget(key_name(key))

    def close_in_child(self) -> None:
        """In a forked child: it is the parent's."""
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
            self._report(peer, "", "too many are in the middle of a handshake")
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
            if found is None:  # somebody else came with it, or it was withdrawn, meanwhile
                arrival.sock.close()
                self._report(peer, arrival.certificate, "its invitation is over")
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


def come(invitation: Invitation, timeout: float) -> Wire:
    """Follow an invitation: the connection, not blocking any more.

    Blocks. Raises OSError, HandshakeError, or SecretError for certificates that cannot be used.
    """
    address, port, key, certificate = invitation
    sock = socket.create_connection((address, port), timeout)
    try:
        sock.settimeout(PATIENCE)
        if not certificate:
            side = introduce(sock, key, {}, INVITATION)
            sock.setblocking(False)
            return authentic(sock, side)
        from monarch._engine.runtime import tls

        with tls.in_words():
            context = tls.client_context()
            context.check_hostname = False  # but see below
            secured = tls.TlsSocket.dial(sock, context, "")
            if hashlib.sha256(secured.certificate).digest() != certificate:
                raise HandshakeError("its TLS certificate is not the one that was announced")
            introduce(secured, key, {}, INVITATION)
            sock.setblocking(False)
            return secured
    except BaseException:
        sock.close()
        raise
