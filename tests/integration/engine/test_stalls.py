"""A stalled event loop of an actor is reported once, with its stack.

A second line reports when the loop runs again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_proc
from monarch.config import configured

from .conftest import WAIT, until

# The actors run in this process, so they share these events with the test.
stuck = threading.Event()
release = threading.Event()


class Worker(Actor):
    @endpoint
    async def ready(self) -> None: ...

    @endpoint
    async def block(self) -> None:
        stuck.set()
        assert release.wait(WAIT)

    @concurrent_endpoint
    async def block_aside(self) -> None:
        await asyncio.sleep(0)
        stuck.set()
        assert release.wait(WAIT)

    @endpoint
    async def suspend(self) -> None:
        assert await asyncio.to_thread(release.wait, WAIT)


Spawn = Callable[[], Worker]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns all text written to stderr so far in this test."""
    parts: list[str] = []

    def read() -> str:
        parts.append(capsys.readouterr().err)
        return "".join(parts)

    return read


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Yield a function that spawns workers whose loops are reported after a stall of one second."""
    stuck.clear()
    release.clear()
    workers: list[Worker] = []

    def make() -> Worker:
        with configured(loop_stall_timeout="1s"):
            workers.append(this_proc().spawn(f"worker{len(workers)}", Worker))
            workers[-1].ready.call_one().get(timeout=WAIT)
        return workers[-1]

    yield make
    release.set()
    for worker in workers:
        worker.stop().get(timeout=WAIT)


@pytest.mark.parametrize("how", ["block", "block_aside"])
def test_a_loop_that_stands_still(spawn: Spawn, printed: Callable[[], str], how: str) -> None:
    blocked = getattr(spawn(), how).call_one()
    assert stuck.wait(WAIT)
    until(lambda: "loop_stall_timeout" in printed())  # the last line of the report
    release.set()
    blocked.get(timeout=WAIT)
    until(lambda: "turns again" in printed())

    report = printed()
    assert report.startswith("monarch: the event loop of <root>.<")
    assert "Worker worker0> (pid " in report
    assert f'File "{__file__}"' in report
    assert f"in {how}" in report
    assert "in _bootstrap" not in report  # the stack begins in the program
    assert "assert release.wait(WAIT)" in report
    assert "asyncio.to_thread" in report
    assert report.count("has not turned for") == 1
    assert report.count("turns again, after") == 1
    if how == "block":
        assert "in endpoint 'block'" in report


def test_a_loop_that_turns_while_its_actor_is_busy(
    spawn: Spawn, printed: Callable[[], str]
) -> None:
    suspended = spawn().suspend.call_one()
    blocked = spawn().block.call_one()
    assert stuck.wait(WAIT)
    # worker0 was called first, so a report about it would come no later than that about worker1.
    until(lambda: "loop_stall_timeout" in printed())
    release.set()
    blocked.get(timeout=WAIT)
    suspended.get(timeout=WAIT)

    assert "worker1" in printed()
    assert "worker0" not in printed()


def test_zero_means_never(spawn: Spawn, printed: Callable[[], str]) -> None:
    with configured(loop_stall_timeout="0s"):
        quiet = this_proc().spawn("quiet", Worker)
        quiet.ready.call_one().get(timeout=WAIT)
    silent = quiet.block.call_one()
    assert stuck.wait(WAIT)
    loud = spawn().block.call_one()
    until(lambda: "loop_stall_timeout" in printed())
    release.set()
    silent.get(timeout=WAIT)
    loud.get(timeout=WAIT)
    quiet.stop().get(timeout=WAIT)

    assert "quiet" not in printed()
