"""`monarch.diagnose` and ``monarch why``: busy, stuck, stopped and waiting actors are named."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch
from monarch._admin import views
from monarch._admin.picture import picture
from monarch._admin.snapshots import snapshot
from monarch._diagnosis.door import ask_script, running_scripts
from monarch._diagnosis.native import native_stacks
from monarch.actor import Actor, SupervisionError, Supervisor, concurrent_endpoint, endpoint

from .conftest import WAIT, until

Fresh = Callable[..., Any]


def wait_for(path: str) -> None:
    until(lambda: os.path.exists(path))


class Stuck(Actor):
    """Waits in one way or another, until the test lets it go on."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def block(self, path: str) -> None:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    @endpoint
    def hold(self, path: str) -> None:
        library = ctypes.PyDLL(None)  # its functions keep the interpreter lock
        with open(path) as file:
            library.flock(file.fileno(), fcntl.LOCK_EX)


class Async(Actor):
    @endpoint
    async def rest(self, path: str) -> None:
        await asyncio.to_thread(wait_for, path)

    @endpoint
    async def ask(self, other: Any, path: str) -> None:
        await other.block.call_one(path)


class Aside(Actor):
    @concurrent_endpoint
    async def rest(self, path: str) -> None:
        await asyncio.to_thread(wait_for, path)


class Asks(Actor):
    @endpoint
    def ask(self, other: Any, path: str) -> None:
        other.block.call_one(path).get()


class Gate:
    """A locked file: actors that lock it wait until it is released."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        self._file.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.release()


def seen(text: str) -> str:
    """Wait until a diagnosis has this text; return it."""
    last = ""

    def is_there() -> bool:
        nonlocal last
        last = str(monarch.diagnose(timeout=WAIT))
        return text in last

    until(is_there)
    return last


def test_a_busy_actor_and_those_that_wait_for_it(fresh: Fresh, gate: Gate, tmp_path: Any) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    asks, waits = fresh(2).spawn("asks", Asks), fresh(1).spawn("waits", Async)
    rests, aside = fresh(1).spawn("rests", Async), fresh(1).spawn("aside", Aside)
    open_ = str(tmp_path / "open")
    calls = [asks.ask.call(stuck, gate.path), rests.rest.call(open_)]
    calls += [aside.rest.call(open_), aside.rest.call(open_), waits.ask.call(stuck, gate.path)]
    for line in (
        "asks.ask(), 2 actors (ranks 0-1)",
        "for stuck.block(), ask() at ",
        "waits{'gpus': 0/1}.ask(): ",
        "stuck{'gpus': 0/1}.block(): ",
        "rests{'gpus': 0/1}.rest(): ",
        "aside{'gpus': 0/1}.rest(), 2 calls: ",
    ):
        text = seen(line)
    assert f"block() at {os.path.relpath(__file__)}:" in text
    gate.release()
    (tmp_path / "open").touch()
    for call in calls:
        call.get(timeout=WAIT)


def test_the_script_waits(fresh: Fresh, gate: Gate) -> None:
    """The main thread's wait is followed to its cause."""
    stuck = fresh(1).spawn("stuck", Stuck)
    asks = fresh(1).spawn("asks", Asks)
    texts: list[str] = []

    def look() -> None:
        try:
            texts.append(seen("because stuck{'gpus': 0/1} has been in block() for "))
        finally:
            gate.release()

    thread = threading.Thread(target=look)
    call = asks.ask.call_one(stuck, gate.path)
    thread.start()
    call.get(timeout=WAIT)
    thread.join()
    assert "waits for asks.ask() since " in texts[0]
    assert "found by way of asks{'gpus': 0/1}" in texts[0]


def test_processes_that_do_not_answer(fresh: Fresh, gate: Gate) -> None:
    """One is stopped by a signal, the other holds its interpreter in native code."""
    stuck = fresh(2).spawn("stuck", Stuck)
    pids = [pid for _, pid in stuck.pid.call().get(timeout=WAIT).items()]
    os.kill(pids[0], signal.SIGSTOP)
    try:
        held = stuck.slice(gpus=1).hold.call_one(gate.path)
        until(lambda: "it sleeps in native code" in str(monarch.diagnose(timeout=0.2)))
        text = str(monarch.diagnose(timeout=0.2))
    finally:
        os.kill(pids[0], signal.SIGCONT)
        gate.release()
    assert f"rocess {pids[0]} on " in text
    assert f"it is stopped by a signal; continue it with: kill -CONT {pids[0]}" in text
    held.get(timeout=WAIT)
    assert "does not answer" not in str(monarch.diagnose(timeout=WAIT))


