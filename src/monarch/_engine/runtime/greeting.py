"""The first bytes of a connection between hosts: the handshake, then what it is for.

`dial` is the blocking side, for a thread of its own. `Greeting` is the listening side, driven by a
reactor: any number of strangers may be in the middle of theirs, and nobody waits for them. A
stranger has `PATIENCE` seconds for all of it; what it sends has a fixed size until it has proved
itself, and is bounded afterwards.

After the handshake the dialer says what the connection is for: a length and a JSON object of at
most `_MOST` bytes. The rest of the connection belongs to the channel.

With TLS (`tls`) all of this happens inside it, twice. The worker, who opens the door, is another
process than the agent that the connection is for, and the state of a TLS session cannot be handed
over. So when the worker knows whom it talks to, both end TLS on that connection, the worker passes
the bare connection on, and dialer and agent begin again, with certificates and all; the secret is
then the session key of the first handshake, so nobody else can have taken the dialer's place in
between. (Rejected: the worker stays in the middle and relays. It costs a hop and a copy for every
byte, and the traffic of all jobs would go through one process.)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.handshake import NO_SECRET, Dialer, HandshakeError, Listener, Peer
from monarch._engine.runtime.reactor import WRITE, Reactor, Timer

if TYPE_CHECKING:
    import ssl

    from monarch._engine.runtime.tls import TlsSocket

__all__ = [
    "PATIENCE",
    "PROBE",
    "Arrival",
    "Greeting",
    "Wire",
    "connect",
    "dial",
    "greet",
    "introduce",
    "listen",
    "python_version",
    "uses_tls",
]

PATIENCE = 5.0
"""Seconds that a handshake may take, name look-up and connection not included."""

PROBE = "probe"
"""The purpose of who only wants to know whether a worker is there."""

_BACKLOG = 1024
_MOST = 4096
_LENGTH = struct.Struct("<H")

Wire: TypeAlias = "socket.socket | TlsSocket"
"""What carries the bytes of an authenticated connection."""


class Arrival(NamedTuple):
    """A stranger that has proved itself, and is none any more."""

    sock: Wire
    purpose: dict[str, Any]
    session: bytes
    """The key that only the two sides have, see `Listener`."""
    authenticated: bool
    """False if it proved nothing and was let in all the same."""
    certificate: str
    """What its TLS certificate calls it; empty without TLS."""


def uses_tls(address: ChannelAddr) -> bool:
    """Whether connections to `address` are by TLS. Raises ValueError for what hosts cannot use."""
    if address.scheme not in ("tcp", "tls", "metatls", "unix"):
        raise ValueError(
            f"{address.url}: hosts do not talk by {address.scheme} in this release; use tcp, tls "
            "or ipc"
        )
    return address.scheme in ("tls", "metatls")


def python_version() -> tuple[int, int]:
    """What must be the same on both sides."""
    return sys.version_info[0], sys.version_info[1]


def _nonce() -> bytes:
    return os.urandom(32)  # noqa: TID251 - must not repeat in any universe


def connect(address: ChannelAddr, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError."""
    if address.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(_unix_path(address))
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection((address.host, address.port), timeout)


