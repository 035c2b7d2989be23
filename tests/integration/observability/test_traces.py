"""`job.profile` and ``monarch profile`` of real scripts: calls, endpoints, what connects them."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from tests.integration.observability.conftest import Run

PROGRAM = """
import json, logging, os, subprocess, sys, time
import monarch.job
from monarch.actor import Actor, concurrent_endpoint, endpoint, span
from monarch.job import LocalJob


class Server(Actor):
    @endpoint
    def pull(self, value):
        with span("load"):
            return value


class Trainer(Actor):
    def __init__(self, server):
        self.server = server

    @concurrent_endpoint
    async def step(self, value):
        return await self.server.pull.call_one(value)


job = LocalJob()
try:
    job.profile()
except RuntimeError as error:
    assert "requires distributed telemetry" in str(error)
job.enable_telemetry()
try:
    job.profile()
except RuntimeError as error:
    assert "is not active; call job.state() before" in str(error)
hosts = job.state(cached_path=None).hosts
server = hosts.spawn_procs().spawn("server", Server)
trainers = hosts.spawn_procs({"gpus": 2}).spawn("trainers", Trainer, server)
trainers.initialized.get()  # (a call could end, by its own clock, within the block)
with job.profile(on_trace_ready=lambda done: print("ready")) as profiled:
    calls = [trainers.step.call(value) for value in range(3)]
    for call in calls:
        call.get()
    trainers.step.broadcast(3)
    trainers.step.call(4).get()
"""


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_a_block_of_a_job(run: Run, tmp_path: Path) -> None:
    tail = """
        until = time.monotonic() + 60
        while True:  # rows of a busy machine may come late
            path = profiled.export_perfetto_trace("block.json", overwrite=True)
            with open(path) as file:
                found = json.load(file)["traceEvents"]
            if sum(event["ph"] == "f" for event in found) >= 18 or time.monotonic() > until:
                break
        path = profiled.export_perfetto_trace("block.pftrace")
        try:
            profiled.export_perfetto_trace(path)
        except FileExistsError as error:
            assert "output already exists" in str(error)
        else:
            raise SystemExit("it was replaced")
        os.environ.pop("USER", None)
        print(profiled.export_perfetto_trace())
    """
    printed = run(PROGRAM + textwrap.dedent(tail), telemetry=False)
    assert printed.startswith("ready\nWrote ")
    assert " spans from 4 actors on 4 procs." in printed
    found = events(tmp_path / "block.json")
    names = Counter(event["name"] for event in found if event["ph"] == "X")
    # Four calls and a broadcast of the script; each trainer calls the server for each.
    assert names["trainers.step.call()"] == 4
    assert names["trainers.step.broadcast()"] == 1
    ten = ("step", "server.pull.call()", "pull", "load")
    assert {name: names[name] for name in ten} == dict.fromkeys(ten, 10)
    flows = Counter(event["ph"] for event in found if event["ph"] in "stf")
    assert (flows["s"], flows["t"]) == (20, 20)
    assert flows["f"] == 18  # the broadcast is not answered
    processes = {event["pid"] for event in found if event["ph"] == "X"}
    assert len(processes) == 4
    assert (tmp_path / "block.pftrace").stat().st_size > 1000
    assert Path(printed.splitlines()[-1]).exists()
    # Each call of a trainer is on the lane of the step that made it, though steps overlap.
    slices = [event for event in found if event["ph"] == "X"]
    steps = {event["args"]["span_id"]: event for event in slices if event["name"] == "step"}
    pulls = [event for event in slices if event["name"] == "server.pull.call()"]
    for pull in pulls:
        step = steps.pop(pull["args"]["parent_id"])
        assert (step["pid"], step["tid"]) == (pull["pid"], pull["tid"])
    assert not steps


def test_the_command(run: Run, tmp_path: Path) -> None:
    tail = """
        command = [sys.executable, "-m", "monarch.cli", "profile", str(os.getpid())]
        command += ["--time", "1s", "-o", "seconds.json"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asked:
            assert "watching all processes for 1 s" in asked.stderr.readline()
            while asked.poll() is None:
                trainers.step.call(0).get()
        assert asked.returncode == 0
        again = subprocess.run(command, capture_output=True, text=True)
        assert again.returncode == 1
        assert "output already exists" in again.stderr
        unfit = subprocess.run([*command, "--mesh", "x"], capture_output=True, text=True)
        assert "--mesh: for --cpu and --wall" in unfit.stderr
    """
    printed = run(PROGRAM + textwrap.dedent(tail), telemetry=False)
    assert "Wrote seconds.json, for https://ui.perfetto.dev" in printed
    names = {event["name"] for event in events(tmp_path / "seconds.json") if event["ph"] == "X"}
    assert {"trainers.step.call()", "step", "server.pull.call()", "pull", "load"} <= names
