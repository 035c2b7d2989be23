"""The first bytes of a connection between hosts: the handshake, then the purpose.

`dial` is the blocking side, for a thread of its own. `Greeting` is the listening side, driven by a
reactor: any number of handshakes may be in progress, and none of them blocks another. A peer has
`PATIENCE` seconds for all of it. Its input has a fixed size until it has authenticated itself, and
a bounded size afterwards.

After the handshake the dialer sends the purpose of the connection: a length, a JSON object of at
most `_MOST` bytes, and a tag made with the session key. The rest of the connection belongs to the
channel. It consists of authenticated records (`authenticated`), unless the connection uses TLS, or
neither side wants such records.

With TLS (`tls`) all of this happens inside TLS, twice. The worker, which accepts the connection, is
another process than the agent that the connection is for, and the state of a TLS session cannot be
handed over. So once the worker has authenticated the peer, both end TLS on that connection, and the
worker passes the bare connection to the agent. Dialer and agent then repeat both handshakes, that
of TLS with its certificates, and ours. The secret of the latter is now the session key of the first
round, so no other process can have taken the dialer's place in between. (Rejected: the worker stays
in the middle and relays. That costs a hop and a copy for every byte, and the traffic of all jobs
would pass one process.)
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.error_page import see_page
from monarch._engine.base.settings import settings
from monarch._engine.protocol.session.handshake import (
    NO_SECRET,
    Dialer,
    HandshakeError,
    Listener,
    Peer,
)
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission.authenticated import AuthenticSocket
from monarch._engine.runtime.admission.host_identity import (
    Verdict,
    check_user,
    far_end,
    meant,
    unix_path,
)
from monarch._engine.runtime.admission.socket_file import listen_at
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import WRITE, Reactor, Timer

if TYPE_CHECKING:
    import ssl

    from monarch._engine.runtime.admission.tls import TlsSocket

__all__ = [
    "CLAIM",
    "PATIENCE",
    "PROBE",
    "Arrival",
    "Greeting",
    "Route",
    "Wire",
    "authentic",
    "connect",
    "dial",
    "direct_way",
    "greet",
    "introduce",
    "listen",
    "python_version",
    "uses_tls",
    "why_unreachable",
]

PATIENCE = 5.0
"""How many seconds a handshake may take, without name look-up and connection."""

PROBE = "probe"
"""The purpose of a connection that only tests whether a worker answers."""

CLAIM = "claim"
"""The purpose of a connection that takes over a job; the value is the job's name."""

_BACKLOG = 1024
_MOST = 4096
_LENGTH = struct.Struct("<H")
_TAG = 32

Wire: TypeAlias = "socket.socket | AuthenticSocket | TlsSocket"
"""The socket of an authenticated connection."""


class Arrival(NamedTuple):
    """An authenticated connection, and what is known of the peer."""

    sock: socket.socket | TlsSocket
    purpose: dict[str, Any]
    session: bytes
    """The session key of the two sides, see `Listener`."""
    bare: bool
    """Whether the data after the handshake is not authenticated."""
    authenticated: bool
    """False if the peer was accepted without a proof."""
    certificate: str
    """The name in the peer's TLS certificate; empty without TLS."""

    def __repr__(self) -> str:
        return f"Arrival({self.sock!r})"  # the key is a secret

    @property
    def wire(self) -> Wire:
        """The connection in the form that is used from now on."""
        if self.bare or not isinstance(self.sock, socket.socket):
            return self.sock
        return AuthenticSocket(self.sock, self.session, dialer=False)


def uses_tls(address: ChannelAddr) -> bool:
    """Whether connections to `address` use TLS. Raises ValueError for a scheme without support."""
    if address.scheme not in ("tcp", "tls", "metatls", "unix"):
        raise ValueError(
            f"{address.url}: hosts cannot be connected by {address.scheme} in this release; use "
            "tcp, tls or ipc"
        )
    return address.scheme in ("tls", "metatls")


def python_version() -> tuple[int, int]:
    """Return the major and minor version of Python, which must be the same on both sides."""
    return sys.version_info[0], sys.version_info[1]


def _nonce() -> bytes:
    return os.urandom(32)  # noqa: TID251 - must not repeat in any universe


def connect(address: ChannelAddr, timeout: float) -> socket.socket:
    """Return a connected socket.

    Raises OSError, and HandshakeError for a Unix socket of another user.
    """
    if address.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(unix_path(address))
            check_user(sock)
        except BaseException:
            sock.close()
            raise
        return sock
    return environments.current.connect((address.host, address.port), timeout)