def listen(address: ChannelAddr) -> socket.socket:
    """A listening socket; at all addresses of the host for ``::``. Raises OSError."""
    if address.bind is not None:  # others dial something else
        address = address.bind
    if address.fd is not None:
        sock = socket.socket(fileno=address.fd)
    elif address.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(_unix_path(address))
    else:
        where = (address.host, address.port)
        if address.host == "::" and socket.has_dualstack_ipv6():
            return socket.create_server(
                where, family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        if address.host == "::":  # this system has no IPv6
            where = ("0.0.0.0", address.port)  # noqa: S104 - that is what was asked for
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    sock.listen(_BACKLOG)
    return sock


def dial(
    address: ChannelAddr,
    key: bytes,
    purpose: Mapping[str, Any],
    timeout: float,
    *,
    trusting: bool = False,
    way: Callable[[ChannelAddr, float], socket.socket] | None = None,
) -> Wire:
    """An authenticated connection; see `Dialer` for `trusting`.

    `way` opens it, from the address and the timeout, where `connect` does not reach.

    Blocks. Raises OSError, HandshakeError, or SecretError for certificates that cannot be used.
    """
    secured = uses_tls(address)
    sock = (way or connect)(address, timeout)
    try:
        sock.settimeout(min(timeout, PATIENCE))
        if not secured:
            introduce(sock, key, purpose, trusting)
            return sock
        from monarch._engine.runtime import tls  # few programs need it

        with tls.in_words():
            context = tls.client_context()
            outer = tls.TlsSocket.dial(sock, context, address.host)
            session = introduce(outer, key, purpose, trusting).session
            outer.step_aside()
            sock.settimeout(PATIENCE)  # its agent may have to be started first
            inner = tls.TlsSocket.dial(sock, context, address.host)
            introduce(inner, session, purpose, trusting=False)
            return inner
    except BaseException:
        sock.close()
        raise


def introduce(sock: Wire, key: bytes, purpose: Mapping[str, Any], trusting: bool) -> Dialer:
    """Prove the key and say what this connection is for."""
    side = Dialer(key, _nonce(), python_version(), trusting=trusting)
    try:
        sock.sendall(side.hello)
    except OSError:
        sock.recv(1)  # it has hung up; if TLS was told why, this raises it
        raise
    while side.wants:
        data = sock.recv(side.wants)
        if not data:
            raise HandshakeError(
                "it closed the connection during the handshake (a worker with TLS is dialed as "
                "tls://, one without as tcp://)"
            )
        sock.sendall(side.receive(data))
    said = json.dumps(purpose).encode()
    sock.sendall(_LENGTH.pack(len(said)) + said)
    return side


def greet(address: ChannelAddr, key: bytes, timeout: float) -> Peer:
    """Who is there: both sides prove themselves, and part. Blocks; raises as `dial`."""
    sock = connect(address, timeout)
    try:
        sock.settimeout(min(timeout, PATIENCE))
        if uses_tls(address):
            from monarch._engine.runtime import tls

            with tls.in_words():
                outer = tls.TlsSocket.dial(sock, tls.client_context(), address.host)
                side = introduce(outer, key, {PROBE: True}, trusting=False)
                outer.step_aside()
        else:
            side = introduce(sock, key, {PROBE: True}, trusting=False)
    except TimeoutError as error:
        text = "somebody listens there, and does not answer the handshake"
        raise HandshakeError(text) from error
    finally:
        sock.close()
    assert side.peer is not None
    return side.peer


class Greeting:
    """One stranger at the door. `accepted(arrival)`, or `refused(why)`, is called once.

    Args:
        reactor: drives it.
        sock: the accepted connection, which is handed on or closed.
        find_key: from a key name to a secret, see `Listener`.
        accepted: takes the connection over.
        refused: is told why not.
        tls: to do it inside TLS.
        steps_aside: end TLS when all is said: the connection is for another process.
        open_to_all: see `Listener`.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        find_key: Callable[[bytes], bytes | None],
        accepted: Callable[[Arrival], None],
        refused: Callable[[str], None],
        *,
        tls: ssl.SSLContext | None = None,
        steps_aside: bool = True,
        open_to_all: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock: Wire = sock
        self._fd = sock.fileno()
        self._side = Listener(find_key, _nonce(), python_version(), open_to_all=open_to_all)
        self._accepted = accepted
        self._refused = refused
        self._tls = tls
        self._steps_aside = steps_aside
        self._certificate = ""
        self._said = bytearray()
        self._timer: Timer = reactor.call_later(PATIENCE, self._too_slow)
        # What to do next, again and again, until it is to be called no more. (What TLS has
        # decrypted makes no event, so each step is tried until there is nothing to read.)
        self._step: Callable[[], None] | None = self._read if tls is None else self._secure
        reactor.register(self._fd, self._ready)

    def _ready(self, mask: int) -> None:
        if not mask & ~WRITE:
            return
        try:
            while self._step is not None:
                self._step()
        except BlockingIOError:
            return
        except HandshakeError as error:
            with contextlib.suppress(OSError):  # it is told if it still listens
                self._sock.send(self._side.farewell)
            self._close(str(error))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._close(f"{type(error).__name__}: {error}")

    def _secure(self) -> None:
        """TLS."""
        from monarch._engine.runtime.tls import TlsSocket, in_words

        assert self._tls is not None
        with in_words():
            if isinstance(self._sock, socket.socket):
                self._sock = TlsSocket.accept(self._sock, self._tls)
            self._sock.shake_hands()
        self._certificate = self._sock.peer_name
        self._step = self._read

    def _read(self) -> None:
        """The handshake, then the purpose."""
        data = self._sock.recv(self._side.wants or self._missing())
        if not data:
            raise HandshakeError("it closed the connection during the handshake")
        if self._side.wants:
            # (What is sent here fits into any socket's buffer.)
            answer = self._side.receive(data)
            if answer:
                self._sock.send(answer)
            return
        self._said += data
        if not self._missing():
            self._step = self._finish

    def _finish(self) -> None:
        purpose: dict[str, Any] = json.loads(self._said[_LENGTH.size :])
        if type(purpose) is not dict:
            raise TypeError("a purpose that is no object")
        if self._steps_aside and not isinstance(self._sock, socket.socket):
            self._sock = self._sock.step_aside()
        self._stop()
        assert self._side.peer is not None
        authenticated = self._side.peer.key != NO_SECRET
        self._accepted(
            Arrival(self._sock, purpose, self._side.session, authenticated, self._certificate)
        )

    def _missing(self) -> int:
        """Bytes of the purpose that are yet to come."""
        if len(self._said) < _LENGTH.size:
            return _LENGTH.size - len(self._said)
        (size,) = _LENGTH.unpack_from(self._said)
        if size > _MOST:
            raise ValueError(f"a purpose of {size} bytes")
        return int(size) + _LENGTH.size - len(self._said)

    def _too_slow(self) -> None:
        self._close(f"it did not prove itself within {PATIENCE:g} s")

    def _close(self, why: str) -> None:
        self._stop()
        self._sock.close()
        self._refused(why)

    def _stop(self) -> None:
        self._step = None
        self._timer.cancel()
        self._reactor.unregister(self._fd)


def _unix_path(address: ChannelAddr) -> str:
    name = address.name
    return "\0" + name[1:] if name.startswith("@") else name
