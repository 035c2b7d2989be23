"""Programs in Jupyter, by real kernels."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from monarch.job.os_process import OsProcess, descendants, wait_for
from tests.docs.test_documents import blocks_of
from tests.integration.jobs.shadowed import PROGRAM
from tests.integration.notebooks.kernel import WAIT, Kernel

PAGE = Path(__file__).resolve().parents[3] / "docs" / "notebooks.md"

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
    def wait_all(self, path):
        if current_rank().rank == 1:
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


QUICK = """
import monarch._output.cell_progress as progress
progress._LONG, progress._LOOK = 0.2, 0.05
"""


def progress(kernel: Kernel, cell: str) -> list[str]:
    return [data["text/plain"] for data in kernel.cells[cell].progress]


@pytest.mark.parametrize(
    "call", ["talkers.wait_all.call({0!r}).get()", "await talkers.wait_all.call({0!r})"]
)
def test_a_long_call_shows_how_many_ranks_have_answered(
    kernel: Kernel, tmp_path: Path, call: str
) -> None:
    kernel.ok(ACTORS)
    kernel.ok(QUICK)
    marker = tmp_path / "waiting"
    cell = kernel.start(call.format(str(marker)) + "; None")
    kernel.until(lambda: any("1 of 2 ranks" in text for text in progress(kernel, cell)))
    kernel.until(marker.exists)
    marker.unlink()
    assert kernel.wait(cell).error == ""
    states = progress(kernel, cell)
    assert re.fullmatch(r"talkers.wait_all: 1 of 2 ranks, waiting for gpus=1 \(\d+ s\)", states[-2])
    assert re.fullmatch(r"talkers.wait_all: 2 ranks answered in \d+ s", states[-1])
    assert '<progress value="1" max="2">' in kernel.cells[cell].progress[-2]["text/html"]
    kernel.ok('talkers.say.call("quick").get(); None')
    assert kernel.run('talkers.say.call("quick").get(); None').progress == []


def release(kernel: Kernel, marker: Path) -> None:
    """Let an actor go on, once it waits."""
    kernel.until(marker.exists)
    marker.unlink()


def test_long_calls_that_end_in_other_ways(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(ACTORS)
    kernel.ok(QUICK)
    marker = tmp_path / "waiting"

    def last(code: str) -> str:
        text: str = kernel.run(code).progress[-1]["text/plain"]
        release(kernel, marker)
        return re.sub(r"\d+ s", "N s", text)

    call = f"wait.call({str(marker)!r})"
    left = "talkers.wait: no longer awaited after N s, 0 of 1 ranks answered"
    assert last(f"first.{call}.get(timeout=1)") == left
    timed = f"await first.wait.options(timeout=1).call({str(marker)!r})"
    assert last(timed) == "talkers.wait: failed after N s"
    several = f"""
import asyncio, threading
calls = [first.{call} for _ in range(3)]
threading.Timer(1, lambda: [call.cancel() for call in calls]).start()
await asyncio.gather(*[call.as_asyncio() for call in calls])
"""
    assert last(several) == "talkers.wait: cancelled after N s; 3 calls took longer than N s"


def test_a_cell_shows_only_its_own_calls_and_none_if_the_setting_says_so(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.ok(ACTORS)
    kernel.ok(QUICK)
    marker = tmp_path / "waiting"
    kernel.ok(f"""
import asyncio
task = asyncio.create_task(asyncio.wait_for(first.wait.call_one({str(marker)!r}), 60))
await asyncio.sleep(0)
""")
    assert kernel.run("await asyncio.sleep(1)").progress == []
    release(kernel, marker)
    kernel.ok("await task")
    kernel.ok("from monarch.config import configure; configure(call_progress=False)")
    assert kernel.run(f"first.wait.call({str(marker)!r}).get(timeout=1)").progress == []
    release(kernel, marker)


def test_the_bar_of_a_recipe_stays_in_one_place(kernel: Kernel) -> None:
    cell = kernel.run("""
from monarch.recipes import progress
for number in progress(range(3), label="numbers"):
    print(number)
