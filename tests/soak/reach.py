"""The map of the mutation tests: which tests reach a line of the package.

`draw` runs the quick tests once under coverage, with the present test as coverage's context. Tests
that fail then are left out. Processes that a test starts are not seen.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import coverage
import pytest

__all__ = ["Reach", "draw"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "monarch"
RINGS = ("unit", "protocol", "sim")
SELECTION = ["-m", "not slow", "-q", "-p", "no:cacheprovider"]
SELECTION += ["-W", "ignore:Module already imported"]
# A mutant is run with the tests that reach few other files, first, so long as these take no more
# than this number of seconds under coverage, which takes two or three times as long.
SECONDS = 10.0
MOST = 100


class Reach:
    """The map that `draw` has made."""

    def __init__(self, file: Path) -> None:
        try:
            found = json.loads(file.read_text())
        except FileNotFoundError:
            sys.exit("there is no map of the lines that tests reach: run `make mutants-map` first")
        self._tests: list[tuple[str, float]] = found["tests"]
        self._sets: list[list[int]] = found["sets"]
        self._lines: dict[str, dict[str, int]] = found["lines"]

    def tests(self, file: str, line: int) -> list[str]:
        """Return the tests to try on a change of this line; none if no test reaches it."""
        number = self._lines.get(file, {}).get(str(line))
        return [] if number is None else [self._tests[test][0] for test in self._sets[number]]

    def seconds(self, tests: list[str]) -> float:
        """Return how long these tests take under coverage."""
        known: dict[str, float] = dict(self._tests)
        return sum(known.get(test, 0.0) for test in tests)


def _summary(data: coverage.CoverageData, seconds: dict[str, float]) -> dict[str, Any]:
    """Choose the tests of each line.

    Those that reach the fewest other files come first. A line that is run by an import only, as
    that of a constant, gets all tests that reach its file.
    """
    lines = {path: data.contexts_by_lineno(path) for path in sorted(data.measured_files())}
    of_file = {
        path: {test for tests in found.values() for test in tests} for path, found in lines.items()
    }
    breadth = Counter(test for tests in of_file.values() for test in tests)
    ranked = sorted(seconds, key=lambda test: (breadth[test], seconds[test], test))
    place = {test: number for number, test in enumerate(ranked)}
    sets: dict[tuple[int, ...], int] = {}

    def chosen(found: Collection[str]) -> int:
        left, few = SECONDS, list[int]()
        for number in sorted(place[test] for test in found if test in place)[:MOST]:
            left -= seconds[ranked[number]]
            if few and left < 0:
                break
            few.append(number)
        return sets.setdefault(tuple(few), len(sets))

    by_line: dict[str, dict[int, int]] = {}
    for path, found in lines.items():
        of_import = chosen(of_file[path])
        by_line[os.path.relpath(path, PACKAGE)] = {
            line: of_import if tests == [""] else chosen(tests) for line, tests in found.items()
        }
    tests = [(test, seconds[test]) for test in ranked]
    return {"tests": tests, "sets": list(sets), "lines": by_line}


class _Contexts:
    """A plugin of pytest: has coverage note the test, and keeps its seconds if it passed."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._measured.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def passed(self) -> dict[str, float]:
        return {
            test: round(seconds, 3)
            for test, seconds in self.seconds.items()
            if test not in self._failed
        }


def draw(file: Path, room: Path, jobs: int) -> None:
    """Run the tests under coverage, in `jobs` processes, and write what each has reached."""
    files = sorted(path for ring in RINGS for path in (ROOT / "tests" / ring).rglob("test_*.py"))
    running = []
    for job in range(jobs):
        arguments = files[job::jobs], room / f"map-{job}"
        running.append(get_context("fork").Process(target=_run, args=arguments))
        running[-1].start()
    for process in running:
        process.join()
    data = coverage.CoverageData(str(room / "lines"))
    seconds: dict[str, float] = {}
    for job in range(jobs):
        part = coverage.CoverageData(str(room / f"map-{job}" / "lines"))
        part.read()
        data.update(part)
        seconds.update(json.loads((room / f"map-{job}" / "tests.json").read_text()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_summary(data, seconds)))
    print(f"{len(seconds):,} tests reach {len(data.measured_files())} files")


def _run(files: list[Path], room: Path) -> None:
    room.mkdir()
    os.chdir(room)  # as the mutants do
    source = [str(PACKAGE)]
    measured = coverage.Coverage(str(room / "lines"), config_file=False, source=source)
    measured.set_option("run:disable_warnings", ["trace-changed", "module-not-measured"])
    measured.start()
    contexts = _Contexts(measured)
    options = [*SELECTION, "--tb=line", "-rfE", f"--basetemp={room / 'tests'}"]
    pytest.main([*options, *map(str, files)], plugins=[contexts])
    measured.stop()
    measured.save()
    (room / "tests.json").write_text(json.dumps(contexts.passed()))