def listen(address: ChannelAddr) -> socket.socket:
    """Return a listening socket; for ``::`` on all addresses of the host. Raises OSError."""
    if address.bind is not None:  # other hosts dial another address than this one
        address = address.bind
    if address.fd is not None:
        sock = socket.socket(fileno=address.fd)
    elif address.scheme == "unix":
        return listen_at(unix_path(address), _BACKLOG)
    else:
        host = address.host
        if host == "::" and socket.has_dualstack_ipv6():
            return socket.create_server(
                (host, address.port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        if host == "::":  # this system has no IPv6
            host = "0.0.0.0"  # noqa: S104 - that is what was asked for
        # A look-up also translates the interface in a link-local address into its number.
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    sock.listen(_BACKLOG)
    return sock


Route: TypeAlias = Callable[[ChannelAddr, float], tuple[socket.socket, str]]
"""Opens a connection; returns it, and where it leads (see `far_end`). A gateway supplies one."""


def direct_way(address: ChannelAddr, timeout: float) -> tuple[socket.socket, str]:
    """Connect without a gateway, as a `Route`. Raises as `connect`."""
    sock = connect(address, timeout)
    try:
        return sock, far_end(sock, address)
    except BaseException:
        sock.close()
        raise


def dial(
    address: ChannelAddr,
    key: bytes,
    purpose: Mapping[str, Any],
    timeout: float,
    *,
    trusting: bool = False,
    way: Route = direct_way,
) -> Wire:
    """Return an authenticated connection; see `Dialer` for `trusting`.

    Blocks. Raises OSError, HandshakeError, or SecretError for certificates that cannot be used.
    """
    secured = uses_tls(address)
    sock, end = way(address, timeout)
    whom = meant(address, end)
    try:
        sock.settimeout(min(timeout, PATIENCE))
        if not secured:
            return authentic(sock, introduce(sock, key, purpose, whom, trusting=trusting))
        from monarch._engine.runtime.admission import tls  # few programs need it

        with tls.in_words():
            context = tls.client_context()
            outer = tls.TlsSocket.dial(sock, context, address.host)
            session = introduce(outer, key, purpose, whom, trusting=trusting).session
            outer.step_aside()
            sock.settimeout(PATIENCE)  # its agent may have to be started first
            inner = tls.TlsSocket.dial(sock, context, address.host)
            introduce(inner, session, purpose, whom)
            return inner
    except BaseException:
        sock.close()
        raise


def why_unreachable(error: OSError, timeout: float) -> str:
    """Return the reason why `dial` raised this error, and a remedy."""
    text = error.strerror or str(error)
    if isinstance(error, TimeoutError):
        return (
            f"timed out after {timeout:g} s: the host is down, a firewall drops packets, or what "
            "listens there is no worker"
        )
    if isinstance(error, ConnectionRefusedError):
        page = see_page("worker-not-running")
        return (
            f"{text}: the host is up, and nothing listens there; start `monarch worker` on it{page}"
        )
    if isinstance(error, FileNotFoundError):
        return f"{text}: no worker has made that socket on this machine"
    return text


def authentic(sock: socket.socket, side: Dialer) -> Wire:
    """Return the connection that the dialing side uses after the handshake."""
    return sock if side.bare else AuthenticSocket(sock, side.session, dialer=True)


def introduce(
    sock: socket.socket | TlsSocket,
    key: bytes,
    purpose: Mapping[str, Any],
    whom: str,
    *,
    trusting: bool = False,
) -> Dialer:
    """Prove the key; send which host is meant (see `meant`) and the purpose of the connection."""
    bare = not settings.authenticate_packets
    side = Dialer(key, _nonce(), python_version(), whom, trusting=trusting, bare=bare)
    try:
        sock.sendall(side.hello)
    except OSError:
        sock.recv(1)  # it has closed; if TLS received the reason, this raises it
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
    said = _LENGTH.pack(len(said)) + said
    sock.sendall(said + purpose_tag(side.session, said))
    return side


def greet(address: ChannelAddr, key: bytes, timeout: float) -> Peer:
    """Return which peer is at an address, after both have authenticated; blocks.

    Raises as `dial`.
    """
    sock, end = direct_way(address, timeout)
    whom = meant(address, end)
    try:
        sock.settimeout(min(timeout, PATIENCE))
        if uses_tls(address):
            from monarch._engine.runtime.admission import tls

            with tls.in_words():
                outer = tls.TlsSocket.dial(sock, tls.client_context(), address.host)
                side = introduce(outer, key, {PROBE: True}, whom)
                outer.step_aside()
        else:
            side = introduce(sock, key, {PROBE: True}, whom)
    except TimeoutError as error:
        text = (
            f"the connection was accepted, but its handshake was not answered within "
            f"{min(timeout, PATIENCE):g} s: the worker hangs, or another program listens there"
        )
        raise HandshakeError(text) from error
    finally:
        sock.close()
    assert side.peer is not None
    return side.peer


class Greeting:
    """The handshake with one accepted connection.

    Either `accepted(arrival)` or `refused(why)` is called, once.

    Args:
        reactor: drives the handshake.
        sock: the accepted connection, which is handed on or closed.
        find_key: from a key name to a secret, see `Listener`.
        accepted: takes over the authenticated connection.
        refused: gets the reason for a failure, as text.
        misdirected: see `Listener`, and `host_identity`. With TLS, certificates name the host.
        tls: context to do all of it inside TLS; None: without TLS.
        steps_aside: end TLS at the end of the handshake: the connection is for another process.
        open_to_all: see `Listener`.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        find_key: Callable[[bytes], bytes | None],
        accepted: Callable[[Arrival], None],
        refused: Callable[[str], None],
        misdirected: Verdict,
        *,
        tls: ssl.SSLContext | None = None,
        steps_aside: bool = True,
        open_to_all: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock: socket.socket | TlsSocket = sock
        self._fd = sock.fileno()
        self._arrival: Arrival | None = None
        self._side = Listener(
            find_key,
            _nonce(),
            python_version(),
            misdirected,
            open_to_all=open_to_all,
            bare=not settings.authenticate_packets,
        )
        self._accepted = accepted
        self._refused = refused
        self._tls = tls
        self._steps_aside = steps_aside
        self._certificate = ""
        self._said = bytearray()
        self._timer: Timer = reactor.call_later(PATIENCE, self._too_slow)
        # The next step, None at the end. A step is repeated until it would block, since data that
        # TLS has decrypted raises no event.
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
            with contextlib.suppress(OSError):  # the peer gets the reason if it still reads
                self._sock.send(self._side.farewell)
                self._sock.recv(_MOST)  # unread input would reset the connection before that
            self._close(str(error))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._close(f"{type(error).__name__}: {error}")
        # Called outside of the `try`: an exception of the callback is no refusal.
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._accepted(arrival)

    def _secure(self) -> None:
        """Continue the TLS handshake."""
        from monarch._engine.runtime.admission.tls import TlsSocket, in_words

        assert self._tls is not None
        with in_words():
            if isinstance(self._sock, socket.socket):
                self._sock = TlsSocket.accept(self._sock, self._tls)
            self._sock.shake_hands()
        self._certificate = self._sock.peer_name
        self._step = self._read

    def _read(self) -> None:
        """Continue the handshake, then read the purpose."""
        if isinstance(self._sock, socket.socket):
            check_user(self._sock)
        data = self._sock.recv(self._side.wants or self._missing())
        if not data:
            raise HandshakeError("it closed the connection during the handshake")
        if self._side.wants:
            # An answer always fits into the buffer of a socket.
            answer = self._side.receive(data)
            if answer:
                self._sock.send(answer)
            return
        self._said += data
        if not self._missing():
            self._step = self._finish

    def _finish(self) -> None:
        said, tag = bytes(self._said[:-_TAG]), bytes(self._said[-_TAG:])
        if not hmac.compare_digest(tag, purpose_tag(self._side.session, said)):
            raise HandshakeError("the purpose of the connection was altered on the way")
        purpose: dict[str, Any] = json.loads(said[_LENGTH.size :])
        if type(purpose) is not dict:
            raise TypeError("a purpose that is no object")
        if self._steps_aside and not isinstance(self._sock, socket.socket):
            self._sock = self._sock.step_aside()
        self._stop()
        assert self._side.peer is not None
        authenticated = self._side.peer.key != NO_SECRET
        session, bare = self._side.session, self._side.bare
        self._arrival = Arrival(
            self._sock, purpose, session, bare, authenticated, self._certificate
        )

    def _missing(self) -> int:
        """Return how many bytes of the purpose are yet to arrive."""
        if len(self._said) < _LENGTH.size:
            return _LENGTH.size - len(self._said)
        (size,) = _LENGTH.unpack_from(self._said)
        if size > _MOST:
            raise ValueError(f"a purpose of {size} bytes")
        return _LENGTH.size + int(size) + _TAG - len(self._said)

    def _too_slow(self) -> None:
        self._close(f"it did not complete the handshake within {PATIENCE:g} s")

    def _close(self, why: str) -> None:
        self._stop()
        self._sock.close()
        self._refused(why)

    def _stop(self) -> None:
        self._step = None
        self._timer.cancel()
        self._reactor.unregister(self._fd)
