"""In-order, exactly-once delivery per sender and receiver, for any adverb, slice and size.

Links get a send buffer of a few kilobytes. Most messages are then queued and written in pieces by
the reactor, interleaved with small messages and with descriptors.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.transport.link import Link
from monarch.actor import Actor, Channel, SupervisionError, Supervisor, endpoint
from tests.adverbs import ADVERBS

from .conftest import WAIT

Fresh = Callable[..., Any]
SIZES = [1, 1000, 60_000, 66_000, 300_000, 4 << 20]


def narrow(link: Any) -> None:
    if isinstance(link, Link):
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


class Log(Actor):
    """An actor that records the numbers of the messages it received, by sender."""

    def __init__(self) -> None:
        self.seen: dict[Any, list[int]] = {}

    @endpoint
    def note(self, sender: Any, number: int, data: bytes) -> int:
        self.seen.setdefault(sender, []).append(number)
        return len(data)

    @endpoint
    def take(self, sender: Any) -> list[int]:
        return self.seen.pop(sender, [])


class Sender(Actor):
    @endpoint
    def send(self, name: Any, logs: Any, plan: list[tuple[str, int | None, int]], port: Any) -> Any:
        return carry_out(name, logs, plan, port)


def carry_out(
    name: Any, logs: Any, plan: list[tuple[str, int | None, int]], port: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Send the messages of `plan`; return the numbers that each rank should have, and has."""
    expected: list[list[int]] = [[] for _ in range(len(logs))]
    waiting: list[Any] = []
    for link in logs._resolve_links():
        narrow(link)
    for number, (adverb, rank, size) in enumerate(plan):
        if adverb == "port":
            port.send((name, number, bytes(size)))
            continue
        if rank is None and adverb in ("call_one", "choose"):
            rank = number % len(logs)
        mesh = logs if rank is None else logs.slice(gpus=rank)
        for place in range(len(logs)) if rank is None else [rank]:
            expected[place].append(number)
        result = getattr(mesh.note, adverb)(name, number, bytes(size))
        waiting += [] if result is None else list(result) if adverb == "stream" else [result]
    for future in waiting:
        future.get(timeout=WAIT)
    # The sender itself asks: no order holds between its broadcasts and another process's call.
    return expected, logs.take.call(name).get(timeout=WAIT).values()


plans = st.lists(
    st.tuples(
        st.sampled_from([*ADVERBS, "port"]),
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from(SIZES),
    ),
    min_size=1,
    max_size=30,
)


@pytest.fixture(scope="module")
def meshes() -> Any:
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"gpus": 3})
    yield procs.spawn("logs", Log), procs.spawn("senders", Sender)
    procs.stop().get(timeout=WAIT)


@given(st.lists(plans, min_size=3, max_size=3), plans)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_order_of_any_mix(meshes: Any, theirs: list[Any], ours: Any) -> None:
    logs, senders = meshes
    for link in client_proc().links.values():
        narrow(link)
    port, receiver = Channel[Any].open()
    running = [
        senders.slice(gpus=who).send.call_one(who, logs, plan, port)
        for who, plan in enumerate(theirs)
    ]
    outcomes: dict[Any, Any] = {"client": carry_out("client", logs, ours, port)}
    outcomes |= {who: future.get(timeout=2 * WAIT) for who, future in enumerate(running)}
    for name, (expected, seen) in outcomes.items():
        assert seen == expected, name
    by_sender: dict[Any, list[int]] = {}
    for _ in range(sum(step[0] == "port" for plan in (*theirs, ours) for step in plan)):
        name, number, _ = receiver.recv().get(timeout=WAIT)
        by_sender.setdefault(name, []).append(number)
    for name, plan in (*enumerate(theirs), ("client", ours)):
        planned = [number for number, step in enumerate(plan) if step[0] == "port"]
        assert by_sender.get(name, []) == planned, name


class Counter(Actor):
    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.count = 0
        self.out_of_order = 0

    @endpoint
    def tick(self, sender: int, number: int) -> None:
        self.out_of_order += self.last.get(sender, -1) + 1 != number
        self.last[sender] = number
        self.count += 1

    @endpoint
    def flood(self, all_of_us: Any, who: int, count: int) -> None:
        for number in range(count):
            all_of_us.tick.broadcast(who, number)

    @endpoint
    def result(self) -> tuple[int, int]:
        return self.count, self.out_of_order


def flood(procs: Any, messages: int, patience: float) -> None:
    """Send `messages` in all, from each proc to each; check that all arrive, in order."""
    size = len(procs)
    senders, receivers = procs.spawn("senders", Counter), procs.spawn("receivers", Counter)
    each = messages // size // size
    futures = [senders.slice(gpus=who).flood.call_one(receivers, who, each) for who in range(size)]
    for future in futures:
        future.get(timeout=patience)
    # The client's call uses another link than the senders' messages, so it may arrive before them:
    # repeat it until all messages are counted.
    expected = [(each * size, 0)] * size
    got = []
    for _ in range(10_000):
        got = receivers.result.call().get(timeout=patience).values()
        if sum(count for count, _ in got) >= each * size * size:
            break
    assert got == expected


@pytest.mark.slow
def test_a_hundred_thousand_messages_from_eight_to_eight(fresh: Fresh) -> None:
    flood(fresh(8), 102_400, 100)


class Replaced(Actor):
    """An actor that is called by two endpoints, in turn."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def exit(self) -> None:
        os._exit(3)

    @endpoint
    def post(self, port: Any) -> None:
        port.send(os.getpid())

    @endpoint
    def even(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def odd(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def take(self) -> list[int]:
        return self.seen


class Newcomer(Actor):
    """An actor that knows the other one by the name that it had before it was replaced."""

    @endpoint
    def open(self) -> Any:
        port, self.receiver = Channel[int].open()
        return port

    @endpoint
    def count_to(self, most: int, replaced: Any) -> list[int]:
        pid = self.receiver.recv().get(timeout=WAIT)
        replaced.even.call_one(0).get(timeout=WAIT)
        os.kill(pid, signal.SIGSTOP)  # messages on two links would be read link by link
        try:
            for number in range(1, most):
                (replaced.odd if number % 2 else replaced.even).broadcast(number)
        finally:
            os.kill(pid, signal.SIGCONT)
        found: list[int] = replaced.take.call_one().get(timeout=WAIT)
        return found

    @endpoint
    def outlive(self, replaced: Any) -> list[int]:
        with pytest.raises(SupervisionError):  # an exit ends the waits on either link
            replaced.exit.call_one().get(timeout=WAIT)
        deadline = time.monotonic() + WAIT
        while True:
            try:
                found: list[int] = replaced.take.call_one().get(timeout=WAIT)
            except SupervisionError:
                assert time.monotonic() < deadline
            else:
                return found


def test_order_after_both_have_connected_to_each_other(fresh: Fresh, faults: Any) -> None:
    """The replacement of a process connects to one that only knows the replaced process."""
    supervisor = Supervisor(max_restarts=2, backoff=0.01)
    replaced = supervisor.spawn(fresh(1), "replaced", Replaced)
    with pytest.raises(SupervisionError):
        replaced.exit.call_one().get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    newcomer = fresh(1).spawn("newcomer", Newcomer)
    replaced.post.call_one(newcomer.open.call_one().get(timeout=WAIT)).get(timeout=WAIT)
    found = newcomer.count_to.call_one(20, replaced).get(timeout=WAIT)
    assert found == list(range(20))
    assert newcomer.outlive.call_one(replaced).get(timeout=WAIT) == []
