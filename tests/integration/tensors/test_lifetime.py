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
from monarch._tensors.mesh import spawn_tensor_engine
from monarch.actor import SupervisionError, this_host

pytestmark = pytest.mark.torch

PROGRAM = """
import torch
from monarch import inspect, remote
from monarch.actor import this_host

@remote(propagate=lambda x: x.clone())
def fail(x):
    raise LookupError("no such thing")

with this_host().spawn_procs({{"gpus": 2}}).activate():
    lost = fail(torch.ones(2))
    {then}
"""


def run(then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)],
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
        with pytest.raises((SupervisionError, RuntimeError)):
            fetch_shard(value).get(timeout=60)
    procs.stop().get(timeout=60)


def test_the_first_operation_may_fail() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    broken = remote(_broken, propagate=torch.ones)
    with procs.activate(), pytest.raises(Exception, match="not this time"):
        inspect(broken(2))
    procs.stop().get(timeout=60)
