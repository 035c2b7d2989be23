"""Replicas that are killed in the middle of steps: no step is lost, doubled or half applied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch.job import ProcessJob
from monarch.job.os_process import OsProcess, descendants, wait_for
from monarch.training import Event, Replicas, TrainingError

WAIT = 120.0

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.failures]


class Learner:
    """A small network, with statistics that change in each forward pass."""

    def __init__(self, hidden: int = 16) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, hidden),
            torch.nn.BatchNorm1d(hidden),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden, 1),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def loss(self, step: int, number: int, count: int) -> Any:
        pictures = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
        mine = pictures[number::count]
        return ((self.model(mine).squeeze(1) - mine.sum(1)) ** 2).mean()

    def state(self) -> list[Any]:
        values = [*self.model.state_dict().values()]
        values += [
            value for each in self.optimizer.state.values() for _, value in sorted(each.items())
        ]
        return [value.detach().clone() for value in values]


def reference(steps: int, count: int, **options: Any) -> list[Any]:
    """Return the state after a training without replicas, with the same shares."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    learner = Learner(**options)
    parameters, buffers = [*learner.model.parameters()], [*learner.model.buffers()]
    for step in range(steps):
        before = [each.clone() for each in buffers]
        sums: list[Any] = []
        for number in range(count):
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            learner.optimizer.zero_grad()
            learner.loss(step, number, count).backward()
            values = [each.grad.clone() for each in parameters] + [b.clone() for b in buffers]
            sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
        means = [each / count if each.is_floating_point() else each // count for each in sums]
        for parameter, mean in zip(parameters, means, strict=False):
            parameter.grad = mean
        for buffer, mean in zip(buffers, means[len(parameters) :], strict=True):
            buffer.copy_(mean)
        learner.optimizer.step()
    torch.set_num_threads(threads)
    return learner.state()


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Trainer(Actor):
    """`deaths`: by rank, steps at which it does something to itself, once, and at which moment."""

    def __init__(
        self, replicas: Any, folder: str, deaths: dict[int, dict[int, str]], **options: Any
    ) -> None:
        from monarch.training import Manager

        torch.set_num_threads(1)
        self.learner = Learner(**options)
        self.manager = Manager(replicas, self.learner.model, self.learner.optimizer)
        self.folder, self.deaths = Path(folder), deaths.get(self.manager.rank, {})

    def moment(self, name: str, step: int) -> None:
        if self.deaths.get(step) != name:
            return
        try:
            (self.folder / f"{self.manager.rank}-{step}").touch(exist_ok=False)
        except FileExistsError:  # the one before has died here
            return
        if name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "raise":
            raise ValueError("a batch is empty")
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def train(self, steps: int) -> list[Any]:
        manager = self.manager
        while manager.quorum(until=steps):
            step = manager.step
            for share in manager.shares():
                self.moment("forward", step)
                loss = self.learner.loss(share.step, share.number, share.count)
                loss.backward()
                share.report(loss.item())
            self.moment("stop", step)
            self.moment("raise", step)
            manager.average()
            self.moment("averaged", step)
            if manager.should_commit():
                self.moment("committed", step)
                self.learner.optimizer.step()
        return self.learner.state()

    @endpoint
    def forget(self) -> str:
        try:
            self.learner.optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.fixture
def procs() -> Iterator[Any]:
    made: list[ProcMesh] = []

    def make(count: int) -> ProcMesh:
        made.append(this_host().spawn_procs({"replicas": count}))
        return made[-1]

    yield make
    for mesh in made:
        mesh.stop().get()


def of_kind(replicas: Replicas, kind: str) -> list[Event]:
    return [event for event in replicas.events if event.kind == kind]


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [16, 8000])  # rows that are read whole, and in parts
def test_kills_at_any_moment_of_a_step_leave_no_trace(
    procs: Any, tmp_path: Path, hidden: int
) -> None:
    replicas = Replicas(3, min_groups=3, shares=3)
    deaths = {1: {2: "forward"}, 2: {4: "averaged"}, 0: {6: "committed"}}
    trainers = replicas.spawn(
        procs(3), "trainers", Trainer, replicas.coordinator, str(tmp_path), deaths, hidden=hidden
    )
    states = replicas.run(trainers, "train", 9)

    expected = reference(9, 3, hidden=hidden)
    assert sorted(states) == [0, 1, 2]
    assert all(equal(expected, state) for state in states.values())
    assert len(of_kind(replicas, "lost")) == len(replicas.restarts) == 3
    assert len(of_kind(replicas, "commit")) == 9
    assert sum(event.rolled_back for event in replicas.events) == 0


