"""The handshake admits a peer that knows the secret, no other peer, and reads no byte too many."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.session.handshake import (
    GREETING_SIZE,
    NO_SECRET,
    PROOF_SIZE,
    Dialer,
    HandshakeError,
    Listener,
    key_name,
)
from monarch._engine.protocol.session.records import AlteredError, Opener, Sealer

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
PYTHON = (3, 11)
HERE = "tcp://10.0.0.7:4444\n10.0.0.7:4444"


def dialer(
    key: bytes = KEY, nonce: bytes = b"d" * 32, python: Any = PYTHON, meant: str = HERE
) -> Dialer:
    return Dialer(key, nonce, python, meant)


def listener(
    *keys: bytes, nonce: bytes = b"l" * 32, python: Any = PYTHON, here: str = HERE
) -> Listener:
    known = {key_name(key): key for key in keys or (KEY,)}
    return Listener(known.get, nonce, python, is_it(here))


def is_it(here: str) -> Callable[[str], str]:
    return lambda meant: "" if meant == here else f"at {here}"


def test_both_prove_themselves_and_nothing_more_is_read() -> None:
    one, two = dialer(), listener()
    assert (one.wants, two.wants) == (GREETING_SIZE, GREETING_SIZE)
    reply = two.receive(one.hello)
    assert (len(reply), two.wants) == (GREETING_SIZE, PROOF_SIZE)
    proof = one.receive(reply)
    assert (len(proof), one.wants) == (PROOF_SIZE, PROOF_SIZE)
    assert two.peer is None
    answer = two.receive(proof)
    assert two.peer == (KEY, 2, PYTHON)
    assert one.peer is None
    assert one.receive(answer) == b""
    assert one.peer == (KEY, 2, PYTHON)
    assert (one.wants, two.wants) == (0, 0)
    with pytest.raises(ValueError, match="wants 0"):
        two.receive(b"more")


def test_byte_by_byte() -> None:
    one, two = dialer(), listener()
    to_listener, to_dialer = bytearray(one.hello), bytearray()
    while one.peer is None or two.peer is None:
        assert to_listener or to_dialer
        if to_listener:
            to_dialer += two.receive(bytes([to_listener.pop(0)]))
        if to_dialer:
            to_listener += one.receive(bytes([to_dialer.pop(0)]))
    assert not to_listener
    assert not to_dialer


def test_a_listener_may_know_several_secrets() -> None:
    one, two = dialer(OTHER), listener(KEY, OTHER)
    one.receive(two.receive(one.receive(two.receive(one.hello))))
    assert one.peer is not None
    assert two.peer is not None
    assert two.peer.key == OTHER


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (dialer(OTHER), listener(), "another secret"),
        (dialer(python=(3, 12)), listener(), "Python"),
    ],
)
def test_the_refused_are_told_why(theirs: Dialer, ours: Listener, text: str) -> None:
    with pytest.raises(HandshakeError, match=text):
        ours.receive(theirs.hello)
    assert ours.peer is None
    assert len(ours.farewell) == GREETING_SIZE
    with pytest.raises(HandshakeError, match=text):
        theirs.receive(ours.farewell)
    assert theirs.peer is None


def test_another_version_is_told_which() -> None:
    ours = listener()
    hello = bytearray(dialer().hello)
    hello[8] += 1
    with pytest.raises(HandshakeError, match="protocol 3, this side 2"):
        ours.receive(bytes(hello))
    reply = bytearray(ours.farewell)
    reply[8] += 1
    with pytest.raises(HandshakeError, match="same release"):
        dialer().receive(bytes(reply))


def test_a_key_name_alone_opens_nothing() -> None:
    """An eavesdropper knows key names and old proofs."""
    one, two = dialer(), listener()
    proof = one.receive(two.receive(one.hello))
    fresh = listener(nonce=b"x" * 32)
    fresh.receive(one.hello)
    with pytest.raises(HandshakeError, match="could not prove"):
        fresh.receive(proof)
    assert fresh.peer is None
    assert fresh.farewell == b""


def test_a_proof_cannot_be_reflected() -> None:
    """A peer that only echoes is not taken for one that knows the secret."""
    one, two = dialer(), listener()
    proof = one.receive(two.receive(one.hello))
    with pytest.raises(HandshakeError, match="could not prove"):
        one.receive(proof)
    mirror = dialer()
    with pytest.raises(HandshakeError):
        mirror.receive(mirror.hello)


def test_both_have_a_session_key_that_no_other_handshake_gives() -> None:
    keys = set()
    for nonce in (b"1" * 32, b"2" * 32):
        one, two = dialer(), listener(nonce=nonce)
        one.receive(two.receive(one.receive(two.receive(one.hello))))
        assert one.session == two.session
        keys.add(one.session)
    assert len(keys) == 2
    assert all(len(key) == 32 for key in keys)


def test_a_listener_that_lets_in_anybody_needs_a_dialer_that_agrees() -> None:
    def both(key: bytes, *, trusting: bool) -> tuple[Dialer, Listener]:
        one = Dialer(key, b"d" * 32, PYTHON, HERE, trusting=trusting)
        two = Listener({key_name(KEY): KEY}.get, b"l" * 32, PYTHON, is_it(HERE), open_to_all=True)
        one.receive(two.receive(one.receive(two.receive(one.hello))))
        return one, two

    one, two = both(OTHER, trusting=True)
    assert one.peer == two.peer == (NO_SECRET, 2, PYTHON)
    one, two = both(KEY, trusting=True)
    assert one.peer == two.peer == (KEY, 2, PYTHON)  # a peer that can prove the secret does so
    with pytest.raises(HandshakeError, match="accepts all clients"):
        both(OTHER, trusting=False)


def test_an_impostor_that_lets_in_anybody_gets_nowhere() -> None:
    """An impostor cannot take a worker's place by claiming that no proof is needed."""
    impostor = Listener({}.get, b"l" * 32, PYTHON, is_it(HERE), open_to_all=True)
    one = dialer()
    with pytest.raises(HandshakeError, match="accepts all clients"):
        one.receive(impostor.receive(one.hello))
    assert one.peer is None


