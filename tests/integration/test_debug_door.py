"""``monarch debug`` without a port: at the door of a script, here and on a host of a job."""

# ruff: noqa: T100 - breakpoint() is what is tested

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, current_rank, debug_controller, endpoint, this_host
from monarch.cli.script_door import ScriptDoor
from tests.editor import Editor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the door needs Linux")

WAIT = 60.0
MONARCH = (sys.executable, "-m", "monarch.cli")
JOB = """
from monarch.job import ProcessJob
job = ProcessJob({"hosts": 2})
"""


class Worker(Actor):
    @endpoint
    def work(self, x: int) -> int:
        y = x + current_rank().rank
        breakpoint()
        return y


@pytest.fixture(scope="module")
def controller() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
        yield debug_controller()


@pytest.fixture
def workers(controller: Any) -> Iterator[Any]:
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs.spawn("workers", Worker)
    procs.stop().get(timeout=WAIT)


def stopped(controller: Any, count: int) -> None:
    """Wait until so many ranks are in pdb."""
    while True:
        controller.wait_pending_session.call_one().get(timeout=WAIT)
        if len(controller.list.call_one(print_output=False).get(timeout=WAIT)) == count:
            return


def debug(*words: str, given: str, cwd: Path | None = None) -> str:
    """Return what ``monarch debug`` prints for these lines."""
    done = subprocess.run(
        [*MONARCH, "debug", *words, "--pid", str(os.getpid())],
        input=given,
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_debugger_of_a_script(controller: Any, workers: Any) -> None:
    """All lines at once, as from a pipe, and the answers to all of them."""
    assert not ScriptDoor(os.getpid()).is_stopped()
    call = workers.work.call(5)
    stopped(controller, 2)
    assert ScriptDoor(os.getpid()).is_stopped()
    said = debug(given="list\nattach workers 1\np y\nc\ncontinue\nquit\n")
    assert said.count("| workers ") == 2
    assert "(Pdb) 6\n" in said
    assert list(call.get(timeout=WAIT).values()) == [5, 6]
    assert not ScriptDoor(os.getpid()).is_stopped()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory whose job runs, on two hosts."""
    (tmp_path / "where.py").write_text(JOB)
    subprocess.run(
        [*MONARCH, "apply", "where.job"], cwd=tmp_path, check=True, timeout=2 * WAIT, stdout=-3
    )
    yield tmp_path
    subprocess.run([*MONARCH, "kill"], cwd=tmp_path, check=True, timeout=2 * WAIT, stdout=-3)


def test_a_script_on_a_host_of_the_job(controller: Any, workers: Any, job: Path) -> None:
    """Its lines, and an editor's bytes, travel over the connections of the job."""
    call = workers.work.call(5)
    stopped(controller, 2)
    said = debug("--job", given="attach workers 1\np y\np y\ndetach\nquit\n", cwd=job)
    assert "(Pdb) 6\n" in said
    assert said.endswith("Quitting debug session...\n")
    pytest.importorskip("debugpy", reason="needs the extra debugger")
    command = [*MONARCH, "debug", "--dap", "--job", "--pid", str(os.getpid()), "workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=job) as process:
        try:
            assert process.stdout is not None
            text = b""
            while not text.endswith(b"\n}\n"):
                assert select.select([process.stdout], [], [], WAIT)[0], text
                text += os.read(process.stdout.fileno(), 65536)
            (configuration,) = json.loads(text)["configurations"]
            assert configuration["pathMappings"] == [
                {"localRoot": "${workspaceFolder}", "remoteRoot": os.getcwd()}
            ]
            editor = Editor(configuration["connect"]["port"])
            try:
                editor.attach(__file__)
                stop = editor.stop()
                assert stop.evaluate("y") == "6"
                stop.assign("y", "60")
                stop.go()
            finally:
                editor.close()
        finally:
            process.terminate()
    debug(given="continue\nquit\n")
    assert list(call.get(timeout=WAIT).values()) == [5, 60]
