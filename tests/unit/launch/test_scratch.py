"""Scratch directories: other users cannot direct a removal; leftovers are removed later."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.launch import scratch
from monarch._engine.launch.launcher import Launcher
from monarch._engine.launch.scratch import (
    ScratchFolder,
    give_multiprocessing,
    remove_if_empty,
    remove_scratch,
)

SOMEBODY = 65534


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    where = f"/proc/{os.getpid()}/fd"
    before = len(os.listdir(where)) if os.path.isdir(where) else 0
    yield
    assert before in (0, len(os.listdir(where)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ScratchFolder]:
    folder = ScratchFolder()
    yield folder
    folder.remove()


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Make a directory tree that no removal may touch."""
    tree = tmp_path / "precious"
    (tree / "below").mkdir(parents=True)
    (tree / "file").write_text("kept")
    (tree / "below" / "file").write_text("kept")
    return tree


def intact(tree: Path) -> bool:
    return [path.read_text() for path in (tree / "file", tree / "below" / "file")] == ["kept"] * 2


def new(folder: ScratchFolder, parent: Path) -> Path:
    return Path(folder.new({"TMPDIR": str(parent)}, "/"))


def filled(path: Path) -> Path:
    (path / "below").mkdir(parents=True)
    (path / "file").touch()
    (path / "below" / "file").touch()
    return path


def test_they_are_in_a_directory_with_a_random_name_that_is_closed_to_others(
    folder: ScratchFolder, tmp_path: Path
) -> None:
    first, second = new(folder, tmp_path), new(folder, tmp_path)
    assert first != second
    assert first.parent == second.parent
    assert not first.exists()
    assert first.parent.parent == tmp_path
    assert first.parent.stat().st_mode & 0o777 == 0o700
    other = ScratchFolder()
    assert new(other, tmp_path).parent != first.parent
    other.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_removed_with_all_in_it_and_links_are_not_followed(
    folder: ScratchFolder, tmp_path: Path, precious: Path
) -> None:
    path = filled(new(folder, tmp_path))
    (path / "below" / "link").symlink_to(precious)
    os.mkfifo(path / "below" / "pipe")  # the removal must not wait for it
    remove_scratch(str(path))
    assert not path.exists()
    assert intact(precious)
    remove_scratch(str(path))  # a second time: the directory no longer exists


def test_a_link_in_the_place_of_a_directory_is_not_followed(
    folder: ScratchFolder, tmp_path: Path, precious: Path
) -> None:
    path = new(folder, tmp_path)
    path.symlink_to(precious)
    remove_scratch(str(path))
    assert intact(precious)
    assert not path.is_symlink()
    top = tmp_path / "top"
    top.symlink_to(precious)
    remove_scratch(str(top / "below"))
    assert intact(precious)


