"""Leftovers of earlier scripts are found, and removed unless a live process uses them."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.job import leftovers as module
from monarch.job.folder import make_folder, note, remove_folder
from monarch.job.host_log import former, rotate
from monarch.job.leftovers import Leftover, host_processes, job_folders, leftovers, remove
from monarch.job.os_process import OsProcess
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
    "name", ["monarch-my-own-job-12345678", "monarch_exec_12345678", "other", "monarch-x"]
)
def test_other_directories_are_left_alone(temporary: Path, name: str) -> None:
    """Jobs of unknown kinds may have no process here that could hold the lock."""
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


SLURM = """#!/bin/sh
case "$2" in
7) echo '{"jobs": [{"job_id": 7, "job_state": ["RUNNING"]}]}' ;;
8) echo '{"jobs": [{"job_id": 8, "job_state": ["COMPLETED"]}]}' ;;
9) echo '{"jobs": []}' ;;
*) echo down >&2; exit 1 ;;
esac
"""


@pytest.fixture
def squeue(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an `squeue` that knows a job that runs, one that has ended, and none of number 9."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "squeue").write_text(SLURM)
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("number", "left", "why"),
    [
        ("7", False, ""),
        ("8", True, ""),
        ("9", True, ""),
        ("10", True, "ended with status 1 and said: down"),
        ("", True, "it does not say which Slurm job it belongs to"),
    ],
)
def test_slurm_is_asked(temporary: Path, squeue: None, number: str, left: bool, why: str) -> None:
    """What cannot be known is kept, with the reason."""
    folder = stale(temporary, "monarch-slurm-job-12345678")
    if number:
        note(str(folder), "number", number)
    found = leftovers()
    assert [one.path for one in found] == [str(folder)] * left
    for one in found:
        assert (why in one.kept) if why else not one.kept
        assert remove(one) == (not why)
    assert folder.exists() == (not left or bool(why))


def test_the_lock_comes_first(temporary: Path, squeue: None) -> None:
    """A job that is being submitted has no number yet, and its script holds the lock."""
    folder = stale(temporary, "monarch-slurm-job-12345678")
    note(str(folder), "number", "8")
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert leftovers() == []
    finally:
        os.close(fd)
    assert remove(leftovers()[0])


@pytest.mark.parametrize(
    ("notes", "left"),
    [
        ({}, True),
        ({"cluster": "there", "request": "done"}, False),
        ({"cluster": "lost", "request": "done"}, True),
        ({"cluster": "lost", "request": "old"}, True),
        ({"cluster": "lost", "request": "open"}, False),
    ],
)
def test_skypilot_is_asked(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, notes: dict[str, str], left: bool
) -> None:
    """A launch that is under way has no cluster yet."""

    class Sky:
        def request(self, name: str) -> str | None:
            return {"done": "SUCCEEDED", "open": "RUNNING"}.get(name)

        def exists(self, cluster: str) -> bool:
            return cluster == "there"

    monkeypatch.setattr("monarch.job.skypilot.leftover.Sky", Sky)
    folder = stale(temporary, "monarch-skypilot-job-12345678")
    for name, text in notes.items():
        note(str(folder), name, text)
    assert leftovers() == [Leftover("directory", str(folder))] * left


def test_skypilot_is_not_installed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    folder = stale(temporary, "monarch-skypilot-job-12345678")
    note(str(folder), "cluster", "there")
    (one,) = leftovers()
    assert "pip install 'pymonarch[skypilot]'" in one.kept
    assert not remove(one)


@pytest.mark.parametrize(
    ("uid", "left"), [("its own", False), ("that of a later one", True), (None, True)]
)
def test_kubernetes_is_asked(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, uid: str | None, left: bool
) -> None:
    pytest.importorskip("kubernetes", reason="needs the client of Kubernetes")
    from monarch.job.kubernetes import leftover, manifests

    asked: list[Any] = []

    class Cluster:
        def __init__(self, namespace: str, config: Any) -> None:
            asked.append((namespace, config.local))

        def read(self, kind: Any, name: str) -> Any:
            asked.append((kind, name))
            return None if uid is None else {"metadata": {"uid": uid}}

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr(leftover, "Cluster", Cluster)
    folder = stale(temporary, "monarch-kubernetes-job-12345678")
    assert leftovers() == []  # attached to pods of others: kept until it is killed
    secret = (manifests.SECRET, "a-secret", "its own")
    leftover.note_objects(str(folder), "ml", "/some/config", [secret])
    assert leftovers() == [Leftover("directory", str(folder))] * left
    assert asked == [("ml", Path("/some/config")), (manifests.SECRET, "a-secret"), "closed"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found by /proc")
def test_only_processes_of_this_user_are_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can read what the processes of others are."""
    contents = {"cmdline": module._HOST, "environ": b"A=1\0" + module._SECRET + b"/job/secret\0"}
    monkeypatch.setattr(module, "_content", lambda number, what: contents[what])
    monkeypatch.setattr("os.listdir", lambda path: ["self", str(os.getpid())])
    assert host_processes() == [(OsProcess.of(os.getpid()), "/job")]
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    assert host_processes() == []


def test_the_hosts_of_a_job_are_those_of_its_directory(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stale(temporary, "monarch-process-job-12345678")
    own, other = OsProcess.of(os.getpid()), OsProcess.of(os.getppid())
    running = [(own, str(folder)), (other, str(temporary / "another"))]
    monkeypatch.setattr(module, "host_processes", lambda: running)
    (job,) = job_folders()
    assert job.hosts == [own]