@pytest.mark.slow
def test_the_others_go_on_and_the_replacement_catches_up(procs: Any, tmp_path: Path) -> None:
    replicas = Replicas(3, shares=3)
    trainers = replicas.spawn(
        procs(3), "trainers", Trainer, replicas.coordinator, str(tmp_path), {2: {3: "forward"}}
    )
    states = replicas.run(trainers, "train", 12)

    expected = reference(12, 3)
    assert sorted(states) == [0, 1, 2]
    assert all(equal(expected, state) for state in states.values())
    assert any(event.groups == (0, 1) for event in of_kind(replicas, "commit"))
    # More steps: all have the state already.
    states = replicas.run(trainers, "train", 15)
    assert all(equal(reference(15, 3), state) for state in states.values())
    first = trainers.slice(replicas=0)
    assert "optimizer.step() without should_commit()" in first.forget.call_one().get()


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced(procs: Any, tmp_path: Path) -> None:
    replicas = Replicas(2, shares=2, timeout=5)
    trainers = replicas.spawn(
        procs(2), "trainers", Trainer, replicas.coordinator, str(tmp_path), {1: {3: "stop"}}
    )
    states = replicas.run(trainers, "train", 8)

    expected = reference(8, 2)
    assert states  # (on a busy machine the replacement may come too late)
    assert all(equal(expected, state) for state in states.values())
    assert any("was expelled" in event.detail for event in of_kind(replicas, "lost"))


@pytest.mark.slow
def test_the_memory_of_a_neighbour_replaces_the_only_copy(procs: Any, tmp_path: Path) -> None:
    """One group of two ranks, each with its own part of the state."""
    replicas = Replicas(1, width=2, copy_every=1)
    trainers = replicas.spawn(
        procs(2), "trainers", Trainer, replicas.coordinator, str(tmp_path), {1: {20: "averaged"}}
    )
    states = replicas.run(trainers, "train", 24)

    assert all(equal(reference(24, 1), state) for state in states.values())
    assert sorted(states) == [0, 1]
    assert len(replicas.restarts) == 1
    # Which steps are lost depends on how fast the copies were made; not all can be.
    assert sum(event.rolled_back for event in replicas.events) < 20


@pytest.mark.slow
def test_a_checkpoint_on_disk_outlives_all_ranks(procs: Any, tmp_path: Path) -> None:
    """A later training goes on from it, too."""
    options: dict[str, Any] = {"folder": tmp_path / "saved", "save_every": 5}
    replicas = Replicas(1, **options)
    trainers = replicas.spawn(procs(1), "trainers", Saving, replicas.coordinator, str(tmp_path))
    (state,) = replicas.run(trainers, "train", 12).values()

    assert equal(reference(12, 1), state)
    assert len(replicas.restarts) == 1
    rolled_back = sum(event.rolled_back for event in replicas.events)
    assert 0 < rolled_back < 12
    assert of_kind(replicas, "saved")

    later = Replicas(1, **options)
    again = later.spawn(procs(1), "later", Saving, later.coordinator, str(tmp_path))
    (state,) = later.run(again, "train", 14).values()
    assert equal(reference(14, 1), state)
    assert len(of_kind(later, "commit")) < 14


