"""The core works without each package that stands beside the engine.

The test runs a program with a copy of monarch from which one package is deleted, so the package is
missing in the client, the host agent, the launchers and the procs alike.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import monarch
from monarch._engine.base.features import HOOKS

SOURCE = Path(monarch.__file__).parent

PROGRAM = """
import importlib.util
import os
import sys
import time

import monarch.actor
from monarch.actor import Actor, ActorError, SupervisionError, endpoint, this_host
from monarch.config import configure

assert importlib.util.find_spec(sys.argv[1]) is None
assert os.path.dirname(os.path.dirname(importlib.util.find_spec("monarch").origin)) == sys.argv[2]


class Adder(Actor):
    def __init__(self, base):
        self.base = base

    @endpoint
    def add(self, x):
        return self.base + x

    @endpoint
    def measure(self, payload):
        return len(payload)

    @endpoint
    def work(self):
        time.sleep(0.5)  # longer than the wait watch waits

    @endpoint
    def say(self, text):
        print(text)

    @endpoint
    def lacks(self, package):
        return importlib.util.find_spec(package) is None

    @endpoint
    def fail(self):
        raise ValueError("on purpose")

    @endpoint
    def exit(self):
        os._exit(3)


class Asker(Actor):
    @endpoint
    async def ask(self, adders, x):
        await adders.work.call()
        return sum((await adders.add.call(x)).values())


procs = this_host().spawn_procs({"gpus": 2})
adders = procs.spawn("adders", Adder, 10)
assert adders.add.call(1).get().values() == [11, 11]
askers = procs.spawn("askers", Asker)
assert askers.ask.call(adders, 2).get().values() == [24, 24]
assert adders.lacks.call(sys.argv[1]).get().values() == [True, True]
adders.work.call().get()
assert adders.measure.call(bytes(1 << 20)).get().values() == [1 << 20, 1 << 20]
try:
    adders.fail.call().get()
except ActorError as error:
    assert "on purpose" in str(error)
else:
    raise AssertionError("no error")
adders.slice(gpus=0).say.call_one("said").get()
monarch.actor.unhandled_fault_hook = lambda failure: None
configure(tail_log_lines=5)  # asks for captured output
other = this_host().spawn_procs({"gpus": 1})
lone = other.spawn("lone", Adder, 1)
assert lone.add.call_one(1).get() == 2
try:
    lone.exit.call_one().get()
except SupervisionError as error:
    assert "3" in str(error)
else:
    raise AssertionError("no error")
procs.stop().get()
print("done")
"""


def packages() -> list[str]:
    return sorted({function.split(".")[1] for function in HOOKS.values()})


@pytest.mark.failures
@pytest.mark.parametrize("package", [name.partition(":")[0] for name in packages()])
def test_the_core_works_without(package: str, tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "rdma")
    shutil.copytree(SOURCE, tmp_path / "monarch", ignore=skipped)
    shutil.rmtree(tmp_path / "monarch" / package)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), f"monarch.{package}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "said\ndone\n", done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
