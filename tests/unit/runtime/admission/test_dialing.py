"""Dialing and listening between hosts: over TCP, TLS and Unix sockets, from end to end."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.settings import settings
from monarch._engine.protocol.session.handshake import HandshakeError, key_name
from monarch._engine.runtime.admission import handshake_io as module
from monarch._engine.runtime.admission.authenticated import AuthenticSocket
from monarch._engine.runtime.admission.handshake_io import (
    PROBE,
    Arrival,
    Greeting,
    Wire,
    connect,
    dial,
    greet,
    listen,
    python_version,
    uses_tls,
    why_unreachable,
)
from monarch._engine.runtime.admission.tls import TlsSocket, server_context
from monarch._engine.runtime.io.listener import Entrance
from monarch._engine.runtime.io.reactor import Reactor
from monarch.security import make_certificates

WAIT = 60.0
KEY = bytes(range(32))
PURPOSE = {"client": 7}


class Host:
    """Listens as a worker does; with TLS it begins again as the agent, where that is needed."""

    def __init__(self, address: ChannelAddr) -> None:
        self.arrivals: queue.Queue[Arrival] = queue.Queue()
        self.refusals: queue.Queue[str] = queue.Queue()
        self.tls = server_context() if uses_tls(address) else None
        self.reactor = Reactor()
        self.sock = listen(address)
        self.entrance = Entrance(self.reactor, self.sock, self._came)
        self.thread = threading.Thread(target=self.reactor.run)
        self.thread.start()

    def address(self, scheme: str) -> ChannelAddr:
        return ChannelAddr.parse(f"{scheme}://127.0.0.1:{self.sock.getsockname()[1]}")

    def _came(self, sock: socket.socket, _address: Any) -> None:
        def accepted(arrival: Arrival) -> None:
            if self.tls is None or arrival.purpose.get(PROBE):
                self.arrivals.put(arrival)
            else:
                assert isinstance(arrival.sock, socket.socket)
                self._greet(arrival.sock, arrival.session, self.arrivals.put, steps_aside=False)

        self._greet(sock, KEY, accepted)

    def _greet(self, sock: socket.socket, key: bytes, accepted: Any, **options: bool) -> None:
        keys, refused = {key_name(key): key}, self.refusals.put
        Greeting(
            self.reactor, sock, keys.get, accepted, refused, lambda _: "",
            tls=self.tls, **options,
        )  # fmt: skip

    def close(self) -> None:
        self.reactor.stop()
        self.thread.join(WAIT)
        self.entrance.close()
        self.reactor.close()


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [files] = make_certificates(tmp_path, [["127.0.0.1"]])
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["tcp", "tls"])
def host(request: pytest.FixtureRequest, certificates: None) -> Iterator[tuple[Host, ChannelAddr]]:
    made = Host(ChannelAddr.parse(f"{request.param}://127.0.0.1:0"))
    yield made, made.address(request.param)
    made.close()


def read(wire: Wire, size: int) -> bytes:
    data = b""
    while len(data) < size:
        with contextlib.suppress(BlockingIOError):
            more = wire.recv(size - len(data))
            assert more
            data += more
    return data


def check_both_ways(near: Wire, far: Wire) -> None:
    for one, other in ((near, far), (far, near)):
        one.send(b"said")
        assert read(other, 4) == b"said"
    near.close()
    far.close()


@pytest.mark.parametrize("bare", [False, True])
def test_both_sides_find_the_same_connection(host: tuple[Host, ChannelAddr], bare: bool) -> None:
    door, address = host
    with settings.configured(authenticate_packets=not bare):
        near = dial(address, KEY, PURPOSE, WAIT)
        arrival = door.arrivals.get(timeout=WAIT)
        far = arrival.wire
    assert arrival.purpose == PURPOSE
    assert arrival.certificate == ("127.0.0.1" if door.tls else "")
    expected = TlsSocket if door.tls else socket.socket if bare else AuthenticSocket
    assert type(near) is type(far) is expected
    assert arrival.session.hex() not in repr(arrival)
    assert repr(arrival).startswith("Arrival(<")
    assert near.getsockname() != far.getsockname()
    check_both_ways(near, far)
    assert door.refusals.empty()


def test_a_greeting_says_who_is_there(host: tuple[Host, ChannelAddr]) -> None:
    door, address = host
    peer = greet(address, KEY, WAIT)
    assert peer.key == KEY
    arrival = door.arrivals.get(timeout=WAIT)
    assert arrival.purpose == {PROBE: True}
    arrival.sock.close()


def test_another_secret_is_refused_on_both_sides(host: tuple[Host, ChannelAddr]) -> None:
    door, address = host
    with pytest.raises(HandshakeError, match="another secret"):
        dial(address, bytes(32), PURPOSE, WAIT)
    assert "another secret" in door.refusals.get(timeout=WAIT)
    assert door.arrivals.empty()


def test_unix_sockets(tmp_path: Path) -> None:
    address = ChannelAddr.parse(f"ipc://{tmp_path}/door")
    with pytest.raises(FileNotFoundError):
        dial(address, KEY, PURPOSE, WAIT)
    door = Host(address)
    near = dial(address, KEY, PURPOSE, WAIT)
    check_both_ways(near, door.arrivals.get(timeout=WAIT).wire)
    door.close()


def test_somebody_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with listen(ChannelAddr.parse("tcp://127.0.0.1:0")) as silent:
        address = ChannelAddr("tcp", "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(TimeoutError):
            dial(address, KEY, PURPOSE, WAIT)
        with pytest.raises(HandshakeError, match="handshake was not answered"):
            greet(address, KEY, WAIT)


def test_somebody_who_hangs_up() -> None:
    with listen(ChannelAddr.parse("tcp://127.0.0.1:0")) as sock:
        threading.Thread(target=lambda: sock.accept()[0].close()).start()
        address = ChannelAddr("tcp", "127.0.0.1", sock.getsockname()[1])
        with pytest.raises((HandshakeError, ConnectionError)):
            dial(address, KEY, PURPOSE, WAIT)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "timed out after 3 s: .*firewall"),
        (ConnectionRefusedError(111, "Connection refused"), "^Connection refused: .*monarch work"),
        (FileNotFoundError(2, "No such file"), "^No such file: no worker has made that socket"),
        (OSError(113, "No route to host"), "^No route to host$"),
        (OSError("other"), "^other$"),
    ],
)
def test_why_a_host_is_not_reached_is_said_with_the_remedy(error: OSError, text: str) -> None:
    with pytest.raises(OSError, match=text):
        raise OSError(why_unreachable(error, 3.0))


def test_what_hosts_talk_by() -> None:
    for scheme, secured in (("tcp", False), ("tls", True), ("metatls", True), ("unix", False)):
        assert uses_tls(ChannelAddr(scheme, "127.0.0.1", 1)) is secured
    with pytest.raises(ValueError, match="use tcp, tls or ipc"):
        uses_tls(ChannelAddr("local", "", 1))
    assert python_version() == module.sys.version_info[:2]


def test_a_door_is_where_its_address_says() -> None:
    address = ChannelAddr.parse("tcp://127.0.0.1:0")
    elsewhere = address._replace(host="192.0.2.1", bind=address)
    with listen(elsewhere) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    with listen(address._replace(fd=bound.detach())) as sock:
        assert sock.getsockname()[1] == port
        connect(ChannelAddr("tcp", "127.0.0.1", port), WAIT).close()


@pytest.mark.parametrize("dual", [True, False])
def test_a_door_at_all_addresses(monkeypatch: pytest.MonkeyPatch, dual: bool) -> None:
    if dual and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    with listen(ChannelAddr("tcp", "::", 0)) as sock:
        port = sock.getsockname()[1]
        connect(ChannelAddr("tcp", "127.0.0.1", port), WAIT).close()
        if dual:
            connect(ChannelAddr("tcp", "::1", port), WAIT).close()


def test_a_connection_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    unix = ChannelAddr.parse(f"ipc://{tmp_path}/door")
    with listen(unix), connect(unix, 3.0) as sock:
        assert sock.gettimeout() == 3.0
    with listen(ChannelAddr.parse("tcp://127.0.0.1:0")) as door:
        address = ChannelAddr("tcp", "127.0.0.1", door.getsockname()[1])
        with connect(address, 3.0) as sock:
            assert sock.gettimeout() == 3.0


def test_a_unix_socket_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unix = ChannelAddr.parse(f"ipc://{tmp_path}/door")
    checked: list[socket.socket] = []

    def refuse(sock: socket.socket) -> None:
        checked.append(sock)
        raise HandshakeError("the other side belongs to another user")

    monkeypatch.setattr(module, "check_user", refuse)
    with listen(unix), pytest.raises(HandshakeError, match="another user"):
        connect(unix, WAIT)
    assert [sock.fileno() for sock in checked] == [-1]


def test_a_name_of_both_kinds_is_listened_at_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_options: found)
    with listen(ChannelAddr("tcp", "both", 0)) as sock:
        assert sock.family == socket.AF_INET


def test_what_fails_on_the_way_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is closed; and by default a dialer trusts only who proves itself."""
    opened: list[socket.socket] = []
    trusted: list[bool] = []

    def open_(*_: Any) -> socket.socket:
        sock, other = socket.socketpair()
        other.close()
        opened.append(sock)
        return sock

    def fail(*_: Any, trusting: bool = False, **_options: Any) -> Any:
        trusted.append(trusting)
        raise ConnectionResetError

    address = ChannelAddr("tcp", "127.0.0.1", 1)
    monkeypatch.setattr(module, "connect", open_)
    monkeypatch.setattr(module, "introduce", fail)
    for attempt in (lambda: dial(address, KEY, {}, WAIT), lambda: greet(address, KEY, WAIT)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "far_end", fail)
            with pytest.raises(ConnectionResetError):
                attempt()
        with monkeypatch.context() as patch:
            patch.setattr(module, "far_end", lambda *_: "end")
            with pytest.raises(ConnectionResetError):
                attempt()
    assert [sock.fileno() for sock in opened] == [-1] * 4
    assert not any(trusted)


