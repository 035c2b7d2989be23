"""Blocks on their way from host to host: read once at the origin, or lost with an answer."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._mounts.delivery import Block, Delivery, parent_of

WAIT = 60.0


class Answer:
    """A future that has its outcome, or gets it from a queue."""

    def __init__(self, wait: Any) -> None:
        self._wait = wait

    def get(self, timeout: float | None = None) -> Any:
        outcome = self._wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Buffer:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def size(self) -> int:
        return len(self._content)

    def read_into(self, memory: Any, timeout: float) -> Answer:
        memory[:] = self._content
        return Answer(lambda: None)


class Origin:
    """Has every block, and counts what is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self.order: list[int] = []
        self.block = self
        self.gate = threading.Event()
        self.gate.set()

    def call_one(self, number: int) -> Answer:
        self.asked[number] += 1
        self.order.append(number)
        return Answer(lambda: (self.gate.wait(WAIT), (Buffer(b"%d" % number), {number: 5}))[1])


class Relay:
    """The endpoint of a host."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.block = self

    def call_one(self, number: int) -> Answer:
        answers: queue.Queue[Any] = queue.Queue()

        def send(block: Block | None) -> None:
            lost = OSError("there is no block")
            answers.put(lost if block is None else (Buffer(block.memory[:]), block.bad))

        self._delivery.need(number, send)
        return Answer(lambda: answers.get(timeout=WAIT))


class Lost:
    def __init__(self) -> None:
        self.block = self

    def call_one(self, number: int) -> Answer:
        return Answer(lambda: RuntimeError("the host was lost"))


@pytest.fixture
def made() -> Iterator[list[Delivery]]:
    made: list[Delivery] = []
    yield made
    for delivery in made:
        delivery.close()


def wanted(delivery: Delivery, number: int) -> Block | None:
    answers: queue.Queue[Block | None] = queue.Queue()
    delivery.need(number, answers.put)
    return answers.get(timeout=WAIT)


def test_a_block_leaves_the_origin_once(made: list[Delivery]) -> None:
    origin = Origin()
    for rank in range(8):
        above = parent_of(rank)
        made.append(Delivery([origin] if above is None else [Relay(made[above]), origin]))
    for delivery in made:
        delivery.prefill(range(3))
    for delivery in reversed(made):
        for number in range(5):
            block = wanted(delivery, number)
            assert block is not None
            assert (block.memory[:], block.bad) == (b"%d" % number, {number: 5})
    assert origin.asked == Counter(range(5))


def test_a_lost_host_is_passed_over(made: list[Delivery]) -> None:
    origin = Origin()
    made.append(Delivery([Lost(), origin]))
    block = wanted(made[0], 7)
    assert block is not None
    assert block.memory[:] == b"7"


def test_a_block_that_no_provider_has_is_an_answer(made: list[Delivery]) -> None:
    made.append(Delivery([Lost(), Lost()]))
    assert wanted(made[0], 7) is None
    assert wanted(made[0], 7) is None  # also at the second attempt


def test_small_files_do_not_delay_a_reader(made: list[Delivery]) -> None:
    """At most one of them is on its way before the block that a reader waits for."""
    origin = Origin()
    origin.gate.clear()
    made.append(Delivery([origin]))
    made[0].prefill(range(100, 200))
    answers: queue.Queue[Any] = queue.Queue()
    made[0].need(1, answers.put)
    origin.gate.set()
    assert answers.get(timeout=WAIT) is not None
    assert origin.order.index(1) <= 1


def test_the_end_answers_what_waits(made: list[Delivery]) -> None:
    origin = Origin()
    origin.gate.clear()
    delivery = Delivery([origin])
    answers: queue.Queue[Any] = queue.Queue()
    delivery.need(1, answers.put)
    delivery.close()
    assert answers.get(timeout=WAIT) is None
    assert wanted(delivery, 2) is None
    origin.gate.set()
