"""TLS between hosts: which certificates are used, and a socket that a reactor can drive.

Both sides show a certificate and verify the other's against one CA, in TLS 1.3 and nothing older. A
dialer also checks that the certificate is valid for the name it dialed. The shared secret is proved
inside TLS, as without TLS: the certificate identifies the machine, the secret identifies the job.

Certificates come from the environment, so that programs need not change::

    HYPERACTOR_TLS_CERT   this host's certificate (and those up to the CA, if there are any)
    HYPERACTOR_TLS_KEY    its private key, without a passphrase
    HYPERACTOR_TLS_CA     the certificate of the CA that signed those of all hosts

Each value is the path of a PEM file, or PEM text. The file of a private key has to be closed to
others: mode 0600, or 0640 if it belongs to root (a group may have been given it on purpose). The
values are read for each connection that is dialed, by a worker when it starts, and by an agent for
each connection that it takes over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from monarch._engine.base.memory_file import memory_file
from monarch._engine.protocol.session.handshake import MAGIC, ClosedInHandshake, HandshakeError
from monarch._engine.runtime.admission.authenticated import ProtectedSocket
from monarch._engine.runtime.admission.secret import SecretError
from monarch._engine.transport.outbox import Outbox

__all__ = ["TlsSocket", "client_context", "in_words", "own_digest", "server_context"]

_RECORD = 16384
_MOST = 1 << 20  # bytes per call, so that a fast peer does not occupy the reactor
_AHEAD = 64 << 10  # bytes received at a time: TLS finds them in the processor's cache
_STEP = 16 * _RECORD  # bytes encrypted at a time: OpenSSL keeps the memory that holds them


def client_context() -> ssl.SSLContext:
    """Return a context for connections that are dialed. Raises SecretError."""
    return _context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def server_context() -> ssl.SSLContext:
    """Return a context for connections that are accepted. Raises SecretError."""
    context = _context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # no resumption: each connection proves everything anew
    return context


def own_digest() -> bytes:
    """Return the SHA-256 digest of the certificate that this host shows. Raises SecretError."""
    with _pem("CERT") as path, open(path) as file:
        text = file.read()
    begin = text.index(ssl.PEM_HEADER)
    end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()


def _context(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    with _pem("CERT") as cert:  # by itself: below, its errors would be reported as those of the key
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    with _pem("CERT") as cert, _pem("KEY") as key:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    with _pem("CA") as ca:
        context.load_verify_locations(ca)
    return context


@contextlib.contextmanager
def _pem(name: str) -> Generator[str]:
    """Yield a file path for a PEM setting; re-raise errors with the variable's name.

    Raises SecretError.
    """
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
        elif name == "KEY":
            _check_closed(value)
        # Errors must not repeat PEM text, which may be a private key.
        yield value if fd < 0 else f"/dev/fd/{fd}"
    except OSError as error:
        where = "its text" if fd >= 0 else value
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise SecretError(f"{variable} cannot be used: {where}: {why or 'no PEM'}") from None
    finally:
        if fd >= 0:
            os.close(fd)


def _check_closed(path: str) -> None:
    """Raise SecretError if others can read a private key, or could have written it."""
    status = os.stat(path)
    if status.st_uid not in (os.getuid(), 0):
        raise SecretError(f"HYPERACTOR_TLS_KEY cannot be used: {path} belongs to another user")
    open_to = 0o027 if status.st_uid == 0 else 0o077
    if stat.S_IMODE(status.st_mode) & open_to:
        raise SecretError(
            f"HYPERACTOR_TLS_KEY cannot be used: {path} is open to others: chmod 600 {path}"
        )


def _no_passphrase() -> str:
    raise SecretError(
        "HYPERACTOR_TLS_KEY cannot be used: the key is protected by a passphrase; store it without "
        "one (openssl pkey -in KEY -out FILE), in a file of mode 0600"
    )


@contextlib.contextmanager
def in_words() -> Generator[None]:
    """Translate TLS errors, ours or the peer's, into HandshakeError or ConnectionError."""
    try:
        yield
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise ClosedInHandshake("it closed the connection during the TLS handshake") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(f"its TLS certificate: {error.verify_message}") from None
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if " alert " in reason:  # an alert comes from the peer
            _, _, reason = reason.partition(" alert ")
            raise HandshakeError(f"it refused this side's TLS certificate: {reason}") from None
        raise HandshakeError(f"TLS: {reason}") from None


