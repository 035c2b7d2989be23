"""The door of a worker: which connections are counted and kept, and what is logged about them."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import HandshakeError
from monarch._engine.runtime.admission.gateway import _join
from monarch._engine.runtime.admission.handshake_io import (
    CLAIM,
    Arrival,
    dial,
    greet,
    listen,
    python_version,
)
from monarch._engine.runtime.admission.host_identity import tls_names
from monarch._engine.runtime.admission.secret import find_secret
from monarch._engine.runtime.agent import worker
from monarch._engine.runtime.agent.worker import Worker
from monarch._engine.runtime.io import descriptors
from monarch._engine.runtime.io import listener as entrance
from monarch._engine.runtime.io.listener import Entrance
from monarch._engine.runtime.io.reactor import Reactor

WAIT = 60.0


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of the tests, and of nobody else\n")
    path.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))


@pytest.fixture
def served() -> Iterator[Worker]:
    """Run a worker."""
    made = Worker(ChannelAddr.parse("tcp://127.0.0.1:0"))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join()
    made._reactor.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Job:
    """A stand-in for a job's agent."""

    def __init__(self, session: int) -> None:
        self.session, self.reign, self.name = session, 0, ""
        self.ended = False
        self.link: Any = self
        self.sock: Any = self

    def shutdown(self, _how: int) -> None:
        self.ended = True


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a worker that does not run and starts no processes."""
    made: Any = Worker(ChannelAddr.parse("tcp://127.0.0.1:0"))
    made.passed_on = []

    def start(client: int, _here: str, session: int) -> Job:
        job = made._jobs[client] = Job(session)
        return job

    monkeypatch.setattr(made, "_start", start)

    def pass_on(job: Job, arrival: Arrival, *_: Any) -> None:
        arrival.sock.close()
        made.passed_on.append(job)

    monkeypatch.setattr(made, "_pass_on", pass_on)
    yield made
    made._entrance.close()
    made._reactor.close()


def come(door: Any, session: int, reign: int = 0) -> socket.socket:
    """Let a connection for client 7 arrive; return the client's end."""
    near, far = socket.socketpair()
    purpose = {"client": 7, "from": "", "as": "here", "session": session, "reign": reign}
    door._admit(Arrival(far, purpose, bytes(32), False, True, ""), ("10.0.0.1", 1))
    return near


def test_a_late_session_does_not_replace_a_newer_job(quiet: Any) -> None:
    """The late session was dialed before the newer one and arrived after it."""
    come(quiet, 5).close()
    newer = quiet._jobs[7]
    with come(quiet, 4) as late:
        late.settimeout(WAIT)
        assert late.recv(1) == b""  # the session is refused
    assert quiet._jobs[7] is newer
    assert not newer.ended
    assert [newer] == quiet.passed_on
    come(quiet, 6).close()
    assert newer.ended
    assert quiet._jobs[7].session == 6


def test_a_second_connection_of_a_session_goes_to_the_same_job(quiet: Any) -> None:
    come(quiet, 5).close()
    come(quiet, 5).close()
    first, second = quiet.passed_on
    assert first is second
    assert not first.ended


def test_a_claim_to_a_job_that_is_not_here_is_closed(quiet: Any) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        quiet._pass_claim(
            Arrival(far, {CLAIM: "another job"}, bytes(32), False, True, ""), "10.0.0.1"
        )
        assert near.recv(1) == b""


def test_what_an_agent_refuses_is_counted_and_logged_by_the_worker(
    quiet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    message = json.dumps({"op": "refused", "peer": "10.0.0.1:1", "reason": "a late one"}).encode()
    link: Any = SimpleNamespace(lost=None, receive=lambda _: [SimpleNamespace(body=message)])
    with caplog.at_level(logging.WARNING, "monarch.worker"):
        quiet._reader(7, Job(5))(link)
    assert quiet.refused == 1
    assert "10.0.0.1:1: a late one" in caplog.text


@pytest.mark.parametrize("tls", [None, object()], ids=["plain", "tls"])
def test_a_connection_is_bound_to_the_names_of_its_kind(
    quiet: Any, monkeypatch: pytest.MonkeyPatch, tls: Any
) -> None:
    greeted: list[Any] = []
    monkeypatch.setattr(worker, "Greeting", lambda *given, **_: greeted.append(given))
    quiet._tls = tls
    with socket.create_connection(("127.0.0.1", quiet.port), WAIT):
        near, address = quiet._sock.accept()
        quiet._came(near, address)
        near.close()
    ((*_, names),) = greeted
    assert (names is tls_names) == (tls is not None)


def test_a_job_gets_what_its_agent_says_of_it(quiet: Any) -> None:
    job: Any = Job(1)
    said = ({"op": "home", "number": 5, "reign": 2}, {"op": "job", "job": "night"})
    frames = [SimpleNamespace(body=json.dumps(message)) for message in said]
    link: Any = SimpleNamespace(receive=lambda scratch: frames, lost=None)
    quiet._reader(7, job)(link)
    assert (job.session, job.reign, job.name) == (5, 2, "night")


def test_the_audit_log_has_whom_a_worker_refused(
    quiet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "monarch.audit"):
        quiet._refuse(("10.0.0.1", 1), "no secret")
    texts = [r.getMessage() for r in caplog.records if r.name == "monarch.audit"]
    # The name of an actor may be before the record, if another test has actors in this process.
    records = [json.loads(text[text.index("{") :]) for text in texts]
    assert [{**record, "time": 0} for record in records] == [
        {"time": 0, "event": "refused", "peer": "10.0.0.1:1", "reason": "no secret", "count": 1}
    ]


def test_strangers_are_limited_by_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((512, 224), (80, 8), (1 << 20, 1000)):
        monkeypatch.setattr(worker, "raise_descriptor_limit", lambda limit=limit: limit)
        made = Worker(ChannelAddr.parse("tcp://127.0.0.1:0"))
        assert expected == made._most
        made._entrance.close()
        made._reactor.close()


def test_a_worker_takes_as_many_descriptors_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _what, new: limits.append(new))
    assert descriptors.raise_descriptor_limit() == 4096
    assert limits[-1] == (4096, 4096)


