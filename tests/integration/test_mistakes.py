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
    r"^## (?P<number>\d+)\. (?P<title>[^\n]+)\n\n<!-- error: (?P<page>[a-z-]+) -->\n.*?"
    r"^```python\n(?P<program>.*?)^```\n\n```text\n(?P<error>.*?)^```\n\n\*\*Remedy\.\*\* ",
    re.MULTILINE | re.DOTALL,
)
HOME = "/home/me"
MARKS = re.compile(r"^ +[~^]+\n", re.MULTILINE)
"""What Python draws below a line of a traceback; 3.13 does so below more lines than 3.11."""

GOES_ON = {"A result that nothing looks at", "A blocking wait on an event loop"}
"""Mistakes that a script survives: it reports them, and exits with 0."""

ERROR_PAGES = "https://docs.example.org/errors/"
WITHOUT_LINK = {
    "child-ended",
    "index-out-of-range",
    "no-such-dimension",
    "no-such-setting",
    "script-global",
}
"""Pages of errors of Python itself, or of shapes and settings, which know of no pages."""


@dataclass(frozen=True)
class Mistake:
    title: str
    page: str
    program: str
    error: str

    @property
    def pattern(self) -> str:
        """A regular expression: `...` matches any text."""
        return re.escape(self.error.strip("\n")).replace(r"\.\.\.", ".*?")


SECTIONS = list(SECTION.finditer(PAGE.read_text()))
MISTAKES = [Mistake(*found.group("title", "page", "program", "error")) for found in SECTIONS]


def test_the_sections_of_the_page_have_their_parts() -> None:
    count = PAGE.read_text().count("\n## ")
    assert [int(found["number"]) for found in SECTIONS] == [*range(1, count + 1)]
    assert count >= 20
    assert {mistake.title for mistake in MISTAKES} >= GOES_ON


def test_each_page_that_the_code_names_exists() -> None:
    source = (path.read_text() for path in (PAGE.parents[1] / "src").rglob("*.py"))
    named = {name for text in source for name in re.findall(r"see_page\([\"']([\w-]+)", text)}
    pages = [mistake.page for mistake in MISTAKES]
    assert named | WITHOUT_LINK == {*pages}
    assert len(pages) == len({*pages})


@pytest.mark.failures
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_the_error_names_the_line_and_the_remedy(mistake: Mistake, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(mistake.program)

    done = run_script(script, 120, MONARCH_ERROR_PAGES=ERROR_PAGES)

    assert (done.returncode == 0) == (mistake.title in GOES_ON), done.stderr
    link = f" (see {ERROR_PAGES}{mistake.page}.html)"
    assert (link in done.stderr) == (mistake.page not in WITHOUT_LINK), done.stderr
    printed = done.stderr.replace(str(tmp_path), HOME).replace(link, "")
    printed = MARKS.sub("", printed)
    if not re.search(mistake.pattern, printed, re.DOTALL):
        assert printed == mistake.error  # the texts differ, and pytest shows where
