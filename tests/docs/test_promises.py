"""The promises listed in docs/reliability.md are on docs/failures.md, and their tests bite.

For each promise, `broken_promises.py` has a change of the code with which its test must fail. Ten
promises are tried each day, in turn; the others are marked as slow. To try those of another day:

    PROMISES_OF_DAY=2026-11-28 python -m pytest tests/docs/test_promises.py -m "not slow"
"""

from __future__ import annotations

import ast
import datetime as dt
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.broken_promises import MUTATIONS, Mutation
from tests.mutated import Change, copy_of_the_package, run_in, run_test

ROOT = Path(__file__).resolve().parents[2]
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()
FAILURES = (ROOT / "docs" / "failures.md").read_text()


def words(text: str) -> str:
    """Return the text without line breaks and emphasis."""
    return " ".join(re.sub(r"[*`]", "", text).split())


def promises() -> list[tuple[str, list[str]]]:
    """Return each promise with its tests."""
    section = RELIABILITY.partition("# Promises and their tests")[2].partition("\n# ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    return [(row[0].strip("“”"), re.findall(r"`(tests/[^`]+)`", row[1])) for row in rows]


PROMISES = promises()


def test_there_are_promises() -> None:
    assert len(PROMISES) > 20
    assert all(tests for _, tests in PROMISES)


@pytest.mark.parametrize("promise", [promise for promise, _ in PROMISES])
def test_a_promise_is_one_of_the_page(promise: str) -> None:
    assert words(promise) in words(FAILURES)


@pytest.mark.parametrize("test", sorted({test for _, tests in PROMISES for test in tests}))
def test_a_test_that_is_named_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    defined = {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not name or name in defined


def test_each_section_of_the_page_has_a_promise_that_is_listed() -> None:
    sections = re.split(r"^## ", FAILURES, flags=re.MULTILINE)
    without = [
        section.partition("\n")[0]
        for section in sections
        if not any(words(promise) in words(section) for promise, _ in PROMISES)
    ]
    assert without == []


# -- the tests of the promises fail without the code that keeps them -------------------------------

DAY = os.environ["PROMISES_OF_DAY"]  # tests/conftest.py sets it, in UTC
A_DAY = 10
HANG = 12.0  # seconds until a test that waits forever counts as failed
LONG = 60.0
HOW = ("It ended in another way than expected", "It passes")


def rows() -> list[Any]:
    """Return the promises that can be tried; those that are not in turn today are slow."""
    known = list(dict.fromkeys(mutation.promise for mutation in MUTATIONS))
    first = A_DAY * dt.date.fromisoformat(DAY).toordinal()
    today = {known[number % len(known)] for number in range(first, first + A_DAY)}
    return [
        pytest.param(row, marks=[] if row in today else [pytest.mark.slow], id=row) for row in known
    ]


def test_each_promise_has_a_change_that_breaks_it() -> None:
    broken: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        tests = {test.partition("[")[0] for test in mutation.tests}
        broken.setdefault(mutation.promise, set()).update(tests)
    listed = {promise: set(tests) for promise, tests in PROMISES}
    assert listed == broken


def test_each_promise_is_tried_within_a_few_days(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set()
    for day in range(1, 6):
        monkeypatch.setitem(globals(), "DAY", f"2026-12-{day:02}")
        today = {row.id for row in rows() if not row.marks}
        assert len(today) == A_DAY
        tried |= today
    assert tried == {row.id for row in rows()}


@pytest.mark.parametrize("promise", rows())
def test_a_test_fails_without_the_code_that_keeps_its_promise(promise: str) -> None:
    for mutation in MUTATIONS:
        for test in mutation.tests if mutation.promise == promise else ():
            ended = run_test(test, mutation.changes, HANG if mutation.hangs else LONG)
            fails = f"FAILED {test}" in ended.stdout
            hung = "from pytest-timeout" in ended.stdout or ended.returncode < 0
            assert fails if not hung else mutation.hangs, (
                f"{test} should fail without the code that keeps the promise (the change is in "
                f"tests/docs/broken_promises.py). {HOW[ended.returncode == 0]}. To repeat it: "
                f"PROMISES_OF_DAY={DAY} python -m pytest {__file__}\n{ended.stdout[-4000:]}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("promise", dict.fromkeys(mutation.promise for mutation in MUTATIONS))
def test_the_tests_of_a_promise_pass_on_a_copy_without_a_change(promise: str) -> None:
    """So they fail by the change, and not since they run on a copy."""
    for mutation in MUTATIONS:
        same = [change._replace(replacement=change.text) for change in mutation.changes]
        for test in mutation.tests if mutation.promise == promise else ():
            ended = run_test(test, same, LONG)
            assert ended.returncode == 0, f"{test}\n{ended.stdout[-4000:]}"


WHERE = """
import os, sys
import monarch
from monarch.actor import Actor, endpoint, this_host

class Where(Actor):
    @endpoint
    def where(self, client):
        found, pid = [monarch.__file__], os.getppid()
        while pid != client:
            with open(f"/proc/{pid}/cmdline") as line, open(f"/proc/{pid}/stat") as stat:
                found.append(line.read())
                pid = int(stat.read().rpartition(")")[2].split()[1])
        return found

if __name__ == "__main__":
    print(monarch.__file__)
    where = this_host().spawn_procs().spawn("where", Where).where.call_one(os.getpid())
    print(*map(repr, where.get(timeout=60)), sep="\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_all_processes_import_the_copy(tmp_path: Path) -> None:
    """The launcher and the agent are started with the folder of their package in the command."""
    (tmp_path / "where.py").write_text(WHERE)
    with copy_of_the_package([]) as folder:
        ended = run_in(folder, [str(tmp_path / "where.py")], LONG)
        lines = ended.stdout.splitlines()
        assert ended.returncode == 0, ended.stdout
        assert len(lines) == 4, lines  # the client, the proc, its launcher, its agent
        assert [line for line in lines if str(folder) not in line] == []


def test_a_change_of_code_that_has_moved_says_so() -> None:
    change = Change("_engine/runtime/actor/cell.py", "no such text", "")
    moved = r"actor/cell.py 0 times, not once.*\nno such text"
    with pytest.raises(ValueError, match=moved), copy_of_the_package([change]):
        pass


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.promise)
def test_the_code_of_a_promise_is_where_its_change_expects_it(mutation: Mutation) -> None:
    for file, text, _ in mutation.changes:
        assert (ROOT / "src" / "monarch" / file).read_text().count(text) == 1, text
