"""The door of a proc admits each invited peer once, and no other peer."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import Dialer, HandshakeError
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission.gateway import Gateway
from monarch._engine.runtime.admission.handshake_io import PATIENCE, Wire, dial, python_version
from monarch._engine.runtime.admission.host_identity import INVITATION
from monarch._engine.runtime.admission.secret import SecretError
from monarch._engine.runtime.direct import ticket as module
from monarch._engine.runtime.direct.ticket import Door, Ticket, come
from monarch._engine.runtime.io.reactor import Reactor
from monarch.security import Certificate, make_certificates

WAIT = 60.0


class Inviter:
    """A door on its own reactor, and the peers that were admitted."""

    def __init__(self, tls: bool = False, address: str = "127.0.0.1") -> None:
        self.reactor = Reactor()
        self.thread = threading.Thread(target=self.reactor.run)
        self.thread.start()
        self.arrivals: queue.Queue[Wire] = queue.Queue()
        self.reports: queue.Queue[tuple[str, str]] = queue.Queue()
        self.peers: list[str] = []
        reports, peers = self.reports, self.peers

        def report(peer: str, certificate: str, refused: str) -> None:
            peers.append(peer)
            reports.put((certificate, refused))

        self.door = Door(
            self.reactor,
            address,
            tls,
            report,
        )

    def do(self, action: Callable[[], Any]) -> Any:
        """Run `action` on the reactor's thread and return its result."""
        done: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            try:
                done.put(action())
            except Exception as error:
                done.put(error)

        self.reactor.call_soon(run)
        result = done.get(timeout=WAIT)
        if isinstance(result, Exception):
            raise result
        return result

    def invite(self) -> Ticket:
        made: Ticket = self.do(lambda: self.door.invite(self.arrivals.put))
        return made

    def end(self) -> None:
        self.do(lambda: [self.door._forget(name) for name in list(self.door._expected)])
        self.reactor.stop()
        self.thread.join(WAIT)
        self.reactor.close()


@pytest.fixture
def inviter() -> Iterator[Inviter]:
    made = Inviter()
    yield made
    made.end()


def is_open(ticket: Ticket) -> bool:
    try:
        socket.create_connection(ticket[:2], WAIT).close()
    except ConnectionRefusedError:
        return False
    return True


def test_who_is_invited_comes_once_and_the_door_closes(inviter: Inviter) -> None:
    ticket = inviter.invite()
    assert ticket.key.hex() not in repr(ticket[:2])
    guest = come(ticket, WAIT)
    with pytest.raises(BlockingIOError):
        guest.recv(1)
    host = inviter.arrivals.get(timeout=WAIT)
    host.send(b"welcome")
    guest.setblocking(True)
    assert guest.recv(100) == b"welcome"
    assert inviter.reports.get(timeout=WAIT) == ("", "")
    assert inviter.door._strangers == 0, "it takes no room any longer"
    assert not is_open(ticket)
    with pytest.raises(ConnectionRefusedError):
        come(ticket, WAIT)
    guest.close()
    host.close()


def test_a_second_with_the_same_key_is_refused(inviter: Inviter) -> None:
    first, other = inviter.invite(), inviter.invite()
    assert first.port == other.port
    come(first, WAIT).close()
    inviter.arrivals.get(timeout=WAIT).close()
    assert inviter.reports.get(timeout=WAIT) == ("", "")
    with pytest.raises(HandshakeError, match="another secret"):
        come(first, WAIT)
    assert "another secret" in inviter.reports.get(timeout=WAIT)[1]
    come(other, WAIT).close()
    inviter.arrivals.get(timeout=WAIT).close()


