"""Services and side streams between simulated processes, for features that bring their own.

A request is answered, refused or explained by the exit of its receiver; a stream brings the bytes
that were sent, in order, and ends when one of its processes does.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import time

import pytest

import monarch.actor
from monarch import _spi
from monarch.actor import Actor, SupervisionError, endpoint
from monarch.testing import (
    Crash,
    CrashAgent,
    CrashHost,
    Drop,
    Partition,
    Pause,
    Reorder,
    Slow,
    simulate,
)

BAD = {
    "well": [],
    "bad": [Drop(0.0, seconds=9, probability=0.05), Reorder(0.0, seconds=9, by=0.05)],
    "cut": [Partition(1.05, 0, 1, seconds=2), Partition(1.1, 1, 2, seconds=2, one_way=True)],
    "slow": [Slow(1.0, "p-1", lag=0.001, seconds=5), Pause(1.001, "p-2", seconds=3)],
}
HEAD = 8


def content(seed, size):
    return random.Random(seed).randbytes(size)


class Server(Actor):
    """An actor whose process serves requests and streams."""

    def __init__(self):
        self.told = []
        self.streams = []
        _spi.serve("double", self.double)
        _spi.serve_streams("sink", self.take)
        _spi.serve_streams("drip", lambda sock, caller: self.streams.append(sock))

    def double(self, request):
        if request.body == b"refuse":
            request.refuse("as asked")
        elif request.body != b"never":
            self.told.append((request.peer, request.body))
            request.answer(2 * request.body)

    def take(self, sock, caller):
        """Read a length and as many bytes, on a thread; answer with their digest."""
        assert caller.via is None or caller.via.here.startswith("10.")

        def run():
            data = bytearray()
            while len(data) < HEAD or len(data) < HEAD + int.from_bytes(data[:HEAD], "big"):
                more = sock.recv(1 << 16)
                if not more:
                    break
                data += more
                if len(data) > 1 << 21:
                    time.sleep(0.001)  # slower than the sender
            with contextlib.suppress(BrokenPipeError):  # the sender has exited
                sock.send(hashlib.sha256(data[HEAD:]).digest())
            sock.close()

        _spi.start_thread("sink", run)

    @endpoint
    def uid(self):
        return _spi.own_uid()

    @endpoint
    def all_told(self):
        return self.told


class Client(Actor):
    @endpoint
    def ask(self, uid, count):
        """Return the outcomes of requests, and of messages without an answer."""
        futures = [_spi.ask(uid, "double", b"%d" % number) for number in range(count)]
        for number in range(count):
            _spi.tell(uid, "double", b"-%d" % number)
        return [outcome(future) for future in futures]

    @endpoint
    def ask_for(self, uid, name, body, timeout=None):
        return outcome(_spi.ask(uid, name, body, timeout=timeout))

    @endpoint
    def push(self, uid, seed, size):
        """Send bytes by a stream; return whether the receiver has the same."""
        sock = _spi.open_stream(uid, "sink")
        data = content(seed, size)
        left = memoryview(size.to_bytes(HEAD, "big") + data)
        while left:
            try:
                left = left[sock.send(left) :]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
        sock.setblocking(True)
        answer = b""
        try:
            while len(answer) < 32 and (more := sock.recv(32 - len(answer))):
                answer += more
        except OSError:
            answer = b""
        sock.close()
        return answer == hashlib.sha256(data).digest() if answer else "end"

    @endpoint
    def await_end(self, uid, purpose):
        sock = _spi.open_stream(uid, purpose)
        sock.setblocking(True)
        return sock.recv(1)


def outcome(future):
    try:
        return future.get(timeout=600)
    except (_spi.Refused, _spi.Unreachable, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


def cluster(hosts):
    """Spawn servers on the hosts 0 and 2, a client on host 1 and one beside the first server."""
    procs = hosts.spawn_procs(name="p")
    servers, clients = procs.spawn("server", Server), procs.spawn("client", Client)
    uids = list(servers.uid.call().get(timeout=600).values())
    time.sleep(max(0.0, 1.0 - time.monotonic()))  # the faults begin then
    return servers, clients, uids


@pytest.fixture
def losses(monkeypatch):
    """Let failures reach the script: the plan causes them."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("faults", BAD.values(), ids=BAD)
