"""The wire format of the data plane, byte by byte, and its reader, with the stream cut anywhere."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.rdma.routes.stream import message
from monarch.rdma.routes.stream.landing import Text, Trash
from monarch.rdma.routes.stream.message import REPLY, REQUEST, Landing, Reader

IDENTITY = bytes(range(16))


def test_a_request_byte_by_byte() -> None:
    packed = REQUEST.pack(7, message.READ, 0, 0x0102, IDENTITY, 3, 4, 5, 6)
    assert (
        packed
        == (
            b"\x07\0\0\0"  # id
            b"\x01\0"  # operation
            b"\0\0"
            b"\x02\x01\0\0\0\0\0\0" + IDENTITY + b"\x03\0\0\0\0\0\0\0"  # number  # offset
            b"\x04\0\0\0\0\0\0\0"  # length
            b"\x05\0\0\0\0\0\0\0"  # first operand
            b"\x06\0\0\0\0\0\0\0"  # second operand
        )
    )


def test_an_answer_byte_by_byte() -> None:
    packed = REPLY.pack(7, message.END, message.FORBIDDEN, 9)
    assert packed == b"\x07\0\0\0\x03\0\x02\0\x09\0\0\0\0\0\0\0"


def test_the_first_request_byte_by_byte() -> None:
    packed = message.hello(IDENTITY, 2)
    assert packed == (
        b"\0\0\0\0"
        b"\x10\0"
        b"\0\0"
        b"\x02\0\0\0\0\0\0\0" + IDENTITY + b"\x01\0\0amdrm" + b"\x01\0\0\0\0\0\0\0" + bytes(16)
    )


def test_numbers_are_as_they_were() -> None:
    """A changed number needs a new version: peers of two releases would misread each other."""
    assert (message.READ, message.WRITE, message.ADD, message.SWAP) == (1, 2, 3, 4)
    assert (message.HELLO, message.INVITE, message.RECALL) == (16, 17, 18)
    assert (message.DATA, message.VALUE, message.END) == (1, 2, 3)
    assert (message.OK, message.NOT_FOUND, message.FORBIDDEN) == (0, 1, 2)
    assert (message.FAILED, message.GONE, message.VERSION) == (3, 4, 1)


class Notes:
    """A reader of messages with a length and that many bytes; it records what it reads."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self.reader = Reader(struct.Struct("<BH"), self.begin)

    def begin(self, kind: int, length: int) -> Landing | None:
        if kind == 0:
            self.found.append(b"-")
            return None
        if kind == 1:
            return Trash(length, lambda: self.found.append(b"*"))
        return Text(length, self.found.append)

    def take(self, data: bytes, direct: int) -> None:
        """Feed `data` as a socket would: up to `direct` bytes go straight into the target."""
        view = memoryview(data)
        while view:
            landing = self.reader.landing
            if landing is None or not direct:
                self.reader.feed(view)
                return

            def receive(room: memoryview, source: memoryview = view) -> int:
                count = min(len(room), len(source), direct)
                room[:count] = source[:count]
                return count

            view = view[landing.fill(receive) :]
            self.reader.filled()


messages = st.lists(
    st.one_of(
        st.just((0, b"")),
        st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)),
    ),
    max_size=12,
)


@given(messages, st.lists(st.integers(1, 30)), st.integers(0, 9))
def test_a_stream_is_understood_however_it_is_cut(
    said: list[tuple[int, bytes]], cuts: list[int], direct: int
) -> None:
    stream = b"".join(struct.pack("<BH", kind, len(body)) + body for kind, body in said)
    notes = Notes()
    for cut in cuts:
        notes.take(stream[:cut], direct)
        stream = stream[cut:]
    notes.take(stream, direct)
    expected = [{0: b"-", 1: b"*"}.get(kind, body) for kind, body in said]
    assert notes.found == expected
    assert notes.reader.landing is None


def test_what_cannot_be_is_told_to_whoever_feeds() -> None:
    def begin(_: int) -> Landing | None:
        raise ValueError("no such thing")

    begun: Callable[..., Landing | None] = begin
    with pytest.raises(ValueError, match="no such thing"):
        Reader(struct.Struct("<B"), begun).feed(memoryview(b"x"))


def test_the_numbers_of_the_operations() -> None:
    assert (message.HELLO, message.INVITE, message.RECALL) == (16, 17, 18)