def test_who_does_not_know_the_key_is_refused_and_reported(inviter: Inviter) -> None:
    ticket = inviter.invite()
    with pytest.raises(HandshakeError, match="another secret"):
        come(ticket._replace(key=bytes(32)), WAIT)
    assert "another secret" in inviter.reports.get(timeout=WAIT)[1]
    with socket.create_connection(ticket[:2], WAIT) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
        assert scanner.recv(1) == b""
    assert "does not speak this protocol" in inviter.reports.get(timeout=WAIT)[1]
    assert inviter.arrivals.empty()
    come(ticket, WAIT).close()
    inviter.arrivals.get(timeout=WAIT).close()


def test_strangers_at_the_door_of_a_proc_are_limited(inviter: Inviter) -> None:
    ticket = inviter.invite()
    waiting = [socket.create_connection(ticket[:2], WAIT) for _ in range(64)]
    with socket.create_connection(ticket[:2], WAIT) as one_more:
        assert one_more.recv(1) == b""
    assert "too many connections are in the middle" in inviter.reports.get(timeout=WAIT)[1]
    assert inviter.door._strangers == 64
    for sock in waiting:
        sock.close()
    for _ in waiting:
        assert "closed the connection" in inviter.reports.get(timeout=WAIT)[1]
    assert inviter.do(lambda: inviter.door._strangers) == 0
    come(ticket, WAIT).close()  # a place is free again
    inviter.arrivals.get(timeout=WAIT).close()


def test_no_repr_shows_a_key(inviter: Inviter) -> None:
    ticket = inviter.invite()
    gateway = Gateway(ChannelAddr.parse("tcp://127.0.0.1:1"), ticket.key, 7)
    for shown in (repr(ticket), f"{ticket}", repr(gateway), f"{[gateway]}"):
        assert repr(ticket.key) not in shown
        assert "key" not in shown
    assert f"Ticket('127.0.0.1', {ticket.port})" == repr(ticket)


def test_who_was_not_dialed_so_is_no_worker(inviter: Inviter) -> None:
    """The key of a ticket is valid only for the purpose of the ticket."""
    ticket = inviter.invite()
    where = ChannelAddr("tcp", ticket.address, ticket.port)
    with pytest.raises(HandshakeError, match="answered is no worker"):
        dial(where, ticket.key, {}, WAIT)
    assert "no worker" in inviter.reports.get(timeout=WAIT)[1]


def test_who_is_not_expected_any_more_is_not_let_in(inviter: Inviter) -> None:
    ticket = inviter.invite()
    inviter.do(lambda: inviter.door.withdraw(ticket.key))
    inviter.do(lambda: inviter.door.withdraw(ticket.key))
    assert not is_open(ticket)


def test_the_door_opens_again_for_the_next(inviter: Inviter) -> None:
    for _ in range(2):
        ticket = inviter.invite()
        come(ticket, WAIT).close()
        inviter.arrivals.get(timeout=WAIT).close()
        assert not is_open(ticket)


def test_a_ticket_that_is_over_when_its_guest_has_proved_itself(inviter: Inviter) -> None:
    """The ticket was withdrawn or used by another peer in the middle of the handshake."""
    ticket, other = inviter.invite(), inviter.invite()
    side = Dialer(ticket.key, bytes(32), python_version(), INVITATION)
    with socket.create_connection(ticket[:2], WAIT) as guest:
        guest.settimeout(WAIT)
        guest.sendall(side.hello)
        proof = b""
        while side.wants and not proof:
            proof = side.receive(guest.recv(side.wants))
        inviter.do(lambda: inviter.door.withdraw(ticket.key))
        guest.sendall(proof)
        while side.wants:
            guest.sendall(side.receive(guest.recv(side.wants)))
        said = struct.pack("<H", 2) + b"{}"
        guest.sendall(said + purpose_tag(side.session, said))
        report = inviter.reports.get(timeout=WAIT)
        assert report == ("", "its ticket was used or withdrawn meanwhile")
        assert guest.recv(1) == b""
    assert inviter.arrivals.empty()
    assert inviter.door._strangers == 0
    come(other, WAIT).close()
    inviter.arrivals.get(timeout=WAIT).close()
    assert inviter.reports.get(timeout=WAIT) == ("", "")


