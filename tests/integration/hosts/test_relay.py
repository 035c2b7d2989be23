"""An attacker between a client and a worker: another process that passes bytes on.

At an address of its own it leads dialers to another worker; on the path to the intended host it
alters bytes in transit. It does not know the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import HandshakeError
from monarch._engine.runtime.admission.handshake_io import dial, greet
from monarch._engine.runtime.admission.secret import find_secret
from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import Actor, attach_to_workers, endpoint, this_host
from monarch.config import configured
from tests.integration.hosts.conftest import Place, free_address
from tests.integration.hosts.test_direct import connections, warm
from tests.integration.hosts.test_hosts import WAIT, attached, faults, secret, start, until
from tests.stopped import stop_process

__all__ = ["faults", "secret", "start"]

# Passes bytes from one address on to another. Between SIGUSR1 and SIGUSR2 it flips a byte now and
# then, in either direction; it prints the number of flipped bytes when its stdin ends.
RELAY = """
import os, random, signal, socket, sys, threading
here, there, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
alters, altered = False, 0

def on(*_):
    global alters
    alters = True

def off(*_):
    global alters
    alters = False

signal.signal(signal.SIGUSR1, on)
signal.signal(signal.SIGUSR2, off)

def parsed(url):
    if url.startswith("ipc://"):
        name = url.removeprefix("ipc://")
        return socket.AF_UNIX, "\\0" + name[1:] if name.startswith("@") else name
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    return socket.AF_INET, (host, int(port))

def carry(source, target):
    global altered
    left = rng.randrange(100_000, 3_000_000)
    try:
        while data := source.recv(1 << 16):
            if alters:
                left -= len(data)
                if left < 0:
                    data = bytearray(data)
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    altered += 1
                    left = rng.randrange(100_000, 3_000_000)
            target.sendall(data)
    except OSError:
        pass
    for sock in (source, target):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def accept():
    while True:
        near, _ = listener.accept()
        far = socket.socket(parsed(there)[0])
        try:
            far.connect(parsed(there)[1])
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=carry, args=ends, daemon=True).start()

family, name = parsed(here)
listener = socket.socket(family)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # another one takes its place
listener.bind(name)
listener.listen(64)
threading.Thread(target=accept, daemon=True).start()
print("here", flush=True)
sys.stdin.read()
print(altered, flush=True)
os._exit(0)
"""


class Relay:
    """The process of the attacker."""

    def __init__(self, script: Path, here: str, there: str, seed: int = 1) -> None:
        self.here = here
        self._process = subprocess.Popen(
            [sys.executable, str(script), here, there, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "here\n"

    def alter(self, *, on: bool) -> None:
        self._process.send_signal(signal.SIGUSR1 if on else signal.SIGUSR2)

    def hold(self, *, on: bool) -> None:
        """Pass no bytes on while `on` is set."""
        if on:
            stop_process(self._process.pid)
        else:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process; the bytes that it holds are lost."""
        self._process.kill()
        self._process.communicate(timeout=WAIT)

    def close(self) -> int:
        """End the process; return how many bytes it has altered."""
        said, _ = self._process.communicate(timeout=WAIT)
        return int(said or 0)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Callable[..., Relay]]:
    script = tmp_path / "relay.py"
    script.write_text(RELAY)
    made: list[Relay] = []

    def make(*args: Any) -> Relay:
        made.append(Relay(script, *args))
        return made[-1]

    yield make
    for each in made:
        if each._process.poll() is None:
            each.hold(on=False)
            each.close()


class Member(Actor):
    def __init__(self) -> None:
        self.noted: list[int] = []

    @endpoint
    def note(self, number: int, data: bytes) -> tuple[int, bytes, bytes]:
        self.noted.append(number)
        return number, hashlib.sha256(data).digest(), data[:30_000]

    @endpoint
    def noted_all(self) -> list[int]:
        return self.noted

    @endpoint
    def echo(self, data: Any) -> Any:
        return data


# A pair of addresses: of the relay, of the worker.
PAIRS = {
    "tcp": lambda _folder: (free_address(), free_address()),
    "ipc": lambda folder: (f"ipc://{folder}/relay", f"ipc://{folder}/worker"),
    "abstract": lambda _folder: tuple(f"ipc://@monarch-{os.urandom(8).hex()}" for _ in range(2)),
}


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    found: tuple[str, str] = PAIRS[request.param](tmp_path)
    return found


