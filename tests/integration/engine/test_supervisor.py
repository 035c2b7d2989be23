"""A supervisor replaces failed ranks in place, in order, and a limited number of times.

No message for an old incarnation of a rank reaches the new one.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.links import LostLink
from monarch._restarts.supervisor import _Ending
from monarch.actor import (
    Actor,
    MeshFailure,
    Restart,
    Restarted,
    SupervisionError,
    Supervisor,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)

from .conftest import WAIT, kill, tables, until

Fresh = Callable[..., Any]


class Worker(Actor):
    """An actor that can fail in every way, and that returns its incarnation number."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.restart: Restart | None = None

    def __restart__(self, restart: Restart) -> None:
        self.restart = restart
        self.rank = current_rank().rank

    @endpoint
    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def incarnation(self) -> int:
        return self.restart.incarnation if self.restart else 0

    @endpoint
    def reason(self) -> tuple[str, int]:
        assert self.restart is not None
        return self.restart.reason, self.rank

    @endpoint
    def end(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise SystemExit("that is all")


class AsyncWorker(Actor):
    def __init__(self) -> None:
        self.restored = 0

    async def __restart__(self, restart: Restart) -> None:
        self.restored = restart.incarnation

    @endpoint
    async def incarnation(self) -> int:
        return self.restored

    @endpoint
    async def end(self, how: str) -> None:
        raise SystemExit(how)


def crash(rank_of_mesh: Any, how: str) -> None:
    with pytest.raises(SupervisionError):
        rank_of_mesh.end.call_one(how).get(timeout=WAIT)


@pytest.mark.parametrize("fresh_process", [False, True])
@pytest.mark.parametrize("how", ["exit", "kill", "raise"])
def test_a_failed_rank_is_replaced_in_place(fresh: Fresh, how: str, fresh_process: bool) -> None:
    procs = fresh(3)
    supervisor = Supervisor(fresh_process=fresh_process)
    workers = supervisor.spawn(procs, "workers", Worker, 10)
    one = workers.slice(gpus=1)
    assert workers.add.call(1).get(timeout=WAIT).values() == [11, 11, 11]
    pids = workers.pid.call().get(timeout=WAIT).values()
    crash(one, how)
    supervisor.healthy.get(timeout=WAIT)
    # The mesh, a slice that was used before, and a new slice all reach the new incarnation.
    assert workers.add.call(1).get(timeout=WAIT).values() == [12, 11, 12]
    assert one.add.call_one(1).get(timeout=WAIT) == 12
    assert workers.slice(gpus=1).incarnation.call_one().get(timeout=WAIT) == 1
    same = [
        a == b for a, b in zip(pids, workers.pid.call().get(timeout=WAIT).values(), strict=True)
    ]
    assert same == [True, how == "raise" and not fresh_process, True]
    (event,) = supervisor.restarts
    assert (event.mesh_name, event.rank, event.incarnation) == ("workers", 1, 1)
    reason, rank = one.reason.call_one().get(timeout=WAIT)
    assert reason == event.reason
    assert "{'gpus': 1/3}" in reason
    assert rank == 1


def test_calls_in_flight_fail_and_healthy_slices_go_on(fresh: Fresh) -> None:
    procs = fresh(3)
    supervisor = Supervisor(backoff=0.0)
    workers = supervisor.spawn(procs, "workers", Worker)
    pids = workers.pid.call().get(timeout=WAIT).values()
    for incarnation in (1, 2):
        kill(workers.slice(gpus=1).pid.call_one().get(timeout=WAIT))
        assert workers.slice(gpus=0).pid.call_one().get(timeout=WAIT) == pids[0]
        until(lambda n=incarnation: len(supervisor.restarts) == n)  # type: ignore[misc]
        assert workers.incarnation.call().get(timeout=WAIT).values() == [0, incarnation, 0]


class Caller(Actor):
    """An actor that calls a given mesh from another process."""

    def __init__(self, workers: Any) -> None:
        self.workers = workers

    @endpoint
    def incarnations(self) -> list[int]:
        found: list[int] = self.workers.incarnation.call().get(timeout=WAIT).values()
        return found

    @endpoint
    def outcome(self) -> str:
        try:
            self.workers.slice(gpus=1).incarnation.call_one().get(timeout=WAIT)
        except SupervisionError:
            return "failed"
        return "answered"


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_other_processes_find_the_new_incarnation(fresh: Fresh, how: str) -> None:
    """A process that used the old incarnation reaches the new one, and so does one that did not."""
    procs = fresh(2)
    supervisor = Supervisor()
    workers = supervisor.spawn(procs, "workers", Worker)
    knows = fresh(1).spawn("knows", Caller, workers)
    new = fresh(1).spawn("new", Caller, workers)
    assert knows.incarnations.call_one().get(timeout=WAIT) == [0, 0]
    new.initialized.get(timeout=WAIT)
    crash(workers.slice(gpus=1), how)
    supervisor.healthy.get(timeout=WAIT)
    assert new.incarnations.call_one().get(timeout=WAIT) == [0, 1]
    # A process that used the old incarnation may get one more failure of it before it learns of the
    # new one.
    until(lambda: knows.outcome.call_one().get(timeout=WAIT) == "answered")
    assert knows.incarnations.call_one().get(timeout=WAIT) == [0, 1]


class Recorder(Actor):
    """An actor that records the messages that its present incarnation received."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.seen: list[int] = []

    def __restart__(self, restart: Restart) -> None:
        self.incarnation = restart.incarnation

    @endpoint
    def note(self, number: int) -> int:
        if number < 0:
            raise SystemExit(number)
        self.seen.append(number)
        return self.incarnation

    @endpoint
    def noted(self) -> list[int]:
        return self.seen


class Flood(Actor):
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    @endpoint
    def flood(self, count: int) -> list[int]:
        """Return for each call, in order, the incarnation that answered it, or -1 for a failure."""
        sent = [self.recorder.note.call_one(number) for number in range(count)]
        return [-1 if future.exception(WAIT) else future.get() for future in sent]


def test_nothing_old_reaches_the_new_actor_of_a_process_that_lives_on(fresh: Fresh) -> None:
    """Another process sends many calls while the actor fails and is replaced at once.

    Calls in flight fail. Calls sent to the new incarnation arrive in order, each exactly once.
    """
    supervisor = Supervisor(max_restarts=50, backoff=0.0)
    recorder = supervisor.spawn(fresh(1), "recorder", Recorder)
    flood = fresh(1).spawn("flood", Flood, recorder)
    for round_ in range(1, 6):
        future = flood.flood.call_one(5000)
        assert isinstance(recorder.note.call_one(-1).exception(WAIT), SupervisionError)
        outcomes = future.get(timeout=WAIT)
        supervisor.healthy.get(timeout=WAIT)
        answered = [outcome for outcome in outcomes if outcome >= 0]
        assert answered == sorted(answered)
        assert set(answered) <= {round_ - 1, round_}
        new = [number for number, outcome in enumerate(outcomes) if outcome == round_]
        assert recorder.noted.call_one().get(timeout=WAIT) == new


@pytest.mark.parametrize("fresh_process", [False, True])
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one_for_one", {("a", 1)}),
        ("one_for_all", {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)}),
        ("rest_for_one", {("a", 1), ("a", 2), ("b", 0), ("b", 1)}),
    ],
)
def test_strategies(
    fresh: Fresh, strategy: Any, expected: set[tuple[str, int]], fresh_process: bool
) -> None:
    supervisor = Supervisor(strategy, fresh_process=fresh_process)
    a = supervisor.spawn(fresh(3), "a", Worker)
    b = supervisor.spawn(fresh(2), "b", Worker)
    supervisor.healthy.get(timeout=WAIT)
    crash(a.slice(gpus=1), "raise")
    supervisor.healthy.get(timeout=WAIT)
    assert {(event.mesh_name, event.rank) for event in supervisor.restarts} == expected
    assert a.incarnation.call().get(timeout=WAIT).values() == [
        int(("a", rank) in expected) for rank in range(3)
    ]
    assert b.incarnation.call().get(timeout=WAIT).values() == [
        int(("b", rank) in expected) for rank in range(2)
    ]


class Stuck(Worker):
    @endpoint
    def wait(self) -> None:
        threading.Event().wait()


def test_a_rank_that_does_not_end_is_killed_after_the_patience(fresh: Fresh) -> None:
    supervisor = Supervisor("one_for_all", patience=0.2)
    stuck = supervisor.spawn(fresh(2), "stuck", Stuck)
    waiting = stuck.slice(gpus=0).wait.call_one()
    crash(stuck.slice(gpus=1), "raise")
    assert isinstance(waiting.exception(WAIT), SupervisionError)
    supervisor.healthy.get(timeout=WAIT)
    assert stuck.incarnation.call().get(timeout=WAIT).values() == [1, 1]


class SlowToEnd(Worker):
    """An actor whose rank 1, after a failure, cleans up until a file exists."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def __cleanup__(self, exc: Exception | None) -> None:
        if exc is not None and current_rank().rank == 1:
            until(self.gate.exists)


def test_a_rank_that_fails_when_it_is_asked_to_end_ends_once(fresh: Fresh, tmp_path: Path) -> None:
    """A failure and the acknowledgement of the stop, received together, count as one exit."""
    gate = tmp_path / "gate"
    supervisor = Supervisor("one_for_all", backoff=0.0)
    mesh = supervisor.spawn(fresh(2), "mesh", SlowToEnd, gate)
    for incarnation in (1, 2, 3):
        crash(mesh.slice(gpus=1), "raise")  # reported to callers, but not yet to the owner
        crash(mesh.slice(gpus=0), "raise")
        until(lambda: supervisor._core._ending)
        gate.touch()
        supervisor.healthy.get(timeout=WAIT)
        assert mesh.incarnation.call().get(timeout=WAIT).values() == [incarnation] * 2
        gate.unlink()
    assert sorted(event.rank for event in supervisor.restarts) == [0] * 3 + [1] * 3


def test_what_cannot_be_asked_or_made_is_not_waited_for(fresh: Fresh) -> None:
    """A request or a restart over a link that was lost earlier fails at once.

    A lost link reports its loss only once, so later users would wait in vain.
    """
    proc = client_proc()
    supervisor = Supervisor()
    mesh = supervisor.spawn(fresh(1), "mesh", Worker)
    supervisor.healthy.get(timeout=WAIT)
    before = tables(proc)
    known = supervisor._by_uid[mesh._uid]
    link = LostLink(known.owned.links[0].uid, Verdict(FAILED, "gone"))
    done = threading.Event()

    def on_reactor() -> None:
        _Ending(supervisor, known, 0, link).ask("replaced", WAIT)
        known.owned.links[0], alive = link, known.owned.links[0]
        supervisor._make(known, 0, "replaced")
        known.owned.links[0] = alive
        done.set()

    proc.reactor.call_soon(on_reactor)
    assert done.wait(WAIT)
    until(lambda: tables(proc)["ports"] <= before["ports"])


def test_too_many_failures_are_the_owners(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    supervisor = Supervisor("one_for_all", max_restarts=2, backoff=0.0)
    workers = supervisor.spawn(fresh(2), "workers", Worker)
    for _ in range(2):
        crash(workers.slice(gpus=0), "exit")
        supervisor.healthy.get(timeout=WAIT)
    assert faults.empty()
    crash(workers.slice(gpus=0), "exit")
    failure = faults.get(timeout=WAIT)
    assert "max_restarts=2" in failure.report()
    assert "exited with non-zero code 3" in failure.report()
    assert failure.crashed_ranks == [0]
    with pytest.raises(SupervisionError, match="max_restarts=2"):
        supervisor.healthy.get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        workers.pid.call().get(timeout=WAIT)
    with pytest.raises(RuntimeError, match="gave up"):
        supervisor.spawn(fresh(1), "more", Worker)
    assert faults.empty()


class Fragile(Worker):
    """An actor whose `__restart__` fails for the first `times` replacements."""

    def __init__(self, where: str, times: int) -> None:
        super().__init__()
        self.where, self.times = where, times

    def __restart__(self, restart: Restart) -> None:
        super().__restart__(restart)
        if self.where == "restart" and restart.incarnation <= self.times:
            raise ValueError("no checkpoint yet")


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_restart_that_fails_is_tried_again(fresh: Fresh, how: str) -> None:
    supervisor = Supervisor(max_restarts=5, backoff=0.01)
    mesh = supervisor.spawn(fresh(1), "fragile", Fragile, "restart", 2)
    crash(mesh, how)
    supervisor.healthy.get(timeout=WAIT)
    assert mesh.incarnation.call_one().get(timeout=WAIT) == 3
    assert "no checkpoint yet" in mesh.reason.call_one().get(timeout=WAIT)[0]
    assert [event.incarnation for event in supervisor.restarts] == [3]


def test_a_restart_that_never_succeeds_is_given_up(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    supervisor = Supervisor(max_restarts=3, backoff=0.0)
    mesh = supervisor.spawn(fresh(1), "fragile", Fragile, "restart", 99)
    crash(mesh, "raise")
    assert "no checkpoint yet" in faults.get(timeout=WAIT).report()
    with pytest.raises(SupervisionError):
        supervisor.healthy.get(timeout=WAIT)


class Unborn(Actor):
    def __init__(self) -> None:
        raise ValueError("never")


def test_a_constructor_that_always_fails(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    supervisor = Supervisor(max_restarts=2, backoff=0.0)
    supervisor.spawn(fresh(1), "unborn", Unborn)
    with pytest.raises(SupervisionError, match="never"):
        supervisor.healthy.get(timeout=WAIT)
    assert "never" in faults.get(timeout=WAIT).report()


def test_async_actors_restore_before_their_first_message(fresh: Fresh) -> None:
    supervisor = Supervisor()
    mesh = supervisor.spawn(fresh(1), "mesh", AsyncWorker)
    crash(mesh, "over")
    supervisor.healthy.get(timeout=WAIT)
    assert mesh.incarnation.call_one().get(timeout=WAIT) == 1


@pytest.mark.failures
def test_the_bootstrap_callable_runs_in_a_replaced_process(fresh: Fresh) -> None:
    def bootstrap() -> None:
        os.environ["BOOTED"] = "yes"

    class Booted(Worker):
        @endpoint
        def booted(self) -> str:
            return os.environ.get("BOOTED", "no")

    supervisor = Supervisor()
    mesh = supervisor.spawn(fresh(2, bootstrap=bootstrap), "mesh", Booted)
    crash(mesh.slice(gpus=1), "kill")
    supervisor.healthy.get(timeout=WAIT)
    assert mesh.booted.call().get(timeout=WAIT).values() == ["yes", "yes"]


class Owner(Actor):
    """An actor that supervises its own mesh.

    Ranks that its supervisor gives up are reported to `__supervise__`.
    """

    def __init__(self, max_restarts: int) -> None:
        self.events: list[Restarted] = []
        self.failures: list[str] = []
        self.procs = this_host().spawn_procs({"gpus": 2})
        self.supervisor = Supervisor(
            max_restarts=max_restarts, backoff=0.0, on_restart=self.events.append
        )
        self.workers: Any = self.supervisor.spawn(self.procs, "workers", Worker)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.report())
        return True

    @endpoint
    def crash(self, rank: int) -> None:
        crash(self.workers.slice(gpus=rank), "exit")

    @endpoint
    def healthy(self) -> list[int]:
        self.supervisor.healthy.get(timeout=WAIT)
        found: list[int] = self.workers.incarnation.call().get(timeout=WAIT).values()
        return found

    @endpoint
    def told(self) -> tuple[list[Restarted], list[str]]:
        return self.events, self.failures


def test_an_actor_supervises(fresh: Fresh) -> None:
    owner = fresh(1).spawn("owner", Owner, 2)
    owner.crash.call_one(1).get(timeout=WAIT)
    assert owner.healthy.call_one().get(timeout=WAIT) == [0, 1]
    owner.crash.call_one(0).get(timeout=WAIT)
    assert owner.healthy.call_one().get(timeout=WAIT) == [1, 1]
    events, failures = until(lambda: _two(owner.told.call_one().get(timeout=WAIT)))
    assert [(event.rank, event.incarnation) for event in events] == [(1, 1), (0, 1)]
    assert failures == []
    owner.crash.call_one(0).get(timeout=WAIT)
    until(lambda: owner.told.call_one().get(timeout=WAIT)[1])


def _two(told: Any) -> Any:
    return told if len(told[0]) == 2 else None


def test_restarts_in_the_scripts_own_process(faults: queue.Queue[Any]) -> None:
    supervisor = Supervisor("one_for_all")
    mesh = supervisor.spawn(this_proc(), "mesh", Worker, 5)
    other = supervisor.spawn(this_proc(), "other", Worker, 6)
    assert mesh.add.call_one(1).get(timeout=WAIT) == 6
    crash(mesh, "raise")
    supervisor.healthy.get(timeout=WAIT)
    assert mesh.add.call_one(1).get(timeout=WAIT) == 6
    assert other.incarnation.call_one().get(timeout=WAIT) == 1
    for one in (mesh, other):
        one.stop().get(timeout=WAIT)
    assert faults.empty()


def test_on_restart_is_told_and_may_fail(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    events: queue.Queue[Restarted] = queue.Queue()

    def on_restart(event: Restarted) -> None:
        events.put(event)
        raise ValueError("the hook's own mistake")

    supervisor = Supervisor(on_restart=on_restart)
    mesh = supervisor.spawn(fresh(1), "mesh", Worker)
    crash(mesh, "raise")
    event = events.get(timeout=WAIT)
    assert (event.mesh_name, event.rank, event.incarnation) == ("mesh", 0, 1)
    assert event.seconds > 0
    assert "the hook's own mistake" in faults.get(timeout=WAIT).report()


def test_a_stopped_mesh_does_not_come_back(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    procs = fresh(2)
    supervisor = Supervisor(backoff=30.0, max_backoff=30.0)
    mesh = supervisor.spawn(procs, "mesh", Worker)
    crash(mesh.slice(gpus=0), "raise")
    supervisor.healthy.get(timeout=WAIT)
    crash(mesh.slice(gpus=0), "raise")  # the replacement now waits for its back-off
    mesh.stop("enough").get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        mesh.pid.call().get(timeout=WAIT)
    assert len(supervisor.restarts) == 1
    assert faults.empty()


def test_stopped_procs_are_not_replaced(fresh: Fresh, faults: queue.Queue[Any]) -> None:
    procs = fresh(2)
    supervisor = Supervisor()
    mesh = supervisor.spawn(procs, "mesh", Worker)
    crash(mesh.slice(gpus=0), "kill")
    supervisor.healthy.get(timeout=WAIT)
    pids = mesh.pid.call().get(timeout=WAIT).values()
    procs.stop().get(timeout=WAIT)
    for pid in pids:  # including that of the replacement
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(supervisor.restarts) == 1
    assert faults.empty()


@pytest.mark.parametrize("how", ["stop the procs", "stop the mesh"])
def test_a_supervisor_forgets_a_mesh_that_was_stopped(fresh: Fresh, how: str) -> None:
    proc = client_proc()
    before = tables(proc)
    supervisor = Supervisor()
    mesh = supervisor.spawn(fresh(2), "mesh", Worker)
    crash(mesh.slice(gpus=0), "raise")
    supervisor.healthy.get(timeout=WAIT)
    (mesh if how == "stop the mesh" else mesh._proc_mesh).stop().get(timeout=WAIT)
    until(lambda: not supervisor._meshes and not supervisor._by_uid)
    mesh._proc_mesh.stop().get(timeout=WAIT)
    until(lambda: all(size <= before[name] for name, size in tables(proc).items()))
    assert mesh._uid not in context().actor_instance._meshes
    supervisor.healthy.get(timeout=WAIT)


def test_a_rank_that_stops_on_purpose_is_not_restarted(
    fresh: Fresh, faults: queue.Queue[Any]
) -> None:
    class Leaver(Worker):
        @endpoint
        def leave(self) -> None:
            context().actor_instance.stop("done here")

    supervisor = Supervisor("one_for_all")
    mesh = supervisor.spawn(fresh(2), "mesh", Leaver)
    mesh.slice(gpus=0).leave.call_one().get(timeout=WAIT)
    until(lambda: mesh.slice(gpus=0).pid.call_one().exception(WAIT))
    supervisor.healthy.get(timeout=WAIT)
    assert supervisor.restarts == []
    crash(mesh.slice(gpus=1), "raise")
    supervisor.healthy.get(timeout=WAIT)
    assert [event.rank for event in supervisor.restarts] == [1]
    assert faults.empty()


def test_many_ranks_at_once_are_one_fault_per_process(fresh: Fresh) -> None:
    procs = fresh(4)
    supervisor = Supervisor(max_restarts=4, backoff=0.0)
    meshes = [supervisor.spawn(procs, f"mesh{n}", Worker) for n in range(3)]
    pids = meshes[0].pid.call().get(timeout=WAIT).values()
    supervisor.healthy.get(timeout=WAIT)
    for pid in pids:
        kill(pid)
    until(lambda: len(supervisor.restarts) == 12)
    supervisor.healthy.get(timeout=WAIT)
    for mesh in meshes:
        assert mesh.incarnation.call().get(timeout=WAIT).values() == [1] * 4


def test_bad_arguments() -> None:
    async def later(event: Restarted) -> None: ...

    for options in (
        {"strategy": "all_for_one"},
        {"max_restarts": -1},
        {"within": 0},
        {"backoff": 2.0, "max_backoff": 1.0},
        {"patience": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            Supervisor(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_restart"):
        Supervisor(on_restart=later)