def test_who_comes_is_reported_with_its_address(inviter: Inviter) -> None:
    with socket.create_connection(inviter.invite()[:2], WAIT) as stranger:
        port = stranger.getsockname()[1]
    inviter.reports.get(timeout=WAIT)
    assert inviter.peers == [f"127.0.0.1:{port}"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_host_may_be_reached_by_ipv6() -> None:
    inviter = Inviter(address="::1")
    guest = come(inviter.invite(), WAIT)
    inviter.arrivals.get(timeout=WAIT).close()
    assert inviter.peers == [f"[::1]:{guest.getsockname()[1]}"]
    guest.close()
    inviter.end()


def test_an_inviter_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a connection may be long; that of a handshake is short."""
    limits: list[float | None] = []

    def introduce(sock: socket.socket, *_: Any) -> None:
        limits.append(sock.gettimeout())
        raise TimeoutError

    monkeypatch.setattr(module, "introduce", introduce)
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(TimeoutError):
        come(Ticket("127.0.0.1", sock.getsockname()[1], bytes(32), b""), WAIT)
    assert limits == [PATIENCE]


def test_a_forked_child_closes_the_door_of_its_parent(inviter: Inviter) -> None:
    door = Door(inviter.reactor, "127.0.0.1", False, lambda *_: None)
    door.close_in_child()
    with socket.socket() as sock:
        door._sock, door._entrance = sock, object()  # type: ignore[assignment]
        door.close_in_child()
        assert sock.fileno() == -1
    assert door._sock is door._entrance is None


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    same = make_certificates(folder / "ca", ["owner", "initiator", "member"])
    return [*same, *make_certificates(folder / "other", ["alien"])]


def use(patch: pytest.MonkeyPatch, certificate: Certificate) -> None:
    for name, value in certificate.environment.items():
        patch.setenv(name, value)


@pytest.fixture
def secured(
    certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Inviter, Ticket]]:
    use(monkeypatch, certificates[0])
    made = Inviter(tls=True)
    yield made, made.invite()
    made.end()


def test_with_tls_both_show_who_they_are(
    secured: Any, certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    inviter, ticket = secured
    use(monkeypatch, certificates[1])
    guest = come(ticket, WAIT)
    host = inviter.arrivals.get(timeout=WAIT)
    assert inviter.reports.get(timeout=WAIT) == ("initiator", "")
    assert not isinstance(guest, socket.socket)
    assert not isinstance(host, socket.socket)
    with pytest.raises(BlockingIOError):
        guest.recv(1)
    guest.close()
    host.close()


def test_a_certificate_that_was_not_announced_is_refused(
    secured: Any, certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CA-signed one, too: a member of the job cannot intercept another's connection."""
    inviter, ticket = secured
    use(monkeypatch, certificates[2])
    impostor = Inviter(tls=True)
    where = impostor.invite()
    use(monkeypatch, certificates[1])
    with pytest.raises(HandshakeError, match="not the one that was announced"):
        come(ticket._replace(port=where.port), WAIT)
    assert impostor.reports.get(timeout=WAIT)[1]
    assert inviter.arrivals.empty()
    impostor.end()


def test_a_stranger_to_the_ca_is_refused(
    secured: Any, certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    inviter, ticket = secured
    use(monkeypatch, certificates[3])
    with pytest.raises((HandshakeError, OSError)):
        come(ticket, WAIT)
    assert inviter.reports.get(timeout=WAIT)[1]
    with pytest.raises((HandshakeError, OSError)):
        come(ticket._replace(certificate=b""), WAIT)  # also without TLS
    assert inviter.reports.get(timeout=WAIT)[1]
    assert inviter.arrivals.empty()


def test_without_certificates_nobody_is_invited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.delenv(f"HYPERACTOR_TLS_{name}", raising=False)
    inviter = Inviter(tls=True)
    with pytest.raises(SecretError, match="HYPERACTOR_TLS_CERT is not set"):
        inviter.invite()
    inviter.end()
