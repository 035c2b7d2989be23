"""`ActorPool` and `first`: least-loaded choice, order, errors, lost actors, retries."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
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


# -- calls that are made again ---------------------------------------------------------------------


class Fragile(Actor):
    """Notes each attempt as a line of the file `x` in a folder."""

    @endpoint
    def square(self, folder: str, x: int, deaths: int) -> int:
        """Return the square; the first `deaths` attempts end the process by SIGKILL."""
        if self.attempt(folder, x) <= deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * x

    @endpoint
    def stumble(self, folder: str, x: int, error: Exception, times: int) -> int:
        """Return the square; the first `times` attempts raise the error."""
        if self.attempt(folder, x) <= times:
            raise error
        return x * x

    @endpoint
    def pid_when(self, folder: str, x: int) -> int:
        """Return the process id when the folder has a file ``go``."""
        self.attempt(folder, x)
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.005)
        return os.getpid()

    def attempt(self, folder: str, x: int) -> int:
        with open(f"{folder}/{x}", "a") as file:
            file.write(f"{os.getpid()}\n")
        return attempts(folder, x)


def attempts(folder: Any, x: int) -> int:
    path = Path(folder, str(x))
    return len(path.read_text().splitlines()) if path.exists() else 0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that spawns actors: under a supervisor, if it gets one."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    meshes: list[Any] = []

    def spawn(count: int, supervisor: Supervisor | None = None) -> Any:
        meshes.append(this_host().spawn_procs({"procs": count}))
        if supervisor is None:
            return meshes[-1].spawn("fragile", Fragile)
        return supervisor.spawn(meshes[-1], "fragile", Fragile)

    yield spawn
    for mesh in meshes:
        with contextlib.suppress(RuntimeError):  # stopped by the test
            mesh.stop().get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("count", "restarts"), [(1, 2), (3, 2), (3, 0)])
def test_a_map_goes_on_when_workers_are_killed(
    fragile: Callable[..., Any], tmp_path: Path, count: int, restarts: int, ordered: bool
) -> None:
    """On the replaced ones if there is a supervisor, else on those that are left."""
    supervisor = Supervisor(max_restarts=restarts) if restarts else None
    pool = ActorPool(fragile(count, supervisor), retries=3)
    mapped = pool.map if ordered else pool.map_unordered

    def call(actor: Any, x: int) -> Any:
        return actor.square.call_one(str(tmp_path), x, int(x in (40, 200)))

    results = list(mapped(call, range(300), timeout=WAIT))
    assert (results if ordered else sorted(results)) == [x * x for x in range(300)]
    assert attempts(tmp_path, 40) == attempts(tmp_path, 200) == 2
    if supervisor is not None:
        supervisor.healthy.get(timeout=WAIT)
        assert len(supervisor.restarts) == 2


@pytest.mark.failures
def test_without_retries_a_loss_is_raised_in_its_place(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    pool = ActorPool(fragile(1))
    results = pool.map(
        lambda actor, x: actor.square.call_one(str(tmp_path), x, int(x == 1)), range(3)
    )
    assert next(results) == 0
    with pytest.raises(SupervisionError, match="SIGKILL"):
        next(results)
    assert attempts(tmp_path, 1) == 1


@pytest.mark.failures
def test_a_worker_is_killed_from_outside_while_the_program_handles_a_result(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    """Its calls are made again at once, and not only when the next result is asked for."""
    pool = ActorPool(fragile(2), retries=1)

    def call(actor: Any, x: int) -> Any:
        folder = str(tmp_path)
        return actor.pid_when.call_one(folder, x) if x else actor.square.call_one(folder, x, 0)

    results = pool.map(call, range(4), ahead=2)
    assert next(results) == 0
    until(lambda: attempts(tmp_path, 1))
    victim = int((tmp_path / "1").read_text())
    os.kill(victim, signal.SIGKILL)
    until(lambda: sum(pool.loads) == 3 and 0 in pool.loads)  # all are with the one that is left
    (tmp_path / "go").touch()
    pids = set(results)
    assert len(pids) == 1
    assert victim not in pids


@pytest.mark.failures
def test_a_value_that_kills_each_worker_is_given_up(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    supervisor = Supervisor(max_restarts=10, backoff=0.0)
    pool = ActorPool(fragile(1, supervisor), retries=2)
    results = pool.map(
        lambda actor, x: actor.square.call_one(str(tmp_path), x, 100 * (x == 1)), range(3)
    )
    assert next(results) == 0
    with pytest.raises(SupervisionError, match="SIGKILL"):
        next(results)
    assert attempts(tmp_path, 1) == 3, "once, and two retries"
    supervisor.healthy.get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize(("count", "text"), [(1, "the only actor"), (2, "all 2 actors")])
def test_when_all_are_lost_the_error_has_the_cause(
    fragile: Callable[..., Any], tmp_path: Path, count: int, text: str
) -> None:
    pool = ActorPool(fragile(count), retries=10)
    call = lambda actor, x: actor.square.call_one(str(tmp_path), x, 100 * (x == 1))
    for mapped in (pool.map, pool.map_unordered):
        with pytest.raises(SupervisionError, match=f"(?s){text} of the pool .*SIGKILL") as caught:
            list(mapped(call, range(3), timeout=WAIT))
        assert caught.value.failure is not None
    assert attempts(tmp_path, 1) == count


@pytest.mark.failures
def test_a_supervisor_that_has_given_up_ends_the_map(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    pool = ActorPool(fragile(1, Supervisor(max_restarts=1)), retries=10)
    with pytest.raises(SupervisionError, match=r"(?s)the supervisor gave up: .*SIGKILL"):
        list(pool.map(lambda actor, x: actor.square.call_one(str(tmp_path), x, 100), [1]))
    assert attempts(tmp_path, 1) == 2


@pytest.mark.parametrize("what", ["actors", "processes"])
def test_actors_that_were_stopped_do_not_come_back(
    fragile: Callable[..., Any], tmp_path: Path, what: str
) -> None:
    actors = fragile(2, Supervisor())
    pool = ActorPool(actors, retries=2)
    actors.square.call(str(tmp_path), 0, 0).get(timeout=WAIT)
    (actors if what == "actors" else actors._proc_mesh).stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        list(pool.map(lambda actor, x: actor.square.call_one(str(tmp_path), x, 0), range(3)))


@pytest.mark.failures
def test_calls_that_a_lost_actor_refuses_are_no_tries(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    """Three of four actors were lost before the pool was made."""
    actors = fragile(4)
    for rank in range(3):
        lost = actors.slice(procs=rank).square.call_one(str(tmp_path), rank, 1)
        assert isinstance(lost.exception(timeout=WAIT), SupervisionError)
    pool = ActorPool(actors, retries=1)
    call = lambda actor, x: actor.square.call_one(str(tmp_path), x, 0)
    assert list(pool.map(call, range(100, 120))) == [x * x for x in range(100, 120)]


def test_own_exceptions_are_raised_unless_they_are_named(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    actors = fragile(2)

    def call(error: Exception, times: int) -> Any:
        return lambda actor, x: actor.stumble.call_one(str(tmp_path), x, error, times)

    with pytest.raises(ActorError, match="not me"):
        list(ActorPool(actors, retries=3).map(call(ValueError("not me"), 1), [1]))
    assert attempts(tmp_path, 1) == 1
    pool = ActorPool(actors, retries=2, retry_exceptions=(ConnectionError,))
    assert list(pool.map(call(ConnectionResetError(), 2), [2, 3])) == [4, 9]
    assert [attempts(tmp_path, x) for x in (2, 3)] == [3, 3]
    with pytest.raises(ActorError) as caught:
        list(pool.map_unordered(call(ConnectionResetError(), 3), [4]))
    assert isinstance(caught.value.exception, ConnectionResetError)
    assert attempts(tmp_path, 4) == 3
    with pytest.raises(ActorError, match="not me"):
        list(pool.map(call(ValueError("not me"), 1), [5]))
    assert attempts(tmp_path, 5) == 1
    until(lambda: sum(pool.loads) == 0)


@pytest.mark.failures
def test_values_are_taken_as_results_come_also_after_a_loss(
    fragile: Callable[..., Any], tmp_path: Path
) -> None:
    pool = ActorPool(fragile(3), retries=1)
    taken: list[int] = []

    def values() -> Iterator[int]:
        for x in itertools.count():
            taken.append(x)
            yield x

    results = pool.map(
        lambda actor, x: actor.square.call_one(str(tmp_path), x, int(x == 10)), values(), ahead=2
    )
    for x in range(100):
        assert next(results) == x * x
        assert len(taken) - x <= 6
    results.close()  # type: ignore[attr-defined]
    until(lambda: sum(pool.loads) == 0)
    for mapped in (pool.map, pool.map_unordered):
        assert list(mapped(lambda actor, x: actor.square.call_one("", x, 0), [])) == []


def test_what_a_pool_refuses(workers: Any) -> None:
    with pytest.raises(ValueError, match="retries must not be negative, got -1"):
        ActorPool(workers, retries=-1)
    with pytest.raises(ValueError, match="retry_exceptions needs retries"):
        ActorPool(workers, retry_exceptions=(OSError,))
