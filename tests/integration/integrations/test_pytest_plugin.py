"""The plugin of pytest, in runs of pytest that find it by its entry point, as a user's would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

ACTORS = """
import os, subprocess, sys, time
import pytest
import monarch.actor
from monarch.actor import Actor, SupervisionError, endpoint, this_host

class Worker(Actor):
    @endpoint
    def add(self, x): return x + 1
    @endpoint
    def sleep(self, seconds): time.sleep(seconds)
    @endpoint
    def exit(self): os._exit(3)
"""

REAL = (
    ACTORS
    + """
@pytest.fixture(scope="module")
def of_the_module():
    procs = this_host().spawn_procs(name="of-the-module")
    yield procs.spawn("worker", Worker)
    procs.stop().get(timeout=60)

def test_two_processes(proc_mesh, host_mesh, of_the_module):
    assert host_mesh.size() == 1
    assert proc_mesh.spawn("w", Worker).add.call(1).get(timeout=60).values() == [2, 2]
    assert of_the_module.add.call_one(1).get(timeout=60) == 2

@pytest.mark.monarch_procs({"gpus": 1}, name="marked")
def test_marker(proc_mesh):
    assert repr(proc_mesh) == "<ProcMesh marked {gpus: 1}>"

def test_forgets(spawn_procs):
    this_host().spawn_procs(name="forgotten").initialized.get(timeout=60)
    spawn_procs(name="stopped").stop().get(timeout=60)

def test_catches(proc_mesh):
    with pytest.raises(SupervisionError):
        proc_mesh.spawn("w", Worker).exit.call().get(timeout=60)

@pytest.mark.monarch_procs(None)
def test_overlooks(proc_mesh):
    call = proc_mesh.spawn("sleeper", Worker).sleep.call_one(60)
    proc_mesh.spawn("w", Worker).exit.broadcast()
    while not call.done():  # a look at its result would be a handled failure
        time.sleep(0.01)

@pytest.mark.monarch_procs(None)
def test_expects(proc_mesh, mesh_failures):
    with pytest.raises(TimeoutError, match="no failure has reached .*test_expects in 0.01 s"):
        mesh_failures.next(0.01)
    proc_mesh.spawn("w", Worker).exit.broadcast()
    assert "code 3" in mesh_failures.next().report()
"""
)


def runs(pytester: pytest.Pytester, program: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=program)
    return pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", *options)


@pytest.mark.failures
def test_meshes_of_a_test_and_what_it_leaves_behind(pytester: pytest.Pytester) -> None:
    result = runs(pytester, REAL)
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "test_it.py::test_forgets left behind:",
            "  <ProcMesh forgotten {}>: call stop() on it, or take it from the fixture spawn_procs",
            "A failure in test_it.py::test_overlooks was not handled:",
            "  The actor <root>.<test_it.Worker w> and all its descendants have failed:",
            "A test that expects a failure * uses mesh_failures.",
        ]
    )
    assert len(re.findall(r"^ERROR test_it.py", result.stdout.str(), re.MULTILINE)) == 2


OVERLOOKED = (
    ACTORS
    + """
import asyncio
from monarch.actor import ActorError
from monarch.config import configure

class Raises(Actor):
    @endpoint
    def bad(self, text="odd"): raise ValueError(text)

@pytest.fixture(scope="module")
def of_the_module():
    procs = this_host().spawn_procs(name="of-the-module")
    yield procs.spawn("older", Raises)
    procs.stop().get(timeout=60)

def test_drops(proc_mesh):
    proc_mesh.spawn("dropped", Raises).bad.call()

def test_drops_later(proc_mesh):
    future = proc_mesh.spawn("later", Raises).bad.call("later")
    while not future.done():
        time.sleep(0.01)

def test_drops_a_circle(proc_mesh):
    kept = [proc_mesh.spawn("circle", Raises).bad.call("in a circle")]
    kept.append(kept)

@pytest.mark.monarch_procs(None)
def test_drops_of_a_stream(proc_mesh):
    raises = proc_mesh.spawn("streams", Raises)
    for future in raises.bad.stream("streamed"):
        pass

@pytest.mark.monarch_procs(None)
def test_drops_on_older_processes(of_the_module):
    future = of_the_module.bad.call_one("older")
    while not future.done():
        time.sleep(0.01)

@pytest.mark.monarch_simulate()
def test_drops_in_a_simulation(proc_mesh):
    proc_mesh.spawn("simulated", Raises).bad.call("virtual")

