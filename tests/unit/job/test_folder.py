"""A job's directory is removed once every process that needs it has been killed, not before."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.job import folder as module
from monarch.job.folder import (
    lock_of,
    make_folder,
    remove_folder,
    remove_stale,
    secret_file,
    use_secret,
)

PREFIX = "monarch-test-job-"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_LONGEST_PATH", 4096)
    yield tmp_path
    while module._locks:
        remove_folder(next(iter(module._locks)))


def killed(folder: str) -> None:
    """Simulate that the script that made `folder` was killed: its lock is released."""
    os.close(module._locks.pop(folder))


def test_that_of_a_script_that_was_killed_is_removed() -> None:
    left, alive = make_folder(PREFIX), make_folder(PREFIX)
    killed(left)
    remove_stale(PREFIX)
    assert not os.path.exists(left)
    assert os.path.exists(secret_file(alive))
    remove_folder(alive)
    assert not os.path.exists(alive)
    assert lock_of(alive) == []


def test_what_keeps_a_host_keeps_the_directory() -> None:
    folder = make_folder(PREFIX)
    host = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=lock_of(folder),
    )
    with host:
        killed(folder)
        remove_stale(PREFIX)
        assert os.path.exists(secret_file(folder))
        host.kill()
    remove_stale(PREFIX)
    assert not os.path.exists(folder)


def test_without_locks_it_stays(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    for number in (errno.ENOLCK, errno.EAGAIN):  # no locks at all, or a lock is never granted

        def flock(_file: int, _how: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        folder = make_folder(PREFIX)
        assert lock_of(folder) == []
        remove_stale(PREFIX)
        assert os.listdir(place) == [os.path.basename(folder)]
        remove_folder(folder)


def test_a_child_that_the_script_forks_does_not_keep_it() -> None:
    folder = make_folder(PREFIX)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if (pid := os.fork()) == 0:
            ours.close()
            theirs.send(b"1")
            theirs.recv(1)  # block until the test ends
            os._exit(0)
        theirs.close()
        assert ours.recv(1)
        killed(folder)
        remove_stale(PREFIX)
        assert not os.path.exists(folder)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("before", [None, "/before"])
def test_a_secret_that_is_used_is_given_back(before: str | None) -> None:
    """A process that attached through a gateway has its former secret once the job is killed."""
    variable = "MONARCH_JOB_SECRET_FILE"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(variable, raising=False)
        if before is not None:
            patch.setenv(variable, before)
        folder = make_folder("monarch-test-")
        for _ in range(2):
            use_secret(folder)
            assert os.environ[variable] == secret_file(folder)
        remove_folder(folder)
        assert os.environ.get(variable) == before
