"""Checkpoints on disk: which one counts, and under which names tensors are in it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from monarch.training import disk

torch = pytest.importorskip("torch")


def make(folder: Path, version: int, mark: int, run: str, positions: int, width: int = 2) -> str:
    path = disk.place(str(folder), version, mark, run, width)
    for position in range(positions):
        complete = Path(path, f"position-{position}", ".metadata")
        complete.parent.mkdir(parents=True)
        complete.touch()
    return path


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    assert disk.find_newest(str(tmp_path / "nothing"), 1) is None
    old = make(tmp_path, 5, 5, "00000001", 2)
    make(tmp_path, 10, 12, "00000001", 1)
    (tmp_path / "step-of-someone-else").mkdir()
    assert disk.find_newest(str(tmp_path), 2) == (5, old)


def test_halves_of_two_trainings_make_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 10, 10, "00000001", 1)
    other = Path(disk.place(str(tmp_path), 10, 10, "00000002", 2), "position-1", ".metadata")
    other.parent.mkdir(parents=True)
    other.touch()
    assert disk.find_newest(str(tmp_path), 2) is None


@pytest.mark.parametrize("width", [1, 4])
def test_a_checkpoint_of_groups_of_another_width_is_refused(tmp_path: Path, width: int) -> None:
    make(tmp_path, 5, 5, "00000001", width, width)
    with pytest.raises(ValueError, match=f"is of groups of width {width}, and this"):
        disk.find_newest(str(tmp_path), 2)


def test_no_two_tensors_have_one_name(tmp_path: Path) -> None:
    from monarch.training.state import pack, unpack

    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "names": torch.full((3,), 7.0)}
    packed = pack(state)
    names = disk._names(packed)
    assert len(set(names)) == 3
    written = threading.Event()
    path = disk.place(str(tmp_path), 1, 1, "00000001", 1)
    disk.Writer().write(path, 0, packed.clone(), written.set)
    assert written.wait(60)
    loaded = unpack(disk.load(path, 0))
    assert torch.equal(loaded["a.b"], torch.ones(1))
    assert torch.equal(loaded["a"]["b"], torch.zeros(2))
    assert torch.equal(loaded["names"], torch.full((3,), 7.0))
