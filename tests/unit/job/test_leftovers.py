"""Leftovers of earlier scripts are found, and removed unless a live process uses them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from monarch.job import leftovers as module
from monarch.job.folder import make_folder, remove_folder
from monarch.job.host_log import former, rotate
from monarch.job.leftovers import Leftover, job_folders, leftovers, remove
from monarch.job.users import join, part


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Look at a directory of the test only."""
    monkeypatch.setattr(
        module, "_entries", lambda: sorted(str(path) for path in tmp_path.iterdir())
    )
    monkeypatch.setattr(module, "host_processes", list)
    return tmp_path


def stale(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir(mode=0o700)
    (folder / "secret").touch(0o600)
    (folder / "below").mkdir()
    return folder


@pytest.mark.parametrize("kind", ["process-job", "ssh-job", "node", "scratch"])
def test_a_stale_directory_is_removed(temporary: Path, kind: str) -> None:
    folder = stale(temporary, f"monarch-{kind}-12345678")
    assert leftovers() == [Leftover("directory", str(folder))]
    assert remove(leftovers()[0])
    assert leftovers() == []
    assert not folder.exists()


@pytest.mark.parametrize(
    "name", ["monarch-slurm-job-12345678", "monarch_exec_12345678", "other", "monarch-x"]
)
def test_other_directories_are_left_alone(temporary: Path, name: str) -> None:
    """A Slurm job has no process here that could hold the lock."""
    stale(temporary, name)
    assert leftovers() == []


def test_what_is_locked_lives(temporary: Path) -> None:
    folder = stale(temporary, "monarch-process-job-12345678")
    (one,) = leftovers()
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert leftovers() == []
        assert not remove(one)  # it was found before the lock was taken
    finally:
        os.close(fd)
    assert (folder / "below").exists()


def test_what_a_script_uses_lives(temporary: Path) -> None:
    folder = str(stale(temporary, "monarch-process-job-12345678"))
    join(folder)
    try:
        assert leftovers() == []
        (job,) = job_folders()
        assert (job.path, job.kind, job.hosts) == (folder, "process", [])
        assert [user.pid for user in job.users] == [os.getpid()]
    finally:
        part(folder)


def test_a_link_and_an_open_directory_are_not_followed(temporary: Path) -> None:
    precious = stale(temporary, "precious")
    (temporary / "monarch-process-job-abcdefgh").symlink_to(precious)
    opened = stale(temporary, "monarch-process-job-12345678")
    opened.chmod(0o755)
    assert leftovers() == []
    assert job_folders() == []
    (temporary / "monarch-process-job-abcdefgh").unlink()
    inside = stale(temporary, "monarch-process-job-00000000")
    (inside / "link").symlink_to(precious)
    (one,) = leftovers()
    assert remove(one)
    assert (precious / "secret").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_directories_of_other_users_are_left_alone(temporary: Path) -> None:
    folder = stale(temporary, "monarch-process-job-12345678")
    os.chown(folder, 12345, 12345)
    assert leftovers() == []
    assert job_folders() == []
    assert not remove(Leftover("directory", str(folder)))
    assert folder.exists()


def test_a_lock_file_that_is_free_is_removed(temporary: Path) -> None:
    path = temporary / f"monarch_lock_{os.getuid()}_0123"
    path.touch(0o600)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert leftovers() == []
    (one,) = leftovers()
    assert one.what == "lock file"
    assert remove(one)
    assert not path.exists()


def test_the_directory_of_a_job_is_listed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    folder = make_folder("monarch-my-own-job-")
    if not folder.startswith(str(temporary)):  # the path is too long for sockets
        remove_folder(folder)
        pytest.skip("the directory of the test has too long a path")
    assert [(job.path, job.kind) for job in job_folders()] == [(folder, "my-own")]
    remove_folder(folder)


def test_a_log_is_rotated_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * 100)
        assert not rotate(str(path), 100)
        assert rotate(str(path), 99)
        file.write(b"more")  # the same open file goes on
    assert path.read_bytes() == b"more"
    assert Path(former(str(path))).read_bytes() == b"x" * 100
    assert rotate(str(path), 3)
    assert Path(former(str(path))).read_bytes() == b"more"
    path.unlink()
    assert not rotate(str(path), 0)
    assert sorted(os.listdir(tmp_path)) == ["0.log.1"]
