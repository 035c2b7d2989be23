"""Connections through a gateway: its answer, its memory for relayed data, the end of a relay."""

from __future__ import annotations

import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission import gateway as module
from monarch._engine.runtime.admission.gateway import Gateway, Relay, _join
from monarch._engine.runtime.admission.handshake_io import Arrival, Greeting
from monarch._engine.runtime.admission.host_identity import tls_names
from monarch._engine.runtime.admission.tls import TlsSocket, server_context
from monarch._engine.runtime.io.reactor import Reactor
from monarch.security import make_certificates


class Relayed:
    """Connections relayed by a reactor in another thread."""

    def __init__(self, count: int) -> None:
        self.reactor = Reactor()
        self.ends: list[tuple[socket.socket, socket.socket]] = []
        self.open = count
        for _ in range(count):
            (near, one), (other, far) = socket.socketpair(), socket.socketpair()
            for end in (near, far):
                end.settimeout(60)
            _join(self.reactor, one, other, self._closed)
            self.ends.append((near, far))
        self.thread = threading.Thread(target=self.reactor.run)
        self.thread.start()

    def _closed(self) -> None:
        self.open -= 1
        if not self.open:
            self.reactor.stop()

    def close(self) -> None:
        for ends in self.ends:
            for end in ends:
                end.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.reactor.close()


def read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += sock.recv(size - len(data))
    return bytes(data)


def test_a_connection_where_all_is_sent_costs_no_memory() -> None:
    tracemalloc.start()
    relayed = Relayed(50)
    try:
        before, _ = tracemalloc.get_traced_memory()
        for near, far in relayed.ends:
            near.sendall(b"ping")
            assert read(far, 4) == b"ping"
            far.sendall(b"pong")
            assert read(near, 4) == b"pong"
        after, _ = tracemalloc.get_traced_memory()
    finally:
        relayed.close()
        tracemalloc.stop()
    assert after - before < 50 * 4096
    assert after < 50 * 65536


def test_a_reader_that_is_slow_gets_every_byte_and_the_end() -> None:
    relayed = Relayed(2)
    try:
        said = bytes(range(256)) * 16384  # more than the sockets can hold
        (near, far), (other_near, other_far) = relayed.ends
        sender = threading.Thread(target=near.sendall, args=(said,))
        sender.start()
        got = read(far, 1000)
        other_near.sendall(b"meanwhile")  # relayed with the same scratch buffer
        assert read(other_far, 9) == b"meanwhile"
        got += read(far, len(said) - len(got))
        sender.join(60)
        assert got == said
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
        far.sendall(b"after the half close")
        assert read(near, 20) == b"after the half close"
    finally:
        relayed.close()


KEY = bytes(32)


def answer(arrival: Arrival, said: dict[str, Any]) -> bytes:
    text = json.dumps(said).encode()
    text = struct.pack("<H", len(text)) + text
    return text + purpose_tag(arrival.session, text)


@pytest.fixture
def open_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that opens a way through a TLS gateway whose answer the test chooses.

    The client is slow: it has sent TLS's close notice, and reads nothing until the gateway's close
    notice and answer have both arrived.
    """
    [files] = make_certificates(tmp_path, [["127.0.0.1"]])
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    near, far = socket.socketpair()
    said = threading.Event()
    receive, converse = TlsSocket._receive, TlsSocket._converse
    ending: list[TlsSocket] = []

    def slow_receive(self: TlsSocket) -> int:
        if self in ending:
            assert said.wait(60)
        return receive(self)

    def slow_converse(self: TlsSocket, step: Any) -> None:
        if step == self._tls.unwrap and not self._tls.server_side:
            ending.append(self)
        converse(self, step)

    monkeypatch.setattr(TlsSocket, "_receive", slow_receive)
    monkeypatch.setattr(TlsSocket, "_converse", slow_converse)
    monkeypatch.setattr(module, "direct_way", lambda *_: (near, "127.0.0.1:1"))
    reactor = Reactor()
    thread = threading.Thread(target=reactor.run)
    thread.start()

    def open_(say: Callable[[Arrival], bytes]) -> tuple[socket.socket, str, socket.socket]:
        def accepted(arrival: Arrival) -> None:
            arrival.sock.send(say(arrival))
            said.set()

        def greet() -> None:
            names = tls_names
            tls = server_context()
            Greeting(reactor, far, lambda _: KEY, accepted, lambda _: said.set(), names, tls=tls)

        reactor.call_soon(greet)
        gateway = Gateway(ChannelAddr.parse("tls://127.0.0.1:1"), KEY, 7)
        sock, end = gateway.open(ChannelAddr.parse("tls://127.0.0.1:2"), 60)
        return sock, end, far

    yield open_
    reactor.stop()
    thread.join(60)
    reactor.close()
    near.close()
    far.close()


def test_the_answer_may_come_together_with_the_end_of_tls(open_way: Any) -> None:
    sock, end, far = open_way(lambda arrival: answer(arrival, {"error": None, "end": "there"}))
    assert end == "there"
    far.send(b"bare")
    assert sock.recv(10) == b"bare"


def test_behind_the_answer_there_is_nothing(open_way: Any) -> None:
    """The dialing side is the first to send."""
    with pytest.raises(ConnectionError, match="altered"):
        open_way(lambda arrival: answer(arrival, {"error": None, "end": "there"}) + b"!")


def test_an_altered_answer_is_refused(open_way: Any) -> None:
    with pytest.raises(ConnectionError, match="altered"):
        open_way(lambda arrival: answer(arrival, {"error": None, "end": "x"})[:-1] + b"!")


def test_a_relay_ends_with_its_worker_whatever_it_carries() -> None:
    reactor = Reactor()
    ours, worker = socket.socketpair()
    relay = Relay(reactor, ours)
    relay._open = 1  # so that it is not idle
    late: list[int] = []

    def give_up() -> None:
        late.append(1)
        reactor.stop()

    reactor.call_later(30.0, give_up)
    worker.close()
    reactor.run()
    assert late == []
    relay.close()
