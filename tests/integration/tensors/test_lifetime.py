"""How a program with distributed tensors ends, and what the loss of a process does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import fetch_shard, inspect, remote
from monarch._tensors.engine import Engine
from monarch._tensors.errors import RemoteException
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch.actor import Actor, SupervisionError, Supervisor, this_host

pytestmark = pytest.mark.torch

PROGRAM = """
import os, queue, select
import torch
import monarch.actor
from monarch import inspect, remote
from monarch.actor import this_host

faults = queue.Queue()

@remote(propagate=lambda x: x.clone())
def fail(x):
    raise LookupError("no such thing")

procs = this_host().spawn_procs({{"gpus": 2}})
with procs.activate():
    lost = {made}(torch.ones(2))
    {then}
"""


def run(then: str, made: str = "fail") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then, made=made)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_error_that_no_call_raised_is_reported_at_exit() -> None:
    ended = run("pass")
    assert ended.returncode == 1
    assert "LookupError: no such thing" in ended.stderr
    assert "lost = fail(torch.ones(2))" in ended.stderr or "<string>" in ended.stderr


@pytest.mark.parametrize(
    "end", ["procs.stop().get()", "monarch.actor.shutdown_context().get()", "lost.mesh.exit()"]
)
def test_an_error_that_no_call_raised_is_reported_after_a_stop(end: str) -> None:
    ended = run(end)
    assert ended.returncode == 1
    assert "LookupError: no such thing" in ended.stderr


LOSS = """
    pid = remote(os.getpid).call().get().item(gpus=1)
    gone = os.pidfd_open(pid)
    os.kill(pid, 9)
    select.select([gone], [], [])
    {then}
    print("end")
""".strip()


@pytest.mark.failures
def test_a_loss_that_no_call_raised_is_reported_at_exit() -> None:
    ended = run(LOSS.format(then="pass"), "torch.clone")
    assert (ended.returncode, ended.stdout) == (1, "end\n")
    assert "Killed(sig=9)" in ended.stderr
    assert "No call of the script raised this failure" in ended.stderr


@pytest.mark.failures
def test_a_loss_that_a_call_raised_is_not_reported_again() -> None:
    then = """
    try:
        while True:
            lost = lost + 1
    except monarch.actor.SupervisionError as error:
        print(error)
""".strip()
    ended = run(LOSS.format(then=then), "torch.clone")
    assert ended.returncode == 0
    assert "Killed(sig=9)" in ended.stdout
    assert "Killed(sig=9)" not in ended.stderr


@pytest.mark.failures
def test_the_hook_for_faults_gets_the_loss() -> None:
    then = "assert 'Killed(sig=9)' in str(faults.get(timeout=60))"
    body = f"monarch.actor.unhandled_fault_hook = faults.put\n    {LOSS.format(then=then)}"
    ended = run(body, "torch.clone")
    assert ended.returncode == 0, ended.stderr


def test_an_error_that_was_raised_is_not_reported_again() -> None:
    ended = run(
        """
    try:
        inspect(lost)
    except Exception as error:
        print(type(error).__name__)
""".strip()
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "RemoteException")
    assert "no such thing" not in ended.stderr


def test_exit_raises_the_first_error_and_ends_the_engine() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    mesh = spawn_tensor_engine(procs)
    broken = remote(_broken, propagate=lambda x: x.clone())
    with mesh.activate():
        value = torch.ones(2)
        broken(value)
    with pytest.raises(Exception, match="not this time"):
        mesh.exit()
    with pytest.raises(RuntimeError, match="exit"):
        value.add(1)
    with procs.activate():
        assert inspect(torch.ones(1)).tolist() == [1.0]
    procs.stop().get(timeout=60)


def _fetch_often(value: Any) -> None:
    for _ in range(100_000):
        inspect(value)


def _broken(x: Any) -> Any:
    raise ValueError("not this time")


@pytest.mark.failures
def test_the_loss_of_a_process_fails_fetches_and_is_no_interrupt() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    with procs.activate():
        value = torch.ones(2)
        pids = remote(os.getpid).call().get(timeout=60)
        os.kill(pids.item(gpus=1), signal.SIGKILL)
        with pytest.raises(SupervisionError):
            _fetch_often(value)
        for _ in range(2):
            with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
                fetch_shard(value).get(timeout=60)
    with pytest.raises(SupervisionError):
        value.mesh.exit()
    procs.stop().get(timeout=60)


def _end_here(x: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.failures
def test_a_copy_from_a_mesh_that_is_lost_fails_before_its_deadline() -> None:
    first, second = (this_host().spawn_procs({"gpus": 1}) for _ in range(2))
    with first.activate():
        value = remote(_end_here, propagate=lambda x: x.clone())(torch.ones(1))
    copied = value.to_mesh(second)
    with pytest.raises(RemoteException, match="rank 0 did not arrive: a process of its mesh"):
        fetch_shard(copied).get(timeout=150)  # less than the deadline of a copy
    with pytest.raises(SupervisionError):
        value.mesh.exit()
    for procs in (first, second):
        procs.stop().get(timeout=60)


def test_the_first_operation_may_fail() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    broken = remote(_broken, propagate=torch.ones)
    with procs.activate(), pytest.raises(Exception, match="not this time"):
        inspect(broken(2))
    procs.stop().get(timeout=60)


class Guard(Actor):
    """An actor to supervise."""


@pytest.mark.failures
def test_a_supervised_mesh_is_activated_again_after_a_loss() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    supervisor = Supervisor(max_restarts=3, within=60)
    supervisor.spawn(procs, "guard", Guard)
    pids = remote(os.getpid)
    with procs.activate():
        old = torch.ones(2)
        before = pids.call().get(timeout=60)
        os.kill(before.item(gpus=1), signal.SIGKILL)
        with pytest.raises(SupervisionError):
            _fetch_often(old)
    supervisor.healthy.get(timeout=60)
    with procs.activate():
        with pytest.raises(SupervisionError):
            old.add(1)
        new = torch.ones(2) + procs.rank_tensor("gpus")
        new = new.reduce("gpus")
        assert inspect(new, gpus=1).tolist() == [3.0, 3.0]
        after = pids.call().get(timeout=60)
    assert before.item(gpus=0) == after.item(gpus=0)
    assert before.item(gpus=1) != after.item(gpus=1)
    procs.stop().get(timeout=60)


@pytest.mark.failures
def test_an_activation_after_a_restart_is_new_although_the_loss_is_noted_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[tuple[Engine, Any]] = []
    procs = this_host().spawn_procs({"gpus": 2})
    supervisor = Supervisor(max_restarts=3, within=60)
    supervisor.spawn(procs, "guard", Guard)
    pids = remote(os.getpid)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_lose", lambda *given: late.append(given))
        with procs.activate():
            old = torch.ones(2)
            os.kill(pids.call().get(timeout=60).item(gpus=1), signal.SIGKILL)
            with pytest.raises(SupervisionError):
                _fetch_often(old)
        with procs.activate():  # no reuse of what is lost, before the restart
            assert spawn_tensor_engine(procs).client is not old.mesh.client
        supervisor.healthy.get(timeout=60)
    with procs.activate():
        new = (torch.ones(2) + procs.rank_tensor("gpus")).reduce("gpus")
        assert inspect(new, gpus=1).tolist() == [3.0, 3.0]
        engine = new.mesh.client
        for noted in late:
            Engine._lose(*noted)
        assert spawn_tensor_engine(procs).client is engine
        assert inspect(new + 1, gpus=0).tolist() == [4.0, 4.0]
        with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
            old.add(1)
    procs.stop().get(timeout=60)
