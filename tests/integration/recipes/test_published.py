"""`publish` and `lookup`: actors of one script that another script calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import ActorError
from monarch.recipes import lookup, publish

from .conftest import WAIT

SCRIPT = """
import os, sys, threading, time
from monarch.actor import Actor, endpoint, this_host
from monarch.recipes import publish

class Counter(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def add(self, number):
        self.count += number
        return self.count

    @endpoint
    def apply(self, function, *, value):
        return function(value)

    @endpoint
    def lock(self):
        return threading.Lock()

    @endpoint
    def wait(self, path):
        open(path, "w").close()
        while os.path.exists(path):
            time.sleep(0.01)

counters = this_host().spawn_procs({"gpus": 2}).spawn("counters", Counter)
published = publish("counters", counters, directory=sys.argv[1])
print("published", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / ("long" * 40))


class Script:
    """A script that publishes, until it is asked to end."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "published\n"

    def end(self) -> int:
        self.process.communicate("\n", timeout=WAIT)
        return self.process.returncode


@pytest.fixture
def script(folder: str) -> Iterator[Script]:
    made = Script(folder)
    yield made
    made.process.kill()
    made.process.communicate(timeout=WAIT)


def test_calls_of_another_script(script: Script, folder: str, tmp_path: Path) -> None:
    with lookup("counters", directory=folder, timeout=WAIT) as counters:
        assert counters.add.call(2).get(timeout=WAIT).values() == [2, 2]
        assert counters.add.choose(0).get(timeout=WAIT) == 2
        assert counters.slice(gpus=0).add.broadcast(4).get(timeout=WAIT) is None
        assert counters.slice(gpus=slice(0, 1)).slice(gpus=0).add.call_one(1).get(timeout=WAIT) == 7
        assert counters.add.call(0).get(timeout=WAIT).values() == [7, 2]

        base = 3  # a closure travels
        squares = counters.apply.call(lambda x: x**2 + base, value=4).get(timeout=WAIT)
        assert squares.values() == [19, 19]

        async def twice() -> list[Any]:
            calls = await asyncio.gather(counters.add.call(1), counters.add.call(1))
            return [call.values() for call in calls]

        assert asyncio.run(twice()) == [[8, 3], [9, 4]]

        with lookup("counters", directory=folder) as other:
            calls = [each.add.call(0) for each in (counters, other) for _ in range(20)]
            assert len(wait(calls, WAIT).done) == 40
        with pytest.raises(ConnectionError, match=r"'counters', published by process \d+"):
            other.add.call(0)
        assert counters.add.call(0).get(timeout=WAIT).values() == [9, 4]
    assert script.end() == 0
    assert os.listdir(os.path.join(folder, "published")) == []


def test_errors(script: Script, folder: str, tmp_path: Path) -> None:
    with lookup("counters", directory=folder, timeout=WAIT) as counters:
        with pytest.raises(ActorError, match="unsupported operand") as caught:
            counters.add.call("x").get(timeout=WAIT)
        assert isinstance(caught.value.exception, TypeError)
        with pytest.raises(AttributeError, match="missing"):
            counters.missing.call().get(timeout=WAIT)
        with pytest.raises(TypeError, match="number"):
            counters.add.call().get(timeout=WAIT)
        with pytest.raises(
            AttributeError, match="call, call_one, choose, broadcast, and no stream"
        ):
            _ = counters.add.stream
        with pytest.raises(ActorError, match="lock"):
            counters.lock.call().get(timeout=WAIT)
        with pytest.raises(
            RuntimeError, match=f"process {script.process.pid} publishes 'counters'"
        ):
            publish("counters", counters, directory=folder)

        marker = tmp_path / "waiting"
        waiting = counters.slice(gpus=0).wait.call(str(marker))
        with pytest.raises(TimeoutError, match=r"no result within 0\.01 s"):
            waiting.get(timeout=0.01)
        script.process.kill()
        script.process.wait(WAIT)
        with pytest.raises(ConnectionError, match="the process has ended or withdrawn it"):
            waiting.get(timeout=WAIT)
    with pytest.raises(LookupError, match="no process on this machine publishes 'counters' in"):
        lookup("counters", directory=folder)

    again = Script(folder)  # in the place of the name of a killed process
    try:
        with lookup("counters", directory=folder, timeout=WAIT) as counters:
            assert counters.add.call(1).get(timeout=WAIT).values() == [1, 1]
        assert again.end() == 0
    finally:
        again.process.kill()


class Pair:
    """A mesh, as far as `publish` needs one."""

    def __init__(self) -> None:
        self.size = self

    def call(self) -> Any:
        raise ValueError("of the mesh")


def test_withdrawing(folder: str) -> None:
    found: list[Any] = []
    seeker = threading.Thread(
        target=lambda: found.append(lookup("pair", directory=folder, timeout=WAIT))
    )
    seeker.start()
    with publish("pair", Pair(), directory=folder) as published:
        seeker.join()
        (pair,) = found
        with pytest.raises(ValueError, match="of the mesh"):
            pair.size.call().get(timeout=WAIT)
    with pytest.raises(ConnectionError):
        pair.size.call().get(timeout=WAIT)
    pair.close()
    published.close()  # a second time
    with publish("pair", Pair(), directory=folder):
        pass


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 61])
def test_names(name: str, folder: str) -> None:
    for use in (lambda: lookup(name, directory=folder), lambda: publish(name, 0, directory=folder)):
        with pytest.raises(ValueError, match="is no name"):
            use()


def test_a_directory_that_others_can_write_is_refused(folder: str) -> None:
    os.makedirs(os.path.join(folder, "published"))
    os.chmod(os.path.join(folder, "published"), 0o777)
    for use in (lambda: lookup("x", directory=folder), lambda: publish("x", 0, directory=folder)):
        with pytest.raises(PermissionError, match="can be written by another user"):
            use()
