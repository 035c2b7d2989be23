"""Mutation tests: change the code in one place at a time, and run the tests that reach it.

    make mutants-map                                     first: which tests reach a line
    make mutants SHARD=1/20                              one twentieth, an hour at most; resumable
    python tests/soak/mutations.py --report              all parts so far into docs/reliability.md
    python tests/soak/mutations.py --files job/saved.py  all mutants of the files whose path ends so
    python tests/soak/mutations.py --sample 60           so many, spread evenly

`--packages _engine/mesh` and `--kinds lock await` restrict each of these. A shard that is tried so
is no even sample of all mutants, and goes to a file of its own, which `--report` does not read.

`mutant.py` says which changes are made. A mutant for which no test fails *survives*, and so does
one that no test reaches: either the change breaks no promise, or a test is missing. A failure
counts only if that test passes by itself without the change, in the same way.

No file is changed: a fork of this process, and each Python that its tests start, compiles the
mutant in place of the module. The order of the mutants is random and the same each time, so what
was tried is an even sample, wherever it is cut off.

Rejected: cosmic-ray, which works with this project. It edits the file in place, starts Python and
pytest for each mutant (which takes ten times as long), and leaves no statement out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from everywhere import PACKAGE, ROOT, begin, environment
from mutant import KINDS, mutants
from reach import FAR_FEW, FAR_MANY, Reach, draw, draw_far

OUT = ROOT / "out" / "mutants"
MAP, FAR_MAP = OUT / "map.json", OUT / "far.json"
PAGE = ROOT / "docs" / "reliability.md"
EXPLAINED = Path(__file__).with_name("survivors.txt")
PACKAGES = (
    "_engine _restarts _failover _deadlock rdma training spmd _admin _tensors/core _tensors/worker "
    "job _mounts"
).split()
WARM = "hypothesis.strategies numpy torch starlette.testclient cloudpickle".split()
"""Loaded here once, and not in each fork, where they are installed."""
NOTICED = ("killed", "hang")
# A mutant hangs, and so counts as noticed, if it uses so many seconds of processor time more than
# its tests took under coverage, or takes _STUCK times as long and _PATIENCE seconds more.
_GRACE = 20.0
_STUCK = 3.0
_PATIENCE = 30.0
_PR_SET_CHILD_SUBREAPER = 36


class Place(NamedTuple):
    """A mutant: the `number`-th of its file."""

    file: str
    scope: str  # the function or class that it is in, as ``Class.function``
    kind: str
    text: str
    nth: int  # of those with the same text there
    line: int
    number: int

    def key(self) -> tuple[str, str, str, int]:
        """Return what stays the same when code elsewhere changes."""
        return self.file, self.scope, self.text, self.nth


def places(files: list[str] | None) -> Iterator[Place]:
    """Yield all mutants."""
    for package in PACKAGES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            file = path.relative_to(PACKAGE).as_posix()
            if files is None or file.endswith(tuple(files)):
                tree = ast.parse(path.read_text())
                scopes = dict(_scopes(tree, ""))
                same = Counter[tuple[str, str]]()
                for number, (line, kind, text, _) in enumerate(mutants(tree)):
                    scope = scopes.get(line, "")
                    yield Place(file, scope, kind, text, same[scope, text], line, number)
                    same[scope, text] += 1


def _scopes(node: ast.AST, outer: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of functions and classes, each with its name: inner ones come later."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{child.name}".removeprefix(".")
            for line in range(child.lineno, (child.end_lineno or 0) + 1):
                yield line, name
        yield from _scopes(child, name)


def package_of(file: str) -> str:
    """Return the part of the package that a file counts for."""
    parts = file.split("/")
    depth = 3 if file.startswith("_engine/runtime/") else 2
    split = parts[0] in {"_engine", "_tensors"} and len(parts) > depth
    return "/".join(parts[:depth] if split else parts[:1])


def chance(place: Place) -> int:
    """Return a random number that is always the same for this mutant."""
    return int.from_bytes(hashlib.sha256(repr(place.key()).encode()).digest(), "big")


class _Note:
    """A plugin of pytest: writes the present test to a file, which is left if the run hangs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._path.write_text(nodeid)