def test_looks(proc_mesh):
    raises = proc_mesh.spawn("looks", Raises)
    with pytest.raises(ActorError):
        raises.bad.call().get(timeout=60)
    assert raises.bad.call().exception(timeout=60) is not None
    for future in raises.bad.stream():
        assert future.exception(timeout=60) is not None

    async def main():
        with pytest.raises(ActorError):
            await raises.bad.call()

    asyncio.run(main())

def test_fails_itself(proc_mesh):
    future = proc_mesh.spawn("fails", Raises).bad.call("of a test that fails")
    while not future.done():
        time.sleep(0.01)
    assert False, "itself"

@pytest.mark.monarch_simulate()
def test_looks_in_a_simulation(proc_mesh):
    with pytest.raises(ActorError):
        proc_mesh.spawn("looks", Raises).bad.call().get()

def test_is_green(proc_mesh):
    assert proc_mesh.spawn("w", Worker).add.call(1).get(timeout=60).values() == [2, 2]

def test_turns_it_off(proc_mesh):
    configure(report_unobserved_errors=False)
    proc_mesh.spawn("off", Raises).bad.call()

def test_turns_it_on_again():
    configure(report_unobserved_errors=True)
"""
)


def test_an_error_that_no_one_looks_at_fails_its_test(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmonarch_check_every_test = true")
    result = runs(pytester, OVERLOOKED)
    result.assert_outcomes(passed=10, failed=2, errors=5)
    text = result.stdout.str()
    found = re.findall(r"^ERROR test_it.py::test_drops(\w*) ", text, re.MULTILINE)
    assert sorted(found) == ["", "_a_circle", "_later", "_of_a_stream", "_on_older_processes"]
    found = re.findall(r"^FAILED test_it.py::test_(\w+)", text, re.MULTILINE)
    assert sorted(found) == ["drops_in_a_simulation", "fails_itself"]
    result.stdout.fnmatch_lines_random(
        [
            "An error of a call in test_it.py::test_drops was not looked at:",
            "  dropped.bad() failed: ValueError: odd (rank ?, pid * on *)",
            "  later.bad() failed: ValueError: later (rank *",
            "  circle.bad() failed: ValueError: in a circle (rank *",
            "  streams.bad() failed: ValueError: streamed (rank *",
            "  older.bad() failed: ValueError: older (rank 0, *) (an earlier test may have made *",
            "An error of a call in test_it.py::test_drops_in_a_simulation was not looked at:",
            "  simulated.bad() failed: ValueError: virtual (rank *",
            "get() or await what a call returns; if the test expects the error, in pytest.raises.",
        ]
    )
    assert "of a test that fails (rank" not in text
    result.stderr.fnmatch_lines(["monarch: fails.bad() failed and its result was never retrieved*"])


LATE = (
    ACTORS
    + """
@pytest.fixture(scope="module")
def late():
    failures = []
    yield failures
    monarch.actor.unhandled_fault_hook(failures[0])

@pytest.mark.monarch_procs(None)
def test_late(late, proc_mesh, mesh_failures):
    proc_mesh.spawn("w", Worker).exit.broadcast()
    late.append(mesh_failures.next())
    mesh_failures.expected = False
    mesh_failures.unhandled()

def test_plain(tmp_path):
    sleeper = [sys.executable, "-c", "print(flush=True); input()"]
    test_plain.left = subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    test_plain.left.stdout.readline()

def test_plain_end():
    with test_plain.left:
        test_plain.left.stdin.close()
"""
)


@pytest.mark.failures
def test_every_test_is_checked_if_that_is_asked_for(pytester: pytest.Pytester) -> None:
    """A failure that comes after the end of its test is reported at the end of the run."""
    pytester.makeini("[pytest]\nmonarch_check_every_test = true")
    pytester.makeconftest(
        "import monarch.integrations.pytest.resources as r\nr.GRACE = 1.0  # it will not exit"
    )
    result = runs(pytester, LATE)
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "test_it.py::test_plain left behind:",
            "  process *: *",
            "A failure that arrived after the end of test_it.py::test_plain_end was not handled:",
        ]
    )


SIMULATED = (
    ACTORS
    + """
import asyncio, random
from monarch.testing import Crash, Rates, Request