@pytest.mark.parametrize("swapped", ["", "below"])
def test_a_directory_that_becomes_a_link_while_it_is_removed_is_not_followed(
    folder: ScratchFolder,
    tmp_path: Path,
    precious: Path,
    monkeypatch: pytest.MonkeyPatch,
    swapped: str,
) -> None:
    path = filled(new(folder, tmp_path))
    victim = path / swapped
    number = victim.stat().st_ino
    swaps = 0

    def swapping(look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(where: Any) -> Any:
            nonlocal swaps
            here = os.stat(where).st_ino == number
            found = look(where)
            if here and not swaps:
                swaps += 1
                victim.rename(tmp_path / "aside")
                victim.symlink_to(precious)
            return found

        return looked

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", swapping(os.listdir))
        patch.setattr(os, "scandir", swapping(os.scandir))
        remove_scratch(str(path))
    assert swaps == 1
    assert intact(precious)


def test_one_that_others_can_enter_is_neither_used_nor_removed(
    folder: ScratchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(new(folder, tmp_path))
    path.parent.chmod(0o755)
    remove_scratch(str(path))
    assert (path / "below" / "file").exists()
    other = path.parent / "other"
    monkeypatch.setattr(scratch, "_path", str(other))
    config = scratch._Config()
    assert config.get("tempdir") is None
    assert not other.exists()
    path.parent.chmod(0o700)
    assert config.get("tempdir") == str(other)
    assert other.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_one_of_another_user_is_neither_used_nor_removed(
    folder: ScratchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(new(folder, tmp_path))
    os.chown(path.parent, SOMEBODY, SOMEBODY)
    remove_scratch(str(path))
    assert (path / "below" / "file").exists()
    monkeypatch.setattr(scratch, "_path", str(path.parent / "other"))
    assert scratch._Config().get("tempdir") is None
    os.chown(path.parent, 0, 0)


def test_what_a_killed_agent_left_is_removed_by_the_next(
    folder: ScratchFolder, tmp_path: Path
) -> None:
    alive = filled(new(folder, tmp_path))
    killed = ScratchFolder()
    left = filled(new(killed, tmp_path))
    ((_, fd),) = killed._folders.values()
    os.close(fd)  # as the exit of the process does
    killed._folders.clear()
    theirs = tmp_path / "monarch-scratch-ofapeer_"
    theirs.mkdir(0o700)
    (theirs / "notes").touch()  # an agent never makes such a file
    other = tmp_path / "of another program"
    other.mkdir(0o700)
    (other / "1").mkdir()
    later = ScratchFolder()
    new(later, tmp_path)
    assert not left.parent.exists()
    assert (alive / "below" / "file").exists()
    assert (theirs / "notes").exists()
    assert (other / "1").exists()
    later.remove()


def test_a_directory_in_the_place_of_an_agents_is_not_removed(tmp_path: Path) -> None:
    folder = ScratchFolder()
    path = new(folder, tmp_path).parent
    path.rename(tmp_path / "moved")
    path.mkdir()
    folder.remove()
    assert path.exists()


def test_an_empty_one_is_removed_by_a_launcher_whose_agent_has_ended(
    folder: ScratchFolder, tmp_path: Path
) -> None:
    first, second = (new(one, tmp_path) for one in (folder, folder))
    first.mkdir()
    remove_if_empty(str(first.parent))
    assert first.exists()
    remove_scratch(str(first))
    remove_if_empty(str(second.parent))
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_locks_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = ScratchFolder()
    assert folder.new({"TMPDIR": str(tmp_path)}, "/") == ""
    assert list(tmp_path.iterdir()) == []


def test_children_have_the_directory_of_their_process(
    folder: ScratchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_path", "")
    path = str(new(folder, tmp_path))
    give_multiprocessing(path)
    config = scratch._Config(other=1)
    assert config.get("other") == 1
    assert config.copy() == {"other": 1, "tempdir": path}
    remove_scratch(path)


def test_one_that_is_taken_for_stale_while_it_is_made_is_given_up(
    folder: ScratchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = new(folder, tmp_path)
    assert path.parent.is_dir()
    assert path.parent not in removed


def test_without_a_temporary_directory_multiprocessing_finds_its_own(tmp_path: Path) -> None:
    folder = ScratchFolder()
    assert folder.new({"TMPDIR": str(tmp_path / "none")}, "/") == ""
    remove_scratch("")
    folder.remove()
    assert scratch._Config().get("tempdir", "its own") == "its own"


def test_the_scratch_directory_of_a_proc_that_exited_is_to_be_removed() -> None:
    told: list[Any] = []
    launcher: Any = object.__new__(Launcher)
    launcher._children = SimpleNamespace(reap=lambda: [(5, 0)], debris=[])
    launcher._procs, launcher._commands = {5: (7, "/tmp/scratch")}, {}
    launcher._tell = told.append
    launcher._reap()
    assert launcher._children.debris == ["/tmp/scratch"]
    assert told == [{"op": "exited", "procs": [{"uid": 7, "status": 0}]}]