""")
    assert cell.text == "0\n1\n2\n"
    first, last = cell.shown[0], cell.shown[-1]
    assert first["text/plain"].startswith("numbers: 0/3 in 0 s")
    assert last["text/plain"].startswith("numbers: 3/3 in ")
    assert '<progress value="3" max="3">' in last["text/html"]


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


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
def test_a_restarted_kernel_finds_its_meshes_again(kernel: Kernel, now: bool) -> None:
    """The cells of docs/notebooks.md; a killed kernel is a restart as well."""
    cells = [block.code for block in blocks_of(PAGE.read_text())]
    assert len(cells) == 2
    running: list[OsProcess] = []
    for count in (1, 2, 3):
        kernel.ok(cells[0].replace("counting", f"counting-{os.getpid()}"))
        cell = kernel.run(cells[1])
        assert cell.error == ""
        assert lines(cell.text) == [f"[{rank}] now at {count}" for rank in (0, 1)]
        assert kernel.ok("print(await counters.add.call(0)); procs").count(f", {count})") == 2
        running = running or descendants([OsProcess.of(kernel.pid)])
        kernel.manager.restart_kernel(now=now)
        kernel.client.wait_for_ready(timeout=WAIT)
    kernel.ok(cells[0].replace("counting", f"counting-{os.getpid()}"))
    kernel.ok("await shutdown_context()")
    assert len(running) >= 2
    assert wait_for(running, WAIT) == []


def test_a_restarted_kernel_finds_meshes_on_the_hosts_of_a_job(kernel: Kernel) -> None:
    kernel.ok(ACTORS.partition("procs =")[0])
    kernel.ok("""
from monarch.job import ProcessJob
job = ProcessJob({"trainers": 2}, grace="1m")
talkers = job.state().trainers.spawn_procs().spawn("talkers", Talker)
await talkers.initialized
""")
    for number in range(3):
        text = kernel.ok(f'await talkers.say.call("kernel {number}"); None')
        assert lines(text) == [f"[{rank}] kernel {number} of {rank}" for rank in (0, 1)]
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=WAIT)
        kernel.ok("""
from monarch.job import job_load
job = job_load()
talkers = job.reattach().actors["talkers"]
""")
    kernel.ok("from monarch.actor import shutdown_context; await shutdown_context(); job.kill()")


def test_a_killed_kernel_leaves_nothing_running(kernel: Kernel) -> None:
    before = processes(kernel)
    os.kill(kernel.pid, signal.SIGKILL)
    ended(before[1:])


def test_hosts_of_a_job_import_what_the_notebook_does(kernel: Kernel, tmp_path: Path) -> None:
    """The module beside the notebook, and not the installed one of the same name."""
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "six.py").touch()
    before = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.modules.pop('six', None)\n"
    said = kernel.ok(before + PROGRAM)
    assert said.split() == [str(folder / "six.py")] * 3


def test_states_of_ranks_stand_under_the_cell_and_their_last_ones_stay(kernel: Kernel) -> None:
    kernel.ok(ACTORS)
    kernel.ok("""
import sys
class Writer(Actor):
    @endpoint
    def write(self, text):
        sys.stderr.write(text.replace("RANK", str(current_rank().rank)))
        sys.stderr.flush()
writers = procs.spawn("writers", Writer)
""")
    first = kernel.start("for n in range(3): writers.write.call(f'\\r\\x1b[31m{n} of RANK').get()")
    states = [r"\S+-0  2 of 0\n\S+-1  2 of 1"]
    kernel.until(
        lambda: [text for text in progress(kernel, first) if re.fullmatch(states[0], text)]
    )
    assert kernel.wait(first).text == ""
    last = kernel.start("writers.write.call('\\n').get(); None")
    kernel.until(lambda: kernel.cells[last].text.count("2 of ") == 2)
    assert re.search(r"\[\S+ \S+\] \[0\] \x1b\[31m2 of 0\x1b\[0m\n", kernel.cells[last].text)
    kernel.until(lambda: "" in [*progress(kernel, first)[-1:], *progress(kernel, last)[-1:]])


def test_the_bar_of_all_ranks_stays_in_one_place(kernel: Kernel) -> None:
    kernel.ok(ACTORS)
    kernel.ok("""
class Counter(Actor):
    @endpoint
    def count(self, bar, number):
        return sum(bar.track(range(number)))
counters = procs.spawn("counters", Counter)
""")
    cell = kernel.run("""
from monarch.recipes import progress
with progress(label="numbers", total=6) as bar:
    print(counters.count.call(bar, 3).get().values())
""")
    assert (cell.text, cell.error) == ("[3, 3]\n", "")
    first, last = cell.shown[0], cell.shown[-1]
    assert first["text/plain"].startswith("numbers: 0/6 in 0 s")
    assert last["text/plain"].startswith("numbers: 6/6 in ")
