"""The promises listed in docs/reliability.md are on docs/failures.md, and their tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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