def test_each_request_has_its_answer_and_none_arrives_twice(faults, seed):
    def main(hosts):
        servers, clients, uids = cluster(hosts)
        pairs = itertools.product(range(3), repeat=2)
        asked = [
            clients.slice(hosts=client).ask.call_one(uids[server], 30) for client, server in pairs
        ]
        for future in asked:
            assert future.get(timeout=600) == [2 * (b"%d" % number) for number in range(30)]
        for told in servers.all_told.call().get(timeout=600).values():
            for peer in uids:
                mine = [int(body) for sender, body in told if sender == peer]
                assert mine == [*range(30), *(-number for number in range(30))]
        return True

    assert simulate(main, hosts=3, faults=faults, seed=seed).value


def test_a_request_that_is_not_answered_has_a_reason():
    def main(hosts):
        _, clients, uids = cluster(hosts)
        client = clients.slice(hosts=1)
        for uid in uids:
            assert client.ask_for.call_one(uid, "double", b"refuse").get() == "Refused: as asked"
            assert client.ask_for.call_one(uid, "treble", b"").get().startswith("Refused: ")
            late = client.ask_for.call_one(uid, "double", b"never", 2.0).get()
            assert late == "TimeoutError: the service did not answer in time"
        return True

    assert simulate(main, hosts=3).value


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("fault", [Crash(2.0, "p-2"), CrashHost(2.0, 2), CrashAgent(2.0, 2)])
def test_requests_and_streams_to_a_process_that_exits_end(fault):
    def main(hosts):
        _, clients, uids = cluster(hosts)
        client, other = clients.slice(hosts=1), clients.slice(hosts=0)
        waiting = client.ask_for.call_one(uids[2], "double", b"never")
        reading = other.await_end.call_one(uids[2], "drip")
        assert waiting.get(timeout=60).startswith("Unreachable: ")
        assert reading.get(timeout=60) == b""
        refusal = client.ask_for.call_one(uids[2], "double", b"1").get()
        assert refusal.startswith("Unreachable: ")
        assert "Verdict(" not in refusal
        assert client.push.call_one(uids[2], 0, 100).get(timeout=60) == "end"
        assert client.ask_for.call_one(uids[0], "double", b"1").get() == b"11"
        return True

    assert simulate(main, hosts=3, faults=[fault]).value


@pytest.mark.parametrize("faults", BAD.values(), ids=BAD)
def test_a_stream_brings_all_bytes(faults):
    """Within a process, between processes of a host, and between hosts; more than fits a buffer."""

    def main(hosts):
        _, clients, uids = cluster(hosts)
        beside = hosts.slice(hosts=0).spawn_procs().spawn("beside", Client)
        pushed = [
            client.push.call_one(uid, size, size)
            for size in (0, 1, 100_000, 2_500_000)
            for client in (clients.slice(hosts=0), beside, clients.slice(hosts=1))
            for uid in (uids[0], uids[2])
        ]
        return {future.get(timeout=600) for future in pushed}

    assert simulate(main, hosts=3, faults=faults).value == {True}


def test_a_stream_that_no_server_takes_is_at_its_end():
    def main(hosts):
        _, clients, uids = cluster(hosts)
        client = clients.slice(hosts=1)
        return [client.await_end.call_one(uid, "unknown").get() for uid in uids]

    assert simulate(main, hosts=3).value == [b""] * 3


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", [Crash(1.01, "p-2"), CrashHost(1.01, 2), Crash(1.01, "p-0")])
def test_a_stream_whose_process_exits_in_the_middle_ends(fault, seed):
    def main(hosts):
        _, clients, uids = cluster(hosts)
        client = clients.slice(hosts=0)
        try:
            return client.push.call_one(uids[2], seed, 8_000_000).get(timeout=600)
        except SupervisionError:
            return "lost"

    expected = "lost" if getattr(fault, "proc", "") == "p-0" else "end"
    assert simulate(main, hosts=3, faults=[fault], seed=seed).value in (expected, True)
