"""The hosts of a job stay warm between two launches, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.spmd.fork_server import keeper
from monarch.spmd.fork_server.finder import KEEPER, connect, reach
from monarch.spmd.fork_server.keeper import keeping
from monarch.spmd.message import Messages, send

from .conftest import WAIT, Program, until

KEEP = 600.0
_opened: list[socket.socket] = []  # of the hosts of tests


@contextlib.contextmanager
def host() -> Generator[Path]:
    """Be a host; yield the directory of its keeper."""
    # The path of a socket is limited, so not `tmp_path`.
    with (
        tempfile.TemporaryDirectory(prefix="warm-") as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(keeper.tempfile, "gettempdir", lambda: place)
        with keeping():
            yield Path(os.environ[KEEPER])
            while _opened:
                _opened.pop().close()
        assert KEEPER not in os.environ
        assert not os.listdir(place)


@pytest.fixture
def folder() -> Iterator[Path]:
    with host() as found:
        yield found


class Server:
    """A launch's connection to a fork server that imports nothing."""

    def __init__(self, find: Any = reach, **environ: str) -> None:
        self.sock: socket.socket = find({"PATH": os.environ["PATH"], **environ}, [], KEEP)
        _opened.append(self.sock)
        self.sock.settimeout(WAIT)
        self._messages = Messages(self.sock)
        self._left: list[dict[str, Any]] = []

    def answer(self, op: str) -> dict[str, Any]:
        while True:
            for message in self._left:
                if message["op"] == op:
                    self._left.remove(message)
                    return message
            self._left += [message for message, _ in self._messages.read()]

    def fork(self, *words: str) -> int:
        """Start a command as a rank; return its pid."""
        null = os.open(os.devnull, os.O_RDWR)
        environ = {"PATH": os.environ["PATH"]}
        request = {"op": "fork", "key": 0, "kind": "command", "program": list(words),
                   "environ": environ, "folder": "/"}  # fmt: skip
        send(self.sock, request, [null, null])
        os.close(null)
        return int(self.answer("forked")["pid"])


def parent(pid: int) -> int:
    """Return the parent of a process that runs, or has not been waited for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def sleeper(server: Server) -> int:
    return server.fork("sleep", "1000")


def test_the_next_launch_finds_the_server_of_the_last(folder: Path) -> None:
    first = Server()
    pid = parent(sleeper(first))
    first.sock.close()
    second = Server(connect)
    assert parent(sleeper(second)) == pid
    assert parent(pid) == os.getpid()
    assert b"MONARCH" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert {path.name for path in folder.iterdir()} > {keeper.SOCKET}
    assert parent(sleeper(Server(OTHER="variables"))) != pid


def test_servers_and_ranks_end_with_the_host() -> None:
    with host():
        rank = sleeper(Server())
        pids = [rank, parent(rank)]
    assert not any(map(runs, pids))


def test_a_directory_whose_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host serves, and each launch has a server of its own."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(keeper.tempfile, "gettempdir", lambda: str(long))
    with keeping():
        assert KEEPER not in os.environ
    assert "too long" in caplog.text
    assert not list(long.iterdir())


def test_the_oldest_server_ends_when_it_is_idle(folder: Path) -> None:
    servers = [Server(NUMBER=str(number)) for number in range(keeper._MOST)]
    pids = [parent(sleeper(server)) for server in servers]
    Server(NUMBER="more")
    again = Server(NUMBER="0")  # it is still there: a launch uses it
    servers[0].sock.close()
    assert parent(sleeper(again)) == pids[0]
    again.sock.close()
    until(lambda: not runs(pids[0]))
    assert all(map(runs, pids[1:]))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_what_ranks_leave_behind_ends_with_the_launch(folder: Path) -> None:
    """A process in a session of its own, whose parents have exited."""
    note = folder / "note"
    server = Server()
    pid = parent(sleeper(server))
    server.fork("sh", "-c", f"setsid sh -c 'echo $$ > {note}; exec sleep 1000' & sleep 1000")
    until(lambda: note.exists() and bool(note.read_text().strip()))
    left = int(note.read_text())
    note.unlink()
    assert runs(left)
    server.sock.close()
    until(lambda: not runs(left))
    assert runs(pid)


def test_a_request_that_breaks_off(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(folder / keeper.SOCKET))
        stranger.sendall(b"\0\0")
    assert runs(parent(sleeper(Server())))


DRIVER = """
import sys
from monarch.job import ProcessJob
job = ProcessJob({"trainers": 2})
"""


@pytest.mark.torch
def test_a_job_with_two_hosts(program: Program) -> None:
    """Their servers are the same for two commands; one ends with its host, one with the job."""
    pytest.importorskip("torch")

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "monarch.cli", *words],
            cwd=program.folder,
            env=program.environ,
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (program.folder / "described.py").write_text(DRIVER)
    command("apply", "described.job")
    try:
        source = (
            "import os, sys; print(os.getppid(), 'torch' in sys.modules, "
            "*[name for name in os.environ if name.startswith('MONARCH_J')])"
        )
        words = ("--mesh=trainers", "--no-prefix", "--nproc-per-node=2")
        first, second = (program(source, *words) for _ in range(2))
        assert first[:2] == second[:2], (first, second)
        assert first[0] == 0
        servers = {int(line.split()[0]) for line in first[1]}
        assert len(servers) == 2
        assert all(line.endswith(" True") for line in first[1])
        killed, _ = servers
        os.kill(parent(killed), signal.SIGKILL)
        until(lambda: not runs(killed))
    finally:
        command("kill")
    assert not any(map(runs, servers))
