"""The handshake: both ends of a connection between hosts prove that they know one secret.

No other data is read from a connection before the handshake is complete. Every message in it has a
fixed size, so a peer that does not know the secret cannot reach a parser. Four messages::

    dialer    HELLO   magic, version, Python, key name, nonce            64 bytes
    listener  REPLY   magic, version, Python, outcome, nonce             64 bytes
    dialer    PROOF   the host it means; HMAC(key, "dialer" + all messages so far)     480 bytes
    listener  ANSWER  its verdict; HMAC(key, "listener" + all messages so far)         480 bytes

It is challenge and response as in SCRAM (RFC 5802) with HMAC-SHA-256 (RFC 2104) and without
passwords: keys are 32 random bytes, so there is nothing to guess and nothing to salt. The dialer
proves itself first: a port scanner learns that something listens here, and nothing more. Proofs are
compared in constant time.

Both sides end up with a *session key*, HMAC(key, "session" + all four messages). All later data on
the connection is authenticated with keys derived from it (`protocol.session.records`), unless TLS
does that already.

Why an attacker who does not know the secret, but controls every wire, gets nowhere:

* *Replay.* Each side contributes a fresh nonce, and each proof covers both nonces. A recording
  proves nothing to a listener or a dialer that has drawn another nonce.
* *Reflection.* The two proofs are computed over different words ("dialer", "listener") and texts of
  different lengths, so one is never the other, within a handshake or between two.
* *Alteration.* Each proof covers every byte sent before it, versions and outcomes included. A
  change of one byte makes the next proof wrong, so a downgrade is impossible.
* *Relay.* The attacker holds an address that a dialer dials (the port of a worker that is down, an
  address that was reassigned to another machine), and relays the handshake to another listener of
  the same secret. The dialer's proof names the host that the dialer means: the address, and where
  the connection led (see `runtime.admission.host_identity`). The listener compares that with its
  own names, and refuses with a proof of its own. If the two agree, the dialer has reached the host
  it means, and the attacker is no more than a piece of wire: without the session key it can neither
  turn the traffic into a proof nor send data of its own.
* *Take-over* of the connection afterwards needs the session key, too.

The handshake does not hide later data. On a network where others must not read it, it runs inside
TLS (see docs/security.md). There the certificate identifies the host that the dialer has reached.

The *key name* is a digest of the key that reveals nothing about the key. It lets error texts
distinguish a peer of another job from an attack, and lets a listener serve several jobs.

A listener that is configured to accept any peer announces this to a dialer whose key it does not
know, and both continue with `NO_SECRET`, which proves nothing. The dialer must be configured to
agree: otherwise any process that answers at the worker's address could impersonate the worker.

Versions are compared first and in the clear, so that incompatible peers report the version instead
of a failed proof. For that HELLO and REPLY are the same in all versions. The minor version of
Python must match since code travels by value; the listener decides, and the dialer learns which
versions there are.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "MAGIC",
    "NO_SECRET",
    "ClosedInHandshake",
    "Dialer",
    "HandshakeError",
    "Listener",
    "Peer",
    "key_name",
]

MAGIC = b"monarch\x01"
"""The first bytes of both sides, in all versions."""
VERSION = 2  # of everything sent on the connection afterwards
KEY_SIZE = 32
NO_SECRET = bytes(KEY_SIZE)
"""The key of a handshake without authentication."""
_NONCE_SIZE = 32

_GREETING = struct.Struct("<8sHBB12s8s32s")  # magic, version, Python, -, outcome
GREETING_SIZE = _GREETING.size
_DIGEST = hashlib.sha256().digest_size
_SAID = struct.Struct("<BBH444s")  # flags, verdict, length of the text, text
PROOF_SIZE = _SAID.size + _DIGEST
MOST_MEANT = 444
"""The most bytes of text in a proof."""

# Flags.
_BARE = 1  # dialer: packets need not be authenticated; listener: they are not
# Verdicts.
_WELCOME = 0
_MISDIRECTED = 1

_OK = b"ok"
_VERSION = b"version"
_PYTHON = b"python"
_KEY = b"key"
_OPEN = b"open"
_NO_TLS = b"no tls"
_TLS_HANDSHAKE = b"\x16\x03"


class HandshakeError(Exception):
    """One side refused the other; the text gives the reason and the remedy."""


class ClosedInHandshake(ConnectionError):
    """The peer closed the connection before the handshake was over."""


class Peer(NamedTuple):
    """The properties of a peer that has proved that it knows the secret."""

    key: bytes
    version: int
    python: tuple[int, int]

    def __repr__(self) -> str:
        return f"Peer(version={self.version}, python={self.python})"  # the key is a secret


def key_name(key: bytes) -> bytes:
    """Return the public name of a key: 12 bytes that reveal nothing about it."""
    return hmac.digest(key, b"monarch key name", "sha256")[:12]


def _greeting(python: tuple[int, int], name: bytes, outcome: bytes, nonce: bytes) -> bytes:
    if len(nonce) != _NONCE_SIZE:
        raise ValueError(f"a nonce has {_NONCE_SIZE} bytes, not {len(nonce)}")
    return _GREETING.pack(MAGIC, VERSION, *python, name, outcome, nonce)


def _said(flags: int, verdict: int, text: str) -> bytes:
    data = text.encode(errors="surrogateescape")[:MOST_MEANT]
    return _SAID.pack(flags, verdict, len(data), data)


def _text(said: tuple[int, int, int, bytes]) -> str:
    return said[3][: said[2]].decode(errors="surrogateescape")


def _misdirected(meant: str, called: str) -> str:
    dialed, _, end = meant.partition("\n")
    end = end.partition(" of ")[0] or "an unknown place"
    return (
        f"{dialed} was dialed, which led to {end}; the worker that answered is {called}: "
        "connections are forwarded on the way. If that is intended (a forwarded port, NAT, a "
        f"service address), start that worker with --name {dialed} or MONARCH_WORKER_NAMES={dialed}"
    )


def _proof(key: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(key, role + b"".join(said), "sha256")


class _Side:
    """The common part of both sides: collects bytes until a message of fixed size is complete."""

    __slots__ = ("_expected", "_got", "bare", "peer", "session")

    def __init__(self, expected: int) -> None:
        self._got = bytearray()
        self._expected = expected
        self.peer: Peer | None = None
        """The peer; None until it has proved that it knows the key."""
        self.session = b""
        """The session key; set with `peer`. An eavesdropper with the secret can compute it."""
        self.bare = False
        """Whether the data after the handshake is not authenticated; set with `peer`."""

    @property
    def wants(self) -> int:
        """The number of bytes to read next, at most, since later ones are not for the handshake.

        0 when the handshake is complete.
        """
        return self._expected - len(self._got)

    def receive(self, data: bytes) -> bytes:
        """Accept up to `wants` bytes; return the bytes to send in reply, which may be empty.

        Raises HandshakeError when the peer is refused: send `farewell` (a listener has one), then
        close.
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
        meant: the host that was dialed: the address, and on a second line where that led (see
            `runtime.admission.host_identity`); at most `MOST_MEANT` bytes.
        trusting: whether to accept a worker that lets in any peer and proves nothing.
        bare: whether to go without authentication of later data, if the listener does, too.
    """

    __slots__ = ("_key", "_meant", "_proved", "_python", "_reply", "_trusting", "_wish", "hello")

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        python: tuple[int, int],
        meant: str,
        *,
        trusting: bool = False,
        bare: bool = False,
    ) -> None:
        super().__init__(GREETING_SIZE)
        if len(meant.encode(errors="surrogateescape")) > MOST_MEANT:
            raise ValueError(f"an address of more than {MOST_MEANT} bytes")
        self._meant = meant
        self._wish = _BARE if bare else 0
        self._proved = b""
        self._trusting = trusting
        self._key = _checked(key)
        self._python = python
        self.hello = _greeting(python, key_name(key), b"", nonce)
        self._reply = b""

    def _on_message(self, message: bytes) -> bytes:
        if not self._reply:
            return self._on_reply(message)
        said = (self.hello, self._reply, self._proved)
        body, proof = message[: _SAID.size], message[_SAID.size :]
        if not hmac.compare_digest(proof, _proof(self._key, b"listener", *said, body)):
            raise HandshakeError("the worker could not prove that it knows the secret")
        flags, verdict, *_ = answer = _SAID.unpack(body)
        if verdict == _MISDIRECTED:
            raise HandshakeError(_misdirected(self._meant, _text(answer)))
        if verdict != _WELCOME:
            raise HandshakeError(f"the worker refused: {verdict}")
        _, version, major, minor, *_ = _GREETING.unpack(self._reply)
        self.peer = Peer(self._key, version, (major, minor))
        self.session = _proof(self._key, b"session", *said, message)
        self.bare = bool(flags & self._wish & _BARE)
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
                "the worker has another secret than this side: give both the same "
                "MONARCH_SECRET_FILE, or start the worker as the same user"
            )
        if outcome == _OPEN:
            if not self._trusting:
                raise HandshakeError(
                    "the worker has another secret than this side, and accepts all clients "
                    "(allow_unauthenticated is on there): give both the same MONARCH_SECRET_FILE; "
                    "or accept a worker without proof: configure(allow_unauthenticated=True)"
                )
            self._key = NO_SECRET
        elif outcome != _OK:
            raise HandshakeError(f"the worker refused: {outcome!r}")
        self._reply = reply
        self._expected = PROOF_SIZE
        body = _said(self._wish, 0, self._meant)
        self._proved = body + _proof(self._key, b"dialer", self.hello, reply, body)
        return self._proved


class Listener(_Side):
    """The side that was dialed.

    Args:
        find_key: returns the secret with a given key name, or None.
        nonce: 32 fresh random bytes.
        python: major and minor version.
        misdirected: given the dialer's `meant`, returns the names of this listener if the dialer
            means another host, else an empty text. Called once the dialer has proved itself.
        open_to_all: whether to accept a dialer that does not know the secret.
        bare: see `Dialer`.

    >>> key = bytes(range(32))
    >>> dialer = Dialer(key, bytes(32), (3, 11), "tcp://10.0.0.7:4444")
    >>> def misdirected(meant):
    ...     return "" if meant == "tcp://10.0.0.7:4444" else "at 10.0.0.7:4444"
    >>> listener = Listener({key_name(key): key}.get, bytes([1] * 32), (3, 11), misdirected)
    >>> proof = dialer.receive(listener.receive(dialer.hello))
    >>> _ = dialer.receive(listener.receive(proof))
    >>> dialer.peer is not None, listener.peer is not None
    (True, True)
    """

    __slots__ = (
        "_bare",
        "_find_key",
        "_hello",
        "_key",
        "_misdirected",
        "_nonce",
        "_open",
        "_python",
        "_reply",
        "farewell",
    )

    def __init__(
        self,
        find_key: Callable[[bytes], bytes | None],
        nonce: bytes,
        python: tuple[int, int],
        misdirected: Callable[[str], str],
        *,
        open_to_all: bool = False,
        bare: bool = False,
    ) -> None:
        super().__init__(GREETING_SIZE)
        self._misdirected = misdirected
        self._bare = bare
        self._open = open_to_all
        self._find_key = find_key
        self._nonce = nonce
        self._python = python
        self._hello = b""
        self._reply = b""
        self._key = b""
        self.farewell = b""
        """The reply to a refused peer, with the reason; empty for a peer with another protocol."""

    def _on_message(self, message: bytes) -> bytes:
        return self._on_proof(message) if self._hello else self._on_hello(message)

    def _on_hello(self, hello: bytes) -> bytes:
        magic, version, major, minor, name, _, _ = _GREETING.unpack(hello)
        if hello.startswith(_TLS_HANDSHAKE):
            raise self._refusal(_NO_TLS, "it speaks TLS, and this side does not")
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
                raise self._refusal(_KEY, "it has another secret")
            key, outcome = NO_SECRET, _OPEN
        self._key = _checked(key)
        self._hello = hello
        self._reply = _greeting(self._python, bytes(12), outcome, self._nonce)
        self._expected = PROOF_SIZE
        return self._reply

    def _on_proof(self, message: bytes) -> bytes:
        said = (self._hello, self._reply)
        body, proof = message[: _SAID.size], message[_SAID.size :]
        if not hmac.compare_digest(proof, _proof(self._key, b"dialer", *said, body)):
            raise HandshakeError("it could not prove that it knows the secret")
        wish, *_ = asked = _SAID.unpack(body)
        meant = _text(asked)
        called = self._misdirected(meant)
        if called:
            self.farewell = self._answer(_said(0, _MISDIRECTED, called), message)
            raise HandshakeError(_misdirected(meant, called))
        self.bare = bool(wish & _BARE) and self._bare
        answer = self._answer(_said(_BARE if self.bare else 0, _WELCOME, ""), message)
        _, version, major, minor, *_ = _GREETING.unpack(self._hello)
        self.peer = Peer(self._key, version, (major, minor))
        self.session = _proof(self._key, b"session", *said, message, answer)
        return answer

    def _answer(self, body: bytes, proof: bytes) -> bytes:
        said = (self._hello, self._reply, proof)
        return body + _proof(self._key, b"listener", *said, body)

    def _refusal(self, outcome: bytes, why: str) -> HandshakeError:
        self.farewell = _greeting(self._python, bytes(12), outcome, self._nonce)
        return HandshakeError(why)


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_SIZE:
        raise ValueError(f"a secret has {KEY_SIZE} bytes, not {len(key)}")
    return key