class Saving(Trainer):
    """Dies once there is a complete checkpoint, of a step that it has."""

    def __init__(self, replicas: Any, folder: str) -> None:
        super().__init__(replicas, folder, {0: {7: "averaged"}})

    def moment(self, name: str, step: int) -> None:
        if (step, name) == (7, "averaged"):
            # It is written in the background: wait for its last file.
            pattern = "saved/step-000000005-*-5/position-0/.metadata"
            while not [*self.folder.glob(pattern)]:
                os.sched_yield()
        super().moment(name, step)


@pytest.mark.slow
def test_an_error_of_the_program_ends_the_training(procs: Any, tmp_path: Path) -> None:
    replicas = Replicas(2)
    trainers = replicas.spawn(
        procs(2), "trainers", Trainer, replicas.coordinator, str(tmp_path), {1: {3: "raise"}}
    )
    with pytest.raises(ActorError, match="a batch is empty") as caught:
        replicas.run(trainers, "train", 1_000_000)
    assert isinstance(caught.value.exception, ValueError)
    assert of_kind(replicas, "failed")


class Lingering(Trainer):
    """Waits at a step until the test has done something."""

    def moment(self, name: str, step: int) -> None:
        if (name, step) == ("averaged", 5):
            (self.folder / f"{self.manager.rank}-waits").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    made = ProcessJob({"hosts": 3})
    yield made
    made.kill()


def kill_host(job: ProcessJob, rank: int) -> None:
    worker: OsProcess = job._hosts["hosts"][rank][1]
    processes = [worker, *descendants([worker])]
    for process in processes:
        process.send(signal.SIGKILL)
    assert not wait_for(processes, WAIT)


