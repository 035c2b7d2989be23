"""Records arrive as they were sent, each once and in order, or the connection is given up."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.session.records import (
    HEADER_SIZE,
    MOST,
    TAG_SIZE,
    AlteredError,
    Opener,
    Sealer,
    purpose_tag,
)

SESSION = bytes(range(100, 132))


def sealed(sealer: Sealer, *parts: bytes) -> bytes:
    return b"".join(map(bytes, sealer.seal(parts)))


def opened(opener: Opener, record: bytes) -> bytes:
    """Return the record's payload; raise AlteredError if it is altered, incomplete or too long."""
    if len(record) < HEADER_SIZE:
        raise AlteredError
    size = opener.size(record[:HEADER_SIZE])
    payload, tag = record[HEADER_SIZE : HEADER_SIZE + size], record[HEADER_SIZE + size :]
    opener.open(payload, tag)
    return payload


@pytest.mark.parametrize("role", ["dialer", "listener"])
def test_known_answers(role: str) -> None:
    """The expected bytes are computed from the format with the standard library alone."""
    key = hmac.new(SESSION, b"records of the " + role.encode(), hashlib.sha256).digest()
    sealer = Sealer(SESSION, dialer=role == "dialer")
    for number, payload in enumerate([b"a", b"Hello, world", bytes(70_000)]):
        said = struct.pack("<QI", number, len(payload)) + payload
        tag = hmac.new(key, said, hashlib.sha256).digest()[:16]
        size = struct.pack("<II", len(payload), 0xFFFFFFFF - len(payload))
        assert size + payload + tag == sealed(sealer, payload[:5], payload[5:])


def test_a_vector_that_is_written_down() -> None:
    expected = "05000000faffffff68656c6c6f4694d9c47735a32a282684dea049e78e"
    assert expected == sealed(Sealer(bytes(32), dialer=True), b"hello").hex()
    expected = "4592d4351ffc2fe37847bdc97fb3f89fd4b05ecf357c3e75816bccdf04217f0c"
    assert expected == purpose_tag(bytes(32), b"\x02\x00{}").hex()


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_what_is_sent_arrives(payloads: list[bytes]) -> None:
    sealer, opener = Sealer(SESSION, dialer=False), Opener(SESSION, dialer=True)
    assert payloads == [opened(opener, sealed(sealer, payload)) for payload in payloads]


@given(st.integers(0, HEADER_SIZE + 12 + TAG_SIZE - 1), st.integers(1, 255))
def test_no_byte_can_be_altered(position: int, change: int) -> None:
    record = bytearray(sealed(Sealer(SESSION, dialer=True), b"Hello, world"))
    record[position] ^= change
    with pytest.raises(AlteredError):
        opened(Opener(SESSION, dialer=False), bytes(record))


def test_nothing_can_be_replayed_moved_or_left_out() -> None:
    sealer = Sealer(SESSION, dialer=True)
    first, second, third = (sealed(sealer, b"same") for _ in range(3))
    opener = Opener(SESSION, dialer=False)
    assert opened(opener, first) == b"same"
    for wrong in (first, third):
        copy = Opener(SESSION, dialer=False)
        opened(copy, first)
        with pytest.raises(AlteredError):
            opened(copy, wrong)
        with pytest.raises(AlteredError):
            opened(copy, second)  # a refusal is final
    assert opened(opener, second) == b"same"


def test_nothing_can_be_reflected_or_come_from_another_session() -> None:
    record = sealed(Sealer(SESSION, dialer=True), b"mine")
    with pytest.raises(AlteredError):
        opened(Opener(SESSION, dialer=True), record)
    with pytest.raises(AlteredError):
        opened(Opener(bytes(32), dialer=False), record)


def test_nothing_is_opened_after_a_record_that_was_altered() -> None:
    """This includes a record that is itself valid and was sent next."""
    right = sealed(Sealer(SESSION, dialer=True), b"right")
    payload, tag = right[HEADER_SIZE:-TAG_SIZE], right[-TAG_SIZE:]
    for altered in (
        lambda opener: opener.size(bytes(HEADER_SIZE)),
        lambda opener: opener.open(b"wrong", tag),
    ):
        for follows in (
            lambda opener: opener.size(right[:HEADER_SIZE]),
            lambda opener: opener.open(payload, tag),
        ):
            opener = Opener(SESSION, dialer=False)
            with pytest.raises(AlteredError):
                altered(opener)
            with pytest.raises(AlteredError):
                follows(opener)


@pytest.mark.parametrize("size", [0, MOST + 1, 0xFFFFFFFF])
def test_a_size_that_cannot_be_is_not_waited_for(size: int) -> None:
    with pytest.raises(AlteredError):
        Opener(SESSION, dialer=False).size(struct.pack("<II", size, size ^ 0xFFFFFFFF))
