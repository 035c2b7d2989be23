"""The handshake: both ends of a connection between hosts prove that they know one secret.

Nothing else is read from a connection before this is over, and everything in it has a fixed size,
so there is nothing to parse for somebody who does not know the secret. Three messages::

    dialer    HELLO   magic, version, Python, key name, nonce            64 bytes
    listener  REPLY   magic, version, Python, outcome, nonce             64 bytes
    dialer    PROOF   HMAC(key, "dialer" + HELLO + REPLY)                32 bytes
    listener  PROOF   HMAC(key, "listener" + HELLO + REPLY + PROOF)      32 bytes

It is challenge and response as in SCRAM (RFC 5802) with HMAC-SHA-256 (RFC 2104) and without
passwords: keys are 32 random bytes, so there is nothing to guess and nothing to salt. Each side
contributes a fresh nonce, so a recorded handshake proves nothing; the two proofs differ in role and
text, so one cannot be reflected as the other; the whole exchange is under the proofs, so it cannot
be altered on the way. The dialer proves itself first: a port scanner learns that something listens
here, and nothing more. Proofs are compared in constant time.

The *key name* is a digest of the key that gives nothing away about it. It tells "you belong to
another job" from "this is an attack" in the error text, and lets a listener serve several jobs.

What the handshake does not do: hide or protect what follows. On a network where others can read or
alter packets it runs inside TLS (see docs/security.md). Both sides end up with a *session key*,
made of the secret and the exchange, with which a second handshake can be tied to this one.

A listener that was told to let in anybody says so to a dialer whose key it does not know, and both
go on with `NO_SECRET`, which proves nothing. The dialer has to agree: if it did so unasked, anybody
who answers at the worker's address could take its place.

Versions are compared first and in the open: peers that would misunderstand each other say so
instead of failing to prove anything. A minor version of Python must match since code travels by
value; the listener decides, the dialer hears which versions there are.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["NO_SECRET", "Dialer", "HandshakeError", "Listener", "Peer", "key_name"]

MAGIC = b"monarch\x01"
VERSION = 1  # of everything that is said on the connection afterwards
KEY_SIZE = 32
NO_SECRET = bytes(KEY_SIZE)
"""The key of those who agreed to prove nothing."""
_NONCE_SIZE = 32

_GREETING = struct.Struct("<8sHBB12s8s32s")  # magic, version, Python, -, outcome
GREETING_SIZE = _GREETING.size
PROOF_SIZE = hashlib.sha256().digest_size

_OK = b"ok"
_VERSION = b"version"
_PYTHON = b"python"
_KEY = b"key"
_OPEN = b"open"


class HandshakeError(Exception):
    """The peer was refused, or refused us; the text says why and what to do."""


class Peer(NamedTuple):
    """What is known of a peer that has proved itself."""

    key: bytes
    version: int
    python: tuple[int, int]


def key_name(key: bytes) -> bytes:
    """What a key is called in the open: 12 bytes that say nothing about it."""
    return hmac.digest(key, b"monarch key name", "sha256")[:12]


def _greeting(python: tuple[int, int], name: bytes, outcome: bytes, nonce: bytes) -> bytes:
    if len(nonce) != _NONCE_SIZE:
        raise ValueError(f"a nonce has {_NONCE_SIZE} bytes, not {len(nonce)}")
    return _GREETING.pack(MAGIC, VERSION, *python, name, outcome, nonce)


def _proof(key: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(key, role + b"".join(said), "sha256")


class _Side:
    """What both sides do: collect bytes until the next message of a fixed size is complete."""

    __slots__ = ("_expected", "_got", "peer", "session")

    def __init__(self, expected: int) -> None:
        self._got = bytearray()
        self._expected = expected
        self.peer: Peer | None = None
        """Set when the peer has proved itself."""
        self.session = b""
        """Set as well: a key that only these two have, unless somebody with the secret listens."""

    @property
    def wants(self) -> int:
        """How many bytes to read next, at most: what comes later belongs to others. 0: done."""
        return self._expected - len(self._got)

    def receive(self, data: bytes) -> bytes:
        """Take up to `wants` bytes; what is to be sent in return, if anything.

        Raises HandshakeError when the peer is refused: send `farewell`, then close.
        """
        if len(data) > self.wants:
            raise ValueError(f"{len(data)} bytes for a handshake that wants {self.wants}")
        self._got += data
        if len(self._got) < self._expected or not data:
            return b""
        message = bytes(self._got)
        self._got.clear()
        self._expected = 0
        return self._on_message(message)

    def _on_message(self, message: bytes) -> bytes:
        raise NotImplementedError


class Dialer(_Side):
    """The side that opened the connection. Send `hello` first.

    Args:
        key: the secret, 32 bytes.
        nonce: 32 fresh random bytes.
        python: major and minor version.
        trusting: whether to go on with a worker that lets in anybody and proves nothing.
    """

    __slots__ = ("_key", "_python", "_reply", "_trusting", "hello")

    def __init__(
        self, key: bytes, nonce: bytes, python: tuple[int, int], *, trusting: bool = False
    ) -> None:
        super().__init__(GREETING_SIZE)
        self._trusting = trusting
        self._key = _checked(key)
        self._python = python
        self.hello = _greeting(python, key_name(key), b"", nonce)
        self._reply = b""

    def _on_message(self, message: bytes) -> bytes:
        if not self._reply:
            return self._on_reply(message)
        said = (self.hello, self._reply, _proof(self._key, b"dialer", self.hello, self._reply))
        if not hmac.compare_digest(message, _proof(self._key, b"listener", *said)):
            raise HandshakeError("the worker could not prove that it knows the secret")
        _, version, major, minor, *_ = _GREETING.unpack(self._reply)
        self.peer = Peer(self._key, version, (major, minor))
        self.session = _proof(self._key, b"session", *said)
        return b""

    def _on_reply(self, reply: bytes) -> bytes:
        magic, version, major, minor, _, outcome, _ = _GREETING.unpack(reply)
        if magic != MAGIC:
            raise HandshakeError(
                "what answers there is no monarch worker (or one with TLS, if this side has none)"
            )
        outcome = outcome.rstrip(b"\0")
        if outcome == _VERSION:
            raise HandshakeError(
                f"the worker speaks protocol {version}, this side {VERSION}: install the same "
                "release of pymonarch on both"
            )
        if outcome == _PYTHON:
            mine = ".".join(map(str, self._python))
            raise HandshakeError(
                f"the worker runs Python {major}.{minor}, this side {mine}: code travels by value, "
                "so both must be the same"
            )
        if outcome == _KEY:
            raise HandshakeError(
                "the worker knows another secret than this side: give both the same "
                "MONARCH_SECRET_FILE, or start the worker as the same user"
            )
        if outcome == _OPEN:
            if not self._trusting:
                raise HandshakeError(
                    "the worker knows another secret than this side and lets in anybody "
                    "(allow_unauthenticated is on there): give both the same MONARCH_SECRET_FILE; "
                    "or trust whoever answers there, with configure(allow_unauthenticated=True)"
                )
            self._key = NO_SECRET
        elif outcome != _OK:
            raise HandshakeError(f"the worker refused: {outcome!r}")
        self._reply = reply
        self._expected = PROOF_SIZE
        return _proof(self._key, b"dialer", self.hello, reply)


class Listener(_Side):
    """The side that was dialed.

    Args:
        find_key: from a key name to the secret that has it, or None.
        nonce: 32 fresh random bytes.
        python: major and minor version.
        open_to_all: whether to let in who does not know the secret.

    >>> key = bytes(range(32))
    >>> dialer = Dialer(key, bytes(32), (3, 11))
    >>> listener = Listener({key_name(key): key}.get, bytes([1] * 32), (3, 11))
    >>> proof = dialer.receive(listener.receive(dialer.hello))
    >>> _ = dialer.receive(listener.receive(proof))
    >>> dialer.peer is not None, listener.peer is not None
    (True, True)
    """

    __slots__ = ("_find_key", "_hello", "_key", "_nonce", "_open", "_python", "_reply", "farewell")

    def __init__(
        self,
        find_key: Callable[[bytes], bytes | None],
        nonce: bytes,
        python: tuple[int, int],
        *,
        open_to_all: bool = False,
    ) -> None:
        super().__init__(GREETING_SIZE)
        self._open = open_to_all
        self._find_key = find_key
        self._nonce = nonce
        self._python = python
        self._hello = b""
        self._reply = b""
        self._key = b""
        self.farewell = b""
        """What a peer that was refused may know; empty for one that does not speak this at all."""

    def _on_message(self, message: bytes) -> bytes:
        return self._on_proof(message) if self._hello else self._on_hello(message)

    def _on_hello(self, hello: bytes) -> bytes:
        magic, version, major, minor, name, _, _ = _GREETING.unpack(hello)
        if magic != MAGIC:
            raise HandshakeError("it does not speak this protocol")
        if version != VERSION:
            raise self._refusal(_VERSION, f"it speaks protocol {version}, this side {VERSION}")
        if (major, minor) != self._python:
            mine = ".".join(map(str, self._python))
            raise self._refusal(_PYTHON, f"it runs Python {major}.{minor}, this side {mine}")
        key = self._find_key(name)
        outcome = _OK
        if key is None:
            if not self._open:
                raise self._refusal(_KEY, "it knows another secret")
            key, outcome = NO_SECRET, _OPEN
        self._key = _checked(key)
        self._hello = hello
        self._reply = _greeting(self._python, bytes(12), outcome, self._nonce)
        self._expected = PROOF_SIZE
        return self._reply

    def _on_proof(self, proof: bytes) -> bytes:
        said = (self._hello, self._reply)
        if not hmac.compare_digest(proof, _proof(self._key, b"dialer", *said)):
            raise HandshakeError("it could not prove that it knows the secret")
        _, version, major, minor, *_ = _GREETING.unpack(self._hello)
        self.peer = Peer(self._key, version, (major, minor))
        self.session = _proof(self._key, b"session", *said, proof)
        return _proof(self._key, b"listener", *said, proof)

    def _refusal(self, outcome: bytes, why: str) -> HandshakeError:
        self.farewell = _greeting(self._python, bytes(12), outcome, self._nonce)
        return HandshakeError(why)


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_SIZE:
        raise ValueError(f"a secret has {KEY_SIZE} bytes, not {len(key)}")
    return key
