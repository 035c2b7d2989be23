"""`Executor`: the interface of `concurrent.futures` over processes that may be lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.actor import Actor, SupervisionError, endpoint, this_host
from monarch.recipes import Executor, first

from .conftest import WAIT


@pytest.fixture
def executor(procs: Any) -> Iterator[Executor]:
    with Executor(procs) as executor:
        yield executor


def test_the_first_of_several_functions(executor: Executor, tmp_path: Path) -> None:
    def wait(path: Path) -> str:
        while not path.exists():
            time.sleep(0.01)
        return path.name

    calls = [executor.submit(wait, tmp_path / name) for name in ("late", "soon")]
    (tmp_path / "soon").touch()
    done, pending = first(calls, timeout=WAIT)
    assert (done, pending) == ([calls[1]], [calls[0]])
    (tmp_path / "late").touch()
    assert [call.result(WAIT) for call in calls] == ["late", "soon"]
    assert first(calls, 2) == (calls, [])


def test_results_in_order_and_as_they_come(executor: Executor) -> None:
    assert list(executor.map(pow, range(20), [2] * 20)) == [x * x for x in range(20)]
    futures = {executor.submit(divmod, x, 3): x for x in range(10)}
    for future in concurrent.futures.as_completed(futures, timeout=WAIT):
        assert future.result() == divmod(futures[future], 3)
    assert len({executor.submit(os.getpid).result(WAIT) for _ in range(8)}) <= 2
    pids = set(executor.map(lambda _: (time.sleep(0.02), os.getpid())[1], range(8)))
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_errors(executor: Executor) -> None:
    def fail() -> None:
        raise KeyError("a function's own")

    future = executor.submit(fail)
    with pytest.raises(KeyError, match="a function's own") as caught:
        future.result(WAIT)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(TypeError):
        executor.submit(threading.Lock().acquire, threading.Lock()).result(WAIT)
    with pytest.raises(TypeError, match="is none"):
        executor.submit(5)  # type: ignore[arg-type]

    async def later() -> None:
        await asyncio.sleep(0)

    with pytest.raises(TypeError, match="later is async"):
        executor.submit(later)
    with pytest.raises(ValueError, match="retries must not be negative"):
        Executor(None, retries=-1)  # type: ignore[arg-type]


def test_a_loop_runs_functions_there(executor: Executor) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor, abs, -i) for i in range(5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_waiting_functions_can_be_cancelled(procs: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "go")

    def wait(path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.005)
        return "waited"

    executor = Executor(procs)
    running = [executor.submit(wait, path) for _ in range(4)]
    while not all(future.running() for future in running):  # two for each process
        time.sleep(0.005)
    waiting = executor.submit(abs, -1)
    assert waiting.cancel()
    more = executor.submit(abs, -2)
    executor.shutdown(wait=False, cancel_futures=True)
    assert more.cancelled()
    with pytest.raises(RuntimeError, match="was shut down"):
        executor.submit(abs, -3)
    Path(path).touch()
    assert {future.result(WAIT) for future in running} == {"waited"}
    executor.shutdown()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", found.append)
    return found


def die_once(path: str) -> str:
    """Kill this process, unless it is the second time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@pytest.mark.failures
@pytest.mark.parametrize("retries", [0, 1])
def test_a_process_is_lost(retries: int, tmp_path: Path, faults: list[Any]) -> None:
    """Its function fails or runs again; the one that had not begun, and later ones, run anyway."""
    mine = this_host().spawn_procs({"procs": 1})
    with Executor(mine, retries=retries) as executor:
        fatal = executor.submit(die_once, str(tmp_path / "once"))
        others = [executor.submit(abs, -i) for i in range(5)]
        assert [other.result(WAIT) for other in others] == [0, 1, 2, 3, 4]
        if retries:
            assert fatal.result(WAIT) == "second"
        else:
            with pytest.raises(SupervisionError):
                fatal.result(WAIT)
    assert not faults
    mine.stop().get(timeout=WAIT)


@pytest.mark.failures
def test_too_many_losses_break_it(faults: list[Any]) -> None:
    mine = this_host().spawn_procs({"procs": 1})
    executor = Executor(mine, max_restarts=1, retries=10)
    fatal = executor.submit(os._exit, 3)
    with pytest.raises(SupervisionError):
        fatal.result(WAIT)
    with pytest.raises(RuntimeError, match="has lost its processes"):
        executor.submit(abs, -1)
    executor.shutdown()
    deadline = time.monotonic() + WAIT
    while not faults and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(faults) == 1  # the supervisor gave up, as any other


class Boss(Actor):
    """Has an executor of its own."""

    @endpoint
    def total(self, count: int) -> int:
        procs = this_host().spawn_procs({"procs": 2})
        with Executor(procs) as executor:
            total = sum(executor.map(abs, range(-count, 0)))
        procs.stop().get()
        return total


def test_an_actor_has_an_executor(procs: Any) -> None:
    bosses = procs.spawn("bosses", Boss)
    assert list(bosses.total.call(5).get(timeout=WAIT).values()) == [15, 15]
    bosses.stop().get(timeout=WAIT)
