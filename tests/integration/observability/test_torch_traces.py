"""``monarch profile --torch``: torch's profiler in chosen processes of a running script."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.integration.observability.conftest import Run

pytestmark = pytest.mark.torch

PROGRAM = """
import os, subprocess, sys
import torch
from monarch.actor import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self):
        return float(torch.ones(16, 16).matmul(torch.ones(16, 16)).sum())


class Plain(Actor):
    @endpoint
    def rest(self):
        pass


trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer)
trainers.step.call().get()


def profile(*words):
    command = [sys.executable, "-m", "monarch.cli", "profile", str(os.getpid()), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as asked:
        while asked.poll() is None:
            trainers.step.call().get()
        print(asked.stdout.read(), end="")
        return asked.returncode, asked.stderr.read()


status, errors = profile("--torch", "1s", "--mesh", "trainers", "-o", "both")
assert status == 0, errors
status, errors = profile("--torch", "1s", "--mesh", "trainers", "-o", "both")
assert status == 1 and "output already exists" in errors, errors
status, errors = profile("--torch", "1s", "--rank", "1", "--mesh", "trainers", "-o", "one.json")
assert status == 0, errors
status, errors = profile("--torch", "1s", "--mesh", "nope", "-o", "none")
assert status == 1 and "there is no process of nope" in errors, errors
"""


def operations(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event.get("name") == "aten::matmul"]


def test_chosen_ranks(run: Run, tmp_path: Path) -> None:
    printed = run(textwrap.dedent(PROGRAM))
    assert printed.startswith("Wrote both/trace_")
    assert {each.name for each in (tmp_path / "both").iterdir()} == {"trace_0.json", "trace_1.json"}
    for each in (tmp_path / "both").iterdir():
        assert operations(each)
    assert operations(tmp_path / "one.json")
    found = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in found if event["ph"] == "X"}
    # The messages of the same time are in the same file, on the same clock.
    call, operation = slices["trainers.step.call()"], slices["aten::matmul"]
    assert abs(call["ts"] - operation["ts"]) < 600e6
    assert any(
        event["name"] == "process_name" and event["args"]["name"].startswith("trace_1: ")
        for event in found
    )
