"""Which benchmark runs are published, and how; the figures are invented."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODULES = ("rows", "environments", "machine", "execute", "results", "report", "publish", "pictures")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the modules of the benchmarks, which are programs side by side and not a package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(
            **{name: importlib.import_module(name) for name in MODULES if name != "pictures"}
        )
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def run(bench: Any) -> Any:
    """A complete run on a quiet machine: ours takes a millisecond, torchmonarch 20, Ray 10."""
    costs = dict(zip(bench.rows.ENGINES, (0.001, 0.020, 0.010), strict=True))
    results = bench.results.Results(
        machine={
            "date": "2026-01-02 03:04 UTC",
            "commit": "abc1234",
            "changed": 0,
            "processor": "a processor",
            "cores": 2,
            "memory_gigabytes": 8,
            "kernel": "6.1",
            "libc": "glibc 2.36",
            "load_before": 0.1,
            "src": "0123456789ab",
            "benchmarks/programs": "ba9876543210",
        },
        settings={"seconds": 1.0, "repeats": 3, "quick": False},
        engines={
            engine: {"version": "0.7.0", "python": "3.11", "torch": "2", "numpy": "2"}
            for engine in costs
        },
        floor=1e-5,
    )
    figures = {row.figure for row in bench.rows.ROWS}
    figures |= {row.share.figure for row in bench.rows.ROWS if row.share}
    for program in bench.rows.PROGRAMS:
        for engine in program.engines:
            cost = costs[engine]
            summary = {"median": cost, "best": cost / 2, "p99": cost * 2, "count": 67}
            for _ in range(program.repeats.get(engine, 3)):
                outcome = bench.execute.Outcome(1.0, figures=dict.fromkeys(figures, summary))
                results.add(program, engine, outcome)
    return results


def set_cost(results: Any, program: str, engine: str, figure: str, cost: float) -> None:
    for figures in results.programs[program][engine].figures:
        figures[figure] = {**figures[figure], "median": cost, "best": cost}


def test_a_complete_run_of_a_commit_on_a_quiet_machine_is_published(bench: Any, run: Any) -> None:
    assert bench.publish.reasons_against(run) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_before": 0.51}, "the machine was busy"),
        ({"load_before": 1.2}, "the machine was busy"),
        ({"changed": 1}, "the tree differed"),
        ({"commit": "abc1234-dirty"}, "the tree differed"),
        ({"commit": "unknown"}, "the tree differed"),
    ],
)
def test_a_run_under_other_conditions_is_refused(
    bench: Any, run: Any, change: dict[str, Any], reason: str
) -> None:
    run.machine.update(change)
    (said,) = bench.publish.reasons_against(run)
    assert reason in said


def test_a_run_that_is_not_whole_is_refused(bench: Any, run: Any) -> None:
    run.interrupted = True
    run.settings["quick"] = True
    del run.programs["kill"]
    run.programs["roundtrip"]["ours"].failures.append("exit status 1")
    reasons = " ".join(bench.publish.reasons_against(run))
    for words in ("interrupted", "quick", "not run on pymonarch: kill", "failed on pymonarch"):
        assert words in reasons


@pytest.fixture
def runner(bench: Any) -> Iterator[Any]:
    """Import the program that measures."""
    pytest.importorskip("rich")
    yield importlib.import_module("run")
    del sys.modules["run"]


def test_the_command_refuses_before_it_measures(
    runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        runner, "facts", lambda: {"load_before": 0.9, "commit": "abc", "changed": 2}
    )
    monkeypatch.setattr(runner, "interpreters", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(sys, "argv", ["run.py", "--publish"])
    assert runner.main() == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "refused" in printed
    assert "the machine was busy: load 0.90" in printed
    assert "the tree differed from a commit" in printed


class Bench:
    """A run of two programs of which only the engines are invented."""

    def __init__(self, runner: Any, run: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.runner, self.facts, self.versions = runner, run.machine, run.engines
        self.taken: list[str] = []
        self.loads: dict[int, float] = {}
        self.failing = self.interrupted = -1
        patch.setattr(runner, "STORE", folder)
        patch.setattr(runner, "floor", lambda *_: 1e-5)
        patch.setattr(runner, "reasons_not_to_trace", lambda _machine: [])
        patch.setattr(runner, "run_program", self._run_program)

    def _run_program(self, program: Any, engine: str, *_: Any) -> Any:
        number = len(self.taken)
        if number == self.interrupted:
            self.interrupted = -1
            raise KeyboardInterrupt
        self.taken.append(f"{program.name} {engine}")
        failure = "exit status 1" if number == self.failing else None
        summary = {"median": float(number), "best": float(number), "p99": 9.0, "count": 1}
        figures = None if failure else {"spawn": summary, "restart": summary}
        load = self.loads.get(number, 0.1)
        return sys.modules["execute"].Outcome(1.0, figures, failure, load=load)

    def measure(self, *options: str) -> Any:
        """Measure what a command with these options would; return the results."""
        sys.argv = ["run.py", *options]
        arguments = self.runner.parse_arguments()
        versions = {engine: self.versions[engine] for engine in arguments.engines}
        results, store = self.runner.begun(arguments, self.facts, versions)
        pythons = dict.fromkeys(arguments.engines, Path("python"))
        rows = self.runner.chosen_rows(["restart", "spawn_actor"])
        programs = self.runner.chosen_programs(rows, arguments.engines, False)
        console = self.runner.Console(quiet=True)
        self.taken.clear()
        try:
            self.runner.measure(programs, pythons, results, store, console)
        except KeyboardInterrupt:
            return None
        return results


@pytest.fixture
def two(runner: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(sys, "argv", [])
    return Bench(runner, run, tmp_path, monkeypatch)


WHOLE = ["restart ours"] * 3 + ["spawn_actor ours", "spawn_actor reference"] * 3
"""The turns of both programs, but for the order of the engines, which changes in each round."""


def test_a_run_goes_on_where_the_one_before_ended(two: Bench) -> None:
    two.interrupted = 5
    assert two.measure() is None
    before = two.taken.copy()
    results = two.measure()
    assert sorted(before + two.taken) == sorted(WHOLE)
    assert len(before) == 5
    assert results.runs("spawn_actor", "reference").count == 3
    two.measure()
    assert two.taken == []


def test_another_engine_is_measured_without_the_first(two: Bench) -> None:
    two.measure("--engines", "ours")
    two.measure()
    assert two.taken == ["spawn_actor reference"] * 3
    two.measure("--engines", "reference")
    two.measure()
    assert two.taken == []


@pytest.mark.parametrize(
    "change",
    [{"src": "1" * 12}, {"benchmarks/programs": "1" * 12}, {"cores": 3}, {"kernel": "6.2"}],
)
def test_other_files_and_other_machines_begin_anew(two: Bench, change: dict[str, Any]) -> None:
    two.measure()
    two.facts.update({"commit": "other", "date": "later", "load_before": 0.4})
    two.measure()
    assert two.taken == []
    two.facts.update(change)
    two.measure()
    assert sorted(two.taken) == sorted(WHOLE)


@pytest.mark.parametrize("options", [["--fresh"], ["--seconds", "2"]])
def test_a_run_that_is_to_be_fresh_or_longer_begins_anew(two: Bench, options: list[str]) -> None:
    two.measure()
    two.measure(*options)
    assert sorted(two.taken) == sorted(WHOLE)


def test_changed_files_begin_anew_each_time(two: Bench) -> None:
    two.facts["changed"] = 1
    for _ in range(2):
        two.measure()
        assert sorted(two.taken) == sorted(WHOLE)


def test_another_release_of_an_engine_is_taken_anew(two: Bench) -> None:
    two.measure()
    two.versions = two.versions | {"reference": {"version": "0.8.0"}}
    results = two.measure()
    assert two.taken == ["spawn_actor reference"] * 3
    assert results.engines["reference"] == {"version": "0.8.0"}


def test_what_failed_is_taken_again_in_the_next_run(two: Bench) -> None:
    two.failing = 0
    assert two.measure().failures("ours").keys() == {"restart"}
    two.failing = -1
    assert two.measure().failures("ours") == {}
    assert two.taken == ["restart ours"] * 3


def test_what_began_under_load_is_taken_again_at_the_end(two: Bench) -> None:
    two.loads[1] = 0.51
    results = two.measure()
    assert two.taken[-3:] == ["restart ours"] * 3
    assert sorted(two.taken[:-3]) == sorted(WHOLE)
    assert results.runs("restart", "ours").figures[0]["restart"]["median"] == 9.0
    assert results.under_load() == []


def test_what_began_under_load_twice_is_not_published(bench: Any, two: Bench, run: Any) -> None:
    two.loads = {1: 0.9, 10: 0.9}
    results = two.measure()
    assert results.under_load() == ["restart"]
    run.programs["restart"]["ours"].loads[0] = 0.9
    assert bench.publish.reasons_against(run) == ["begun under load, run again: restart"]


def test_a_run_ends_when_its_files_change(
    two: Bench, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter([[], ["files were changed"]])
    monkeypatch.setattr(runner, "reasons_not_to_trace", lambda _machine: next(reasons))
    with pytest.raises(runner.SetUpError, match="files were changed"):
        two.measure()
    assert two.taken == ["restart ours"] * 3


def test_a_run_waits_until_the_machine_is_quiet(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([1.7, 0.6, 0.2, 9.9])
    monkeypatch.setattr(bench.machine, "_load", lambda: next(loads))
    assert bench.machine.load_when_quiet() == 0.2
    assert bench.machine.load_when_quiet(patience=0) == 9.9


def test_a_program_on_one_core_keeps_its_processes_there(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import json, os, subprocess, sys\n"
        "code = 'import os; print(len(os.sched_getaffinity(0)))'\n"
        "cores = subprocess.check_output([sys.executable, '-c', code])\n"
        "print(json.dumps({'figures': {'cores': {'median': int(cores)}}}))\n"
    )
    monkeypatch.setattr(bench.execute, "PROGRAMS", tmp_path)
    monkeypatch.setattr(bench.execute, "load_when_quiet", lambda: 0.3)
    # This process has other descendants, which are not those of the program.
    monkeypatch.setattr(bench.execute, "_bury_orphans", lambda grace: None)
    program = bench.rows.Program("own", one_core=True)
    outcome = bench.execute.run_program(program, "ours", Path(sys.executable), 1.0)
    assert (outcome.figures, outcome.load) == ({"cores": {"median": 1}}, 0.3)


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / "benchmarks" / "programs").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    for name in ("src/a.py", "benchmarks/programs/b.py", "page.md"):
        (tmp_path / name).write_text(name)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_measured_files_are_traced(bench: Any, repository: Path) -> None:
    measured = bench.machine.sources(repository)
    assert measured["changed"] == 0
    assert bench.machine.reasons_not_to_trace(measured, repository) == []
    (repository / "page.md").write_text("made anew")
    git(repository, "commit", "-am", "two")
    assert bench.machine.reasons_not_to_trace(measured, repository) == []


def test_a_rewritten_commit_has_another_name_and_the_same_folders(
    bench: Any, repository: Path
) -> None:
    measured = bench.machine.sources(repository)
    git(repository, "commit", "--amend", "-m", "other words")
    (reason,) = bench.machine.reasons_not_to_trace(measured, repository)
    assert "not in the history" in reason
    now = bench.machine.sources(repository)
    assert now["commit"] != measured["commit"]
    assert {**now, "commit": ""} == {**measured, "commit": ""}


@pytest.mark.parametrize("name", ["page.md", "src/a.py", "benchmarks/programs/b.py"])
def test_files_that_change_meanwhile_are_not_traced(
    bench: Any, repository: Path, name: str
) -> None:
    measured = bench.machine.sources(repository)
    (repository / name).write_text("changed")
    (reason,) = bench.machine.reasons_not_to_trace(measured, repository)
    assert "files were changed" in reason
    git(repository, "commit", "-am", "two")
    traced = bench.machine.reasons_not_to_trace(measured, repository)
    assert bool(traced) == (name != "page.md")


def test_goals_of_the_design_are_counted_apart_and_first(bench: Any, run: Any) -> None:
    goals = {row.key for row in bench.rows.ROWS if row.has_goal}
    assert len(bench.rows.DESIGN) == 25
    assert goals > bench.rows.DESIGN
    assert len(goals) == 75
    set_cost(run, "in_process", "ours", "round_trip", 0.019)
    said = bench.report.counts(run)
    met, of, later = re.findall(r"(\d+) of the (\d+) of the design, (\d+) of the 50 that", said)[0]
    design = [row for row in bench.rows.ROWS if row.key in bench.rows.DESIGN]
    verdicts = [run.verdict(row) for row in design]
    assert (int(met), int(of)) == (verdicts.count(bench.results.MET), 25)
    assert run.verdict(next(row for row in design if row.key == "in_process")) == "missed"
    assert int(later) <= 50
    assert said in bench.report.summary(run)


def test_a_figure_that_was_not_measured_is_no_goal_met(bench: Any, run: Any) -> None:
    for figures in run.programs["memory"]["ours"].figures:
        del figures["pss_of_all"]
    assert "of the design (1 not measured)" in bench.report.counts(run)


def test_what_a_program_does_not_print_yet_is_not_measured(bench: Any, run: Any) -> None:
    rows = {row.key: row for row in bench.rows.ROWS}
    row = rows["numpy_64_out_read"]
    assert bench.report.cell_text(run, row, "ours") == "1.00 ms (0.500 ms)"
    for figures in run.programs[row.program]["ours"].figures:
        del figures["out_read"]
    assert bench.report.cell_text(run, row, "ours") == "not measured"
    assert bench.report.cell_text(run, rows["in_process"], "ray") == ""


def test_each_payload_has_a_row_with_the_reading(bench: Any) -> None:
    keys = [row.key for row in bench.rows.GROUPS["Payloads"]]
    assert len(keys) == 16
    assert keys[1::2] == [f"{key}_read" for key in keys[::2]]


def test_figures_on_one_core_stand_beside_the_others(bench: Any, run: Any) -> None:
    set_cost(run, "roundtrip on one core", "ours", "blocking", 0.004)
    tables = {part.partition(":")[0]: part for part in bench.report.tables(run)}
    for title in ("Messages", "Calls of a whole mesh", "Payloads"):
        head, _, *lines = tables[f"| {title}"].splitlines()
        assert head.endswith("| on one core: pymonarch | torchmonarch | ratio |")
        assert {line.count("|") for line in lines} == {head.count("|")}
    lines = tables["| Messages"].splitlines()
    assert lines[2].endswith("| met | 4,000 µs (4,000 µs) | 20,000 µs (10,000 µs) | 5.0x |")
    assert "one core" not in tables["| Processes"].splitlines()[0]


def test_the_floor_is_shown_for_both_settings(bench: Any, run: Any) -> None:
    run.floor_on_one_core = 3e-6
    _, words = bench.report.floor(run)
    assert "**10.0 µs** on this machine" in words
    assert "on one core **3.00 µs**" in words


def test_the_table_of_the_readme_is_every_third_row_of_the_design(bench: Any, run: Any) -> None:
    set_cost(run, "in_process", "ours", "round_trip", 0.019)
    lines = bench.report.overview(run)
    design = [row for row in bench.rows.ROWS if row.key in bench.rows.DESIGN]
    titles = [line.split(" | ")[0].strip("| ") for line in lines[2:-2]]
    assert titles == [design[place].title for place in range(0, 25, 3)]
    assert "| 1.1x | 10x | **missed** |" in lines[3]
    assert "| 20.0x | 10x | met |" in lines[2]
    assert "commit abc1234 (`src` 0123456789ab, `benchmarks/programs` ba9876543210)" in lines[-1]


def test_there_is_no_ratio_against_a_time_limit(bench: Any, run: Any) -> None:
    kills = [row for row in bench.rows.ROWS if row.key.startswith("kill")]
    assert len(kills) == 7
    for row in kills:
        assert run.ratio(row) is None
        assert bench.report.ratio_text(run, row) == "a time-out there"
        assert bench.report.cell_text(run, row, "reference").startswith(("20.0 ms", "40.0 ms"))


def test_percentiles_go_with_the_number_of_their_samples(bench: Any, run: Any) -> None:
    rows = {row.key: row for row in bench.rows.ROWS}
    assert bench.report.cell_text(run, rows["call_one_p99"], "ours").endswith(", n = 201)")
    assert bench.report.cell_text(run, rows["kill_gloo_p99"], "ours").endswith(", n = 67)")
    assert "n = " not in bench.report.cell_text(run, rows["call_one"], "ours")


def test_the_notes_hold_no_figures_of_other_runs() -> None:
    measured = re.compile(
        r"\d[\d.,]*(?: ?- ?\d[\d.,]*)?\s*(?:%|[µmn]?s\b|x\b|times|[kMG]i?B|k/s|seconds)"
    )
    for path in (BENCHMARKS / "notes").glob("*.md"):
        assert measured.findall(path.read_text()) == [], path.name


def test_each_note_is_of_a_row(bench: Any) -> None:
    keys = {row.key for row in bench.rows.ROWS}
    assert {path.stem for path in (BENCHMARKS / "notes").glob("*.md")} <= keys


@pytest.fixture
def pages(bench: Any, tmp_path: Path) -> Path:
    """Copy the pages that are written, and only those."""
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/reliability.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_publishing_writes_every_page_from_the_same_figures(
    bench: Any, run: Any, pages: Path
) -> None:
    bench.report.write(run, pages)
    readme = (pages / "README.md").read_text()
    assert (
        "| `call_one().get()`, other process | 1,000 µs | 20,000 µs | 10,000 µs | 20.0x |" in readme
    )
    assert bench.report.counts(run) in readme
    performance = (pages / "docs" / "performance.md").read_text()
    assert "| 20.0 ms (10.0 ms) | 10.0 ms (5.00 ms) | a time-out there |" in performance
    reliability = (pages / "docs" / "reliability.md").read_text()
    assert "idle | 1.00 ms | 2.00 ms | 67 | 20.0 ms |" in reliability
    assert bench.report.summary(run) in performance
    for name in ("README.md", "docs/reliability.md"):
        old, new = (ROOT / name).read_text(), (pages / name).read_text()
        begin, end = bench.report.BEGIN, bench.report.END
        assert new.partition(begin)[0] == old.partition(begin)[0]
        assert new.partition(end)[2] == old.partition(end)[2]


def test_the_pages_are_what_the_published_figures_give(bench: Any, pages: Path) -> None:
    bench.report.write(bench.results.Results.load(bench.report.RESULTS), pages)
    for name in ("README.md", "docs/performance.md", "docs/reliability.md"):
        assert (pages / name).read_text() == (ROOT / name).read_text(), "run benchmarks/report.py"


@pytest.mark.parametrize("kind", ["array", "bytes"])
def test_payloads_are_random_bytes_between_their_stamps(bench: Any, kind: str) -> None:
    pytest.importorskip("numpy")
    sys.path.insert(0, str(BENCHMARKS / "programs"))
    try:
        values = importlib.import_module("values")
    finally:
        sys.path.remove(str(BENCHMARKS / "programs"))
        sys.modules.pop("values", None)
    make = values.MAKERS[kind](1 << 16)
    for stamp in (1, 0, 1):
        value = make(stamp)
        assert values.check(value, stamp)
        assert memoryview(value).nbytes == 1 << 16
        assert len(set(bytes(value)[16:-16])) == 256
        data = bytes(value)
        words = [data[place : place + 8] for place in range(0, len(data), 8)]
        whole = sum(int.from_bytes(word, sys.byteorder, signed=True) for word in words)
        assert (values.total(value) - whole) % 2**64 == 0
