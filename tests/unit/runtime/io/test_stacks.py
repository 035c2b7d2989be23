"""Stacks of other threads are read at once, whatever the program and its collector do meanwhile."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from monarch._engine.runtime.io import stacks as module
from monarch._engine.runtime.io.stacks import (
    NO_STACK,
    Step,
    stack_of_task,
    stack_of_thread,
    stacks,
)

WAIT = 60.0

LOOKED_AT = """
import os, random, sys, threading, time
from monarch._engine.runtime.io.stacks import stack_of_thread

class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        if random.random() < 0.02:
            time.sleep(0)  # lets another thread run

def shallow(depth):
    if depth:
        shallow(depth - 1)

def large(depth, one=1, two=2.5, three="c"):
    some, more, last = [depth], {depth: one}, depth
    if depth:
        large(depth - 1)
    return some, more, last

def work():
    while True:
        shallow(20)
        large(30)
        large(11)
        Garbage()

def settings():
    while True:
        gc.disable()
        gc.enable()
        gc.set_threshold(random.randrange(300, 900))
        time.sleep(0)

sys.setswitchinterval(1e-4)
worker = threading.Thread(target=work, daemon=True)
worker.start()
if "toggle" in sys.argv:
    import gc

    threading.Thread(target=settings, daemon=True).start()
began, looks = time.monotonic(), 0
while time.monotonic() < began + 2.5 or looks < 100:
    files = {step.file for step in stack_of_thread(worker.ident).steps}
    assert files <= {"<string>", threading.__file__}, files
    looks += 1
    time.sleep(0.0005)
os._exit(0)
"""


@pytest.mark.parametrize("collector", ["on", "toggle"])
def test_looking_at_a_thread_that_makes_garbage(collector: str) -> None:
    """On CPython 3.11 a walk by `f_back` crashes, or reads other objects, in a second."""
    command = [sys.executable, "-X", "faulthandler", "-c", LOOKED_AT, collector]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def parked() -> Iterator[int]:
    """Yield the number of a thread that waits in `inner`, called by `outer`."""
    until, waits = threading.Event(), threading.Event()

    def inner(number: int) -> None:
        waits.set()
        until.wait(WAIT)

    def outer(number: int) -> None:
        inner(number + 1)

    thread = threading.Thread(target=outer, args=(1,))
    thread.start()
    assert waits.wait(WAIT)
    try:
        yield thread.ident or 0
    finally:
        until.set()
        thread.join(WAIT)


def test_a_stack_has_its_steps_and_the_variables_of_the_code_asked_for() -> None:
    with parked() as thread:
        steps = stack_of_thread(thread).steps
        names = [step.name for step in steps]
        assert names[names.index("inner") :][:2] == ["inner", "outer"]
        inner = next(step for step in steps if step.name == "inner")
        assert inner.file == __file__
        assert inner.line - inner.code.co_firstlineno == 2
        assert inner.module["__name__"] == __name__
        assert stack_of_thread(thread).variables == []
        found = stack_of_thread(thread, inner.code).variables
        assert [variables["number"] for variables in found] == [2]
        assert thread in stacks()
        assert list(stacks(of=(thread,))) == [thread]
    assert stack_of_thread(None) == NO_STACK


def test_the_lines_of_steps_are_those_of_frames() -> None:
    def here() -> tuple[list[Step], FrameType]:
        return stack_of_thread(threading.get_ident()).steps, sys._getframe()

    steps, frame = here()
    frames: list[FrameType] = []
    walked: FrameType | None = frame.f_back
    while walked is not None:
        frames.append(walked)
        walked = walked.f_back
    own = [step.code for step in steps].index(frame.f_code)
    found = [(step.code, step.line) for step in steps[own + 1 :]]
    assert [code for code, _ in found] == [outer.f_code for outer in frames]
    assert [line for _, line in found[1:]] == [outer.f_lineno for outer in frames[1:]]


def test_a_task_that_awaits_has_the_stack_of_its_coroutines() -> None:
    async def inner(number: int) -> None:
        await asyncio.get_running_loop().create_future()

    async def outer() -> None:
        await inner(7)

    async def main() -> None:
        task = asyncio.ensure_future(outer())
        await asyncio.sleep(0)
        found = stack_of_task(task)
        assert [step.name for step in found.steps] == ["outer", "inner"]
        inner_code = found.steps[1].code
        assert stack_of_task(task, inner_code).variables[0]["number"] == 7
        task.cancel()
        await asyncio.wait([task])
        assert stack_of_task(task) == NO_STACK  # it has ended

    asyncio.run(main())


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 3, 4), (123, 5, 6)])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_the_program_has_set_it(
    enabled: bool, thresholds: tuple[int, int, int]
) -> None:
    before, was = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*thresholds)
    expected = gc.get_threshold()  # 3.13 has no third one
    (gc.enable if enabled else gc.disable)()
    try:
        stacks()
        assert (gc.get_threshold(), gc.isenabled()) == (expected, enabled)
        with pytest.raises(ZeroDivisionError):
            module._at_once(lambda: (1 // number for number in [0]))
        assert (gc.get_threshold(), gc.isenabled()) == (expected, enabled)
    finally:
        gc.set_threshold(*before)
        (gc.enable if was else gc.disable)()


def test_a_look_keeps_nothing_that_a_thread_drops() -> None:
    class Thing:
        pass

    things: list[weakref.ref[Thing]] = []

    def hold() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        waits.set()
        until.wait(WAIT)

    until, waits = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert waits.wait(WAIT)
    looked = stack_of_thread(thread.ident)
    until.set()
    thread.join(WAIT)
    assert "hold" in {step.name for step in looked.steps}
    assert things[0]() is None
