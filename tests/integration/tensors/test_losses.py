"""The table of losses: what each kind of work raises when a process of its mesh is killed.

Whatever the processes were doing, each pending and each later fetch raises a `SupervisionError`
with the text that calls of actors raise. No fetch hangs, the script is not interrupted, and the
same client goes on with another mesh.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, fetch_shard, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.pipe import remote_generator
from monarch._tensors.recording import compile as compiled
from monarch.actor import Actor, ProcMesh, SupervisionError, Supervisor, endpoint, this_host
from monarch.job import ProcessJob

pytestmark = [pytest.mark.torch, pytest.mark.failures]

KILLED = r"Killed\(sig=9\)"


def end_here(x: Any, rank: Any) -> Any:
    if int(rank) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


end = remote(end_here, propagate=lambda x, rank: x.clone())
"""Kills the process of rank 1."""


@remote(propagate=lambda x: x.clone())
def end_for_three(x: Any) -> Any:
    """Kill each process whose first number is 3."""
    if float(x[0]) == 3.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


def sends_once(pipe: Any) -> None:
    pipe.send(torch.ones(2))
    pipe.recv()


@remote_generator(sends_once)  # type: ignore[arg-type]  # a function is the same as its path
def described(pipe: Any) -> Any:
    while True:
        yield torch.empty(2)


class Guard(Actor):
    """An actor on the mesh."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def other() -> Iterator[ProcMesh]:
    """Return the mesh with which the client goes on."""
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs
    procs.stop().get(timeout=60)


# -- work that is under way when the process is killed; each returns a tensor ---------------------


