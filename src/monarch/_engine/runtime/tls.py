"""TLS between hosts: whose certificates, and a socket that a reactor can drive.

Both sides show a certificate and check the other's against one CA, in TLS 1.3 and nothing older; a
dialer also checks that the certificate is one for the name it dialed. The shared secret is proved
inside, as without TLS: a certificate says which machine this is, the secret which job.

Which certificates is a matter of the environment, so that programs need not change::

    HYPERACTOR_TLS_CERT   this host's certificate (and those up to the CA, if there are any)
    HYPERACTOR_TLS_KEY    its private key, without a passphrase
    HYPERACTOR_TLS_CA     the certificate of the CA that signed everybody's

each the path of a PEM file, or PEM text. They are read for each connection that is dialed, by a
worker when it starts, and by an agent for each connection that it takes over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
from collections.abc import Generator, Sequence
from typing import Any

from monarch._engine.base.memory_file import memory_file
from monarch._engine.protocol.handshake import HandshakeError
from monarch._engine.runtime.secret import SecretError

__all__ = ["TlsSocket", "client_context", "in_words", "own_digest", "server_context"]

_RECORD = 16384
_MOST = 16 * _RECORD  # bytes per call, so that a fast peer does not keep the reactor


def client_context() -> ssl.SSLContext:
    """For connections that are dialed. Raises SecretError."""
    return _context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def server_context() -> ssl.SSLContext:
    """For connections that are accepted. Raises SecretError."""
    context = _context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # each connection proves everything anew
    return context


def own_digest() -> bytes:
    """The SHA-256 digest of this host's certificate, as it is shown. Raises SecretError."""
    with _pem("CERT") as path, open(path) as file:
        text = file.read()
    begin = text.index(ssl.PEM_HEADER)
    end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()


def _context(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    with _pem("CERT") as cert, _pem("KEY") as key:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    with _pem("CA") as ca:
        context.load_verify_locations(ca)
    return context


@contextlib.contextmanager
def _pem(name: str) -> Generator[str]:
    """The path of what a setting means; an error of who uses it is told with its name."""
    variable = f"HYPERACTOR_TLS_{name}"
    value = os.environ.get(variable, "")
    if not value:
        raise SecretError(
            f"{variable} is not set: a TLS address needs HYPERACTOR_TLS_CERT, HYPERACTOR_TLS_KEY "
            "and HYPERACTOR_TLS_CA, each a PEM file or PEM text (see docs/security.md)"
        )
    fd = -1
    try:
        if "-----BEGIN " in value:
            fd = memory_file()
            os.write(fd, value.encode())
            os.lseek(fd, 0, os.SEEK_SET)
        # (The error must not repeat the value: it may be a private key.)
        yield value if fd < 0 else f"/dev/fd/{fd}"
    except OSError as error:
        where = "its text" if fd >= 0 else value
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise SecretError(f"{variable} cannot be used: {where}: {why or 'no PEM'}") from None
    finally:
        if fd >= 0:
            os.close(fd)


def _no_passphrase() -> str:
    raise SecretError(
        "HYPERACTOR_TLS_KEY cannot be used: it has a passphrase, and nobody to ask for it"
    )


@contextlib.contextmanager
def in_words() -> Generator[None]:
    """What TLS has against the peer, or the peer against us, as a HandshakeError."""
    try:
        yield
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise ConnectionError("it closed the connection during the TLS handshake") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(f"its TLS certificate: {error.verify_message}") from None
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if " alert " in reason:  # the other side's words
            _, _, reason = reason.partition(" alert ")
            raise HandshakeError(f"it refused this side's TLS certificate: {reason}") from None
        raise HandshakeError(f"TLS: {reason}") from None


class TlsSocket:
    """The part of a socket's face that a reactor needs, over TLS, never blocking.

    What the plain one says by BlockingIOError, this one does too. Records hold 16 kB: small buffers
    share one, what is larger is encrypted from where it is and decrypted to where it belongs.

    In TLS 1.3 reading never has to write first, nor writing to read, once the handshake is over;
    so whoever waits for one waits for the event of that name.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent: bytes | memoryview | None = None  # OpenSSL wants to see the same again
        self.family = sock.family
        self.fileno = sock.fileno
        self.getsockname = sock.getsockname
        self.close = sock.close
        self.pending = sock.pending
        self.setblocking = sock.setblocking
        self.setsockopt = sock.setsockopt

    @classmethod
    def accept(cls, sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
        """For the side that was dialed; `shake_hands` comes next."""
        return cls(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def shake_hands(self) -> None:
        """Go on with the TLS handshake; returns when it is over."""
        with _not_now():
            self._sock.do_handshake()

    def step_aside(self) -> socket.socket:
        """End TLS on both sides; the bare connection. This object is of no use afterwards."""
        with _not_now():
            self._sock.unwrap()
        return socket.socket(fileno=self._sock.detach())

    @property
    def peer_name(self) -> str:
        """What the peer's certificate calls it."""
        certificate: Any = self._sock.getpeercert()
        for part in certificate["subject"]:
            for key, value in part:
                if key == "commonName":
                    return str(value)
        return ""

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes; none: the peer has closed the connection."""
        with _not_now():
            return self._sock.recv(size)

    def recv_into(self, target: memoryview) -> int:
        """Fill `target`, as far as there is something; 0: the peer has closed the connection.

        Ask `pending` afterwards: what is decrypted already makes no event.
        """
        got = 0
        most = min(len(target), _MOST)
        with _not_now():
            got = self._sock.recv_into(target, most)
        # The rest of what has come; a record that is not full is the last one.
        with contextlib.suppress(ssl.SSLWantReadError):
            last = got
            while last and got < most and (last == _RECORD or self._sock.pending()):
                last = self._sock.recv_into(target[got:most], most - got)
                got += last
        return got

    def send(self, data: bytes | memoryview) -> int:
        """Send what fits. After a BlockingIOError the next call must begin with the same bytes."""
        with _not_now():
            return self._sock.send(data)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send the first of these bytes; how many.

        After a BlockingIOError the next call must begin with the same bytes.
        """
        if self._unsent is None:
            self._unsent = _next(buffers)
        with _not_now():
            sent = self._sock.send(self._unsent)
        self._unsent = None
        return sent


def _next(buffers: Sequence[memoryview]) -> bytes | memoryview:
    if len(buffers) == 1 or len(buffers[0]) >= _RECORD:
        return buffers[0][:_MOST]
    room = _RECORD
    parts: list[memoryview] = []
    for buffer in buffers:
        parts.append(buffer[:room])
        room -= len(parts[-1])
        if not room:
            break
    return b"".join(parts)


@contextlib.contextmanager
def _not_now() -> Generator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