def test_an_impostor_of_a_worker_is_found_out() -> None:
    one, two = dialer(), listener()
    one.receive(two.receive(one.hello))
    with pytest.raises(HandshakeError, match="worker could not prove"):
        one.receive(bytes(PROOF_SIZE))
    assert one.peer is None


def test_no_byte_can_be_changed_on_the_way() -> None:
    for position in range(2 * GREETING_SIZE + 2 * PROOF_SIZE):
        one, two = dialer(), listener()
        at = 0

        def wire(data: bytes, position: int = position) -> bytes:
            nonlocal at
            altered = bytearray(data)
            if at <= position < at + len(data):
                altered[position - at] ^= 1 << position % 8
            at += len(data)
            return bytes(altered)

        with pytest.raises(HandshakeError):
            one.receive(wire(two.receive(wire(one.receive(wire(two.receive(wire(one.hello))))))))
        assert one.peer is None


def mac(key: bytes, *said: bytes) -> bytes:
    """Return the MAC that RFC 2104 and the table in the module define."""
    return hmac.new(key, b"".join(said), hashlib.sha256).digest()


@pytest.mark.parametrize(("ours", "theirs"), [(False, False), (True, False), (True, True)])
def test_known_answers(ours: bool, theirs: bool) -> None:
    """Each message is as the format defines it, computed without the module's code."""
    one = Dialer(KEY, b"d" * 32, PYTHON, HERE, bare=ours)
    known = {key_name(KEY): KEY}
    two = Listener(known.get, b"l" * 32, PYTHON, is_it(HERE), bare=theirs)
    name = mac(KEY, b"monarch key name")[:12]
    hello = b"monarch\x01" + bytes([2, 0, 3, 11]) + name + bytes(8) + b"d" * 32
    assert hello == one.hello
    reply = b"monarch\x01" + bytes([2, 0, 3, 11]) + bytes(12) + b"ok".ljust(8, b"\0") + b"l" * 32
    assert reply == two.receive(hello)
    text = HERE.encode()
    said = bytes([ours, 0, len(text), 0]) + text.ljust(444, b"\0")
    proof = said + mac(KEY, b"dialer", hello, reply, said)
    assert proof == one.receive(reply)
    verdict = bytes([ours and theirs, 0, 0, 0]) + bytes(444)
    answer = verdict + mac(KEY, b"listener", hello, reply, proof, verdict)
    assert answer == two.receive(proof)
    assert one.receive(answer) == b""
    session = mac(KEY, b"session", hello, reply, proof, answer)
    assert session == one.session == two.session
    assert (ours and theirs) == one.bare == two.bare


