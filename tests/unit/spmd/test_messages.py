"""Messages to the fork server arrive whole, in order, with their descriptors."""

from __future__ import annotations

import contextlib
import os
import socket

import hypothesis.strategies as st
import pytest
from hypothesis import given

from monarch.spmd.message import Messages, send


@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=5))
def test_messages_arrive_in_order(sent: list[dict[str, str]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages = Messages(theirs)
        for message in sent:
            send(ours, message)
        ours.shutdown(socket.SHUT_WR)
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found += messages.read()
        assert found == [(message, []) for message in sent]


def test_descriptors_come_with_their_message() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send(ours, {"op": "fork", "long": "x" * 100_000}, [write])
        os.close(write)
        messages, found = Messages(theirs), []
        while not found:
            found = messages.read()
        ((message, fds),) = found
        assert message["op"] == "fork"
        os.write(fds[0], b"hello")
        os.close(fds[0])
    assert os.read(read, 10) == b"hello"
    os.close(read)


def test_descriptors_skip_the_messages_before_theirs() -> None:
    """The kernel gives all of them in one read if the receiver is late."""
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send(ours, {"op": "signal"})
        send(ours, {"op": "fork"}, [read, write])
        send(ours, {"op": "prepare"})
        messages, found = Messages(theirs), []
        while len(found) < 3:
            found += messages.read()
    assert [(message["op"], len(fds)) for message, fds in found] == [
        ("signal", 0),
        ("fork", 2),
        ("prepare", 0),
    ]
    for fd in (read, write, *found[1][1]):
        os.close(fd)


def test_a_message_that_is_too_long_ends_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff" * 5)
        with pytest.raises(EOFError):
            Messages(theirs).read()