def train_and_lose_a_host(
    job: ProcessJob, replicas: Replicas, trainers: Any, folder: Path
) -> dict[int, Any]:
    """Run 10 steps, and kill the second host while both ranks linger in one."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(replicas.run, trainers, "train", 10)
        until([folder / "0-waits", folder / "1-waits"])
        kill_host(job, 1)
        (folder / "go").touch()
        return running.result(WAIT)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [True, False])
def test_a_host_is_lost_in_the_middle_of_a_step(
    job: ProcessJob, tmp_path: Path, spare: bool
) -> None:
    """With a spare host its ranks go there, in place; without one the others go on."""
    hosts = job.state(cached_path=None).hosts
    spares = hosts.slice(hosts=2) if spare else None
    # At the end those that are left wait so long for a rank that is not replaced.
    timeout = 60.0 if spare else 5.0
    replicas = Replicas(2, shares=2, copy_every=1, spares=spares, timeout=timeout)
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs({"replicas": 1})
    trainers = replicas.spawn(procs, "trainers", Lingering, replicas.coordinator, str(tmp_path), {})
    states = train_and_lose_a_host(job, replicas, trainers, tmp_path)
    expected = reference(10, 2)
    assert sorted(states) == ([0, 1] if spare else [0])
    assert all(equal(expected, state) for state in states.values())
    assert sum(event.rolled_back for event in replicas.events) == 0
    assert len(of_kind(replicas, "lost")) == 1
    (restart,) = replicas.restarts if spare else [None]
    if restart is not None:
        assert restart.host == job._hosts["hosts"][2][0]


class Neighbouring(Lingering):
    """Each step ends when the copies that it was asked for are complete, but before the vote."""

    def moment(self, name: str, step: int) -> None:
        deadline = time.monotonic() + WAIT
        if name == "averaged" and not (self.folder / "go").exists():
            role = self.manager._role
            assert role is not None
            while any(each[1:] not in self.manager._snapshots for each in role.pull):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        super().moment(name, step)


@pytest.mark.slow
def test_the_state_of_a_lost_host_comes_from_the_memory_of_its_neighbour(
    job: ProcessJob, tmp_path: Path
) -> None:
    """One group over two hosts: the loss of one leaves no rank with the state of its position."""
    hosts = job.state(cached_path=None).hosts
    replicas = Replicas(1, width=2, copy_every=1, spares=hosts.slice(hosts=2))
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs({"ranks": 1})
    made = (replicas.coordinator, str(tmp_path), {})
    trainers = replicas.spawn(procs, "trainers", Neighbouring, *made)
    states = train_and_lose_a_host(job, replicas, trainers, tmp_path)
    expected = reference(10, 1)
    assert sorted(states) == [0, 1]
    assert all(equal(expected, state) for state in states.values())
    assert sum(event.rolled_back for event in replicas.events) == 0
    assert [restart.rank for restart in replicas.restarts] == [1]


def until(paths: list[Path]) -> None:
    deadline = time.monotonic() + WAIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Uneven(Trainer):
    """The first position of a group has rows that are read in parts, the second has small ones."""

    def __init__(self, replicas: Any, folder: str, stop_at: dict[int, int]) -> None:
        from monarch.actor import current_rank

        self.stop_at = stop_at
        hidden = 16 if current_rank().rank % replicas.width else 8000
        super().__init__(replicas, folder, {}, hidden=hidden)

    @endpoint
    def uneven(self, steps: int) -> int:
        manager, rank = self.manager, self.manager.rank
        while manager.quorum(until=self.stop_at.get(rank, steps)):
            for share in manager.shares():
                self.learner.loss(share.step, share.number, share.count).backward()
            if manager.should_commit():
                self.learner.optimizer.step()
        return manager.step

    @endpoint
    def leave_early(self) -> None:
        manager = self.manager
        while manager.quorum(until=3):
            for _ in manager.shares():
                break
            manager.should_commit()


@pytest.mark.slow
def test_positions_with_small_and_big_parts_train_together_and_save(
    procs: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    replicas = Replicas(2, width=2, timeout=30, folder=folder, save_every=2)
    trainers = replicas.spawn(procs(4), "uneven", Uneven, replicas.coordinator, str(tmp_path), {})
    assert replicas.run(trainers, "uneven", 12) == dict.fromkeys(range(4), 12)
    assert of_kind(replicas, "saved")
    with pytest.raises(ValueError, match="is of groups of width 2"):
        Replicas(2, folder=folder)


@pytest.mark.slow
def test_ranks_that_want_different_numbers_of_steps(procs: Any, tmp_path: Path) -> None:
    replicas = Replicas(2)
    trainers = replicas.spawn(
        procs(2), "uneven", Uneven, replicas.coordinator, str(tmp_path), {0: 3}
    )
    with pytest.raises(ActorError, match="after 3 steps ranks 0 want no more of them"):
        replicas.run(trainers, "uneven", 6)


@pytest.mark.slow
def test_a_loop_over_shares_that_is_left_early(procs: Any, tmp_path: Path) -> None:
    replicas = Replicas(2)
    trainers = replicas.spawn(procs(2), "uneven", Uneven, replicas.coordinator, str(tmp_path), {})
    with pytest.raises(ActorError, match=r"shares \[[01]\] of this step have no gradients"):
        replicas.run(trainers, "leave_early")


class Counting(threading.Condition):
    """A condition without notifications: each wait ends at once, as if its limit had passed."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.waited += timeout
        return predicate()


@pytest.mark.parametrize("timeout", [3.0, 90.0])
def test_a_rank_that_is_not_replaced_is_given_up_after_the_timeout(timeout: float) -> None:
    replicas = Replicas(2, timeout=timeout)
    replicas._changed = changed = Counting()
    never: Any = object()
    replicas._calls["trainers", 1] = never
    assert not replicas._is_called_again("trainers", 1, never)
    assert changed.waited == timeout


def test_the_script_needs_no_torch() -> None:
    code = "import sys, monarch.training as t; t.Replicas(2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_numbers_that_do_not_fit(procs: Any) -> None:
    with pytest.raises(ValueError, match="min_groups must be between 1 and 2"):
        Replicas(2, min_groups=3)
    with pytest.raises(ValueError, match="save_every needs a folder"):
        Replicas(2, save_every=10)
    replicas = Replicas(2)
    with pytest.raises(ValueError, match="2 replica groups of 1 need 2 procs, and the mesh has 1"):
        replicas.spawn(procs(1), "trainers", Trainer, replicas.coordinator, "", {})
    assert issubclass(TrainingError, RuntimeError)