def listens(address: str) -> None:
    def there() -> bool:
        with contextlib.suppress(OSError):
            greet(ChannelAddr.parse(address), find_secret(), WAIT)
            return True
        return False

    until(there)


def test_who_holds_an_address_cannot_lead_a_dialer_to_another_worker(
    pair: tuple[str, str], start: Any, relay: Any
) -> None:
    """The relay serves the address that the dialer means, and passes the handshake on."""
    held, worker = pair
    start(worker)
    listens(worker)
    relay(held, worker)
    with pytest.raises(HandshakeError) as error:
        dial(ChannelAddr.parse(held), find_secret(), {"client": 0}, WAIT)
    text = str(error.value)
    assert f"{held} was dialed" in text
    assert f"--name {held}" in text
    assert f"MONARCH_WORKER_NAMES={held}" in text
    if worker.startswith("tcp"):
        assert f"the worker that answered is at {worker.removeprefix('tcp://')}" in text
    with pytest.raises(RuntimeError, match="connections are forwarded on the way"):
        attach_to_workers(ca="trust_all_connections", workers=[held]).initialized.get(timeout=WAIT)


def test_a_worker_that_was_given_the_name_is_reached(
    pair: tuple[str, str], start: Any, relay: Any
) -> None:
    held, worker = pair
    start(worker, MONARCH_WORKER_NAMES=f"tcp://other.invalid:1, {held}")
    relay(held, worker)
    listens(worker)
    assert greet(ChannelAddr.parse(held), find_secret(), WAIT).version


@pytest.mark.parametrize("pair", ["tcp", "ipc"], indirect=True)
def test_altered_bytes_break_connections_and_calls_end_right(
    pair: tuple[str, str], place: Place, relay: Any
) -> None:
    held, worker = pair
    place.environ["MONARCH_WORKER_NAMES"] = held
    served = place.worker(worker)
    between = relay(held, worker)
    with configured(direct_connections=False), attached(held) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        member.noted_all.call_one().get(timeout=WAIT)
        between.alter(on=True)
        expected = 0
        for _ in range(20):
            calls = []
            for size in (10, 50_000, 0, 700, 200_000, 3_000, 300_000, 1):
                data = os.urandom(size)
                calls.append((data, member.note.call_one(expected, data)))
                expected += 1
            for number, (data, call) in enumerate(calls, expected - len(calls)):
                digest = hashlib.sha256(data).digest()
                assert call.get(timeout=WAIT) == (number, digest, data[:30_000])
        between.alter(on=False)
        assert member.noted_all.call_one().get(timeout=WAIT) == list(range(expected))
    assert between.close() > 1
    assert place.records(served, "altered")


@pytest.mark.parametrize("pair", ["tcp", "ipc"], indirect=True)
@pytest.mark.parametrize("shutdown", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_hosts_have_the_order_to_let_go_when_a_program_may_end(
    pair: tuple[str, str], start: Any, relay: Any, shutdown: bool, lost: bool
) -> None:
    held, worker = pair
    _, process = start(worker, MONARCH_WORKER_NAMES=held)
    listens(worker)
    between = relay(held, worker)
    with configured(host_timeout="60s"):
        hosts = attach_to_workers(ca="trust_all_connections", workers=[held])
        hosts.initialized.get(timeout=WAIT)
        between.hold(on=True)
        left = hosts.shutdown() if shutdown else hosts.stop()
        # The agent got its request before this one, so its answer would have arrived first.
        here = this_host().spawn_procs()
        here.spawn("here", Member).noted_all.call_one().get(timeout=WAIT)
        here.stop().get(timeout=WAIT)
        assert not left.done()
        if lost:
            between.kill()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(held.removeprefix("ipc://"))
            relay(held, worker)
        else:
            between.hold(on=False)
        left.get(timeout=WAIT)
    if shutdown:
        assert process.wait(WAIT) == 0


def test_a_program_may_end_whose_hosts_are_lost(start: Any, faults: list[Any]) -> None:
    address, process = start()
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    hosts.initialized.get(timeout=WAIT)
    process.kill()
    process.wait()
    hosts.shutdown().get(timeout=WAIT)


def test_a_direct_connection_whose_bytes_are_altered_is_given_up(start: Any) -> None:
    with attached(start()[0]) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        warm(member)
        (link,) = connections()
        link.direct.sock._sock.send(b"not a record")
        for number in range(300):
            assert member.echo.call_one(number).get(timeout=WAIT) == number
        assert client_proc().links