def keep_orphans() -> None:
    """Become the parent of every descendant whose parent exits, so that all can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Run:
    """A fork of this process that runs tests, with a mutant or without a change."""

    def __init__(self, place: Place | None, tests: list[str], seconds: float, room: Path) -> None:
        self.place, self.tests = place, tests
        self._room = Path(tempfile.mkdtemp(dir=room))
        self._deadline = time.monotonic() + _STUCK * seconds + _PATIENCE
        self.pid = os.fork()
        if not self.pid:
            self._work(seconds + _GRACE)

    def _work(self, most: float) -> None:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            keep_orphans()
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(most), resource.RLIM_INFINITY))
            with open(self._room / "output", "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            # The mutant's files are below this directory, which is removed, and it removes no
            # others.
            tempfile.tempdir = os.environ["TMPDIR"] = str(self._room)
            if self.place is not None:
                change = "mutant", self.place.file, self.place.number
                os.environ.update(environment(self._room, *change))
                begin()
            os.chdir(self._room)  # some mutants write into the current directory
            options = ["-x", "-q", "--tb=no", "--hypothesis-profile=mutations"]
            options += ["-p", "no:cacheprovider"]
            options += ["-W", "ignore:Module already imported"]
            options += [f"--basetemp={self._room / 't'}"]
            tests = [f"{ROOT}/{test}" for test in self.tests]
            status = int(pytest.main([*options, *tests], plugins=[_Note(self._room / "test")]))
        finally:
            os._exit(status)

    def poll(self) -> str | None:
        """Return the outcome, or None while it runs: ``survived``, ``killed`` or ``hang``."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            if time.monotonic() < self._deadline:
                return None
            self.kill()
            return "hang"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return "hang"
        return "killed" if status else "survived"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def last_test(self) -> str:
        """Return the test that ran last; the first one, if the tests could not be imported."""
        with contextlib.suppress(FileNotFoundError):
            return (self._room / "test").read_text()
        return self.tests[0]

    def clean(self) -> None:
        shutil.rmtree(self._room, ignore_errors=True)


def end_orphans(running: set[int]) -> None:
    """Kill all that mutants have left: they are children of this process, which `running` lacks."""
    if sys.platform != "linux":
        return
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while left := {int(pid) for pid in children.read_text().split()} - running:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def place_of(result: dict[str, Any]) -> Place:
    return Place(*(result[field] for field in Place._fields))


