"""The pages with measured figures name files that the repository has.

A commit may get another hash when it lands, so the hashes of the measured folders count.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/performance.md", "docs/reliability.md")
FOLDERS = ("src", "benchmarks/programs")


def git(*arguments: str, given: str = "") -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def history() -> set[tuple[str, ...]]:
    """Return the hashes of the folders in each commit that leads to this one."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository, not a source distribution")
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the whole history; this clone is shallow")
    commits = git("log", "--format=%H").split()
    names = "".join(f"{commit}:{folder}\n" for commit in commits for folder in FOLDERS)
    found = git("cat-file", "--batch-check=%(objectname)", given=names).splitlines()
    return set(zip(*[iter(line[:12] for line in found)] * len(FOLDERS), strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_of_files_that_the_repository_has(
    page: str, history: set[tuple[str, ...]]
) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"commit \w+ \(`src` (\w{12}), `benchmarks/programs` (\w{12})\)", text)
    assert len(named) == 1
    assert set(named) <= history


def test_the_folders_of_this_commit_are_found(history: set[tuple[str, ...]]) -> None:
    today = tuple(git("rev-parse", f"HEAD:{folder}")[:12] for folder in FOLDERS)
    assert today in history
    assert today[::-1] not in history