def test_vectors_that_are_written_down() -> None:
    one, two = dialer(), listener()
    reply = two.receive(one.hello)
    proof = one.receive(reply)
    answer = two.receive(proof)
    one.receive(answer)
    assert proof[-32:].hex() == "4d576aae852b02e54bcf8605988c80341fda69b7efeb550b3f05bf469e99066e"
    assert answer[-32:].hex() == "79184159c2b30c9c551e0b32de3f4fce7da1b6feaceb40fe29fba1f1d0ce11d8"
    assert one.session.hex() == "d52e94931d83c4bf4a6546c8071c3efd997e867cc48f48a611015aff72418eac"


# The recorded HELLO of a release that spoke version 1.
OLD_HELLO = bytes.fromhex(
    "6d6f6e6172636801"  # magic
    "0100030b"  # version, Python
    "364e8eb14e70416131ae0742"
    "0000000000000000" + "64" * 32
)


def test_a_peer_of_the_old_version_is_told_so() -> None:
    two = listener()
    with pytest.raises(HandshakeError, match="it speaks protocol 1, this side 2"):
        two.receive(OLD_HELLO)
    # The old release compares its own magic, then the outcome.
    magic, version, major, minor, _, outcome, _ = struct.unpack("<8sHBB12s8s32s", two.farewell)
    assert (magic, version, major, minor, outcome) == (b"monarch\x01", 2, 3, 11, b"version\0")
    reply = bytearray(two.farewell)
    reply[8] = 1  # as an old listener refuses
    with pytest.raises(HandshakeError, match=r"speaks protocol 1, this side 2.*same release"):
        dialer().receive(bytes(reply))


def test_who_speaks_tls_is_told_that_there_is_none() -> None:
    two = listener()
    with pytest.raises(HandshakeError, match="it speaks TLS, and this side does not"):
        two.receive(b"\x16\x03\x01".ljust(GREETING_SIZE))
    assert two.farewell.startswith(b"monarch")


# --------------------------------------------------------------------------------------------------
# A peer on the wire that does not know the secret
# --------------------------------------------------------------------------------------------------


def test_relayed_to_another_listener_of_the_same_secret() -> None:
    """The dialer means one worker; a relay at its address passes all bytes to another worker."""
    one, other = dialer(), listener(here="tcp://10.0.0.8:4444\n10.0.0.8:4444")
    proof = one.receive(other.receive(one.hello))
    with pytest.raises(HandshakeError, match=r"the worker that answered is at tcp://10\.0\.0\.8"):
        other.receive(proof)
    assert other.peer is None
    assert other.session == b""
    # The answering worker's address is proved, too, so the dialer can believe and report it.
    with pytest.raises(HandshakeError, match=r"7:4444 was dialed.* answered is at .*10\.0\.0\.8"):
        one.receive(other.farewell)
    assert one.peer is None
    forged = bytearray(other.farewell)
    forged[1] = 0  # welcome
    again = dialer()
    again.receive(other._reply)
    with pytest.raises(HandshakeError, match="could not prove"):
        again.receive(bytes(forged))


def test_what_the_dialer_means_cannot_be_exchanged() -> None:
    one, other = dialer(), listener(here="there")
    proof = bytearray(one.receive(other.receive(one.hello)))
    proof[2:4] = struct.pack("<H", len("there"))
    proof[4 : 4 + len("there")] = b"there"
    with pytest.raises(HandshakeError, match="could not prove"):
        other.receive(bytes(proof))


