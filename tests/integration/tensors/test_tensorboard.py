"""`monarch.tensorboard`: event files that processes write, read back with TensorBoard's reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensorboard")

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch import Stream, no_mesh
from monarch._tensors.errors import RemoteException
from monarch._tensors.tensorboard import Tensorboard
from monarch.actor import this_host

pytestmark = pytest.mark.torch


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return steps and values in the event files of a folder."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(name)]


def test_a_process_writes_its_own_values(mesh: Any, tmp_path: Path) -> None:
    other = Stream("other")
    with mesh.activate():
        board = Tensorboard(mesh.slice(host=1, gpu=0), tmp_path, flush_secs=1000)
        rank = mesh.process_idx()
        for step in range(3):
            board.log("rank", rank * 1.0 + step, step)
        weight = torch.ones(1, requires_grad=True)
        board.log("needs gradient", weight * 4, 7)
    with mesh.activate(), other.activate():
        board.log("rank", torch.full((1, 1), 9.5), 3)
    with no_mesh.activate():
        board.log("number", 2, 0)
        board.log("number", torch.tensor(0.5), 1)
    board.flush()
    # The two streams write in no order.
    assert sorted(curve(tmp_path, "rank")) == [(0, 2.0), (1, 3.0), (2, 4.0), (3, 9.5)]
    assert curve(tmp_path, "needs gradient") == [(7, 4.0)]
    board.close()
    board.close()
    assert curve(tmp_path, "number") == [(0, 2.0), (1, 0.5)]
    assert board.url == f"file://{tmp_path}"
    with pytest.raises(ValueError, match="is closed"):
        board.log("number", 1, 2)


def test_several_processes_write_into_folders_of_their_own(mesh: Any, tmp_path: Path) -> None:
    with mesh.activate(), Tensorboard(mesh.slice(host=0), str(tmp_path)) as board:
        board.log("rank", mesh.process_idx(), 0)
    assert [curve(tmp_path / f"rank{rank}", "rank") for rank in (0, 1)] == [[(0, 0.0)], [(0, 1.0)]]


def test_what_it_refuses(mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mesh.activate(), Tensorboard(mesh.slice(host=0, gpu=0), tmp_path) as board:
        with pytest.raises(ValueError, match=r"loss is a tensor of \[2\]"):
            board.log("loss", torch.ones(2), 0)
        with mesh.slice(host=1).activate():
            elsewhere = torch.ones(())
        with pytest.raises(ValueError, match="no part of"):
            board.log("loss", elsewhere, 0)
    (tmp_path / "file").write_text("in the way")
    broken = Tensorboard(mesh.slice(host=0, gpu=0), tmp_path / "file")
    with pytest.raises(RemoteException, match="file"):
        broken.flush()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pymonarch\[tensorboard\]"):
        Tensorboard(mesh, tmp_path)


def test_a_coordinator_of_its_own(mesh: Any, tmp_path: Path) -> None:
    """Values of another mesh are refused; those that were copied there are written."""
    procs = this_host().spawn_procs(name="coordinator")
    with Tensorboard(procs, tmp_path) as board:
        with mesh.slice(host=0, gpu=0).activate():
            loss = torch.full((), 2.5)
        with pytest.raises(ValueError, match="no part of"):
            board.log("loss", loss, 0)
        board.log("loss", loss.to_mesh(procs), 0)
    assert curve(tmp_path, "loss") == [(0, 2.5)]
    procs.stop().get(timeout=60)
