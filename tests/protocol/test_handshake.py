"""The handshake lets in who knows the secret, nobody else, and reads no byte too many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.handshake import (
    GREETING_SIZE,
    NO_SECRET,
    PROOF_SIZE,
    Dialer,
    HandshakeError,
    Listener,
    key_name,
)

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
PYTHON = (3, 11)


def dialer(key: bytes = KEY, nonce: bytes = b"d" * 32, python: Any = PYTHON) -> Dialer:
    return Dialer(key, nonce, python)


def listener(*keys: bytes, nonce: bytes = b"l" * 32, python: Any = PYTHON) -> Listener:
    known = {key_name(key): key for key in keys or (KEY,)}
    return Listener(known.get, nonce, python)


def test_both_prove_themselves_and_nothing_more_is_read() -> None:
    one, two = dialer(), listener()
    assert (one.wants, two.wants) == (GREETING_SIZE, GREETING_SIZE)
    reply = two.receive(one.hello)
    assert (len(reply), two.wants) == (GREETING_SIZE, PROOF_SIZE)
    proof = one.receive(reply)
    assert (len(proof), one.wants) == (PROOF_SIZE, PROOF_SIZE)
    assert two.peer is None
    answer = two.receive(proof)
    assert two.peer == (KEY, 1, PYTHON)
    assert one.peer is None
    assert one.receive(answer) == b""
    assert one.peer == (KEY, 1, PYTHON)
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
    with pytest.raises(HandshakeError, match="protocol 2, this side 1"):
        ours.receive(bytes(hello))
    reply = bytearray(ours.farewell)
    reply[8] += 1
    with pytest.raises(HandshakeError, match="same release"):
        dialer().receive(bytes(reply))


def test_a_key_name_alone_opens_nothing() -> None:
    """An eavesdropper knows names and old proofs."""
    one, two = dialer(), listener()
    proof = one.receive(two.receive(one.hello))
    fresh = listener(nonce=b"x" * 32)
    fresh.receive(one.hello)
    with pytest.raises(HandshakeError, match="could not prove"):
        fresh.receive(proof)
    assert fresh.peer is None
    assert fresh.farewell == b""


def test_a_proof_cannot_be_reflected() -> None:
    """Who only echoes is not taken for one who knows."""
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
        one = Dialer(key, b"d" * 32, PYTHON, trusting=trusting)
        two = Listener({key_name(KEY): KEY}.get, b"l" * 32, PYTHON, open_to_all=True)
        one.receive(two.receive(one.receive(two.receive(one.hello))))
        return one, two

    one, two = both(OTHER, trusting=True)
    assert one.peer == two.peer == (NO_SECRET, 1, PYTHON)
    one, two = both(KEY, trusting=True)
    assert one.peer == two.peer == (KEY, 1, PYTHON)  # who can prove something does
    with pytest.raises(HandshakeError, match="lets in anybody"):
        both(OTHER, trusting=False)


def test_an_impostor_that_lets_in_anybody_gets_nowhere() -> None:
    """A worker's place is not taken by saying that nothing needs proving."""
    impostor = Listener({}.get, b"l" * 32, PYTHON, open_to_all=True)
    one = dialer()
    with pytest.raises(HandshakeError, match="lets in anybody"):
        one.receive(impostor.receive(one.hello))
    assert one.peer is None


def test_an_impostor_of_a_worker_is_found_out() -> None:
    one, two = dialer(), listener()
    one.receive(two.receive(one.hello))
    with pytest.raises(HandshakeError, match="worker could not prove"):
        one.receive(bytes(PROOF_SIZE))
    assert one.peer is None


@given(position=st.integers(0, 2 * GREETING_SIZE + 2 * PROOF_SIZE - 1), bit=st.integers(0, 7))
def test_no_bit_can_be_changed_on_the_way(position: int, bit: int) -> None:
    one, two = dialer(), listener()
    at = 0

    def wire(data: bytes) -> bytes:
        nonlocal at
        altered = bytearray(data)
        if at <= position < at + len(data):
            altered[position - at] ^= 1 << bit
        at += len(data)
        return bytes(altered)

    with pytest.raises(HandshakeError):
        one.receive(wire(two.receive(wire(one.receive(wire(two.receive(wire(one.hello))))))))
    assert one.peer is None


@given(data=st.binary(min_size=GREETING_SIZE, max_size=GREETING_SIZE))
def test_noise_is_refused(data: bytes) -> None:
    two = listener()
    with pytest.raises(HandshakeError):
        two.receive(data)
    with pytest.raises(HandshakeError):
        dialer().receive(data)


def test_bad_keys_and_nonces() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        dialer(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        dialer(nonce=b"short")
