"""A process of a mesh: what a fork may not share, and what it owes its user at the exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from types import SimpleNamespace
from typing import NoReturn

import pytest

from monarch._engine.runtime.agent import bootstrap

PROGRAM = """
import atexit, ctypes, sys
from monarch._engine.runtime.agent import bootstrap

class Proc:
    def start(self):
        pass

bootstrap._Prepared.callbacks = atexit._ncallbacks()
bootstrap._Prepared.modules = frozenset(sys.modules)
for stream in (sys.stdout, sys.stderr):  # whatever the environment says
    stream.reconfigure(line_buffering=False, write_through=False)
print("said", end="")
print("complained", end="", file=sys.stderr)
ctypes.CDLL(None).puts(b", also by a library")
bootstrap._finalise(Proc())
"""


def test_what_was_printed_last_is_not_lost_at_the_exit() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=buffered,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("said, also by a library\n", "complained")


def test_each_forked_process_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators are seeded in the launcher, so all its processes would draw alike."""
    seeded: list[str] = []

    def seeds(name: str) -> SimpleNamespace:
        return SimpleNamespace(seed=lambda: seeded.append(name))

    monkeypatch.setenv("HYPERACTOR_PROCESS_NAME", "")
    monkeypatch.setattr(bootstrap, "_serve", lambda *_: None)
    for name, module in {
        "__main__": sys.modules["__main__"],  # it is replaced
        "numpy.random": seeds("numpy"),
        "torch": SimpleNamespace(default_generator=seeds("torch")),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    bootstrap.proc_main({"label": "trainer-0"}, -1, -1)
    assert seeded == ["numpy", "torch"]


@pytest.mark.parametrize(
    ("name", "file", "is_library"),
    [
        ("os", os.__file__, True),
        ("json", json.__file__, True),
        ("monarch.actor", None, True),
        ("torch", "/venv/lib/python3.11/site-packages/torch/__init__.py", True),
        ("mine", "/home/me/mine.py", False),
        ("made_by_the_program", None, False),
        ("__main__", os.__file__, False),
    ],
)
def test_modules_of_the_program_are_dropped_at_the_exit(
    name: str, file: str | None, is_library: bool
) -> None:
    module = types.ModuleType(name)
    module.__file__ = file
    assert bootstrap._is_library(name, module) is is_library


def test_what_multiprocessing_makes_is_in_the_scratch_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is removed with that folder, and it is set before any code of the program runs."""

    class Given(Exception):
        """The folder."""

    def give(path: str) -> NoReturn:
        raise Given(path)

    monkeypatch.setattr(bootstrap, "give_multiprocessing", give)
    with pytest.raises(Given, match="/tmp/of-this-process"):
        bootstrap._serve({"scratch": "/tmp/of-this-process"}, -1, -1)
