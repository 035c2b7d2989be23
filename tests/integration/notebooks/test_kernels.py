"""Programs in Jupyter, by real kernels."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from monarch.job.os_process import OsProcess, descendants, wait_for
from tests.integration.notebooks.kernel import WAIT, Kernel

ACTORS = """
import os, time
from monarch.actor import Actor, current_rank, endpoint, this_host

class Talker(Actor):
    @endpoint
    def say(self, text):
        print(text, "of", current_rank().rank)
        return current_rank().rank

    @endpoint
    def wait(self, path):
        open(path, "w").close()
        while os.path.exists(path):
            time.sleep(0.02)

    @endpoint
    def fail(self):
        raise ValueError("of the actor")

procs = this_host().spawn_procs({"gpus": 2})
talkers = procs.spawn("talkers", Talker)
first = talkers.slice(gpus=0)
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_output_is_under_the_cell_of_the_call(kernel: Kernel) -> None:
    kernel.ok(ACTORS)
    for number in range(5):
        text = kernel.ok(f'print("before"); talkers.say.call("cell {number}").get()')
        assert text.startswith("before\n")
        assert lines(text) == [f"[0] cell {number} of 0", f"[1] cell {number} of 1", "before"]
        text = kernel.ok(f'await first.say.call_one("await {number}")')
        assert lines(text) == [f"[0] await {number} of 0"]
    kernel.ok("await procs.logging_option(stream_to_client=True, aggregate_window_sec=60)")
    text = kernel.ok('await talkers.say.call("streamed")')
    assert re.search(r"\[2 similar log lines\] \[([01])\] streamed of \1 \(ranks 0-1\)\n", text)
    kernel.ok("await procs.logging_option(stream_to_client=False)")
    assert kernel.ok('await talkers.say.call("not streamed")') == ""


def lines(text: str) -> list[str]:
    """Return sorted lines, without the host and the process before the rank."""
    return sorted(re.sub(r"^\[\S+ \S+\] ", "", line) for line in text.splitlines())


def test_results_and_errors_as_a_notebook_shows_them(kernel: Kernel) -> None:
    kernel.ok(ACTORS)
    (shown,) = kernel.run('await talkers.say.call("x")').shown
    assert shown["text/plain"].startswith("ValueMesh({gpus: 2})")
    assert "rgba(66,133,244,0.70)" in shown["text/html"]
    (shown,) = kernel.run("talkers").shown
    assert "<b>ActorMesh</b> {gpus: 2}" in shown["text/html"]
    for call in ("talkers.fail.call().get()", "await talkers.fail.call()"):
        error = plain(kernel.run(call).error)
        assert f"----> 1 {call}" in error
        assert "ValueError: of the actor" in error
        assert os.path.join("monarch", "_engine") not in error
    ours = plain(kernel.run("def f():\n    return 1 / 0\nf()").error)
    assert "in f()" in ours


@pytest.mark.parametrize("call", ["first.wait.call({0!r}).get()", "await first.wait.call({0!r})"])
def test_an_interrupt_ends_the_wait_of_the_cell_only(
    kernel: Kernel, tmp_path: Path, call: str
) -> None:
    kernel.ok(ACTORS)
    marker = tmp_path / "waiting"
    cell = kernel.start(call.format(str(marker)))
    kernel.until(marker.exists)
    kernel.manager.interrupt_kernel()
    error = plain(kernel.wait(cell).error)
    assert "KeyboardInterrupt" in error or "CancelledError" in error
    assert os.path.join("monarch", "_engine") not in error
    marker.unlink()  # the actor goes on
    assert kernel.ok('await talkers.say.call("still here")').count("still here") == 2


def test_an_actor_defined_again_is_the_new_one(kernel: Kernel) -> None:
    for value in ("old", "new"):
        kernel.ok(
            f"""
from monarch.actor import Actor, endpoint, this_host
SUFFIX = "!"
class Definition(Actor):
    @endpoint
    def value(self):
        return {value!r} + SUFFIX
procs = globals().get("procs") or this_host().spawn_procs()
definition = procs.spawn("definition", Definition)
"""
        )
        assert kernel.ok("print(await definition.value.call_one())") == f"{value}!\n"


def ended(pids: list[int]) -> None:
    """Wait until the processes have ended."""
    left = [process for process in map(OsProcess.of, pids) if process.alive]
    assert wait_for(left, WAIT) == []


def processes(kernel: Kernel) -> list[int]:
    kernel.ok(ACTORS + "\nawait talkers.initialized")
    pids = [process.pid for process in descendants([OsProcess.of(kernel.pid)])]
    assert len(pids) >= 2
    return [kernel.pid, *pids]


def test_a_restart_leaves_nothing_running(kernel: Kernel) -> None:
    before = processes(kernel)
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=WAIT)
    ended(before[1:])
    text = kernel.ok(ACTORS + '\nawait first.say.call_one("again")')
    assert lines(text) == ["[0] again of 0"]


def test_a_killed_kernel_leaves_nothing_running(kernel: Kernel) -> None:
    before = processes(kernel)
    os.kill(kernel.pid, signal.SIGKILL)
    ended(before[1:])