def test_relayed_to_the_one_that_is_meant_leaves_the_attacker_without_a_key() -> None:
    """The relay has seen every byte, and cannot produce a record that either side accepts."""
    one, two = dialer(), listener()
    reply = two.receive(one.hello)
    proof = one.receive(reply)
    answer = two.receive(proof)
    one.receive(answer)
    for key in (NO_SECRET, mac(bytes(32), one.hello, reply, proof, answer), answer[-32:]):
        head, *payload, tag = Sealer(key, dialer=True).seal([b"run this"])
        opener = Opener(two.session, dialer=False)
        opener.size(head)
        with pytest.raises(AlteredError):
            opener.open(b"".join(map(bytes, payload)), tag)


def test_replayed_to_the_same_listener_and_to_the_same_dialer() -> None:
    one, two = dialer(), listener()
    reply = two.receive(one.hello)
    proof = one.receive(reply)
    answer = two.receive(proof)
    fresh = listener(nonce=b"x" * 32)
    fresh.receive(one.hello)
    with pytest.raises(HandshakeError, match="could not prove"):
        fresh.receive(proof)
    again = dialer(nonce=b"y" * 32)
    again.receive(reply)
    with pytest.raises(HandshakeError, match="could not prove"):
        again.receive(answer)
    assert again.peer is None


def test_reflected_to_a_host_that_dials_and_listens() -> None:
    """The packets of a host's dialer are sent to its own listener, and the other way round."""
    one, own = dialer(), listener(nonce=b"d" * 32)
    reply = own.receive(one.hello)
    proof = one.receive(reply)
    with pytest.raises(HandshakeError, match="could not prove"):
        one.receive(proof)
    answer = own.receive(proof)
    second = listener(nonce=b"l" * 32)
    second.receive(one.hello)
    with pytest.raises(HandshakeError, match="could not prove"):
        second.receive(answer)


def test_nobody_can_negotiate_authentication_away() -> None:
    """Both sides must agree to it; a bit that is altered in transit breaks the handshake."""
    one, two = dialer(), listener()
    proof = bytearray(one.receive(two.receive(one.hello)))
    proof[0] |= 1
    with pytest.raises(HandshakeError, match="could not prove"):
        two.receive(bytes(proof))
    one, two = dialer(), listener()
    answer = bytearray(two.receive(one.receive(two.receive(one.hello))))
    answer[0] |= 1
    with pytest.raises(HandshakeError, match="could not prove"):
        one.receive(bytes(answer))


def test_no_repr_shows_a_key() -> None:
    one, two = dialer(), listener()
    one.receive(two.receive(one.receive(two.receive(one.hello))))
    assert repr(one.peer) == "Peer(version=2, python=(3, 11))"


@given(data=st.binary(min_size=GREETING_SIZE, max_size=GREETING_SIZE))
def test_noise_is_refused(data: bytes) -> None:
    two = listener()
    with pytest.raises(HandshakeError):
        two.receive(data)
    with pytest.raises(HandshakeError, match="what answers there is no monarch worker"):
        dialer().receive(data)


def test_what_is_no_greeting_is_called_that() -> None:
    with pytest.raises(HandshakeError, match="it does not speak this protocol"):
        listener().receive(b"SSH-2.0-" + dialer().hello[8:])


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_packets_go_without_authentication_if_both_want_that(ours: bool, theirs: bool) -> None:
    one = Dialer(KEY, b"d" * 32, PYTHON, HERE, bare=ours)
    two = Listener({key_name(KEY): KEY}.get, b"l" * 32, PYTHON, is_it(HERE), bare=theirs)
    one.receive(two.receive(one.receive(two.receive(one.hello))))
    assert (one.bare, two.bare) == (ours and theirs, ours and theirs)


def test_bad_keys_and_nonces() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        dialer(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        dialer(nonce=b"short")
