"""Private directories are made beside processes that remove stale ones, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.launch import own_folder


@pytest.mark.parametrize("step", ["_new", "enter"])
def test_a_directory_that_another_process_takes_for_a_stale_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The other process removes it after this step, before it is locked."""
    takes = getattr(own_folder, step)
    taken: list[str] = []

    def lose(*args: Any) -> Any:
        result = takes(*args)
        if not taken:
            taken.extend(os.listdir(tmp_path))
            own_folder.remove_stale("test-", str(tmp_path))
        return result

    monkeypatch.setattr(own_folder, step, lose)
    path, lock = own_folder.make("test-", str(tmp_path))
    try:
        assert len(taken) == 1
        assert [os.path.basename(path)] == os.listdir(tmp_path) != taken
        assert os.path.samestat(os.stat(path), os.fstat(lock))
    finally:
        os.close(lock)


def test_a_file_system_without_locks_is_named_by_its_error_and_keeps_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def flock(fd: int, _operation: int) -> None:
        tried.append(fd)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        own_folder.make("test-", str(tmp_path))
    (fd,) = tried
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)
    assert os.listdir(tmp_path) == []
