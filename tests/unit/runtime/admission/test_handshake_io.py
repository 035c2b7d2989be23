"""The greeting at the door ends once, in one of two ways, whatever comes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.session.handshake import Dialer, HandshakeError, key_name
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission import handshake_io as module
from monarch._engine.runtime.admission.handshake_io import Arrival, Greeting, python_version
from monarch._engine.runtime.io.reactor import READ, Timer

KEY = bytes(range(32))
PURPOSE = {"client": 7, "from": "", "as": "here"}


class Bell:
    """As much of a reactor as a greeting needs."""

    def __init__(self) -> None:
        self.ready: Callable[[int], None] | None = None
        self.late: Callable[[], None] | None = None

    def call_later(self, _delay: float, callback: Callable[[], None]) -> Timer:
        self.late = callback
        self.timer = Timer(0.0, callback)
        return self.timer

    def register(self, _fd: int, callback: Callable[[int], None]) -> None:
        self.ready = callback

    def unregister(self, _fd: int) -> None:
        self.ready = None

    def ring(self) -> None:
        if self.ready is not None:
            self.ready(READ)


def misdirected(meant: str) -> str:
    return "" if meant == "you" else "it is another"


class Visit:
    """A stranger and the door it is at."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.bell: Any = Bell()
        self.arrivals: list[Arrival] = []
        self.refusals: list[str] = []
        find = {key_name(KEY): KEY}.get
        self.session = b""
        came, refused = self.arrivals.append, self.refusals.append
        Greeting(self.bell, theirs, find, came, refused, misdirected)

    def say(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.sock.sendall(data)
        self.bell.ring()

    def prove(self) -> None:
        side = Dialer(KEY, os.urandom(32), python_version(), "you")
        self.say(side.hello)
        while side.wants:
            self.say(side.receive(self.sock.recv(side.wants)))
        self.session = side.session

    def purpose(self, text: bytes) -> bytes:
        said = len(text).to_bytes(2, "little") + text
        return said + purpose_tag(self.session, said)

    def leave(self) -> None:
        self.sock.close()
        self.bell.ring()
        for arrival in self.arrivals:
            arrival.sock.close()


def test_who_knows_the_secret_is_let_in_and_nothing_more_is_read() -> None:
    visit = Visit()
    visit.prove()
    for byte in visit.purpose(json.dumps(PURPOSE).encode()):
        visit.say(bytes([byte]))
    [arrival] = visit.arrivals
    assert visit.bell.timer.callback is None, "it is not too slow later"
    assert (arrival.purpose, arrival.authenticated) == (PURPOSE, True)
    visit.say(b"the channel's")
    assert arrival.sock.recv(100) == b"the channel's"
    visit.leave()
    assert visit.refusals == []


def test_it_reads_no_byte_of_the_channel_that_comes_along() -> None:
    visit = Visit()
    visit.prove()
    visit.say(visit.purpose(b"{}") + b"the channel's")
    assert visit.arrivals[0].sock.recv(100) == b"the channel's"
    visit.leave()


@given(st.binary(max_size=400), st.booleans())
def test_noise_is_refused(data: bytes, proved: bool) -> None:
    visit = Visit()
    if proved:
        visit.prove()
        visit.say(visit.purpose(data))
    else:
        visit.say(data)
    visit.leave()
    accepted = proved and type(loaded(data)) is dict
    assert (len(visit.arrivals), len(visit.refusals)) == (accepted, not accepted)


def loaded(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None


def test_a_purpose_that_was_altered_on_the_way() -> None:
    length = 2 + len(b'{"client": 7}') + 32
    for position in range(length):
        visit = Visit()
        visit.prove()
        said = bytearray(visit.purpose(b'{"client": 7}'))
        assert len(said) == length
        said[position] ^= 1
        visit.say(bytes(said))
        visit.leave()
        assert visit.arrivals == []
        assert len(visit.refusals) == 1


def test_a_purpose_that_is_nested_too_deeply() -> None:
    visit = Visit()
    visit.prove()
    visit.say(visit.purpose(b"[" * 4000))
    visit.leave()
    assert len(visit.refusals) == 1


def test_who_does_not_finish_is_turned_away() -> None:
    visit = Visit()
    visit.say(b"m")
    visit.bell.late()
    assert visit.refusals == ["it did not complete the handshake within 5 s"]
    visit.leave()
    assert len(visit.refusals) == 1


def test_a_stranger_that_says_too_much_is_told_why_it_is_refused() -> None:
    """What it has sent beyond that is read, or it would only see a broken connection."""
    visit = Visit()
    side = Dialer(bytes(32), os.urandom(32), python_version(), "you")
    visit.say(side.hello)
    while not visit.refusals:
        visit.say(side.receive(visit.sock.recv(side.wants)) + bytes(100))
    assert visit.sock.recv(100)
    visit.leave()


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_sock: socket.socket) -> None:
        raise HandshakeError("the other side belongs to another user")

    monkeypatch.setattr(module, "check_user", refuse)
    visit = Visit()
    visit.say(b"m")
    assert visit.refusals == ["the other side belongs to another user"]
    visit.leave()


def test_a_purpose_is_bounded() -> None:
    for size, refusals in ((4096, []), (4097, ["ValueError: a purpose of 4097 bytes"])):
        visit = Visit()
        visit.prove()
        visit.say(size.to_bytes(2, "little"))
        assert visit.refusals == refusals
        visit.leave()
