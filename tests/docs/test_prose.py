"""Comments, docstrings and Markdown avoid the turns of phrase that CONTRIBUTING.md lists.

The check finds symptoms only: a text without them can still be hard to read.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.prose import ROOT, blocks, files

LIMIT = 2.0
"""Per 1,000 words of a folder."""

QUESTION_WORDS = ("Who", "What", "Whom", "Whoever", "Nobody", "Nothing")
"""No sentence begins with one of these, unless it is a question."""

WORDS = (
    "any more",
    "for ever",
    "gone",
    "hear",
    "heard",
    "hears",
    "last words",
    "nobody",
    "the asked",
    "the news",
    "told",
    "whoever",
    "whom",
)

BEGINNINGS = re.compile(rf"(?:^|[.!?]\s+|\(\s*)({'|'.join(QUESTION_WORDS)})\b(?![^.!?]*\?)")
ANYWHERE = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
CODE = re.compile(r"(`+)[^`]*\1")


def folder_of(path: Path) -> str:
    """Return the folder that a file counts for: for src/monarch and its engine, each subfolder."""
    *folders, _ = path.relative_to(ROOT).parts
    if folders[:2] == ["src", "monarch"]:
        return "/".join(folders[: 4 if folders[2:3] == ["_engine"] else 3])
    return folders[0] if folders else "docs"


def tics(text: str) -> list[str]:
    """Return the turns of phrase in a text, outside code in backticks."""
    plain = " ".join(CODE.sub("x", text).split())
    found = {match.end(): match[1] for match in BEGINNINGS.finditer(plain)}
    found |= {match.end(): match[0] for match in ANYWHERE.finditer(plain)}
    return [found[place] for place in sorted(found)]


def measure(folder: str) -> tuple[int, list[str]]:
    """Return the number of words of a folder and the places of all turns of phrase."""
    words, places = 0, []
    for path in files():
        if folder_of(path) != folder:
            continue
        for block in blocks(path):
            words += len(block.text.split())
            places += [f"{path.relative_to(ROOT)}:{block.line}: {tic}" for tic in tics(block.text)]
    return words, places


ALL = sorted({folder_of(path) for path in files()})


def test_a_tic_is_found_where_a_sentence_begins_and_in_the_middle() -> None:
    assert tics("It ends.\nWhoever asks is\ntold.") == ["Whoever", "told"]
    assert tics("What is this?") == []
    assert tics("See `nobody` and ``gone``.") == []


@pytest.mark.parametrize("folder", ALL)
def test_the_prose_of_a_folder_is_plain(folder: str) -> None:
    words, places = measure(folder)
    rate = 1000 * len(places) / max(1, words)
    assert rate <= LIMIT, "\n".join(places)