@pytest.mark.monarch_simulate(hosts=2)
@pytest.mark.parametrize("hours", [1])
def test_hosts(host_mesh, proc_mesh, spawn_procs, hours):
    assert host_mesh.size() == 2
    assert dict(proc_mesh.extent) == {"hosts": 2, "procs": 2}
    spawn_procs().spawn("w", Worker).sleep.call(3600 * hours / 2).get()
    assert time.monotonic() >= 1800

@pytest.mark.monarch_simulate(seeds=100)
def test_seeds(record_property):
    if (drawn := random.random()) > 0.9:
        pytest.fail(f"drew {drawn}")

@pytest.mark.monarch_simulate()
async def test_async(proc_mesh):
    await asyncio.sleep(1000)
    assert (await proc_mesh.spawn("w", Worker).add.call(1)).values() == [2, 2]

@pytest.mark.monarch_simulate()
def test_skips():
    pytest.skip("not here")

@pytest.mark.monarch_simulate(faults=[Crash(Request(1, actor="w"))])
def test_expects(proc_mesh, mesh_failures):
    proc_mesh.spawn("w", Worker).sleep.broadcast(1)
    assert "SIGKILL" in mesh_failures.next().report()

@pytest.mark.monarch_simulate(faults=[Crash(Request(1, actor="w"))])
def test_overlooks(proc_mesh):
    proc_mesh.spawn("w", Worker).sleep.broadcast(1)
    time.sleep(100)

@pytest.fixture
def worker(proc_mesh):
    return proc_mesh.spawn("w", Worker)

@pytest.mark.monarch_simulate()
def test_fixture_too_early(worker):
    pass

CASES = {cases!r}

SEEDS = 0 if CASES else 5
CRASHES = Rates(crash=3, at_requests=1.0)

@pytest.mark.monarch_simulate(cases=CASES, seeds=SEEDS, faults=CRASHES)
def test_explores(proc_mesh):
    worker = proc_mesh.spawn("w", Worker)
    for _ in range(4):
        worker.add.call(1).get()
"""
)


def test_simulated_tests(pytester: pytest.Pytester) -> None:
    result = runs(pytester, SIMULATED.replace("{cases!r}", "[]"))
    result.assert_outcomes(passed=3, skipped=1, failed=3, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "*proc_mesh of a test that is marked monarch_simulate exists only while*",
            "*UnhandledFaultError: a failure reached the script*",
        ]
    )
    text = result.stdout.str()
    (seed, drawn) = re.findall(r"(?s)drew ([\d.]+)\n.*?The seed was (\d+):", text)[0][::-1]
    again = runs(
        pytester, SIMULATED.replace("{cases!r}", "[]"), f"--monarch-seed={seed}", "-k", "test_seeds"
    )
    again.assert_outcomes(failed=1, deselected=7)
    assert f"drew {drawn}" in again.stdout.str()

    (case,) = re.findall(r"monarch_simulate\(cases=\[('.*?')\]", text)
    kept = runs(pytester, SIMULATED.replace("{cases!r}", f"[{case}]"), "-k", "test_explores")
    kept.assert_outcomes(failed=1, deselected=7)
    assert f"It was the case {case[1:-1]}" in kept.stdout.str()


def test_a_run_without_meshes_loads_the_plugin_alone(pytester: pytest.Pytester) -> None:
    program = """
        import sys

        def test_modules():
            loaded = {name for name in sys.modules if name.partition(".")[0] == "monarch"}
            assert loaded == {
                "monarch", "monarch._compat", "monarch.integrations", "monarch.integrations.pytest"
            }

        def test_asserts_are_not_rewritten():
            import monarch.actor
            assert "Rewriting" not in type(monarch.actor.__loader__).__name__
    """
    runs(pytester, program).assert_outcomes(passed=2)
    result = runs(pytester, program, "-p", "no:monarch", "-k", "test_modules")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*assert set() == *"])


def test_help_and_misuse(pytester: pytest.Pytester) -> None:
    runs(pytester, "", "--markers").stdout.fnmatch_lines(["@pytest.mark.monarch_simulate(*"])
    program = "import pytest\n@pytest.mark.monarch_procs({}, {})\ndef test_it(proc_mesh): pass"
    result = runs(pytester, program)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*monarch_procs takes one mapping, and keywords*"])


def test_the_page_shows_the_example() -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "testing.md").read_text()
    shown = re.findall(r"(?s)^<!-- run by [^>]+ -->\n```python\n(.*?)^```$", page, re.MULTILINE)
    program = (root / "examples" / "testing.py").read_text()
    assert len(shown) == 3
    assert [code for code in shown if code not in program] == []
