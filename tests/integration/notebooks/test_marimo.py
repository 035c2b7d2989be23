"""Programs in marimo, by a real server and its kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.job.os_process import OsProcess, descendants, wait_for
from tests.docs.test_documents import blocks_of
from tests.integration.notebooks.marimo_server import WAIT, Marimo, running_marimo

PAGE = Path(__file__).resolve().parents[3] / "docs" / "notebooks.md"

ACTORS = """
import os, time
from monarch.actor import Actor, current_rank, endpoint, this_host

SIGN = "!"

class Talker(Actor):
    @endpoint
    def say(self, text):
        print(text, "of", current_rank().rank, SIGN)
        return current_rank().rank

    @endpoint
    def wait(self, path):
        open(path, "w").close()
        while os.path.exists(path):
            time.sleep(0.02)

    @endpoint
    def fail(self):
        raise ValueError("of the actor")
"""
SPAWN = """
procs = this_host().spawn_procs({"gpus": 2})
talkers = procs.spawn("talkers", Talker)
first = talkers.slice(gpus=0)
"""


@pytest.fixture
def marimo(tmp_path: Path) -> Iterator[Marimo]:
    with running_marimo(tmp_path) as marimo:
        yield marimo


def lines(text: str) -> list[str]:
    """Return sorted lines of actors, without the host and the process before the rank."""
    return sorted(
        re.sub(r"^\[\S+ \S+\] ", "", line) for line in re.findall(r"^\[.*", text, re.MULTILINE)
    )


def said(text: str) -> list[str]:
    return [f"[{rank}] {text} of {rank} !" for rank in (0, 1)]


def test_a_notebook(marimo: Marimo, tmp_path: Path) -> None:
    """Output under its cell, values and meshes drawn, interrupts, an error, late output."""
    # Cells that run at once: the output of one must not be under the next.
    calls = ("await talkers.say.call('awaited'); None", "talkers.say.call('got').get(); None")
    marimo.ok(ACTORS, SPAWN, *calls)
    *_, awaited, got = marimo.cells.values()
    marimo.until(lambda: len(lines(got.text)) == 2)
    assert lines(awaited.text) == said("awaited")
    assert lines(got.text) == said("got")

    for code, text in (
        ("talkers", "<b>ActorMesh</b> {gpus: 2}"),
        ("await talkers.say.call('drawn')", "rgba(66,133,244,0.70)"),
    ):
        kind, data = marimo.run(code).shown[-1]
        assert kind == "text/html"
        assert text in data

    cell = marimo.run("talkers.fail.call().get()")
    assert "ValueError: of the actor" in cell.error

    marker = tmp_path / "waiting"
    call = f"first.wait.call({str(marker)!r})"
    for code in (f"{call}.get()", f"await {call}"):
        name = marimo.start(code)
        marimo.until(lambda name=name: "monarch: talkers.wait: wait" in marimo.cells[name].text)
        assert marker.exists()
        marimo.post("interrupt", {})
        assert "interruption" in marimo.wait(name).error
        marker.unlink()  # the actor goes on

    late = marimo.start("talkers.say.broadcast('late'); None")
    marimo.until(lambda: lines(marimo.cells[late].text) == said("late"))
    # marimo itself would read no output now that some has come while no cell ran.
    last = marimo.start("await talkers.say.call('last')")
    marimo.until(lambda: lines(marimo.cells[last].text) == said("last"))


def test_the_bar_of_a_recipe(marimo: Marimo) -> None:
    marimo.ok("from monarch.recipes import progress")
    code = "for _number in progress({}, label='numbers'): print(_number)"
    for items in ("range(3)", "iter(range(3))"):
        cell = marimo.run(code.format(items))
        assert (cell.error, cell.text) == ("", "0\n1\n2\n")
        shown = "".join(str(data) for _, data in cell.shown)
        assert "numbers" in shown
        assert ("3/3 in " if items == "range(3)" else "3 in ") in shown


def test_the_bar_of_all_ranks(marimo: Marimo) -> None:
    marimo.ok(ACTORS)
    marimo.ok("""
from monarch.recipes import progress

class Counter(Actor):
    @endpoint
    def count(self, bar, number):
        return sum(bar.track(range(number)))
""")
    marimo.ok('counters = this_host().spawn_procs({"gpus": 2}).spawn("counters", Counter)')
    cell = marimo.run("""
with progress(label="numbers", total=6) as _bar:
    print(counters.count.call(_bar, 3).get().values())
""")
    assert (cell.error, cell.text) == ("", "[3, 3]\n")
    assert "6/6 in " in "".join(str(data) for _, data in cell.shown)


def test_a_restarted_kernel_finds_its_meshes_again(marimo: Marimo) -> None:
    """The cells of docs/notebooks.md."""
    cells = [block.code for block in blocks_of(PAGE.read_text())]
    cells[0] = cells[0].replace("counting", f"marimo-{os.getpid()}")
    for count in (1, 2):
        last = marimo.start(*cells)
        marimo.until(lambda last=last: len(lines(marimo.cells[last].text)) == 2)
        assert marimo.wait(last).error == ""
        assert lines(marimo.cells[last].text) == [f"[{rank}] now at {count}" for rank in (0, 1)]
        marimo.restart()
    marimo.ok(cells[0], "await shutdown_context()")


def test_a_restart_leaves_nothing_running(marimo: Marimo) -> None:
    for _ in range(2):
        marimo.ok(ACTORS, SPAWN, "await talkers.initialized")
        pid = int(re.findall(r"\d+", marimo.run("os.getpid()").shown[-1][1])[-1])
        kernel = OsProcess.of(pid)
        running = descendants([kernel])
        assert len(running) >= 3
        marimo.restart()
        assert wait_for([kernel, *running], WAIT) == []