class Trial:
    """Runs mutants, several at once, until all are done or the time is over.

    The results are written to `file` once a minute and at the end.
    """

    def __init__(self, reach: Reach, jobs: int, room: Path, file: Path) -> None:
        self._reach, self._jobs, self._room, self._file = reach, jobs, room, file
        self._running: dict[int, Run] = {}
        self._sound: dict[str, bool] = {}  # tests that failed -> whether they pass without a change
        self._doubted: dict[str, list[tuple[Run, str]]] = defaultdict(list)
        self.results: dict[tuple[Any, ...], dict[str, Any]] = {}  # by the keys of their places

    def run(self, todo: list[Place], until: float) -> None:
        """Run these mutants in this order; start none after `until`."""
        todo.reverse()
        written = time.monotonic()
        try:
            while self._running or (todo and time.monotonic() < until):
                while todo and len(self._running) < self._jobs and time.monotonic() < until:
                    self._try(todo.pop())
                time.sleep(0.01)
                if time.monotonic() > written + 60:
                    written = time.monotonic()
                    self.write()
                for run in list(self._running.values()):
                    if (outcome := run.poll()) is not None:
                        del self._running[run.pid]
                        end_orphans(set(self._running))
                        self._ended(run, outcome)
                        run.clean()
        finally:
            for run in self._running.values():
                run.kill()
            end_orphans(set())
            self.write()

    def write(self) -> None:
        """Write the results so far, and say how many there are of each."""
        self._file.write_text(json.dumps([*self.results.values()], indent=1))
        outcomes = Counter(result["outcome"] for result in self.results.values())
        print(f"{len(self.results):,} mutants:", dict(outcomes), flush=True)

    def _try(self, place: Place) -> None:
        reached = self._reach.tests(place.file, place.line)
        tests = [test for test in reached if self._sound.get(test, True)]
        if tests:
            self._start(place, tests)
        else:
            self._note(place, "not reached", "")

    def _start(self, place: Place | None, tests: list[str]) -> None:
        run = Run(place, tests, self._reach.seconds(tests), self._room)
        self._running[run.pid] = run

    def _ended(self, run: Run, outcome: str) -> None:
        if run.place is None:  # a test that has noticed mutants, without a change
            (test,) = run.tests
            self._sound[test] = outcome == "survived"
            if not self._sound[test]:
                print(f"not counted, since it fails without a change: {test}", flush=True)
            for doubted, how in self._doubted.pop(test):
                self._judge(doubted, how, test)
        elif outcome == "survived":
            self._note(run.place, outcome, "")
        else:
            self._judge(run, outcome, run.last_test())

    def _judge(self, run: Run, outcome: str, test: str) -> None:
        """Count a failure of this test, once it is known that it passes without a change."""
        assert run.place is not None
        if test not in self._sound:
            if test not in self._doubted:
                self._start(None, [test])
            self._doubted[test].append((run, outcome))
        elif self._sound[test] or test not in run.tests:
            self._note(run.place, outcome, test)
        else:
            self._try(run.place)

    def _note(self, place: Place, outcome: str, test: str) -> None:
        self.results[place.key()] = {**place._asdict(), "outcome": outcome, "test": test}
        if not test:
            where = f"{place.file}:{place.line}: {place.scope}"
            print(f"{where}: {place.kind}: {place.text}: {outcome}", flush=True)


# -- the page --------------------------------------------------------------------------------------

BEGIN, END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->\n"


def explanations() -> dict[tuple[str, str], str]:
    """Return why a mutant breaks no promise, by its file and scope, and its text."""
    lines = EXPLAINED.read_text().splitlines() if EXPLAINED.exists() else []
    found = {}
    for line in lines:
        if line and line[0] != "#":
            place, _, rest = line.partition(" | ")
            text, _, why = rest.rpartition(" | ")  # a change may have such a bar, too
            found[place, text] = why
    return found


def table(results: list[dict[str, Any]], made: Counter[str]) -> str:
    """Return the tables of the page: counts by package and kind, and the survivors."""
    tried: Counter[tuple[str, str]] = Counter()
    unseen: Counter[str] = Counter()  # not reached
    killed: Counter[tuple[str, str]] = Counter()
    for result in results:
        for package in (package_of(result["file"]), "all"):
            unseen[package] += result["outcome"] == "not reached"
            for kind in (result["kind"], "all"):
                tried[package, kind] += 1
                killed[package, kind] += result["outcome"] in NOTICED

    def cell(package: str, kind: str) -> str:
        count = tried[package, kind]
        return f"{killed[package, kind]} of {count}" if count else ""

    lines = [
        f"| package | made | tried | killed | survived | not reached | {' | '.join(KINDS)} |",
        f"|---|{'---:|' * (5 + len(KINDS))}",
    ]
    for package in [*sorted(made.keys() - {"all"}), "all"]:
        count, dead = tried[package, "all"], killed[package, "all"]
        share = f"{dead / count:.0%}" if count else ""
        cells = [
            f"{made[package]:,}",
            f"{count:,}",
            share,
            f"{count - dead:,}",
            f"{unseen[package]:,}",
        ]
        cells += [cell(package, kind) for kind in KINDS]
        name = package if package == "all" else f"`{package}`"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    why = explanations()
    lines += ["", "| survivor | change | why it breaks no promise |", "|---|---|---|"]
    left = [result for result in results if result["outcome"] not in NOTICED]
    for result in sorted(left, key=lambda result: (result["file"], result["line"])):
        text = result["text"].replace("|", "\\|").replace("`", "'")
        place = f"{result['file']}:{result['scope']}"
        reason = why.get((place, result["text"]), "")
        if not reason:
            reason = "(not reached)" if result["outcome"] == "not reached" else "(open)"
        lines.append(f"| `{place}` | `{text}` | {reason} |")
    return "\n".join(lines) + "\n"


