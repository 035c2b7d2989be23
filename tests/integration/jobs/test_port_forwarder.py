"""Forwarded ports carry each byte, half-closes and resets, between processes and between hosts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import ActorError, Point, this_host, this_proc
from monarch.job import PortForwarder, ProcessJob
from monarch.job.os_process import descendants
from tests.ports import free_port

WAIT = 60.0
MANY = 5_000_000


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    job = ProcessJob({"a": 2, "b": 2})
    yield job.state(cached_path=None)
    job.kill()


@pytest.fixture
def forward() -> Iterator[Callable[..., None]]:
    procs = this_host().spawn_procs()
    forwarder = procs.spawn("forwarder", PortForwarder)

    def start(*arguments: Any) -> None:
        forwarder.forward.call_one(*arguments).get(timeout=WAIT)

    yield start
    procs.stop().get(timeout=WAIT)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Yield a function that serves connections by a function, and returns the port."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(act: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        listeners.append(listener)

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:  # the test has ended
                    return
                thread = threading.Thread(target=answer, args=(sock,))
                threads.append(thread)
                thread.start()

        def answer(sock: socket.socket) -> None:
            sock.settimeout(WAIT)
            with sock, contextlib.suppress(ConnectionError):
                act(sock)

        thread = threading.Thread(target=accept)
        threads.append(thread)
        thread.start()
        port: int = listener.getsockname()[1]
        return port

    yield serve
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(WAIT)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT)


def read_all(sock: socket.socket) -> bytes:
    data = bytearray()
    while part := sock.recv(1 << 16):
        data += part
    return bytes(data)


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def answer_at_the_end(sock: socket.socket) -> None:
    sock.sendall(hashlib.sha256(read_all(sock)).digest())


@pytest.fixture
def procs(hosts: Any) -> Iterator[Callable[[str], Any]]:
    """Yield a function that returns processes at a place; stop them after the test."""
    spawned: list[Any] = []

    def spawn(name: str) -> Any:
        if name == "the client":
            return this_proc()
        place = {
            "this host": this_host(),
            "a host": hosts.a.slice(hosts=0),
            "another": hosts.b.slice(hosts=1),
            "two hosts": hosts.a,
            "two others": hosts.b,
        }[name]
        spawned.append(place.spawn_procs())
        return spawned[-1]

    yield spawn
    for mesh in spawned:
        mesh.stop().get(timeout=WAIT)


PLACES = [
    ("this host", "this host"),
    ("this host", "a host"),
    ("a host", "this host"),
    ("a host", "another"),
    ("a host", "the client"),
    ("the client", "a host"),
]


@pytest.mark.parametrize(("destination", "source"), PLACES)
def test_each_byte_arrives(
    procs: Any, forward: Any, server: Any, port: int, destination: str, source: str
) -> None:
    """A client that has closed its direction still gets the answer."""
    to, by = procs(destination), procs(source)
    forward(to, server(answer_at_the_end), by, f"127.0.0.1:{port}")
    for size in (0, 1, 65_535, 65_537, MANY):
        data = os.urandom(size)
        with connect(port) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == hashlib.sha256(data).digest()


def test_a_server_that_closes_first_still_reads(
    procs: Any, forward: Any, server: Any, port: int
) -> None:
    received: list[bytes] = []
    done = threading.Event()

    def talk(sock: socket.socket) -> None:
        sock.sendall(b"that is all")
        sock.shutdown(socket.SHUT_WR)
        received.append(read_all(sock))
        done.set()

    forward(procs("a host"), server(talk), procs("another"), f"127.0.0.1:{port}")
    with connect(port) as sock:
        assert read_all(sock) == b"that is all"
        data = os.urandom(MANY)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert done.wait(WAIT)
    assert received == [data]


def test_a_slow_reader_holds_up_the_writer(
    procs: Any, forward: Any, server: Any, port: int
) -> None:
    """What is under way is bounded, and all of it arrives once the reader reads."""
    go = threading.Event()

    def read_late(sock: socket.socket) -> None:
        assert go.wait(WAIT)
        answer_at_the_end(sock)

    forward(procs("a host"), server(read_late), procs("another"), f"127.0.0.1:{port}")
    block, sent = os.urandom(1 << 20), 0
    digest = hashlib.sha256()
    with connect(port) as sock:
        sock.setblocking(False)
        while sent < 200 << 20 and select.select([], [sock], [], 1.0)[1]:
            with contextlib.suppress(BlockingIOError):
                count = sock.send(block)
                digest.update(block[:count])
                sent += count
        assert 0 < sent < 100 << 20
        go.set()
        sock.settimeout(WAIT)
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == digest.digest()


def test_many_connections_at_once(procs: Any, forward: Any, server: Any, port: int) -> None:
    place = procs("a host"), procs("another")
    forward(place[0], server(echo), place[1], f"127.0.0.1:{port}")
    socks = [connect(port) for _ in range(100)]
    for number, sock in enumerate(socks):
        sock.sendall(b"%d" % number * 1000)
        sock.shutdown(socket.SHUT_WR)
    for number, sock in reversed(list(enumerate(socks))):
        assert read_all(sock) == b"%d" % number * 1000
        sock.close()


def test_no_server(procs: Any, forward: Any, port: int) -> None:
    forward(procs("a host"), free_port(), procs("another"), f"127.0.0.1:{port}")
    with connect(port) as sock, pytest.raises(ConnectionResetError):
        read_all(sock)


def test_a_reset_is_no_end(procs: Any, forward: Any, server: Any, port: int) -> None:
    """A client that breaks off is not taken for one that has sent everything."""
    outcome: list[str] = []
    done, here = threading.Event(), threading.Event()

    def read(sock: socket.socket) -> None:
        try:
            assert sock.recv(5) == b"hello"
            here.set()
            outcome.append(f"an end after {len(read_all(sock))} more")
        except ConnectionResetError:
            outcome.append("reset")
        done.set()

    forward(procs("a host"), server(read), procs("another"), f"127.0.0.1:{port}")
    with connect(port) as sock:
        sock.sendall(b"hello")
        assert here.wait(WAIT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert done.wait(WAIT)
    assert outcome == ["reset"]


def test_equal_coordinates_belong_together(procs: Any, forward: Any, server: Any) -> None:
    def greeting(text: bytes) -> Callable[[socket.socket], None]:
        return lambda sock: sock.sendall(text)

    ports = [server(greeting(b"first")), server(greeting(b"second"))]
    open_ports = [free_port(), free_port()]

    def dst_port(point: Point) -> int:
        return ports[point["hosts"]]

    def src_address(point: Point) -> str:
        return f"[::1]:{open_ports[0]}" if point.rank == 0 else f"localhost:{open_ports[1]}"

    forward(procs("two hosts"), dst_port, procs("two others"), src_address)
    with socket.create_connection(("::1", open_ports[0]), timeout=WAIT) as sock:
        assert read_all(sock) == b"first"
    with connect(open_ports[1]) as sock:
        assert read_all(sock) == b"second"


@pytest.mark.failures
def test_a_host_that_is_killed(forward: Any, server: Any) -> None:
    """Its connections are reset, those of other hosts go on."""
    job = ProcessJob({"a": 2, "b": 2})
    state = job.state(cached_path=None)
    try:
        open_ports = [free_port(), free_port()]

        def src_address(point: Point) -> str:
            return f"127.0.0.1:{open_ports[point.rank]}"

        destinations = state.a.spawn_procs()
        forward(destinations, server(echo), state.b.spawn_procs(), src_address)
        socks = [connect(port) for port in open_ports]
        for sock in socks:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        host = job._hosts["a"][0][1]
        for process in [host, *descendants([host])]:  # as a machine that loses its power
            process.send(signal.SIGKILL)
        with pytest.raises(ConnectionError):
            assert socks[0].recv(1) == b"never"
        socks[1].sendall(b"y")
        assert socks[1].recv(1) == b"y"
        with connect(open_ports[1]) as later:
            later.sendall(b"z")
            assert later.recv(1) == b"z"
        for sock in socks:
            sock.close()
    finally:
        job.kill()


def test_stopped_with_its_actor(procs: Any, server: Any, port: int) -> None:
    """Nothing listens any longer, and open connections are reset."""
    place = this_host().spawn_procs()
    forwarder = place.spawn("forwarder", PortForwarder)
    sources = procs("a host")
    arguments = (procs("another"), server(echo), sources, f"127.0.0.1:{port}")
    forwarder.forward.call_one(*arguments).get(timeout=WAIT)
    with connect(port) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        forwarder.stop().get(timeout=WAIT)
        with pytest.raises(ConnectionError):
            assert sock.recv(1) == b"never"
    with pytest.raises(ConnectionRefusedError):
        connect(port)
    place.stop().get(timeout=WAIT)


def test_a_forward_that_fails_leaves_nothing(
    procs: Any, forward: Any, server: Any, port: int
) -> None:
    """The same place can be used for the next one."""
    to, by = procs("a host"), procs("two others")
    service = server(echo)
    text = rf"cannot listen at 127.0.0.1:{port}: .*in use"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ActorError, match=text):
        forward(to, service, by.slice(hosts=0), f"127.0.0.1:{port}")
    forward(to, service, by.slice(hosts=0), f"127.0.0.1:{port}")
    with connect(port) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"


@pytest.mark.parametrize(
    ("port", "address", "text"),
    [
        (0, "127.0.0.1:8080", "dst_port must be a port between 1 and 65535, not 0"),
        (65536, "127.0.0.1:8080", "dst_port must be a port"),
        ("80", "127.0.0.1:8080", "dst_port must be a port between 1 and 65535, not '80'"),
        (80, "127.0.0.1:0", "the port of src_address must be a port between 1 and 65535, not 0"),
        (80, "127.0.0.1:http", "the port of src_address must be .* not 'http'"),
        (80, "127.0.0.1:-1", "the port of src_address must be .* not '-1'"),
        (80, "127.0.0.1", "src_address must be host:port"),
        (80, ":8080", "src_address must be host:port"),
        (80, "::1:8080", "src_address must be host:port"),
        (80, "[::1", "src_address must be host:port"),
        (80, "[localhost]:8080", "src_address must be host:port"),
        (80, 8080, "src_address must be host:port"),
    ],
)
def test_impossible_values(forward: Any, port: Any, address: Any, text: str) -> None:
    here = this_proc()
    with pytest.raises(ActorError, match=f"ValueError: {text}"):
        forward(here, port, here, address)


def test_meshes_of_different_extents(procs: Any, forward: Any) -> None:
    with pytest.raises(ActorError, match=r"ValueError: src_proc_mesh is .*the same extent"):
        forward(procs("two hosts"), 80, this_proc(), "127.0.0.1:8080")
