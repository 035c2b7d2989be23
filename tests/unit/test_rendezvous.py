"""Job doors' directory: other users cannot enter, and a look-up of a job does not create it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.wire.frame import CONTROL, pack
from monarch._failover.rendezvous import Rendezvous, answers, dismiss, jobs, knock, open_door

ACTS: list[Callable[[], object]] = [
    lambda: open_door("a"),
    lambda: knock("a", b"k" * 32, 1.0),
    lambda: dismiss("a", b"k" * 32, 1.0),
    lambda: answers("a"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pymonarch"


def test_it_is_made_for_its_user_alone_by_the_first_door(folder: Path) -> None:
    assert jobs() == []
    assert not answers("a")
    with pytest.raises(LookupError, match="there is no job 'a'"):
        knock("a", b"k" * 32, 1.0)
    assert not folder.exists()
    sock, path = open_door("a")
    with sock:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.path.dirname(path) == str(folder)
        assert (jobs(), answers("a")) == (["a"], True)
        with pytest.raises(RuntimeError, match="there is a job 'a' already"):
            open_door("a")
    assert not answers("a")
    sock, _ = open_door("a")  # the stale socket is replaced
    sock.close()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_one_that_others_can_enter_is_not_used(
    folder: Path, bit: int, act: Callable[[], object]
) -> None:
    folder.mkdir()
    folder.chmod(0o700 | bit)
    with pytest.raises(PermissionError, match=f"closed to others .*: chmod 700 {folder}"):
        act()


@pytest.mark.parametrize("act", ACTS)
def test_a_link_is_not_used(folder: Path, tmp_path: Path, act: Callable[[], object]) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a directory of this user"):
        act()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("act", ACTS)
def test_one_of_another_user_is_not_used(folder: Path, act: Callable[[], object]) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match=r"\(now: user 65534\) .*set XDG_RUNTIME_DIR"):
        act()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a path is refused")
def test_the_path_of_a_door_may_be_longer_than_the_name_of_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    sock, path = open_door("a")
    with sock:
        assert os.path.dirname(path) == str(deep / "pymonarch")
        assert answers("a")


def test_a_door_that_cannot_be_opened_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Socket(socket.socket):
        def listen(self, *_: int) -> None:
            made.append(self)
            raise OSError("no room for another door")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(OSError, match="no room"):
        open_door("a")
    assert [sock.fileno() for sock in made] == [-1]


@pytest.mark.parametrize("key", [b"k" * 32, b"x" * 32], ids=["right", "wrong"])
def test_a_door_admits_who_knows_the_secret(folder: Path, key: bytes) -> None:
    came: list[dict[str, Any]] = []

    def knocked(sock: socket.socket, purpose: dict[str, Any]) -> None:
        came.append(purpose)
        sock.close()  # the job ends

    reactor = Reactor()
    reactor.scratch = memoryview(bytearray(4096))
    sock, path = open_door("a")
    door = Rendezvous(reactor, sock, path, b"k" * 32, knocked)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="just ended" if key == b"k" * 32 else "refused"):
            knock("a", key, 30.0)
    finally:
        reactor.call_soon(door.close)
        reactor.call_soon(reactor.stop)
        thread.join()
        reactor.close()
    assert came == [{"job": "a", "pid": os.getpid()}] * (key == b"k" * 32)
    assert not os.path.exists(path)


def test_who_is_refused_at_the_door_learns_why(folder: Path) -> None:
    def knocked(sock: socket.socket, _purpose: dict[str, Any]) -> None:
        body = json.dumps({"op": "refused", "reason": "it has a driver, process 7"}).encode()
        sock.send(pack(CONTROL, 0, 0, 0, b"", body))
        sock.close()

    reactor = Reactor()
    sock, path = open_door("a")
    door = Rendezvous(reactor, sock, path, b"k" * 32, knocked)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    try:
        for act, verb in ((knock, "re-attach to"), (dismiss, "end")):
            with pytest.raises(RuntimeError, match=f"cannot {verb} job 'a': it has a driver"):
                act("a", b"k" * 32, 30.0)
    finally:
        reactor.call_soon(door.close)
        reactor.call_soon(reactor.stop)
        thread.join()
        reactor.close()
