"""The users of a job are found by locks or by processes, whatever clock and disk do."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.job import users as module
from monarch.job.os_process import OsProcess
from monarch.job.users import join, part, users


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    part(str(tmp_path))


def no_locks(number: int) -> Callable[[Any, int], None]:
    def flock(_file: Any, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


def other(folder: str, *, pid: int = 2**22 + 1, place: str | None = None) -> Path:
    """Write the file of another script, which does not hold its lock."""
    path = Path(folder, f"user.{pid}.1")
    place = module._place() if place is None else place
    started = OsProcess.of(pid).started or 7
    said = {"script": "other.py", "pid": pid, "started": started, "place": place, "since": 0.0}
    path.write_text(json.dumps(said))
    return path


def test_who_has_joined_is_a_user_until_it_parts(folder: str) -> None:
    assert users(folder) == []
    join(folder)
    join(folder)
    (user,) = users(folder)
    assert user.pid == os.getpid()
    assert user.script in str(user)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EAGAIN])
def test_without_locks_the_process_is_looked_for(
    folder: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file system has no locks, or never grants one."""
    monkeypatch.setattr(fcntl, "flock", no_locks(number))
    join(folder)
    other(folder)
    assert [user.pid for user in users(folder)] == [os.getpid()]


def test_in_another_container_the_lock_decides(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = other(folder, place="another")
    assert users(folder) == []
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [user.script for user in users(folder)] == ["other.py"]
    monkeypatch.setattr(fcntl, "flock", no_locks(errno.ENOLCK))
    assert [user.script for user in users(folder)] == ["other.py"]  # the script may still run


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_a_clock_that_jumps_changes_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    join(folder)
    gone = other(folder)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert [user.pid for user in users(folder)] == [os.getpid()]
    os.utime(gone, (real() - jump, real() - jump))
    assert [user.pid for user in users(folder)] == [os.getpid()]


@pytest.mark.slow
def test_a_job_that_is_killed_has_no_users(folder: str) -> None:
    assert users(os.path.join(folder, "none")) == []


def test_a_forked_child_can_join_a_job_whatever_a_thread_did(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that the child does not have held the lock, and the files are the parent's."""
    join(folder)
    kept = os.dup(module._joined[folder])
    with monkeypatch.context() as child:
        child.setattr(module, "_lock", threading.Lock())
        child.setattr(module, "_joined", {folder: kept})
        module._lock.acquire()
        module._forked()
        assert module._lock.acquire(blocking=False)
        assert module._joined == {}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(kept)
