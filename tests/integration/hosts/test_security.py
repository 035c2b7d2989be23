"""Strangers at a worker's door are refused, counted and logged; the clients are not disturbed."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import Dialer, HandshakeError
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.runtime.admission import host_identity
from monarch._engine.runtime.admission.handshake_io import dial
from monarch._engine.runtime.admission.secret import SecretError, find_secret
from monarch.security import Certificate, make_certificates
from tests.ports import free_port

WAIT = 60.0
PYTHON = (sys.version_info[0], sys.version_info[1])
OTHER = b"another secret.................."

WORKER = """
import logging, sys
from monarch.actor import run_worker_loop_forever
from monarch.config import configure
address, audit, *options = sys.argv[1:]
log = logging.getLogger("monarch.audit")
log.setLevel(logging.INFO)
log.addHandler(logging.FileHandler(audit))
if options:
    configure(allow_unauthenticated=True)
run_worker_loop_forever(address=address, ca="trust_all_connections")
"""

CLIENT = """
import os, sys
from monarch.actor import Actor, attach_to_workers, endpoint
from monarch.config import configure
class Echo(Actor):
    @endpoint
    def echo(self, value): return value
    @endpoint
    def pid(self): return os.getpid()
if sys.argv[2:]:
    configure(allow_unauthenticated=True)
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1]])
hosts.initialized.get(timeout=60)
procs = hosts.spawn_procs()
echo = procs.spawn("echo", Echo)
print(echo.pid.call_one().get(timeout=60), flush=True)
for line in sys.stdin:
    data = os.urandom(int(line))
    print(echo.echo.call_one(data).get(timeout=60) == data, flush=True)
procs.stop().get(timeout=60)
hosts.stop().get(timeout=60)
"""


class Door:
    """A worker loop, its log, and a client that it serves."""

    def __init__(self, folder: Path, scheme: str, environ: dict[str, str], *options: str) -> None:
        self.folder = folder
        self.environ = {**os.environ, **environ}
        self.port = free_port()
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self._audit = folder / f"audit-{self.port}"
        self.errors = folder / f"errors-{self.port}"
        self._client: subprocess.Popen[str] | None = None
        with self.errors.open("w") as errors:
            self._process = self._run(WORKER, str(self._audit), *options, stderr=errors)
        until(lambda: self.records("listening"))

    def _run(self, code: str, *args: str, **options: Any) -> subprocess.Popen[str]:
        # (A script file, not `-c`: cloudpickle then finds its functions.)
        script = self.folder / f"script-{abs(hash(code))}.py"
        script.write_text(code)
        command = [sys.executable, str(script), self.address, *args]
        return subprocess.Popen(command, env=self.environ, text=True, **options)

    def client(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        self.environ, before = {**self.environ, **environ}, self.environ
        pipe = subprocess.PIPE
        client = self._run(CLIENT, *args, stdin=pipe, stdout=pipe, stderr=pipe)
        self.environ = before
        return client

    def check(self) -> None:
        """Check that the client is still served."""
        if self._client is None:
            self._client = self.client()
            assert int(said(self._client)) > 0
        for size in (1, 3_000_000):
            ask(self._client, size)

    def records(self, event: str) -> list[dict[str, Any]]:
        if not self._audit.exists():
            return []
        lines = map(json.loads, self._audit.read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def refusal(self, peer: tuple[str, int]) -> dict[str, Any]:
        """Return the record of the one refused connection from that address."""
        name = f"{peer[0]}:{peer[1]}"
        [found] = until(lambda: [r for r in self.records("refused") if r["peer"] == name])
        return dict(found)

    def close(self) -> None:
        if self._client is not None:
            finish(self._client)
        assert self._process.poll() is None
        self._process.kill()
        self._process.wait()


def said(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        assert client.stderr is not None
        pytest.fail(client.stderr.read())
    return line.strip()


def ask(client: subprocess.Popen[str], size: int) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{size}\n")
    client.stdin.flush()
    assert said(client) == "True"


def finish(client: subprocess.Popen[str]) -> str:
    """Wait for the client's exit; return its stderr."""
    _, errors = client.communicate(timeout=WAIT)
    return errors


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    for name in ("secret", "other"):
        (folder / name).write_text(f"the {name} of the tests, and of nobody else\n")
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture(autouse=True)
def ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the key of the workers."""
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(folder / "secret"))
    return find_secret()


@pytest.fixture(scope="module")
def certificates(folder: Path) -> dict[str, Certificate]:
    """Make certificates of our CA for a worker and a client, expired ones, and another CA's."""
    client, worker, late = make_certificates(folder / "ca", ["client", "127.0.0.1", "late"])
    alien, impostor = make_certificates(folder / "other-ca", ["client", "127.0.0.1"])
    past = dt.timedelta(minutes=-1)
    expired, stale = make_certificates(folder / "old-ca", ["client", "127.0.0.1"], valid=past)
    return {
        "client": client,
        "worker": worker,
        "late": late,
        "alien": alien,
        "impostor": impostor,
        "expired": expired,
        "stale": stale,
    }


