"""Socket files of workers: a stale one is replaced, one in use is not."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.runtime.admission import socket_file
from monarch._engine.runtime.admission.socket_file import listen_at, remove
from monarch._engine.runtime.agent.worker import Worker


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def left(path: str) -> Iterator[str]:
    """Make a socket file whose process has exited."""
    listen_at(path, 1).close()
    assert os.path.exists(path)
    return path


def accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


def refused(path: str) -> bool:
    with pytest.raises(OSError) as caught:
        listen_at(path, 1)
    return caught.value.errno == errno.EADDRINUSE


def test_one_that_was_left_is_replaced(left: str) -> None:
    with listen_at(left, 1):
        assert accepts(left)
    assert os.listdir(os.path.dirname(left)) == ["s"]


def test_one_that_is_in_use_is_not_replaced(path: str) -> None:
    with listen_at(path, 0):
        number = os.stat(path).st_ino
        assert refused(path)
        assert refused(path)  # the backlog has no more room now
        remove(path)
        assert os.stat(path).st_ino == number


def test_another_kind_of_file_is_not_replaced(path: str) -> None:
    Path(path).write_text("kept")
    assert refused(path)
    remove(path)
    assert Path(path).read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_one_of_another_user_is_not_replaced(left: str) -> None:
    os.chown(left, 65534, 65534)
    assert refused(left)
    remove(left)
    assert os.path.exists(left)


def test_it_is_removed_by_the_process_that_listened(left: str) -> None:
    remove(left)
    assert os.listdir(os.path.dirname(left)) == []
    remove(left)


def test_of_many_that_start_at_once_exactly_one_listens(left: str) -> None:
    start, results = threading.Barrier(8), list[socket.socket | OSError]()

    def begin() -> None:
        start.wait()
        try:
            results.append(listen_at(left, 8))
        except OSError as error:
            results.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (sock,) = (one for one in results if isinstance(one, socket.socket))
    assert accepts(left)
    sock.close()


def test_it_waits_for_another_that_is_about_to_listen(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_file, "_PATIENCE", 0.0)
    with open(f"{left}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another process holds the lock .*lock") as caught:
            listen_at(left, 1)
        assert caught.value.errno == errno.EADDRINUSE
    listen_at(left, 1).close()


def test_it_goes_on_when_that_one_listens_no_more(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = os.open(f"{left}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    pauses: list[float] = []

    def pause(*_files: object) -> None:
        pauses.append(0.0)
        if len(pauses) == 2:
            os.unlink(f"{left}.lock")
            os.close(lock)

    monkeypatch.setattr(select, "select", pause)
    listen_at(left, 1).close()
    assert len(pauses) == 2


def test_a_lock_whose_file_was_removed_meanwhile_is_none(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, modes = fcntl.flock, list[int]()

    def flock(fd: int, operation: int) -> None:
        modes.append(os.fstat(fd).st_mode & 0o777)
        if len(modes) == 1:
            os.unlink(f"{left}.lock")
            Path(f"{left}.lock").touch(0o600)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    listen_at(left, 1).close()
    assert modes == [0o600, 0o600]


def test_an_error_of_the_lock_is_raised(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OSError, match="no locks"):
        listen_at(left, 1)
    assert before in (0, len(os.listdir("/proc/self/fd")))


def test_abstract_names_have_no_file(tmp_path: Path) -> None:
    name = f"\0monarch-test-{os.getpid()}"
    with listen_at(name, 1):
        assert accepts(name)
        assert refused(name)


def test_a_worker_replaces_what_was_left_and_removes_its_own(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    worker = Worker(ChannelAddr.parse(f"ipc://{left}"))
    worker.stop()
    worker.run()
    worker._reactor.close()
    assert not os.path.exists(left)
