"""Memory that a gateway keeps for the connections that pass through it."""

from __future__ import annotations

import socket
import threading
import tracemalloc

from monarch._engine.runtime.gateway import _join
from monarch._engine.runtime.reactor import Reactor


class Relayed:
    """Connections through a reactor that runs aside."""

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
        said = bytes(range(256)) * 16384  # more than the sockets hold
        (near, far), (other_near, other_far) = relayed.ends
        sender = threading.Thread(target=near.sendall, args=(said,))
        sender.start()
        got = read(far, 1000)
        other_near.sendall(b"meanwhile")  # with the same scratch
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
