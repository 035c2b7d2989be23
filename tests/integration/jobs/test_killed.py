"""A mesh that the program or `monarch kill` stops has not failed, wherever its owner is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WAIT = 60.0

SCRIPT = """
import sys, threading
from monarch.actor import *
from monarch.config import configure
from monarch.job import ProcessJob

configure(stop_actor_timeout="1s")


class Worker(Actor):
    @endpoint
    def rank(self):
        return current_rank().rank

    @endpoint
    def wait(self, begun):
        begun.send(None)
        threading.Event().wait(100)


class Owner(Actor):
    @endpoint
    def own(self, place):
        procs = place.spawn_procs({"gpus": 1}) if hasattr(place, "spawn_procs") else place
        self.workers = procs.spawn("workers", Worker)
        self.workers.rank.call().get()

    @endpoint
    def use(self, begun):
        self.workers.wait.call(begun).get()

    @endpoint
    def fine(self):
        return "fine"


class AsyncOwner(Actor):
    @endpoint
    async def own(self, place):
        procs = place.spawn_procs({"gpus": 1}) if hasattr(place, "spawn_procs") else place
        self.workers = procs.spawn("workers", Worker)
        await self.workers.rank.call()

    @concurrent_endpoint
    async def use(self, begun):
        await self.workers.wait.call(begun)

    @endpoint
    async def fine(self):
        return "fine"


how, use, kind = sys.argv[1:]
job = ProcessJob({"a": 1, "b": 2})
state = job.state(cached_path=None if how != "command" else ".monarch/job_state.pkl")
begun, receiver = Channel.open()
procs = state.b.spawn_procs({"gpus": 1}) if how == "procs" else None
if kind == "script":
    workers = (procs or state.b.spawn_procs({"gpus": 1})).spawn("workers", Worker)
    workers.rank.call().get()
    if use == "call":
        workers.wait.broadcast(begun)
else:
    where = state.a if kind == "on a host" else this_host()
    owner = where.spawn_procs().spawn("owner", AsyncOwner if kind == "async" else Owner)
    owner.own.call_one(procs or state.b).get()
    if use == "call":
        called = owner.use.call_one(begun)
    elif use == "broadcast":
        owner.use.broadcast(begun)
if use != "idle":
    receiver.recv().get(timeout=60)
print("ready", flush=True)
if how == "kill":
    job.kill()
elif how == "procs":
    procs.stop().get()
elif how == "shutdown":
    state.b.shutdown().get()
else:
    sys.stdin.readline()
if kind not in ("script", "on a host"):
    print(owner.fine.call_one().get(timeout=60))
if use == "call" and kind not in ("script", "on a host"):
    try:
        called.get(timeout=60)
    except Exception as error:
        print(type(error).__name__)
print("end")
"""


WAYS = ["kill", "procs", "shutdown", "command"]
CASES = [(how, use, "actor") for how in WAYS for use in ("idle", "call", "broadcast")]
CASES += [(how, "idle", "script") for how in WAYS]
CASES += [("kill", "broadcast", "async"), ("kill", "call", "on a host")]


@pytest.mark.parametrize(("how", "use", "kind"), CASES)
def test_a_stop_is_no_failure(directory: Path, how: str, use: str, kind: str) -> None:
    command = [sys.executable, "-c", SCRIPT, how, use, kind]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as script:
        said = ""
        if how == "command":
            assert script.stdout is not None
            said = script.stdout.readline()  # no more comes yet, which `communicate` would not see
            kill = [sys.executable, "-m", "monarch.cli", "kill"]
            subprocess.run(kill, check=True, timeout=WAIT, capture_output=True)
        output, errors = script.communicate("\n", timeout=WAIT)
    output = said + output
    assert script.returncode == 0, errors
    assert output.splitlines()[-1] == "end", errors
    if kind in ("actor", "async"):
        assert "fine" in output
        if use == "call":
            assert "Error" in output
        if use == "broadcast":
            assert "use() ended early, and no caller waits for it" in errors
            assert "stopped" in errors
    assert "Nothing handled this failure" not in errors