def test_an_idle_actor(fresh: Fresh) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    stuck.pid.call_one().get(timeout=WAIT)
    found = monarch.diagnose(timeout=WAIT)
    actors = [actor for account in found.accounts for actor in account["actors"]]
    assert [actor["doing"] for actor in actors if actor["name"] == "stuck"] == [[]]
    assert "stuck" not in str(found)


class Fragile(Actor):
    @endpoint
    def fail(self) -> None:
        raise ValueError("bad weights")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_failure_is_there_though_the_actor_was_replaced(fresh: Fresh) -> None:
    supervisor = Supervisor()
    mesh = supervisor.spawn(fresh(2), "fragile", Fragile)
    mesh.slice(gpus=1).fail.broadcast()
    until(lambda: supervisor.restarts)
    mesh.pid.call().get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    text = str(monarch.diagnose())
    assert text.count("ValueError: bad weights (replaced since)") == 1
    assert "{'gpus': 1/2}" in text


def test_in_an_actor(fresh: Fresh) -> None:
    class Diagnoses(Actor):
        @endpoint
        def try_it(self) -> str:
            with pytest.raises(RuntimeError) as caught:
                monarch.diagnose()
            return str(caught.value)

    actor = fresh(1).spawn("diagnoses", Diagnoses)
    assert "is called in the script" in actor.try_it.call_one().get(timeout=WAIT)


linux = pytest.mark.skipif(sys.platform != "linux", reason="the door is in Linux's namespace")


