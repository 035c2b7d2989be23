"""Pipes: functions that run beside each worker, in processes of their own."""

from __future__ import annotations

import os
import select
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.pipe import Pipe, create_pipe, remote_generator

pytestmark = pytest.mark.torch


def numbers(pipe: Any, start: int) -> None:
    """Send batches, and say where that happens."""
    step = 0
    while True:
        place = torch.tensor([pipe.ranks["host"], pipe.ranks["gpu"], pipe.sizes["gpu"]])
        pipe.send({"x": torch.full((2,), float(start + step)), "place": place, "pid": os.getpid()})
        step += 1


@remote_generator(numbers)  # type: ignore[arg-type]  # a function is the same as its path
def described(pipe: Any, start: int) -> Any:
    while True:
        yield {"x": torch.empty(2), "place": torch.empty(3, dtype=torch.int64), "pid": 0}


def doubled(pipe: Any) -> None:
    for _ in range(3):
        pipe.send(pipe.recv() * 2)


def described_doubled(pipe: Any) -> Any:
    while True:
        yield torch.empty((), dtype=torch.int64)


def described_one(pipe: Any, sent: int) -> Any:
    while True:
        yield torch.empty(())


def from_environment(pipe: Any, name: str) -> None:
    pipe.send(torch.tensor(float(os.environ.get(name, "0"))))


def broken(pipe: Any, sent: int) -> None:
    for _ in range(sent):
        pipe.send(torch.ones(()))
    raise LookupError("no more data")


def test_a_pipe_sends_ahead_from_a_process_of_its_own(active: Any) -> None:
    pipe = described(5)
    first, second = pipe.recv(), pipe.recv()
    assert inspect(first["x"] + second["x"]).tolist() == [11.0, 11.0]
    assert inspect(first["place"], host=1, gpu=0).tolist() == [1, 0, 2]
    assert pipe.sizes == {"host": 2, "gpu": 2}
    assert inspect(pipe.ranks["gpu"], host=0, gpu=1).item() == 1
    pipe.delete_ref()


def test_a_pipe_takes_objects_and_ends_with_its_function(active: Any) -> None:
    pipe = create_pipe(remote(doubled, propagate=described_doubled), max_messages=1)
    rank = active.rank("gpu")
    for step in range(3):
        pipe.send(rank + step)
        assert inspect(pipe.recv(), host=0, gpu=1).item() == 2 * (1 + step)
    ended = pipe.recv()
    with pytest.raises(RemoteException, match="has ended") as caught:
        inspect(ended)
    assert isinstance(caught.value.original, EOFError)


def test_an_error_of_the_function_is_raised_after_what_it_sent(active: Any) -> None:
    pipe = create_pipe(remote(broken, propagate=described_one), 1)
    assert inspect(pipe.recv()).item() == 1
    with pytest.raises(RemoteException, match="LookupError: no more data"):
        inspect(pipe.recv())


def test_the_processes_end_with_the_pipe(active: Any) -> None:
    pipe = described(0)
    pids = _pids(pipe)
    ends = [os.pidfd_open(pid) for pid in pids]
    del pipe
    inspect(torch.ones(()))
    for end in ends:
        assert select.select([end], [], [], 60)[0]
        os.close(end)


def test_a_process_has_the_environment_that_its_worker_has_now(active: Any) -> None:
    make = remote(from_environment, propagate=described_one)
    assert inspect(create_pipe(make, "PIPE_TEST").recv()).item() == 0
    remote(_set).call("PIPE_TEST", "7").get(timeout=60)
    assert inspect(create_pipe(make, "PIPE_TEST").recv()).item() == 7


def test_a_pipe_of_another_stream(active: Any) -> None:
    stream = Stream("loader")
    with stream.activate():
        pipe = described(1)
        x = pipe.recv()["x"]
        assert inspect(x).tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="WRONG_STREAM"):
        pipe.recv()


def test_what_a_pipe_refuses(active: Any) -> None:
    with pytest.raises(ValueError, match="cannot be distributed tensors"):
        described(torch.ones(()))
    with pytest.raises(ValueError, match="generator"):
        create_pipe(remote(doubled))
    pipe = create_pipe(remote(doubled, propagate=lambda _pipe: iter(())))
    with pytest.raises(EOFError, match="generator"):
        pipe.recv()


def test_a_pipe_needs_an_active_mesh() -> None:
    with pytest.raises(ValueError, match="needs an active mesh"):
        described(1)


def _pids(pipe: Pipe) -> list[int]:
    """Return the processes of the functions: the workers are asked for them."""
    found = remote(_children).call(pipe._handle).get(timeout=60)
    return [pid for _, pid in found.items()]


def _set(name: str, value: str) -> int:
    os.environ[name] = value
    return 0


def _children(handle: Any) -> int:
    return int(handle.value.recv()["pid"])
