"""``monarch profile``: where the time of all processes of a running script goes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._diagnosis.door import knock
from monarch._traces.request import Selection, cpu_profile
from monarch._traces.sampler import Options
from monarch._traces.stacks import Profile
from monarch.actor import Actor, endpoint

from .conftest import WAIT, until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the door is in Linux's namespace, as are clocks of threads"
)
Fresh = Callable[..., Any]
SVG = "{http://www.w3.org/2000/svg}"


class Trainer(Actor):
    """Burns processor time, or waits, until the file exists."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def burn(self, path: str) -> None:
        while not os.path.exists(path):
            for _ in range(200):  # the file releases the interpreter lock, where samples are taken
                self.step()

    def step(self) -> None:
        sum(range(10_000))

    @endpoint
    def rest(self, path: str) -> None:
        with open(f"{path}.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@pytest.fixture
def done(tmp_path: Path) -> Iterator[str]:
    """The path of a file that lets burning actors go on; those that rest do so at the end."""
    path = tmp_path / "done"
    with (tmp_path / "done.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(path)
    path.touch()


def until_sampled(count: int, seconds: float) -> bool:
    """Wait until the time is over, which is long."""
    deadline = time.monotonic() + seconds
    until(lambda: time.monotonic() >= deadline)
    return True


def profile(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch.cli", "profile", str(os.getpid()), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


def names(text: str) -> list[list[str]]:
    """Return the stacks of collapsed text, without places."""
    rows = [line.rpartition(" ")[0].split(";") for line in text.splitlines()]
    return [[frame.partition(" (")[0].rpartition(".")[2] for frame in row] for row in rows]


def test_one_flame_graph_of_all_processes(fresh: Fresh, done: str, tmp_path: Path) -> None:
    trainers = fresh(2).spawn("trainers", Trainer)
    rests = fresh(1).spawn("rests", Trainer)
    trainers.pid.call().get(timeout=WAIT)
    rests.pid.call().get(timeout=WAIT)
    call = trainers.burn.call(done)
    rests.rest.call(done)

    def of_all() -> Profile | None:
        found = cpu_profile(os.getpid(), Options(1.0), Selection(), until_sampled)
        return None if found.count < 4 or found.notes else found  # with the script

    found: Profile = until(of_all)
    stacks = {tuple(f.name.rpartition(".")[2] for f in s) for s in found.stacks.weights}
    assert any(stack[:3] == ("trainers", "burn", "step") for stack in stacks)
    assert not any("rest" in stack for stack in stacks)
    places = {f.file for stack in found.stacks.weights for f in stack if f.name.endswith("burn")}
    assert places == {__file__}

    svg = str(tmp_path / "all.svg")
    made = profile("--cpu", "0.5", "-o", svg)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"Wrote {svg}: ")
    titles = [title.text or "" for title in ET.parse(svg).getroot().iter(f"{SVG}title")]
    assert any("burn (test_profiles.py:" in title for title in titles)
    again = profile("--cpu", "0.5", "-o", svg)
    assert again.returncode == 1
    assert "output already exists" in again.stderr

    scope = str(tmp_path / "all.json")
    made = profile("--wall", "0.5", "--mesh", "rests", "-o", scope)
    assert made.returncode == 0, made.stderr
    content = json.loads(Path(scope).read_text())
    assert "rest" in {f["name"].rpartition(".")[2] for f in content["shared"]["frames"]}
    assert "burn" not in {f["name"].rpartition(".")[2] for f in content["shared"]["frames"]}

    made = profile("--wall", "0.5", "--mesh", "trainers", "--rank", "1", "-o", "-")
    assert made.returncode == 0, made.stderr
    assert "watching 1 process for 0.5 s" in made.stderr
    assert {row[0] for row in names(made.stdout)} == {"trainers"}
    made = profile("--cpu", "0.5", "--mesh", "trainer", "-o", "-")
    assert made.returncode == 1
    assert "there is no process of trainer; the meshes are " in made.stderr
    assert "trainers" in made.stderr
    Path(done).touch()
    call.get(timeout=WAIT)


def test_ctrl_c_writes_what_there_is(fresh: Fresh, done: str) -> None:
    trainers = fresh(1).spawn("trainers", Trainer)
    trainers.pid.call().get(timeout=WAIT)
    call = trainers.burn.call(done)
    command = [sys.executable, "-m", "monarch.cli", "profile", str(os.getpid())]
    command += ["--cpu", "1h", "--mesh", "trainers", "-o", "-"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stderr is not None
        assert "watching 1 process" in asked.stderr.readline()
        deadline = time.monotonic() + 1.0
        until(lambda: time.monotonic() > deadline)
        busy = cpu_busy()
        assert "a profile is under way" in busy
        asked.send_signal(signal.SIGINT)
        text, errors = asked.communicate(timeout=WAIT)
    assert asked.returncode == 0, errors
    assert any(row[:2] == ["trainers", "burn"] for row in names(text))
    Path(done).touch()
    call.get(timeout=WAIT)


def cpu_busy() -> str:
    """Return why a second profile is refused."""
    with pytest.raises(RuntimeError) as caught:
        cpu_profile(os.getpid(), Options(1.0), Selection("trainers"), until_sampled)
    return str(caught.value)


def test_processes_that_exit_and_commands_that_leave(fresh: Fresh, done: str) -> None:
    """A lost process is named, the others are shown; a killed command leaves no sampler."""
    mesh = fresh(1)
    trainers, rests = mesh.spawn("trainers", Trainer), fresh(1).spawn("rests", Trainer)
    pid = trainers.pid.call_one().get(timeout=WAIT)
    rests.pid.call_one().get(timeout=WAIT)

    def stop_first(count: int, seconds: float) -> bool:
        mesh.stop().get(timeout=WAIT)
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        return False

    found = cpu_profile(os.getpid(), Options(WAIT, wall=True), Selection(), stop_first)
    assert any("it is not in the profile" in note for note in found.notes)
    assert any(stack[0].name == "rests" for stack in found.stacks.weights)

    request = {
        "ask": "profile",
        "kind": "stacks",
        "options": list(Options(3600.0)),
        "mesh": "rests",
        "ranks": None,
    }
    with knock(os.getpid(), request, WAIT) as sock:
        assert sock.recv(4)

    def is_free() -> bool:
        with contextlib.suppress(RuntimeError):
            cpu_profile(os.getpid(), Options(0.05), Selection("rests"), until_sampled)
            return True
        return False

    until(is_free)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    for words, text in (
        (["--cpu", "soon"], "soon"),
        (["--cpu", "2h"], "up to an hour"),
        (["--cpu", "1s", "--rate", "0"], "--rate is 1 to 1000"),
        (["--cpu", "1s", "--rank", "x"], "--rank is a number"),
        (["--cpu", "1s", "-o", str(tmp_path / "a.pdf")], "ends in .svg"),
        (["--cpu", "1s", "-o", str(tmp_path / "no" / "a.svg")], "is no directory"),
    ):
        made = profile(*words)
        assert made.returncode == 1
        assert text in made.stderr
        assert len(made.stderr.splitlines()) == 1


@pytest.mark.skipif(
    shutil.which("py-spy", path=os.path.dirname(sys.executable)) is None, reason="needs py-spy"
)
def test_native_frames(fresh: Fresh, done: str) -> None:
    trainers = fresh(1).spawn("trainers", Trainer)
    trainers.pid.call().get(timeout=WAIT)
    call = trainers.burn.call(done)
    made = profile("--cpu", "1s", "--native", "-o", "-")
    Path(done).touch()
    call.get(timeout=WAIT)
    if made.returncode:
        assert "py-spy could not trace process" in made.stderr
    else:
        assert any("burn" in row for row in names(made.stdout))


class Breaks(Actor):
    """Has the sampler of its process end with an error."""

    @endpoint
    def prepare(self) -> int:
        from monarch._traces.sampler import Sampler

        def fail(self: Sampler, elapsed: int) -> None:
            raise AttributeError("no attribute f_code")

        Sampler._sample = fail  # type: ignore[method-assign]
        return os.getpid()


def test_a_sampling_that_ends_with_an_error_is_told(fresh: Fresh) -> None:
    """The process is named, the others are shown, and the command fails."""
    pid = fresh(1).spawn("breaks", Breaks).prepare.call_one().get(timeout=WAIT)
    made = profile("--wall", "0.3", "-o", "-")
    assert made.returncode == 1
    assert f"(pid {pid} on " in made.stderr
    assert "the sampling ended with an error after 0.0 s: AttributeError" in made.stderr
    assert "it is not in the profile" in made.stderr
    assert any(row[0] == "the script" for row in names(made.stdout))
