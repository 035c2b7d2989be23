"""Streams in memory: the calls of a socket that the engine relies on, compared with a real one."""

from __future__ import annotations

import array
import errno
import select
import socket

import pytest

from monarch._engine.runtime.io import environment as environments
from monarch.testing import simulate

RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


def real():
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right


def simulated():
    left, right = environments.current.streams.pair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right


def on_both(check):
    """Run a check with pairs of real sockets, and with simulated ones in a simulation."""

    def both():
        check(real, lambda: None)
        scheduler = environments.current.streams.scheduler
        check(simulated, lambda: scheduler.sleep(0.001))

    simulate(both)


def test_what_is_sent_arrives_in_order_and_once():
    def check(pair, wait):
        left, right = pair()
        assert left.send(b"one") == 3
        assert left.sendmsg([b"two", memoryview(b"three")]) == 8
        wait()
        into = bytearray(4)
        assert right.recv_into(into) == 4
        assert right.recv(100) == b"wothree"
        with pytest.raises(BlockingIOError):
            right.recv(1)
        left.close()
        right.close()

    on_both(check)


def test_an_end_is_seen_after_the_data():
    def check(pair, wait):
        left, right = pair()
        left.send(b"the rest")
        left.close()
        wait()
        assert right.recv(3) == b"the"
        assert right.recv(100) == b" rest"
        assert right.recv(100) == b""
        with pytest.raises(BrokenPipeError):
            right.send(b"more")
        right.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            left.send(b"x")

    on_both(check)


def test_half_of_a_stream_can_be_closed():
    def check(pair, wait):
        left, right = pair()
        left.shutdown(socket.SHUT_WR)
        wait()
        assert right.recv(1) == b""
        right.send(b"back")
        wait()
        assert left.recv(100) == b"back"
        left.close()
        right.close()

    on_both(check)


def test_a_full_buffer_takes_a_part_and_then_nothing():
    def check(pair, wait):
        left, right = pair()
        data = bytes(range(256)) * 40_000
        sent = left.send(data)
        assert 0 < sent < len(data)
        with pytest.raises(BlockingIOError):
            left.send(data)
        wait()
        got = bytearray()
        while len(got) < sent:
            got += right.recv(1 << 16)
        assert got == data[:sent]
        wait()
        assert left.send(b"again") == 5
        left.close()
        right.close()

    on_both(check)


def test_a_descriptor_travels_and_keeps_its_stream_open():
    def check(pair, wait):
        left, right = pair()
        one, other = pair()
        numbers = array.array("i", [other.fileno()])
        left.sendmsg([b"take it"], [(*RIGHTS, numbers.tobytes())])
        other.close()
        wait()
        room = bytearray(100)
        count, [(level, kind, data)], _, _ = right.recvmsg_into([room], 100)
        assert (level, kind, bytes(room[:count])) == (*RIGHTS, b"take it")
        (number,) = array.array("i", data)
        taken = environments.current.socket_of(number)
        taken.send(b"here")
        wait()
        assert one.recv(100) == b"here"
        taken.close()
        wait()
        assert one.recv(100) == b""
        for sock in (left, right, one):
            sock.close()

    on_both(check)


def test_a_descriptor_that_no_process_takes_is_closed_with_its_message():
    def check(pair, wait):
        left, right = pair()
        one, other = pair()
        numbers = array.array("i", [other.fileno()])
        left.sendmsg([b"take it"], [(*RIGHTS, numbers.tobytes())])
        other.close()
        right.close()
        wait()
        assert one.recv(100) == b""
        left.close()
        one.close()

    on_both(check)


def test_a_reactor_is_called_back_as_long_as_there_is_something_to_do():
    def main():
        streams = environments.current.streams
        reactor = environments.current.reactor()
        reactor.place = streams.scheduler.strand.place
        left, right = simulated()
        masks = []

        def ready(mask):
            masks.append(mask)
            if mask & select.POLLIN:
                data = right.recv(3)
                if not data:
                    reactor.unregister(right.fileno())

        reactor.register(right.fileno(), ready)
        left.send(b"seven b")
        streams.scheduler.sleep(0.01)
        assert masks == [select.POLLIN] * 3
        reactor.watch_writes(right.fileno(), True)
        streams.scheduler.sleep(20e-6)
        reactor.watch_writes(right.fileno(), False)
        assert set(masks[3:]) == {select.POLLOUT}
        del masks[3:]
        left.close()
        streams.scheduler.sleep(0.01)
        assert masks[3:] == [select.POLLIN | select.POLLHUP]

    simulate(main)


def test_another_number_is_another_descriptor_of_the_same_end():
    def main():
        streams = environments.current.streams
        left, right = simulated()
        copy = streams.duplicate(left.fileno())
        assert copy != left.fileno()
        left.close()
        assert environments.current.socket_of(copy).send(b"x") == 1
        with pytest.raises(OSError, match="Bad file") as caught:
            streams.close(left.fileno())
        assert caught.value.errno == errno.EBADF
        assert right.recv(1) == b"x"

    simulate(main)
