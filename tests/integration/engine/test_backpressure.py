"""Back-pressure: a slow receiver slows its senders, and mailboxes and queues stay bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch._engine.base.errors import BackpressureError
from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import Actor, ActorError, Channel, endpoint
from monarch.config import configured
from tests.stopped import stop_process

from .conftest import WAIT, Inside, tables, until

Fresh = Callable[..., Any]

MESSAGES = 200
BYTES = 4 << 20


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with configured(mailbox_limit=MESSAGES, mailbox_bytes_limit=BYTES, backpressure_timeout="1s"):
        yield


class Slow(Actor):
    """An actor that handles messages only while its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.count = 0

    @endpoint
    def work(self, data: bytes) -> None:
        self.gate.wait(WAIT)
        self.count += 1

    @endpoint
    def done(self) -> int:
        return self.count


class Gatekeeper(Actor):
    """An actor in the process of `Slow`, which reads its mailbox size and opens its gate."""

    def _slow(self) -> Any:
        cells = client_proc().cells.values()
        return next(cell for cell in cells if cell.identity.name == "slow")

    @endpoint
    def depth(self) -> tuple[int, int]:
        cell = self._slow()
        return cell.depth(), cell.flow_control.bytes

    @endpoint
    def open(self) -> None:
        until(lambda: self._slow().behaviour).actor.gate.set()  # it may not be constructed yet


class Producer(Actor):
    @endpoint
    def produce(self, slow: Any, count: int, size: int) -> int:
        for _ in range(count):
            slow.work.broadcast(bytes(size))
        return count

    @endpoint
    def depth(self, keeper: Any) -> tuple[int, int]:
        """Return the depth of the slow actor's mailbox, in messages and bytes.

        The request uses the link of the produced messages, so it arrives after all of them.
        """
        found: tuple[int, int] = keeper.depth.call_one().get(timeout=WAIT)
        return found


@pytest.mark.parametrize(("count", "size"), [(1_000_000, 10), (100_000, 30_000), (5000, 1 << 20)])
def test_a_producer_waits_for_its_consumer(fresh: Fresh, count: int, size: int) -> None:
    there, here = fresh(1), fresh(1)
    slow, keeper = there.spawn("slow", Slow), there.spawn("keeper", Gatekeeper)
    slow.done.call_one().get(timeout=WAIT)
    producer = here.spawn("producer", Producer)

    def is_told() -> bool:
        told = producer.produce.call_one(slow, count, size).exception(timeout=WAIT)
        assert isinstance(told, ActorError)
        return "mailbox_limit" in str(told)  # rather than the error for a stalled reader

    until(is_told)
    messages, nbytes = producer.depth.call_one(keeper).get(timeout=WAIT)
    # The mailbox may exceed its limit by the messages in flight when it filled up: those queued on
    # the link (send_buffer_limit), and those sent before the producer's process was notified.
    assert messages <= count // 10
    assert is_told()
    assert producer.depth.call_one(keeper).get(timeout=WAIT) == (messages, nbytes)
    keeper.open.call_one().get(timeout=WAIT)
    until(lambda: producer.depth.call_one(keeper).get(timeout=WAIT) == (0, 0))
    assert slow.done.call_one().get(timeout=WAIT) >= messages
    assert producer.produce.call_one(slow, 10, size).get(timeout=WAIT) == 10


def test_everything_arrives_when_the_consumer_goes_on(fresh: Fresh) -> None:
    with configured(backpressure_timeout=f"{WAIT:g}s"):
        there, here = fresh(1), fresh(1)
    slow, keeper = there.spawn("slow", Slow), there.spawn("keeper", Gatekeeper)
    producers = [here.spawn(f"producer{n}", Producer) for n in range(3)]
    keeper.open.call_one().get(timeout=WAIT)
    futures = [p.produce.call_one(slow, 20_000, 10) for p in producers]
    for future in futures:
        assert future.get(timeout=WAIT) == 20_000
    until(lambda: slow.done.call_one().get(timeout=WAIT) == 60_000)


class Selfish(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def tick(self) -> None:
        self.count += 1

    @endpoint
    def fill(self, me: Any, count: int) -> None:
        for _ in range(count):
            me.tick.broadcast()

    @endpoint
    def cross(self, other: Any, count: int) -> int:
        for _ in range(count):
            other.tick.broadcast()
        return count


def test_an_actor_that_fills_its_own_mailbox_is_told_at_once(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("selfish", Selfish)
    with pytest.raises(ActorError, match="its own mailbox") as caught:
        mesh.fill.call_one(mesh, 100_000).get(timeout=WAIT)
    assert isinstance(caught.value.exception, BackpressureError)
    mesh.fill.call_one(mesh, 10).get(timeout=WAIT)


def test_two_that_fill_each_other_are_told(fresh: Fresh) -> None:
    left, right = fresh(1).spawn("left", Selfish), fresh(1).spawn("right", Selfish)
    futures = [left.cross.call_one(right, 100_000), right.cross.call_one(left, 100_000)]
    outcomes = [future.exception(timeout=WAIT) for future in futures]
    assert all(error is None or isinstance(error, ActorError) for error in outcomes)
    # A sender is accepted again once the receiver's mailbox is half empty.
    until(lambda: left.cross.call_one(right, 5).exception(timeout=WAIT) is None)
    until(lambda: right.cross.call_one(left, 5).exception(timeout=WAIT) is None)


class Poster(Actor):
    @endpoint
    def post(self, port: Any, count: int, size: int) -> None:
        for _ in range(count):
            port.send(bytes(size))


def test_a_channel_that_nobody_reads_is_bounded(fresh: Fresh) -> None:
    """A port has the limits of a mailbox.

    Its senders wait, and get an error if no receiver reads in time.
    """
    port, receiver = Channel[bytes].open()
    poster = fresh(1).spawn("poster", Poster)
    poster.post.call_one(port, 200_000, 10_000).exception(timeout=WAIT)
    assert len(receiver._queue.messages) <= 20_000  # the limit, and the messages in flight


def test_a_send_that_gives_up_leaves_nothing_behind(fresh: Fresh, proc: Any) -> None:
    """A suspended process reads no bytes: the caller gets an error, and no table keeps the call."""
    mesh = fresh(1).spawn("inside", Inside)
    pid = mesh.pid.call_one().get(timeout=WAIT)
    link = mesh._resolve_links()[0]
    before = tables(proc)
    patience, limit = proc._patience, link.queue_limit
    proc._patience, link.queue_limit = 0.2, 100_000
    stop_process(pid)
    try:
        with contextlib.suppress(BackpressureError):
            for _ in range(10_000):
                mesh.pid.call()
        failed = len(proc.ports)
        with pytest.raises(BackpressureError, match="took no bytes"):
            mesh.pid.call()
        assert len(proc.ports) == failed
    finally:
        proc._patience, link.queue_limit = patience, limit
        os.kill(pid, signal.SIGCONT)
    assert mesh.pid.call_one().get(timeout=WAIT) == pid
    # Sizes may also shrink, since remains of earlier meshes may be released meanwhile.
    until(lambda: all(size <= before[name] for name, size in tables(proc).items()))