def opened(folder: Path, scheme: str, *options: str, **environ: str) -> Door:
    return Door(
        folder, scheme, {"MONARCH_SECRET_FILE": str(folder / "secret"), **environ}, *options
    )


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Door]:
    door = opened(folder, "tcp")
    yield door
    door.close()


@pytest.fixture(scope="module")
def secured(folder: Path, certificates: dict[str, Certificate]) -> Iterator[Door]:
    # (The door trusts the CA of the expired ones, too, so only their expiry can refuse them.)
    ours, old = certificates["worker"], certificates["stale"]
    both = folder / "both.crt"
    both.write_text(Path(ours.ca).read_text() + Path(old.ca).read_text())
    door = opened(folder, "tls", **{**ours.environment, "HYPERACTOR_TLS_CA": str(both)})
    door.environ.update(certificates["client"].environment)  # for the client that it serves
    yield door
    door.close()


# --------------------------------------------------------------------------------------------------
# Strangers
# --------------------------------------------------------------------------------------------------

Stranger = Callable[[socket.socket, bytes], None]


def hangs_up(sock: socket.socket, key: bytes) -> None:
    """Connect and close, as a port scan does."""


def resets(sock: socket.socket, key: bytes) -> None:
    """Connect and reset, as a fast port scan does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def speaks_http(sock: socket.socket, key: bytes) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 4)


def sends_too_much(sock: socket.socket, key: bytes) -> None:
    """Send a first frame above the size limit."""
    with contextlib.suppress(OSError):
        for _ in range(64):
            sock.sendall(bytes(1 << 20))


def meant(sock: socket.socket) -> str:
    """Return the address that the dialer meant."""
    scheme = "tls" if isinstance(sock, ssl.SSLSocket) else "tcp"
    address = ChannelAddr(scheme, *sock.getpeername())
    return host_identity.meant(address, host_identity.far_end(sock, address))


def greet(sock: socket.socket, key: bytes, python: tuple[int, int] = PYTHON) -> Dialer:
    """Do the handshake."""
    return greet_and_tell(sock, key, python)[0]


def greet_and_tell(
    sock: socket.socket, key: bytes, python: tuple[int, int] = PYTHON
) -> tuple[Dialer, bytes]:
    """Do the handshake; return it and the bytes that were sent."""
    side = Dialer(key, os.urandom(32), python, meant(sock))
    sent = side.hello
    sock.sendall(sent)
    while side.wants:
        data = sock.recv(side.wants)
        if not data:
            raise ConnectionError
        answer = side.receive(data)
        sock.sendall(answer)
        sent += answer
    return side, sent


def say(sock: socket.socket, side: Dialer, text: bytes) -> None:
    """Send the purpose of a connection."""
    said = struct.pack("<H", len(text)) + text
    sock.sendall(said + purpose_tag(side.session, said))


def knows_another_secret(sock: socket.socket, key: bytes) -> None:
    with pytest.raises(HandshakeError, match="another secret"):
        greet(sock, OTHER)


def runs_another_python(sock: socket.socket, key: bytes) -> None:
    with pytest.raises(HandshakeError, match="Python"):
        greet(sock, key, (3, 99))


def replays(sock: socket.socket, key: bytes) -> None:
    """Replay the bytes that a member sent earlier."""
    with socket.create_connection(sock.getpeername()) as other:
        _, sent = greet_and_tell(other, key)
    sock.sendall(sent)
    with contextlib.suppress(OSError):
        assert len(sock.recv(1000)) == 64  # only a challenge
        assert sock.recv(1000) == b""


def says_too_much(sock: socket.socket, key: bytes) -> None:
    greet(sock, key)
    with contextlib.suppress(OSError):
        sock.sendall(b"\xff\xff" + bytes(1 << 16))


def says_nothing_sensible(sock: socket.socket, key: bytes) -> None:
    say(sock, greet(sock, key), b"[]")


def says_not_what_for(sock: socket.socket, key: bytes) -> None:
    say(sock, greet(sock, key), b"{}")


def speaks_tls(sock: socket.socket, key: bytes) -> None:
    with pytest.raises(OSError):
        ssl._create_unverified_context().wrap_socket(sock)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (hangs_up, "closed the connection"),
        (resets, "ConnectionResetError|closed the connection"),
        (speaks_http, "does not speak"),
        (sends_too_much, "does not speak"),
        (knows_another_secret, "another secret"),
        (runs_another_python, r"runs Python 3\.99"),
        (replays, "could not prove"),
        (says_too_much, "a purpose of 65535 bytes"),
        (says_nothing_sensible, "no object"),
        (says_not_what_for, "the purpose of the connection is invalid"),
        (speaks_tls, "it speaks TLS, and this side does not"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_at_a_plain_door(plain: Door, ours: bytes, stranger: Stranger, reason: str) -> None:
    refused(plain, stranger, ours, reason)


def refused(door: Door, stranger: Stranger, key: bytes, reason: str) -> None:
    door.check()
    before = len(door.records("refused"))
    sock = socket.create_connection(("127.0.0.1", door.port))
    peer = sock.getsockname()
    with sock:
        stranger(sock, key)
    record = door.refusal(peer)
    assert re.search(reason, record["reason"])
    assert record["count"] > before
    door.check()


def inside(certificate: Certificate | None, then: Stranger, **options: Any) -> Stranger:
    """Return a stranger that tries to get through TLS, and then acts as `then`."""

    def stranger(sock: socket.socket, key: bytes) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        for name, value in options.items():
            setattr(context, name, value)
        if certificate is not None:
            context.load_cert_chain(certificate.cert, certificate.key)
        copy = socket.socket(fileno=os.dup(sock.fileno()))
        with contextlib.suppress(OSError), context.wrap_socket(copy) as wrapped:
            then(wrapped, key)

    return stranger


def listens(sock: socket.socket, key: bytes) -> None:
    while sock.recv(1000):
        pass


@pytest.mark.parametrize(
    ("certificate", "then", "reason"),
    [
        ("alien", listens, "TLS certificate: .*(issuer|self)"),
        ("expired", listens, "TLS certificate: .*expired"),
        (None, listens, "did not return a certificate"),
        ("client", hangs_up, "closed the connection"),
        ("client", knows_another_secret, "another secret"),
        ("client", sends_too_much, "does not speak"),
        ("client", says_too_much, "a purpose of 65535 bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", value) if not isinstance(value, str) else value,
)
def test_at_a_door_with_tls(
    secured: Door,
    ours: bytes,
    certificates: dict[str, Certificate],
    certificate: str | None,
    then: Stranger,
    reason: str,
) -> None:
    shown = None if certificate is None else certificates[certificate]
    refused(secured, inside(shown, then), ours, reason)


def test_an_older_tls_is_refused(
    secured: Door, ours: bytes, certificates: dict[str, Certificate]
) -> None:
    old = inside(certificates["client"], listens, maximum_version=ssl.TLSVersion.TLSv1_2)
    refused(secured, old, ours, "unsupported protocol")


def hello_in_the_open(sock: socket.socket, key: bytes) -> None:
    with pytest.raises((HandshakeError, OSError)):
        greet(sock, key)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (hangs_up, "closed the connection"),
        (hello_in_the_open, "TLS"),
        (speaks_http, "TLS: http request"),
        (sends_too_much, "TLS"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_without_tls_at_a_door_with_tls(
    secured: Door, ours: bytes, stranger: Stranger, reason: str
) -> None:
    refused(secured, stranger, ours, reason)


def test_who_is_slow_is_turned_away(plain: Door, secured: Door) -> None:
    """Slow-loris: one byte at a time, without end; and silence."""
    hello = Dialer(OTHER, os.urandom(32), PYTHON, "").hello
    for door in (plain, secured):
        door.check()
    socks = [socket.create_connection(("127.0.0.1", d.port)) for d in (plain, plain, secured)]
    names = [sock.getsockname() for sock in socks]
    (drop, *_), left = socks, list(hello)

    def given_up() -> bool:
        if len(left) > 1:
            with contextlib.suppress(OSError):
                drop.sendall(bytes([left.pop(0)]))
        return len(plain.records("refused")) >= before + 2

    before = len([r for r in plain.records("refused") if "did not complete" not in r["reason"]])
    until(given_up)
    for sock, name, door in zip(socks, names, (plain, plain, secured), strict=True):
        assert "did not complete the handshake within 5 s" in door.refusal(name)["reason"]
        sock.close()
        door.check()


# --------------------------------------------------------------------------------------------------
# The data path
# --------------------------------------------------------------------------------------------------


def test_messages_of_all_sizes_over_tls(secured: Door) -> None:
    client = secured.client()
    said(client)
    for size in (0, 1, 16_000, 16_384, 70_000, 1 << 20, 50_000_001):
        ask(client, size)
    finish(client)


def test_the_agent_takes_nobody_but_whom_the_worker_has_met(
    secured: Door, ours: bytes, certificates: dict[str, Certificate]
) -> None:
    """A member takes over another's connection between worker and agent: it is refused."""
    secured.check()
    before = len(secured.records("detached"))
    files = certificates["client"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    sock = socket.create_connection(("127.0.0.1", secured.port))
    peer = sock.getsockname()
    said = json.dumps({"client": 99, "from": "", "as": "here", "session": 1}).encode()
    outer = context.wrap_socket(sock, server_hostname="127.0.0.1")
    say(outer, greet(outer, ours), said)
    outer.unwrap()
    inner = context.wrap_socket(outer, server_hostname="127.0.0.1")
    # The attacker knows the secret and has a certificate, but not the session key.
    with inner, pytest.raises(HandshakeError, match="another secret"):
        greet(inner, ours)
    assert "another secret" in secured.refusal(peer)["reason"]
    until(lambda: len(secured.records("detached")) > before)  # the agent for the attacker exits
    secured.check()


class Wire:
    """A relay between a client and a door; it breaks on demand, and accepts new connections."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._carriers: list[threading.Thread] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._socks += [near, far]
                self.connections += 1
                for ends in ((near, far), (far, near)):
                    self._carriers.append(threading.Thread(target=self._carry, args=ends))
                    self._carriers[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut()
        for thread in self._carriers:
            thread.join()
        for sock in self._socks:
            sock.close()


def test_a_connection_with_tls_that_breaks_is_dialed_again(secured: Door) -> None:
    wire = Wire(secured.port)
    direct, secured.address = secured.address, f"tls://127.0.0.1:{wire.port}"
    client = secured.client()
    secured.address = direct
    said(client)
    for _ in range(2):
        ask(client, 100_000)
        wire.cut()
        ask(client, 100_000)
    assert wire.connections >= 3
    finish(client)
    wire.close()


# --------------------------------------------------------------------------------------------------
# Error texts of refused dialers, and of dialers that refuse a worker
# --------------------------------------------------------------------------------------------------

PURPOSE = {"client": 0, "from": "elsewhere", "as": "here"}  # names a job that does not exist


def tried(address: str, key: bytes, certificate: Certificate | None = None) -> str:
    """Dial; return the text of the error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (certificate.environment if certificate else {}).items():
            patch.setenv(name, value)
        with pytest.raises((HandshakeError, OSError)) as error:
            dial(ChannelAddr.parse(address), key, PURPOSE, WAIT)
    return str(error.value)


def test_the_refused_are_told(
    plain: Door, secured: Door, ours: bytes, certificates: dict[str, Certificate]
) -> None:
    client, alien, expired = (certificates[name] for name in ("client", "alien", "expired"))
    trusting_alien = alien._replace(ca=client.ca)
    assert "another secret" in tried(plain.address, OTHER)
    assert "another secret" in tried(secured.address, OTHER, client)
    assert "unknown ca" in tried(secured.address, ours, trusting_alien)
    trusting_expired = expired._replace(ca=client.ca)
    assert "certificate expired" in tried(secured.address, ours, trusting_expired)
    assert "has no TLS" in tried(plain.address.replace("tcp", "tls"), ours, client)
    assert re.search("closed|reset", tried(secured.address.replace("tls", "tcp"), ours))


def test_a_worker_has_to_show_a_certificate_for_its_name(
    folder: Path, ours: bytes, certificates: dict[str, Certificate]
) -> None:
    client = certificates["client"]
    for name, ca, words in (
        ("impostor", client.ca, "issuer|self"),
        ("stale", certificates["stale"].ca, "expired"),
        ("late", client.ca, "not valid for '127.0.0.1'"),
    ):
        door = opened(folder, "tls", **certificates[name].environment)
        text = tried(door.address, ours, client._replace(ca=ca))
        assert re.search(words, text), text
        door.close()


def test_settings_that_cannot_be_used(
    folder: Path, ours: bytes, certificates: dict[str, Certificate], monkeypatch: Any
) -> None:
    address = ChannelAddr.parse("tls://127.0.0.1:1")
    listener = socket.create_server(("127.0.0.1", 0))
    address = address._replace(port=listener.getsockname()[1])
    with pytest.raises(SecretError, match="HYPERACTOR_TLS_CERT is not set"):
        dial(address, ours, PURPOSE, WAIT)
    for name, value in certificates["client"].environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HYPERACTOR_TLS_CA", "/nowhere.crt")
    with pytest.raises(SecretError, match=r"HYPERACTOR_TLS_CA cannot .* /nowhere\.crt"):
        dial(address, ours, PURPOSE, WAIT)
    listener.close()
    with pytest.raises(ValueError, match="cannot be connected by quic"):
        dial(ChannelAddr.parse("quic://127.0.0.1:1"), ours, PURPOSE, WAIT)


def test_certificates_as_text(
    secured: Door, ours: bytes, certificates: dict[str, Certificate], monkeypatch: Any
) -> None:
    files = certificates["client"]
    text = Certificate(*(Path(file).read_text() for file in files))
    # The dialer passes TLS, so the refusal is about the secret.
    assert "another secret" in tried(secured.address, OTHER, text)
    broken = text._replace(key=text.key.replace("M", "?"))
    with pytest.raises(SecretError, match="HYPERACTOR_TLS_KEY") as error:
        tried(secured.address, ours, broken)
    assert "BEGIN" not in str(error.value)


def test_certificates_by_command(folder: Path) -> None:
    where = folder / "by-command"
    command = [sys.executable, "-m", "monarch.cli", "certificates", str(where), "127.0.0.1,node1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    client, worker = (
        dict(line.removeprefix("export ").split("=", 1) for line in part.splitlines()[1:])
        for part in done.stdout.split("# ")[1:]
    )
    assert (where / "client.key").stat().st_mode & 0o777 == 0o600
    door = opened(folder, "tls", **worker)
    door.environ.update(client)
    door.check()
    door.close()


# --------------------------------------------------------------------------------------------------
# Doors without a lock, and the log
# --------------------------------------------------------------------------------------------------


def test_an_open_door_says_so_and_both_sides_have_to_agree(folder: Path) -> None:
    door = opened(folder, "tcp", "open")
    other = {"MONARCH_SECRET_FILE": str(folder / "other")}
    assert "accepts ALL clients" in until(door.errors.read_text)
    assert door.records("listening")[0]["open_to_all"] is True
    words = finish(door.client(**other))
    assert "accepts all clients" in words
    client = door.client("trusting", **other)
    said(client)
    ask(client, 70_000)
    finish(client)
    door.check()  # a client that knows the secret proves so
    assert [record["authenticated"] for record in door.records("attached")] == [False, True]
    door.close()


def test_the_environment_opens_nothing(folder: Path) -> None:
    door = opened(folder, "tcp", MONARCH_ALLOW_UNAUTHENTICATED="true")
    assert door.records("listening")[0]["open_to_all"] is False
    assert "another secret" in tried(door.address, OTHER)
    door.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_what_is_written_down(
    folder: Path, certificates: dict[str, Certificate], scheme: str
) -> None:
    door = opened(folder, scheme, **certificates["worker"].environment)
    door.environ.update(certificates["client"].environment)
    client = door.client()
    pid = int(said(client))
    finish(client)
    [listening] = door.records("listening")
    [attached] = door.records("attached")
    [spawned] = door.records("spawned")
    [detached] = until(lambda: door.records("detached"))
    [stopped] = door.records("stopped")
    assert listening["tls"] is (scheme == "tls")
    assert set(attached) == {
        *("time", "event", "peer", "client", "host", "authenticated", "certificate")
    }
    assert attached["peer"].startswith("127.0.0.1:")
    assert attached["authenticated"] is True
    assert attached["certificate"] == ("client" if scheme == "tls" else "")
    assert [proc["pid"] for proc in spawned["procs"]] == [pid]
    assert (stopped["uid"], stopped["pid"]) == (spawned["procs"][0]["uid"], pid)
    assert "exited" in stopped["reason"]
    assert len({record["client"] for record in (attached, spawned, stopped, detached)}) == 1
    door.close()