def test_too_many_strangers_are_turned_away(served: Worker) -> None:
    served._most = 2
    address = ("127.0.0.1", served.port)
    waiting = [socket.create_connection(address, WAIT) for _ in range(2)]
    with socket.create_connection(address, WAIT) as third:
        assert third.recv(1) == b""
    until(lambda: served.refused == 1)
    for sock in waiting:
        sock.close()
    until(lambda: served.refused == 3)


def test_who_is_refused_after_the_handshake_is_counted_once(served: Worker) -> None:
    """An error during admission does not count the connection a second time."""
    where = ChannelAddr("tcp", "127.0.0.1", served.port)
    done = threading.Event()

    def fails(_arrival: Arrival, _address: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    counts: list[int] = []
    refuse = served._refuse

    def refused(address: Any, why: str) -> None:
        counts.append(served._strangers)
        refuse(address, why)
        done.set()

    served._admit, served._refuse = fails, refused  # type: ignore[method-assign]
    sock: Any = dial(where, find_secret(), {"client": 7}, WAIT)
    assert done.wait(WAIT)
    assert sock.recv(1) == b""
    sock.close()
    until(lambda: bool(counts))
    assert counts == [0]
    assert served._strangers == 0


def test_a_socket_in_the_place_of_the_worker_s_cannot_lead_to_it(tmp_path: Path) -> None:
    """The worker's file was moved; another process listens at the path and passes all bytes on."""
    address = ChannelAddr.parse(f"ipc://{tmp_path}/socket")
    made = Worker(address)
    thread = threading.Thread(target=made.run)
    thread.start()
    relays = Reactor()
    aside = threading.Thread(target=relays.run)
    try:
        assert greet(address, find_secret(), WAIT).python == python_version()
        (tmp_path / "socket").rename(tmp_path / "moved")
        with listen(address) as listener, socket.socket(socket.AF_UNIX) as far:
            far.connect(str(tmp_path / "moved"))
            relays.register(
                listener.fileno(),
                lambda _mask: _join(relays, listener.accept()[0], far, relays.stop),
            )
            aside.start()
            with pytest.raises(HandshakeError, match="connections are forwarded on the way"):
                greet(address, find_secret(), WAIT)
            aside.join(WAIT)
            relays.unregister(listener.fileno())
    finally:
        made.stop()
        thread.join()
        made._reactor.close()
        relays.close()


def test_the_name_of_a_peer_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a connecting Unix socket is any bytes that its owner chose."""
    monkeypatch.chdir(tmp_path)
    address = ChannelAddr.parse(f"ipc://{tmp_path}/door")
    made = Worker(address)
    thread = threading.Thread(target=made.run)
    with caplog.at_level(logging.WARNING, "monarch.worker"):
        thread.start()
        for name in (b"x\nrefused a connection from root: no\x1b[31m", b"\0abstract\n\xff"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(name)
                sock.connect(str(tmp_path / "door"))
                sock.sendall(b"nonsense".ljust(64))
                sock.settimeout(WAIT)
                assert sock.recv(1) == b""
        made.stop()
        thread.join()
        made._reactor.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    for line in said:
        assert line.isprintable(), line
    assert r"x\nrefused" in said[0]


class Bell:
    """The part of a reactor that an entrance needs."""

    def __init__(self) -> None:
        self.watched = True
        self.later: list[Any] = []

    def register(self, _fd: int, ready: Any) -> None:
        self.ready = ready

    def unregister(self, _fd: int) -> None:
        self.ready = None

    def watch(self, _fd: int, *, reads: bool, writes: bool) -> None:
        self.watched = reads

    def call_later(self, _delay: float, callback: Any) -> None:
        self.later.append(callback)


class Listener:
    """A listening socket in a process that has no descriptors left for a while."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.open = True

    def setblocking(self, _on: bool) -> None: ...

    def fileno(self) -> int:
        return 9 if self.open else -1

    def close(self) -> None:
        self.open = False

    def accept(self) -> Any:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_without_descriptors_it_waits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    scarce = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    listener: Any = Listener(scarce, scarce, ("sock", "address"), scarce)
    bell: Any = Bell()
    came: list[Any] = []
    Entrance(bell, listener, lambda *one: came.append(one))
    with caplog.at_level(logging.WARNING, entrance._log.name):
        for _ in range(2):
            bell.ready(1)
            assert not bell.watched  # so the reactor does not spin
            bell.later.pop()()
            assert bell.watched
        assert len(caplog.records) == 1
        assert "ulimit -n" in caplog.text
        bell.ready(1)
        assert came == [("sock", "address")]
        bell.ready(1)
        assert len(caplog.records) == 2  # the warning is repeated
        listener.close()
        bell.later.pop()()  # too late, and harmless


def test_an_unexpected_error_of_accept_is_not_hidden() -> None:
    listener: Any = Listener(OSError(errno.EINVAL, "no"))
    bell: Any = Bell()
    Entrance(bell, listener, lambda *_: None)
    with pytest.raises(OSError, match="no"):
        bell.ready(1)