class Broken:
    """A connection on which nothing can be sent, or nothing comes."""

    def __init__(self, *, sends: bool, says: Exception | None = None) -> None:
        self.sends, self.says = sends, says

    def sendall(self, _data: bytes) -> None:
        if not self.sends:
            raise BrokenPipeError("broken pipe")

    def recv(self, _size: int) -> bytes:
        if self.says is not None:
            raise self.says
        return b""


@pytest.mark.parametrize(
    ("broken", "error", "text"),
    [
        (Broken(sends=True), HandshakeError, "closed the connection during the handshake"),
        (Broken(sends=False), BrokenPipeError, "broken pipe"),
        (Broken(sends=False, says=HandshakeError("its reason")), HandshakeError, "its reason"),
    ],
)
def test_who_hangs_up_is_asked_why(broken: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        module.introduce(broken, KEY, {}, "you")


def test_who_proves_nothing_is_not_trusted_unless_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusting: list[bool] = []

    def dialer(*_: Any, **options: Any) -> None:
        trusting.append(options["trusting"])
        raise ConnectionResetError

    monkeypatch.setattr(module, "Dialer", dialer)
    with pytest.raises(ConnectionResetError):
        module.introduce(Broken(sends=True), KEY, {}, "you")  # type: ignore[arg-type]
    with pytest.raises(ConnectionResetError):
        module.introduce(Broken(sends=True), KEY, {}, "you", trusting=True)  # type: ignore[arg-type]
    assert trusting == [False, True]


def test_an_agent_has_time_to_start(certificates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second handshake has the time of any, however short that for a connection is."""
    door = Host(ChannelAddr.parse("tls://127.0.0.1:0"))
    limits: list[float | None] = []
    introduce = module.introduce

    def timed(sock: TlsSocket, *args: Any, **options: Any) -> Any:
        limits.append(sock._sock.gettimeout())
        return introduce(sock, *args, **options)

    monkeypatch.setattr(module, "introduce", timed)
    near = dial(door.address("tls"), KEY, PURPOSE, 4.5)
    assert limits == [4.5, module.PATIENCE]
    check_both_ways(near, door.arrivals.get(timeout=WAIT).wire)
    door.close()


@pytest.mark.parametrize("probe", [False, True])
def test_a_handshake_has_its_own_limit(probe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def introduce(sock: socket.socket, *_: Any, **_options: Any) -> None:
        limits.append(sock.gettimeout())
        raise ConnectionResetError

    monkeypatch.setattr(module, "introduce", introduce)
    with listen(ChannelAddr.parse("tcp://127.0.0.1:0")) as door:
        address = ChannelAddr("tcp", "127.0.0.1", door.getsockname()[1])
        with pytest.raises(ConnectionResetError):
            greet(address, KEY, WAIT) if probe else dial(address, KEY, {}, WAIT)
    assert limits == [module.PATIENCE]
