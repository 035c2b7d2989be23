"""The sampler charges processor time to the code that used it, and none to threads that wait."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._spi import Step
from monarch._traces.sampler import ENGINE, Options, ProcessProfile, Sampler, Tree, _Thread
from monarch._traces.stacks import Profile, Stacks

WAIT = 60.0
SECOND = 1_000_000_000

STACKS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 9)), max_size=30
)


@given(STACKS)
def test_a_tree_has_what_was_added(samples: list[tuple[list[int], int]]) -> None:
    tree, expected = Tree(), {}
    for stack, weight in samples:
        tree.add(tree.node(stack), weight)
        before = expected.get(tuple(stack), (0, 0))
        expected[tuple(stack)] = before[0] + weight, before[1] + 1
    expected.pop((), None)
    found = {tuple(stack): (weight, count) for weight, count, *stack in tree.stacks()}
    assert expected == found


@given(STACKS, st.integers(2, 6))
def test_a_full_tree_keeps_the_outer_part_of_a_stack(
    samples: list[tuple[list[int], int]], most: int
) -> None:
    tree = Tree(most=most)
    for stack, weight in samples:
        tree.add(tree.node(stack), weight)
    found = tree.stacks()
    assert len(found) < most
    outer = {tuple(stack[:size]) for stack, _ in samples for size in range(5)}
    assert {tuple(row[2:]) for row in found} <= outer
    if not tree.cut:
        assert sum(row[0] for row in found) == sum(weight for stack, weight in samples if stack)


class Worker:
    """A thread that executes what it is given, one function after the other."""

    def __init__(self, name: str) -> None:
        self.todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, name=name)
        self.thread.start()

    def run(self) -> None:
        while (function := self.todo.get(timeout=WAIT)) is not None:
            function()


@contextmanager
def worker(name: str) -> Iterator[Worker]:
    made = Worker(name)
    try:
        yield made
    finally:
        made.todo.put(None)
        made.thread.join(WAIT)


def burn(until: threading.Event, started: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))
        if time.thread_time() > 0.03:
            started.set()


def rest(until: threading.Event, started: threading.Event) -> None:
    started.set()
    until.wait(WAIT)


def sampled(sampler: Sampler, elapsed: int) -> Stacks:
    """Take a sample, end, and return the stacks."""
    sampler._sample(elapsed)
    sampler.stop()
    sampler._ended.set()
    profile = Profile("CPU")
    profile.add(sampler.result(1, "here", "me"))
    return profile.stacks


def names(stacks: Stacks) -> set[str]:
    return {frame.name for stack in stacks.weights for frame in stack}


@pytest.mark.parametrize("wall", [False, True])
def test_a_thread_that_waits_uses_no_processor_time(wall: bool) -> None:
    until, busy, waits = threading.Event(), threading.Event(), threading.Event()
    with worker("burns-3") as first, worker("rests-7") as second:
        second.todo.put(lambda: rest(until, waits))
        assert waits.wait(WAIT)
        sampler = Sampler(Options(1.0, wall=wall), dict)
        sampler._sample(0)
        first.todo.put(lambda: burn(until, busy))
        assert busy.wait(WAIT)
        stacks = sampled(sampler, 10_000_000)
        until.set()
    found = names(stacks)
    assert {"burns-N", "burn"} <= found
    assert ("rest" in found) == wall
    if wall:
        assert {weight for weight, _ in stacks.weights.values()} == {10_000_000}
    else:
        burnt = [w for stack, (w, _) in stacks.weights.items() if stack[0].name == "burns-N"]
        assert burnt[0] >= 20_000_000  # nanoseconds


def test_actors_give_their_names_to_their_threads() -> None:
    until, waits = threading.Event(), threading.Event()
    with worker("monarch-actor") as actor, worker("monarch-other") as other:
        for each in (actor, other):
            waits.clear()
            each.todo.put(lambda: rest(until, waits))
            assert waits.wait(WAIT)
        ident = actor.thread.ident
        assert ident is not None
        sampler = Sampler(Options(1.0, wall=True), lambda: {ident: "trainers"})
        sampler._sample(0)
        stacks = sampled(sampler, 5)
        until.set()
    roots = {stack[0].name for stack in stacks.weights}
    assert "trainers" in roots
    assert ENGINE not in roots  # threads of the library that wait are left out


@pytest.mark.parametrize("lines", [False, True])
def test_the_lines_of_a_function_are_told_apart_on_request(lines: bool) -> None:
    until, waits = threading.Event(), threading.Event()

    def steps() -> None:
        rest(first, waits)
        rest(until, again)

    first, again = threading.Event(), threading.Event()
    sampler = Sampler(Options(1.0, wall=True, lines=lines), dict)
    with worker("steps") as thread:
        thread.todo.put(steps)
        assert waits.wait(WAIT)
        sampler._sample(0)
        sampler._sample(5)
        first.set()
        assert again.wait(WAIT)
        stacks = sampled(sampler, 5)
        until.set()
    found = {frame for stack in stacks.weights for frame in stack if "steps" in frame.name}
    found = {frame for frame in found if frame.file}
    assert len(found) == (2 if lines else 1)


def test_a_sampler_ends_by_itself_and_on_request() -> None:
    for seconds, stops in ((0.05, False), (3600.0, True)):
        sampler = Sampler(Options(seconds, rate=1000), dict)
        thread = threading.Thread(target=sampler.run)
        thread.start()
        if stops:
            sampler.stop()
        thread.join(WAIT)
        assert sampler.ended
        found: ProcessProfile = sampler.result(1, "here", "me")
        assert found["seconds"] < WAIT


def test_a_sampler_that_ends_with_an_error_says_so() -> None:
    """Its result is no profile of the time before, and no error goes to the program's output."""
    labels: list[dict[int, str]] = [{}]
    sampler = Sampler(Options(WAIT), lambda: labels[0] if labels else labels.pop())
    sampler._sample(0)
    labels.clear()
    sampler._samples = 0
    sampler.run()  # asks for the labels again
    assert sampler.ended
    with pytest.raises(RuntimeError) as caught:
        sampler.result(1, "here", "me")
    assert "the sampling ended with an error" in str(caught.value)
    assert "IndexError: pop from empty list" in str(caught.value)
    assert "test_sampler.py" in str(caught.value)


def test_a_thread_of_unknown_clock_works_if_its_stack_has_changed() -> None:
    thread = _Thread("", None, new=True)
    frame = sys._getframe()
    step = Step(frame.f_code, 4, {})
    assert thread.has_moved([step])
    assert not thread.has_moved([step])
    assert thread.has_moved([step._replace(offset=8)])
    assert thread.has_moved([step._replace(offset=8), step])
