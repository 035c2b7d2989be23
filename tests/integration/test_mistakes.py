"""Each program of docs/mistakes.md ends by itself, and its error names the line and the remedy.

The page is the list of the programs, and has the parts of the errors that are compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scripts import run_script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
SECTION = re.compile(
    r"^## (?P<number>\d+)\. (?P<title>[^\n]+)\n.*?"
    r"^```python\n(?P<program>.*?)^```\n\n```text\n(?P<error>.*?)^```\n\n\*\*Remedy\.\*\* ",
    re.MULTILINE | re.DOTALL,
)
HOME = "/home/me"
GOES_ON = {"A result that nothing looks at"}
"""Mistakes that a script survives: it reports them, and exits with 0."""


@dataclass(frozen=True)
class Mistake:
    title: str
    program: str
    error: str

    @property
    def pattern(self) -> str:
        """A regular expression: `...` matches any text."""
        return re.escape(self.error.strip("\n")).replace(r"\.\.\.", ".*?")


SECTIONS = list(SECTION.finditer(PAGE.read_text()))
MISTAKES = [Mistake(found["title"], found["program"], found["error"]) for found in SECTIONS]


def test_the_page_has_twenty_sections_and_each_has_its_parts() -> None:
    assert [int(found["number"]) for found in SECTIONS] == [*range(1, 21)]
    assert PAGE.read_text().count("\n## ") == 20
    assert {mistake.title for mistake in MISTAKES} >= GOES_ON


@pytest.mark.failures
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_the_error_names_the_line_and_the_remedy(mistake: Mistake, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(mistake.program)

    done = run_script(script, 120)

    assert (done.returncode == 0) == (mistake.title in GOES_ON), done.stderr
    printed = done.stderr.replace(str(tmp_path), HOME)
    if not re.search(mistake.pattern, printed, re.DOTALL):
        assert printed == mistake.error  # the texts differ, and pytest shows where
