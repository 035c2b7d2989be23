"""`run_function`: a function on each process of a mesh, as a rank of torch.distributed."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import ActorError, Channel, SupervisionError, this_host
from monarch.config import configured
from monarch.spmd import function, run_function

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
WAIT = 120


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"hosts": 1, "gpus": 3})
    yield mesh
    mesh.stop().get(timeout=WAIT)


def total(value: float) -> tuple[float, int, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")  # and is left, as scripts do
    each = torch.full((1,), value)
    dist.all_reduce(each)
    return each.item(), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def fails_on_1(error: BaseException, tidy: bool) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # a rank that still connects to one that has left would try for half an hour
    try:
        if dist.get_rank() == 1:
            raise error
        dist.all_reduce(torch.ones(1))  # would wait for half an hour
    finally:
        if tidy:
            dist.destroy_process_group()


def test_each_function_has_a_group_of_its_own(procs: Any) -> None:
    for value in (1.0, 2.0):
        found = run_function(procs, total, value)
        assert found.extent == procs.extent
        assert found.values() == [(3 * value, rank, 3) for rank in range(3)]
    part = procs.slice(gpus=slice(1, 3))
    assert run_function(part, total, value=5.0).values() == [(10.0, 0, 2), (10.0, 1, 2)]


@pytest.mark.parametrize("tidy", [False, True], ids=["left", "destroyed"])
def test_the_first_cause_is_raised_and_the_mesh_goes_on(procs: Any, tidy: bool) -> None:
    """A rank that destroys its group makes others fail before its own error arrives."""
    with pytest.raises(ValueError, match="batch 7 is empty") as caught:
        run_function(procs, fails_on_1, ValueError("batch 7 is empty"), tidy)
    assert isinstance(caught.value.__cause__, ActorError)
    assert "'gpus': 1/3" in str(caught.value.__cause__)
    assert run_function(procs, total, 1.0).values()[0][0] == 3.0


@pytest.mark.parametrize("code", [0, None])
def test_a_normal_exit_returns_none(procs: Any, code: int | None) -> None:
    assert run_function(procs, sys.exit, code).values() == [None] * 3


def test_another_exit_is_an_error(procs: Any) -> None:
    with pytest.raises(RuntimeError, match="fails_on_1 exited with status 3"):
        run_function(procs, fails_on_1, SystemExit(3), False)


def test_the_example_prints_what_it_shows() -> None:
    assert doctest.testmod(function).failed == 0


def test_what_is_no_function_is_refused(procs: Any) -> None:
    with pytest.raises(TypeError, match="is none"):
        run_function(procs, "train.py")  # type: ignore[arg-type]


def test_a_function_that_cannot_be_read_is_named(procs: Any, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def unknown(): pass")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        unknown = importlib.import_module("only_here").unknown
        with pytest.raises(ModuleNotFoundError, match="only_here"):
            run_function(procs, unknown)
    assert run_function(procs, total, 1.0).values()[0][0] == 3.0


def test_a_rank_that_goes_on_is_interrupted(
    procs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "_PATIENCE", 0.5)
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def goes_on(gate: Path) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("batch 7 is empty")
        gate.read_bytes()  # waits without end

    with pytest.raises(ValueError, match="batch 7 is empty"):
        run_function(procs, goes_on, gate)
    assert run_function(procs, total, 1.0).values()[0][0] == 3.0


def test_a_rank_that_goes_on_after_the_interrupt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "_PATIENCE", 0.5)
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def goes_on(gate: Path) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("batch 7 is empty")
        with contextlib.suppress(BaseException):
            gate.read_bytes()  # waits for the interrupt
        gate.read_bytes()  # waits for the test

    with configured(cleanup_timeout="500ms"):
        procs = this_host().spawn_procs({"gpus": 2})
    with pytest.raises(ValueError, match="batch 7 is empty"):
        run_function(procs, goes_on, gate)
    with pytest.raises(ValueError, match=r"len cannot run: .*goes_on.* still runs"):
        run_function(procs, len, "")
    gate.write_bytes(b"")
    procs.stop().get(timeout=WAIT)


def test_an_interrupt_ends_the_wait_and_the_functions(procs: Any) -> None:
    def waits(entered: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() != 1:
            entered.send(None)
            dist.all_reduce(torch.ones(1))

    entered, arrivals = Channel[None].open()

    def watch() -> None:
        for _ in range(2):
            arrivals.recv().get(timeout=WAIT)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        run_function(procs, waits, entered)
    watcher.join()
    assert run_function(procs, total, 1.0).values()[0][0] == 3.0


@pytest.mark.failures
def test_the_loss_of_a_process_is_the_cause() -> None:
    def dies() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    procs = this_host().spawn_procs({"gpus": 2})
    with pytest.raises(SupervisionError, match="SIGKILL"):
        run_function(procs, dies)
    procs.stop().get(timeout=WAIT)