class _Scratch(threading.local):
    """A buffer per thread, which holds received ciphertext until TLS has taken it."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(_AHEAD))


_scratch = _Scratch()


class TlsSocket(ProtectedSocket):
    """A socket whose data is protected by TLS.

    OpenSSL works on memory here, not on the socket. On a socket OpenSSL calls the kernel twice for
    each record of 16 kB that arrives, and once for each that is sent. Those calls cost more than
    the two copies that they would save (a quarter of the processor time of a large transfer). Small
    buffers share a record; larger ones are encrypted from, and decrypted to, the caller's memory.

    Once the handshake is over, TLS 1.3 never has to write before it can read, or to read before it
    can write. So a caller waits for a read event to read, and for a write event to write.

    OpenSSL does not allow that one thread reads while another writes, so a lock guards it. The lock
    is reentrant: the garbage collector may run code that writes in the middle of a read.
    """

    secured = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None) -> None:
        super().__init__(sock)
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived, self._leaving, server_side=name is None, server_hostname=name or None
        )
        self._lock = threading.RLock()
        self._sealed = Outbox()  # ciphertext that the socket has not taken yet
        self._holds = 0  # plaintext bytes covered by `_sealed`
        self._came = 0  # bytes received by the last read of the socket

    @classmethod
    def dial(cls, sock: socket.socket, context: ssl.SSLContext, name: str) -> TlsSocket:
        """Return the socket of the side that dialed `name`, after the TLS handshake; blocks."""
        self = cls(sock, context, name.partition("%")[0])  # certificates name no interface
        self.shake_hands()
        return self

    @classmethod
    def accept(cls, sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
        """Return the socket of the side that was dialed; call `shake_hands` next."""
        return cls(sock, context, None)

    def shake_hands(self) -> None:
        """Continue the TLS handshake; return when it is complete."""
        self._converse(self._tls.do_handshake)

    def step_aside(self) -> socket.socket:
        """End TLS on both sides; return the bare connection. This object is unusable afterwards.

        The dialing side announces the end of TLS first, sends nothing until it has an answer, and
        is then the first to send. So no plaintext can have been read together with the end of TLS.
        """
        sock, early = self.part()
        if early:
            raise ConnectionError("it sent data before the end of TLS was confirmed")
        return sock

    def part(self) -> tuple[socket.socket, bytes]:
        """End TLS as `step_aside` does, for a connection where the dialed side sends first.

        Returns the bare connection, and the plaintext that was read together with the end of TLS.
        """
        if self._tls.server_side and self.recv(1):
            raise ConnectionError("it sent data where it had to end TLS")
        self._converse(self._tls.unwrap)
        return self._sock, self._arrived.read()

    @property
    def certificate(self) -> bytes:
        """The peer's certificate, in DER; empty if the peer showed none."""
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def peer_name(self) -> str:
        """The common name in the peer's certificate; empty if there is none."""
        certificate: Any = self._tls.getpeercert()
        for part in certificate["subject"]:
            for key, value in part:
                if key == "commonName":
                    return str(value)
        return ""

    def pending(self) -> bool:
        """Whether data has been received but not read; such data raises no event."""
        return self._arrived.pending > 0 or self._tls.pending() > 0

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; none when the peer has closed the connection."""
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                if not self._receive():
                    return b""
            except ssl.SSLEOFError:  # the end was reported before
                return b""

    def recv_into(self, target: memoryview) -> int:
        """Fill `target` as far as there is data; return the size, 0 if the peer has closed.

        Ask `pending` afterwards.
        """
        arrived = self._arrived
        read: Any = self._tls.read  # its stub omits that it returns a number here
        most = min(len(target), _MOST)
        got = 0
        more = self.pending() or self._receive() > 0
        while more:
            try:
                # OpenSSL reads one record per call. It wants more only after it took all `arrived`.
                while got < most and (arrived.pending or not got):
                    room = target[got:]
                    with self._lock:
                        count = read(most - got, room)
                    if not count:
                        return got
                    got += count
            except ssl.SSLWantReadError:
                pass
            if got == most or (got and self._came < _AHEAD):
                break
            try:
                more = self._receive() > 0
            except BlockingIOError:
                if not got:
                    raise
                break
        return got

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """See `ProtectedSocket`."""
        if not self._sealed:
            data = _next(buffers)
            self._holds = min(len(data), _MOST)
            for at in range(0, self._holds, _STEP):
                step = data[at : min(at + _STEP, self._holds)]
                with self._lock:
                    self._tls.write(step)
                    self._seal()
        self._flush()
        return self._holds

    def _seal(self) -> None:
        sealed = self._leaving.read()
        if sealed:
            self._sealed.append(memoryview(sealed))

    def _flush(self) -> None:
        while self._sealed:
            self._sealed.write(self._sock)

    def _receive(self) -> int:
        """Pass received bytes to TLS, up to `_AHEAD`; return the size, 0 if the peer has closed."""
        room = _scratch.room
        count = self._came = self._sock.recv_into(room)
        if count:
            self._arrived.write(room[:count])
        else:
            self._arrived.write_eof()
        return count

    def _converse(self, step: Callable[[], Any]) -> None:
        """Repeat `step` until it is complete. Call again after a BlockingIOError."""
        while True:
            try:
                step()
            except ssl.SSLWantReadError:
                self._seal()
                self._flush()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the alert that reports the error
                    self._seal()
                    self._flush()
                if self._came and bytes(_scratch.room[: len(MAGIC)]) == MAGIC:
                    text = "the worker there has no TLS: dial it as tcp://, or start it as tls://"
                    raise HandshakeError(text) from None
                raise
            else:
                self._seal()
                self._flush()
                return


def _next(buffers: Sequence[memoryview]) -> memoryview:
    if len(buffers) == 1 or len(buffers[0]) >= _RECORD:
        return buffers[0]
    room = _RECORD
    parts: list[memoryview] = []
    for buffer in buffers:
        parts.append(buffer[:room])
        room -= len(parts[-1])
        if not room:
            break
    return memoryview(b"".join(parts))
