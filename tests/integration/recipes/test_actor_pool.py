"""`ActorPool` and `first`: least-loaded choice, order, errors, lost actors."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.actor import Actor, ActorError, SupervisionError, Supervisor, endpoint, this_host
from monarch.recipes import ActorPool, first

from .conftest import WAIT


class Worker(Actor):
    @endpoint
    def wait(self, path: str) -> int:
        while not os.path.exists(path):
            time.sleep(0.005)
        return os.getpid()

    @endpoint
    def square(self, x: int) -> int:
        if x < 0:
            raise ValueError(f"{x} is negative")
        return x * x

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def exit(self) -> None:
        os._exit(1)


@pytest.fixture
def workers(procs: Any) -> Any:
    workers = procs.spawn("workers", Worker)
    yield workers
    workers.stop().get(timeout=WAIT)


def test_the_least_loaded_is_chosen(workers: Any, tmp_path: Path) -> None:
    pool = ActorPool(workers)
    path = str(tmp_path / "go")
    slow = pool.submit(lambda actor: actor.wait.call_one(path))
    busy = pool.loads.index(1)
    quick = [pool.submit(lambda a: a.pid.call_one()).get(timeout=WAIT) for _ in range(10)]
    assert len(set(quick)) == 1
    Path(path).touch()
    assert slow.get(timeout=WAIT) not in quick
    assert pool.loads[busy] == 0 or sum(pool.loads) == 0
    assert len(pool) == 2


def test_map(workers: Any) -> None:
    pool = ActorPool(workers)
    square = lambda actor, x: actor.square.call_one(x)
    assert list(pool.map(square, range(10))) == [x * x for x in range(10)]
    assert sorted(pool.map_unordered(square, range(10))) == [x * x for x in range(10)]
    endless = pool.map(square, itertools.count())
    assert list(itertools.islice(endless, 5)) == [0, 1, 4, 9, 16]
    endless.close()  # type: ignore[attr-defined]
    results = pool.map(square, [1, -1, 2])
    assert next(results) == 1
    with pytest.raises(ActorError, match="-1 is negative"):
        next(results)
    with pytest.raises(ValueError, match="ahead must be positive"):
        next(pool.map(square, [1], ahead=0))
    with pytest.raises(AttributeError):
        pool.submit(lambda actor: actor.squares.call_one(1))
    while sum(pool.loads):
        time.sleep(0.005)


def test_time_limits(workers: Any, tmp_path: Path) -> None:
    pool = ActorPool(workers)
    path = str(tmp_path / "go")
    for mapped in (pool.map, pool.map_unordered):
        results = mapped(lambda actor, _: actor.wait.call_one(path), [1], timeout=0.01)
        with pytest.raises(TimeoutError):
            next(results)
    Path(path).touch()


@pytest.mark.failures
def test_a_lost_actor_is_left_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    procs = this_host().spawn_procs({"procs": 2})
    supervisor = Supervisor(max_restarts=1)
    pool = ActorPool(supervisor.spawn(procs, "workers", Worker))
    with pytest.raises(SupervisionError):
        pool.submit(lambda actor: actor.exit.call_one()).get(timeout=WAIT)
    # The lost one looks idle; calls go to the other one at once, or wait for the replacement.
    assert list(pool.map(lambda a, x: a.square.call_one(x), range(20)))[-1] == 361
    supervisor.healthy.get(timeout=WAIT)
    deadline = time.monotonic() + WAIT
    pids: set[int] = set()
    while len(pids) < 2 and time.monotonic() < deadline:
        pids.add(pool.submit(lambda a: a.pid.call_one()).get(timeout=WAIT))
    assert len(pids) == 2
    procs.stop().get(timeout=WAIT)


def test_first(workers: Any, tmp_path: Path) -> None:
    flat = workers.flatten("rank")
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    calls = [flat.slice(rank=i).wait.call_one(path) for i, path in enumerate(paths)]
    assert first(calls, timeout=0.01) == ([], calls)
    Path(paths[1]).touch()
    done, pending = first(calls, timeout=WAIT)
    assert (done, pending) == ([calls[1]], [calls[0]])
    Path(paths[0]).touch()
    done, pending = first(calls, 2, timeout=WAIT)
    assert set(map(id, done)) == set(map(id, calls))
    assert pending == []
    failed = flat.slice(rank=0).square.call_one(-1)
    assert first([failed])[0] == [failed]
    with pytest.raises(ActorError):
        failed.get()
    for wrong in (0, 3):
        with pytest.raises(ValueError, match="between 1 and the 2"):
            first(calls, wrong)
    with pytest.raises(ValueError, match="there twice"):
        first([calls[0], calls[0]])