def report() -> None:
    """Merge the shards, and write their table to the page."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(OUT.glob("shard-*.json"), key=lambda path: path.stat().st_mtime):
        for result in json.loads(path.read_text()):
            merged[place_of(result).key()] = result
    found = {place.key(): place for place in places(None)}
    stale = len(merged.keys() - found.keys())
    made = Counter(package_of(place.file) for place in found.values())
    made["all"] = len(found)
    made_tables = table([result for key, result in merged.items() if key in found], made)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + made_tables + END + rest.partition(END)[2])
    print(f"{len(merged):,} mutants, {stale:,} of code that has changed since and left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--map", action="store_true", help="find which tests reach a line")
    parser.add_argument("--report", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--shard", default="", help="K/N: a part of all; written to out/mutants")
    parser.add_argument("--files", nargs="*", help="only files whose path ends so")
    parser.add_argument("--packages", nargs="*", help="only files whose path begins so")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="only mutants of these kinds")
    parser.add_argument("--sample", type=int, help="so many mutants")
    parser.add_argument(
        "--survivors", action="store_true", help="try those of the shard again, with more tests"
    )
    parser.add_argument("--minutes", type=float, default=55.0, help="start none after that")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), help="at the same time"
    )
    options = parser.parse_args()
    # Overrides the environment: without byte code files, a run takes three times as long.
    sys.dont_write_bytecode = False
    # The exit ends all processes that were started.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutants-") as room:
        if options.map:
            OUT.mkdir(parents=True, exist_ok=True)
            keep_orphans()
            for number, (part, file) in enumerate([(draw, MAP), (draw_far, FAR_MAP)]):
                place = Path(room) / str(number)
                place.mkdir()
                part(file, place, options.jobs)
                end_orphans(set())
        elif options.report:
            report()
        else:
            _run(options, Path(room))


def _run(options: argparse.Namespace, room: Path) -> None:
    # The examples are the same as in other test runs, but failing ones are not shrunk: shrinking
    # would take longer than all the rest.
    hypothesis.settings.register_profile(
        "mutations",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    kinds = options.kinds or KINDS
    packages = tuple(f"{package}/" for package in options.packages or ())
    chosen = (each for each in places(options.files) if each.kind in kinds)
    todo = sorted((each for each in chosen if each.file.startswith(packages or "")), key=chance)
    name = "last"
    if options.shard:
        shard, of = map(int, options.shard.split("/"))
        todo = [place for place in todo if chance(place) % of == shard - 1]
        restricted = options.files or options.packages or options.kinds
        name = f"{'part' if restricted else 'shard'}-{shard}-{of}"
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{name}.json"
    reach = Reach(MAP, FAR_MAP, FAR_MANY if options.survivors else FAR_FEW)
    trial = Trial(reach, options.jobs, room, file)
    if options.shard and file.exists():
        before = {place_of(result).key(): result for result in json.loads(file.read_text())}
        trial.results.update((key, before[key]) for key in map(Place.key, todo) if key in before)
        left = {place.key() for place in todo} - before.keys()
        if options.survivors:
            left = {key for key, was in trial.results.items() if was["outcome"] not in NOTICED}
        todo = [place for place in todo if place.key() in left]
    todo = todo[: options.sample]
    print(f"{len(todo):,} mutants to try in at most {options.minutes:.0f} minutes", flush=True)
    gc.freeze()
    keep_orphans()
    trial.run(todo, time.monotonic() + 60 * options.minutes)


if __name__ == "__main__":
    main()