def nothing(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    x = torch.ones(2)
    pids = remote(os.getpid).call().get(timeout=60)
    os.kill(pids.item(gpus=1), signal.SIGKILL)
    return x


def a_function(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    return end(torch.ones(2), rank)


def a_collective(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    inspect(torch.ones(2).reduce("gpus"))  # the group is there
    return end(torch.ones(2), rank).reduce("gpus")


def a_first_collective(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    return end(torch.ones(2), rank).reduce("gpus")


def a_replay(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    stream = Stream("other")

    @compiled
    def step(x: Any) -> Any:
        borrowed, borrow = stream.borrow(x)
        with borrow, stream.activate():
            end_for_three(borrowed)
        return x.reduce("gpus")

    for number in (1, 2):
        inspect(step(torch.ones(2) * number))
    return step(torch.ones(2) * (2 + rank))


def a_pipe(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    pipe = described()
    inspect(pipe.recv())
    end(torch.ones(2), rank)
    return pipe.recv()


def a_copy_to_another_mesh(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    x = end(torch.ones(2), rank)
    return x, x.to_mesh(other)


def a_copy_from_another_mesh(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    end(torch.ones(2), rank)
    with other.activate():
        x = torch.ones(2)
    return x.to_mesh(mesh)


def a_borrow(mesh: Any, rank: Any, other: ProcMesh) -> Any:
    stream = Stream("other")
    x = torch.ones(2)
    borrowed, borrow = stream.borrow(x, mutable=True)
    kept, lent = stream.borrow(rank)
    with stream.activate():
        borrowed.add_(end(borrowed, kept))
    borrow.drop()
    lent.drop()
    return x


WORK = [
    *(nothing, a_function, a_collective, a_first_collective, a_replay),
    *(a_pipe, a_copy_to_another_mesh, a_copy_from_another_mesh, a_borrow),
]


def lost(procs: ProcMesh, other: ProcMesh, work: Callable[[Any, Any, ProcMesh], Any]) -> None:
    """Check what a program sees when a process of `procs` is killed during `work`."""
    guards = procs.spawn("guards", Guard)
    guards.pid.call().get(timeout=60)
    with procs.activate():
        rank = procs.rank_tensor("gpus")
        mesh = rank.mesh
        before = torch.zeros(2)
        copied: list[Any] = []
        pending: list[Any] = []
        with pytest.raises(SupervisionError, match=KILLED) as first:
            _issue(lambda: work(mesh, rank, other), before, copied, pending)
        for future in pending:
            with pytest.raises(SupervisionError, match=KILLED):
                future.get(timeout=120)
        with pytest.raises(SupervisionError, match=KILLED):
            fetch_shard(before).get(timeout=120)
        with pytest.raises(SupervisionError, match=KILLED):
            before.add(1)
        with pytest.raises(SupervisionError, match=KILLED) as called:
            guards.pid.call().get(timeout=120)
    assert first.value.failure is not None
    assert called.value.failure is not None
    assert first.value.failure.root.error == called.value.failure.root.error
    with pytest.raises(SupervisionError, match=KILLED):
        mesh.exit()
    for copy in copied:
        with pytest.raises(RemoteException, match="did not arrive: a process of its mesh is lost"):
            inspect(copy)
    with other.activate():
        total = (torch.ones(2) + other.rank_tensor("gpus")).reduce("gpus")
        assert inspect(total, gpus=1).tolist() == [3.0, 3.0]


def _issue(work: Callable[[], Any], before: Any, copied: list[Any], pending: list[Any]) -> None:
    """Issue the work and two fetches, and wait; any of these may be the first to raise."""
    made = work()
    value, *copied[:] = made if type(made) is tuple else (made,)
    pending.append(fetch_shard(value))
    pending.append(fetch_shard(before, gpus=0))
    pending[0].get(timeout=120)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_a_process_is_killed_during(
    other: ProcMesh, work: Callable[[Any, Any, ProcMesh], Any]
) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    lost(procs, other, work)
    procs.stop().get(timeout=60)


def test_a_process_on_another_host_is_killed(other: ProcMesh) -> None:
    job = ProcessJob({"hosts": 1})
    procs = job.state(cached_path=None).hosts.spawn_procs({"gpus": 2})
    try:
        lost(procs.slice(hosts=0), other, a_collective)
    finally:
        procs.stop().get(timeout=60)
        job.kill()


def test_a_supervised_process_is_killed_in_a_replay(other: ProcMesh) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    supervisor = Supervisor(max_restarts=3, within=60)
    supervisor.spawn(procs, "guard", Guard)
    with procs.activate():
        rank, before = procs.rank_tensor("gpus"), torch.zeros(2)
        with pytest.raises(SupervisionError, match=KILLED):
            _issue(lambda: a_replay(rank.mesh, rank, other), before, [], [])
        with pytest.raises(SupervisionError, match=KILLED):
            before.add(1)
    supervisor.healthy.get(timeout=120)
    with procs.activate():
        total = (torch.ones(2) + procs.rank_tensor("gpus")).reduce("gpus")
        assert inspect(total, gpus=1).tolist() == [3.0, 3.0]
    procs.stop().get(timeout=60)


class Driver(Actor):
    """An actor with meshes of its own."""

    def __supervise__(self, failure: Any) -> bool:
        return True

    @endpoint
    def drive(self) -> tuple[str, str, list[float]]:
        """Return what fetch and operation raise after a loss, and what the next mesh gives."""
        procs = this_host().spawn_procs({"gpus": 2})
        with procs.activate():
            value = torch.ones(2)
            end(value, procs.rank_tensor("gpus"))
            found = []
            for use in (inspect, torch.neg):
                try:
                    use(value)
                except SupervisionError as error:
                    found.append(str(error))
        after = this_host().spawn_procs({"gpus": 1})
        with after.activate():
            values = inspect(torch.ones(2) + 1).tolist()
        for mesh in (procs, after):
            mesh.stop().get(timeout=60)
        return found[0], found[1], values


def test_the_script_of_the_mesh_is_an_actor() -> None:
    procs = this_host().spawn_procs()
    driver = procs.spawn("driver", Driver)
    fetched, operated, values = driver.drive.call_one().get(timeout=240)
    assert "Killed(sig=9)" in fetched
    assert "Killed(sig=9)" in operated
    assert values == [2.0, 2.0]
    procs.stop().get(timeout=60)
