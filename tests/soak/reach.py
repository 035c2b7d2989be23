"""The map of the mutation tests: which tests reach a line of the package.

`draw` runs the quick tests of one process once under coverage, with the present test as coverage's
context: they are known for each line. The tests of `tests/integration` and `tests/docs` run with
probes in all processes (`everywhere.py`): they are known for each block. Tests that fail then are
left out.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import coverage
import pytest
from everywhere import ENTERED, PACKAGE, ROOT, begin, blocks, environment, forget

__all__ = ["Reach", "draw", "draw_far"]

RINGS = ("unit", "protocol", "sim")
FAR = ("integration", "docs")
OUTLIVES = ("mount", "workspace_places", "odd_file_systems", "networks", "gateway", "slurm", "ssh")
OUTLIVES += ("out_of_memory",)
"""Parts of the names of files whose tests leave something that is no process if they are killed."""
SELECTION = ["-m", "not slow", "-q", "-p", "no:cacheprovider"]
SELECTION += ["-W", "ignore:Module already imported"]
# A mutant is run with the tests that reach few other files, first, so long as these take no more
# than this number of seconds under coverage, which takes two or three times as long.
SECONDS = 10.0
MOST = 100
# Tests of `FAR`, whose seconds are a mutant's, too, for each mutant, and for those that are tried
# again since they have survived.
FAR_FEW = 5, 15.0
FAR_MANY = 40, 60.0


class Reach:
    """The map that `draw` and `draw_far` have made."""

    def __init__(self, file: Path, far: Path, limits: tuple[int, float]) -> None:
        try:
            found = json.loads(file.read_text())
        except FileNotFoundError:
            sys.exit("there is no map of the lines that tests reach: run `make mutants-map` first")
        self._near: list[tuple[str, float]] = found["tests"]
        self._sets: list[list[int]] = found["sets"]
        self._lines: dict[str, dict[str, int]] = found["lines"]
        found = json.loads(far.read_text()) if far.exists() else {"tests": [], "blocks": {}}
        self._far: list[tuple[str, float]] = found["tests"]
        self._limits = limits
        self._blocks: dict[str, dict[str, list[int]]] = found["blocks"]
        self._seconds: dict[str, float] = dict(self._near + self._far)
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def tests(self, file: str, line: int) -> list[str]:
        """Return the tests to try on a change of this line; none if no test reaches it."""
        number = self._lines.get(file, {}).get(str(line))
        near = [] if number is None else [self._near[test][0] for test in self._sets[number]]
        far = self._blocks.get(file, {}).get(str(self._block(file, line)), [])
        most, left = self._limits
        for number in far[:most]:
            test, seconds = self._far[number]
            left -= seconds
            if left < 0:
                break
            near.append(test)
        return near

    def _block(self, file: str, line: int) -> int:
        """Return the first line of the innermost block with this line; 0 if it is in none."""
        if file not in self._spans:
            tree = ast.parse((PACKAGE / file).read_text())
            self._spans[file] = sorted((start, end) for _, start, end in blocks(tree))
        spans = self._spans[file]
        for start, end in reversed(spans[: bisect_right(spans, (line, sys.maxsize))]):
            if line <= end:
                return start
        return 0

    def seconds(self, tests: list[str]) -> float:
        """Return how long these tests took for the map."""
        return sum(self._seconds.get(test, 0.0) for test in tests)


def _summary(data: coverage.CoverageData, seconds: dict[str, float]) -> dict[str, Any]:
    """Choose the tests of each line.

    Those that reach the fewest other files come first. A line that is run by an import only, as
    that of a constant, gets all tests that reach its file.
    """
    lines = {path: data.contexts_by_lineno(path) for path in sorted(data.measured_files())}
    of_file = {
        path: {test for tests in found.values() for test in tests} for path, found in lines.items()
    }
    ranked = _specific_first(of_file.values(), seconds)
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


def _specific_first(reached: Iterable[Collection[str]], seconds: Mapping[str, float]) -> list[str]:
    """Sort tests by how many of the places they reach."""
    breadth = Counter(test for tests in reached for test in tests)
    return sorted(seconds, key=lambda test: (breadth[test], seconds[test], test))


class _Tests:
    """A plugin of pytest: says which test runs, and keeps its seconds if it passed."""

    def __init__(self, runs: Callable[[str], object]) -> None:
        self._runs = runs  # called with a test, and with "" when it has ended
        self.seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._runs(item.nodeid)
        try:
            return (yield)
        finally:
            self._runs("")

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
    """Run the tests of one process under coverage, and write which reach a line."""
    files = [path for ring in RINGS for path in (ROOT / "tests" / ring).rglob("test_*.py")]
    seconds = _share(_run, files, room, jobs)
    data = coverage.CoverageData(str(room / "lines"))
    for job in range(jobs):
        part = coverage.CoverageData(str(room / f"map-{job}" / "lines"))
        part.read()
        data.update(part)
    file.write_text(json.dumps(_summary(data, seconds)))
    print(f"{len(seconds):,} tests reach {len(data.measured_files())} files")


def draw_far(file: Path, room: Path, jobs: int) -> None:
    """Run the tests of `FAR` with probes, and write which enter a block; 0: one of the file."""
    found = [path for ring in FAR for path in (ROOT / "tests" / ring).rglob("test_*.py")]
    files = [path for path in found if not any(part in str(path) for part in OUTLIVES)]
    (room / "probes").mkdir()
    seconds = _share(_run_far, files, room, jobs)
    file.write_text(json.dumps(_far_summary(room / "probes" / ENTERED, seconds)))
    print(f"{len(seconds):,} tests with several processes")


def _far_summary(entered: Path, seconds: dict[str, float]) -> dict[str, Any]:
    quick = {test: count for test, count in seconds.items() if count <= FAR_FEW[1]}
    of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in entered.read_text().splitlines():
        test, path, number = line.split("\t")
        if test in quick:
            of[path, number].add(test)
            of[path, "0"].add(test)
    ranked = _specific_first(of.values(), quick)
    place = {test: number for number, test in enumerate(ranked)}
    blocks_of: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for (path, number), tests in of.items():
        blocks_of[path][number] = sorted(place[test] for test in tests)[: FAR_MANY[0]]
    return {"tests": [(test, seconds[test]) for test in ranked], "blocks": blocks_of}


def _share(
    run: Callable[[list[str], Path], dict[str, float]], files: list[Path], room: Path, jobs: int
) -> dict[str, float]:
    """Call `run` in `jobs` processes with their files; return the seconds of the tests."""
    names = sorted(map(str, files))

    def work(job: int) -> None:
        mine = room / f"map-{job}"
        mine.mkdir()
        os.chdir(mine)  # as the mutants do
        (mine / "tests.json").write_text(json.dumps(run(names[job::jobs], mine)))

    running = [get_context("fork").Process(target=work, args=(job,)) for job in range(jobs)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    seconds: dict[str, float] = {}
    for job in range(jobs):
        seconds.update(json.loads((room / f"map-{job}" / "tests.json").read_text()))
    return seconds


def _options(room: Path) -> list[str]:
    return [*SELECTION, "--tb=line", "-rfE", f"--basetemp={room / 't'}"]


def _run(files: list[str], room: Path) -> dict[str, float]:
    source = [str(PACKAGE)]
    measured = coverage.Coverage(str(room / "lines"), config_file=False, source=source)
    measured.set_option("run:disable_warnings", ["trace-changed", "module-not-measured"])
    measured.start()
    tests = _Tests(measured.switch_context)
    pytest.main([*_options(room), *files], plugins=[tests])
    measured.stop()
    measured.save()
    return tests.passed()


def _run_far(files: list[str], room: Path) -> dict[str, float]:
    current = room / "current"
    os.environ.update(environment(room, "probes", room.parent / "probes", current))
    begin()

    def runs(test: str) -> None:
        current.write_text(test)
        forget()

    tests = _Tests(runs)
    pytest.main([*_options(room), *files], plugins=[tests])
    return tests.passed()