def why(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch.cli", "why", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


@linux
def test_the_command(fresh: Fresh, gate: Gate) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    call = stuck.block.call_one(gate.path)
    seen("stuck{'gpus': 0/1}.block(): ")
    assert os.getpid() in running_scripts()
    asked = why(str(os.getpid()))
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "stuck{'gpus': 0/1}.block(): " in asked.stdout
    data = json.loads(why("--json", str(os.getpid())).stdout)
    assert data["pid"] == os.getpid()
    gate.release()
    call.get(timeout=WAIT)


@linux
def test_top(fresh: Fresh, gate: Gate) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    call = stuck.block.call_one(gate.path)
    command = [sys.executable, "-m", "monarch.cli", "top", str(os.getpid())]
    found: list[str] = []

    def is_shown() -> bool:
        once = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
        assert (once.returncode, once.stderr) == (0, "")
        found[:] = once.stdout.splitlines()
        rows = [line for line in found if "stuck{" in line]
        busy = [row for row in rows if row.startswith("busy") and "block()" in row]
        return any(re.search(r" \d+% ", row) for row in busy)  # it was there at both looks

    until(is_shown)
    assert found[0].startswith(f"script {os.getpid()}: ")
    assert found[2].split()[:3] == ["STATE", "SINCE", "QUEUE"]

    screen, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    size = {**os.environ, "COLUMNS": "100", "LINES": "20"}
    top = subprocess.Popen(
        [*command, "--delay", "0.2"], stdin=terminal, stdout=terminal, stderr=terminal, env=size
    )
    shown = b""
    while shown.count(b"STATE") < 2:  # it is drawn again
        shown += os.read(screen, 4096)
    os.write(screen, b"q")
    while not shown.endswith(b"\x1b[?1049l"):
        shown += os.read(screen, 4096)
    assert top.wait(timeout=WAIT) == 0
    assert termios.tcgetattr(terminal) == before
    os.close(screen)
    os.close(terminal)
    gate.release()
    call.get(timeout=WAIT)


@linux
@pytest.mark.skipif(
    shutil.which("py-spy", path=os.path.dirname(sys.executable)) is None, reason="needs py-spy"
)
def test_native_stacks(fresh: Fresh, gate: Gate) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    pid = stuck.pid.call_one().get(timeout=WAIT)
    call = stuck.hold.call_one(gate.path)
    until(lambda: "it sleeps in native code" in str(monarch.diagnose(timeout=0.2)))
    asked = why("--native", str(os.getpid()))
    assert asked.returncode == 0, asked.stderr
    shown = asked.stdout.partition(f"Process {pid}, with native frames:\n")[2]
    assert "hold (" in shown or "ermission denied" in shown, asked.stdout
    gate.release()
    call.get(timeout=WAIT)


@linux
def test_native_stacks_without_py_spy(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(1)
    monkeypatch.setattr("shutil.which", lambda *_args, **_kwargs: None)
    data = monarch.diagnose(timeout=WAIT).to_dict()
    with pytest.raises(RuntimeError, match=r"pymonarch\[native\]"):
        list(native_stacks(data))


@linux
def test_the_command_without_a_script() -> None:
    asked = why("1")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == (
        "monarch why: process 1 is no script that uses processes of this library now\n"
    )


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_gets_no_byte(fresh: Fresh) -> None:
    fresh(1)
    code = (
        "import os, socket, sys; os.setuid(65534); sock = socket.socket(socket.AF_UNIX);"
        "sock.connect(sys.argv[1].replace('@', chr(0))); print(len(sock.recv(1)))"
    )
    name = f"@monarch/{os.getuid()}/{os.getpid()}"
    command = [sys.executable, "-c", code, name]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert asked.stdout == "0\n", asked.stderr


@linux
def test_callers_that_leave_or_send_do_no_harm(fresh: Fresh) -> None:
    stuck = fresh(1).spawn("stuck", Stuck)
    for data in (b"", b"\0" * 4096):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0monarch/{os.getuid()}/{os.getpid()}")
            sock.sendall(data)
    until(lambda: bool(ask_script(os.getpid(), WAIT)))
    assert stuck.pid.call_one().get(timeout=WAIT)


class Native(Actor):
    """Computes in a given number of threads, without the interpreter."""

    @endpoint
    def compute(self, threads: int, until: str) -> None:
        def work() -> None:
            data = bytes(1 << 20)
            while not os.path.exists(until):
                hashlib.sha256(data).digest()

        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()


def test_a_host_with_more_threads_than_cores(fresh: Fresh, tmp_path: Path) -> None:
    mesh = fresh(2).spawn("native", Native)
    threads = 4 * len(os.sched_getaffinity(0))
    computing = mesh.compute.call(threads, str(tmp_path / "end"))
    until(lambda: "want to compute" in str(monarch.diagnose(timeout=WAIT)))
    (tmp_path / "end").touch()
    computing.get(timeout=WAIT)
    assert "want to compute" not in str(monarch.diagnose(timeout=WAIT))


@pytest.mark.failures
def test_a_killed_rank_is_among_the_failures(fresh: Fresh) -> None:
    """Supervised and replaced, or not, with its mesh and rank."""
    supervisor = Supervisor()
    replaced = supervisor.spawn(fresh(2), "replaced", Fragile)
    os.kill(replaced.slice(gpus=1).pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    with pytest.raises(SupervisionError):
        replaced.slice(gpus=1).pid.call_one().get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    lost = fresh(2).spawn("lost", Fragile)
    os.kill(lost.slice(gpus=0).pid.call_one().get(timeout=WAIT), signal.SIGSEGV)
    with pytest.raises(SupervisionError):
        lost.pid.call().get(timeout=WAIT)
    found = monarch.diagnose(timeout=WAIT)
    _, failures = str(found).split("\nFailures:\n")
    killed, faulted = failures.splitlines()[-2:]
    assert re.search(r"replaced{'gpus': 1/2}>: .*SIGKILL \(replaced since\)$", killed)
    assert re.search(r"lost{'gpus': 0/2}>: .*SIGSEGV$", faulted)
    seen = picture(found.to_dict(), time.time())
    rows = snapshot(seen, "1", (0.0, "me"), 100)["actor_failures"]
    assert [re.search(r"Killed\(sig=(\d+)\)", row[2])[1] for row in rows[-2:]] == ["9", "11"]
    groups = views.failures(seen)["groups"]
    assert [(group["mesh"], group["ranks"]) for group in groups[:2]] == [
        ("lost", "0"),
        ("replaced", "1"),
    ]
