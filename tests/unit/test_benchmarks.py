"""Which benchmark runs are published, and how; the figures are invented."""

from __future__ import annotations

import importlib
import re
import shutil
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


def test_the_command_refuses_before_it_measures(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    module = importlib.import_module("run")
    monkeypatch.setattr(
        module, "facts", lambda: {"load_before": 0.9, "commit": "abc", "changed": 2}
    )
    monkeypatch.setattr(module, "interpreters", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(sys, "argv", ["run.py", "--publish"])
    try:
        assert module.main() == 3
    finally:
        del sys.modules["run"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "refused" in printed
    assert "the machine was busy: load 0.90" in printed
    assert "the tree differed from a commit" in printed


def test_goals_of_the_design_are_counted_apart_and_first(bench: Any, run: Any) -> None:
    goals = {row.key for row in bench.rows.ROWS if row.has_goal}
    assert len(bench.rows.DESIGN) == 25
    assert goals > bench.rows.DESIGN
    assert len(goals) == 69
    set_cost(run, "in_process", "ours", "round_trip", 0.019)
    said = bench.report.counts(run)
    met, of, later = re.findall(r"(\d+) of the (\d+) of the design, (\d+) of the 44 that", said)[0]
    design = [row for row in bench.rows.ROWS if row.key in bench.rows.DESIGN]
    verdicts = [run.verdict(row) for row in design]
    assert (int(met), int(of)) == (verdicts.count(bench.results.MET), 25)
    assert run.verdict(next(row for row in design if row.key == "in_process")) == "missed"
    assert int(later) <= 44
    assert said in bench.report.summary(run)


def test_a_figure_that_was_not_measured_is_no_goal_met(bench: Any, run: Any) -> None:
    for figures in run.programs["memory"]["ours"].figures:
        del figures["pss_of_all"]
    assert "of the design (1 not measured)" in bench.report.counts(run)


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
    assert "| 20.0 ms | 10.0 ms | a time-out there |" in readme
    reliability = (pages / "docs" / "reliability.md").read_text()
    assert "idle | 1.00 ms | 2.00 ms | 67 | 20.0 ms |" in reliability
    assert bench.report.summary(run) in (pages / "docs" / "performance.md").read_text()
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
