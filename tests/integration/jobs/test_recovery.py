"""A supervised mesh on hosts of a job that are killed: its ranks come back in place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, Supervisor, current_rank, endpoint
from monarch.job import LocalJob, ProcessJob
from monarch.job.os_process import OsProcess, descendants, wait_for

WAIT = 120.0


class Worker(Actor):
    @endpoint
    def pid(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def nap(self) -> None:
        """Sleep until after the end of the test."""
        time.sleep(2 * WAIT)

    @endpoint
    def ask(self, other: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = other.pid.call().get(timeout=WAIT).values()
        return found


def kill_host(job: ProcessJob, mesh: str, rank: int) -> OsProcess:
    """Kill a host as a power failure does: worker, agent, launcher, procs."""
    worker: OsProcess = job._hosts[mesh][rank][1]
    processes = [worker, *descendants([worker])]
    for process in processes:
        process.send(signal.SIGKILL)
    assert not wait_for(processes, WAIT)
    return worker


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("spares", ["mesh", "job", "function"])
def test_the_ranks_of_a_killed_host_come_back_in_place(
    spares: str, killed: Any, faults: list[Any]
) -> None:
    job = killed(ProcessJob({"a": 2, "spare": 1} if spares == "mesh" else {"a": 2}))
    state = job.state(cached_path=None)
    given = {
        "mesh": lambda: state.spare,
        "job": lambda: job,
        "function": lambda: lambda address: job.replace_host(address),
    }[spares]()
    supervisor = Supervisor("one_for_one", max_restarts=3, within=60, spares=given)
    mesh = supervisor.spawn(state.a.spawn_procs({"gpus": 2}), "mesh", Worker)
    holder = state.a.slice(hosts=0).spawn_procs().spawn("holder", Worker)
    before = holder.ask.call_one(mesh).get(timeout=WAIT)

    napping = mesh.slice(hosts=1).nap.call()
    kill_host(job, "a", 1)
    with pytest.raises(SupervisionError, match="unreachable"):
        napping.get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)

    after = mesh.pid.call().get(timeout=WAIT).values()
    assert [rank for rank, _ in after] == [0, 1, 2, 3]
    assert before[:2] == after[:2]
    assert not {*before[2:]} & {*after[2:]}
    assert sorted(event.rank for event in supervisor.restarts) == [2, 3]
    place = job._hosts["spare"][0] if spares == "mesh" else job._hosts["a"][1]
    assert {event.host for event in supervisor.restarts} == {place[0]}
    below = {process.pid for process in descendants([place[1]])}
    assert {pid for _, pid in after[2:]} <= below
    # A holder of links to the old procs reaches the new ones, and so does a new process.
    assert holder.ask.call_one(mesh).get(timeout=WAIT) == after
    stranger = state.a.slice(hosts=1).spawn_procs().spawn("stranger", Worker)
    assert stranger.ask.call_one(mesh).get(timeout=WAIT) == after
    assert supervisor.running(mesh) == [0, 1, 2, 3]
    if spares == "mesh":
        with pytest.raises(RuntimeError, match="taken the place of"):
            state.spare.spawn_procs()
    assert not faults


def test_a_mesh_goes_on_smaller_and_grows_when_there_is_a_host(
    killed: Any, faults: list[Any]
) -> None:
    """The job replaces its host later; when that one is lost as well, a spare is added later."""
    job = killed(ProcessJob({"a": 2, "spare": 1}))
    state = job.state(cached_path=None)
    may_replace = threading.Event()

    def replace(address: str) -> str:
        if not may_replace.is_set():
            raise RuntimeError("no machine is free")
        return job.replace_host(address)

    supervisor = Supervisor("one_for_one", max_restarts=9, within=600, min_size=2, spares=replace)
    mesh = supervisor.spawn(state.a.spawn_procs({"gpus": 2}), "mesh", Worker)
    holder = state.a.slice(hosts=0).spawn_procs().spawn("holder", Worker)
    before = holder.ask.call_one(mesh).get(timeout=WAIT)
    for again in (False, True):
        may_replace.clear()
        kill_host(job, "a", 1)
        until(lambda: supervisor.running(mesh) == [0, 1])
        supervisor.healthy.get(timeout=WAIT)
        partial = mesh.pid.options(on_failure="partial").call().get(timeout=WAIT)
        assert [answer for _, answer in partial.successes()] == before[:2]
        if again:
            supervisor.add_spares(state.spare)
        else:
            may_replace.set()
        until(lambda: supervisor.running(mesh) == [0, 1, 2, 3])
        supervisor.healthy.get(timeout=WAIT)
        after = mesh.pid.call().get(timeout=WAIT).values()
        assert [rank for rank, _ in after] == [0, 1, 2, 3]
        assert before[:2] == after[:2]
        assert holder.ask.call_one(mesh).get(timeout=WAIT) == after
        place = job._hosts["spare"][0] if again else job._hosts["a"][1]
        assert {event.host for event in supervisor.restarts[-2:]} == {place[0]}
        assert {pid for _, pid in after[2:]} <= {one.pid for one in descendants([place[1]])}
    assert len(supervisor.restarts) == 4
    assert not faults


def test_jobs_that_cannot_replace_a_host_say_so(killed: Any) -> None:
    job = LocalJob()
    with pytest.raises(RuntimeError, match="the job does not run"):
        job.replace_host("tcp://somewhere:1")
    job.apply()
    with pytest.raises(NotImplementedError, match="LocalJob cannot replace a lost host"):
        job.replace_host("tcp://somewhere:1")
    hosts = killed(ProcessJob({"a": 1}))
    hosts.apply()
    with pytest.raises(ValueError, match=r"no host at tcp://somewhere:1; its hosts are ipc://"):
        hosts.replace_host("tcp://somewhere:1")


def test_spares_that_are_none() -> None:
    with pytest.raises(TypeError, match="spares must be a HostMesh, a job, or a function"):
        Supervisor(spares=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_size must be at least 1"):
        Supervisor(min_size=0)
