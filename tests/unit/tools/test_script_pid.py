"""The pid of a script on the command line, and the width of tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from monarch.cli.dashboard import add_dashboard
from monarch.cli.profile import add_profile
from monarch.cli.query import _table, _words, add_query
from monarch.cli.top import add_top
from monarch.cli.tui import add_tui
from monarch.cli.why import add_why


@pytest.mark.parametrize("add", [add_why, add_top, add_dashboard, add_tui, add_profile])
@pytest.mark.parametrize("words", [["4242"], ["--pid", "4242"], ["--pid=4242"], []])
def test_both_ways_to_give_it(
    add: Callable[[argparse.ArgumentParser], None], words: list[str]
) -> None:
    parser = argparse.ArgumentParser()
    add(parser)
    found = vars(parser.parse_args(words))
    value: Any = found.get("pid", found.get("source"))
    assert value in (([4242, "4242"]) if words else [None])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["4242", "SELECT 1"], ("SELECT 1", 4242)),
        (["--pid", "4242", "SELECT 1"], ("SELECT 1", 4242)),
        (["SELECT 1", "--pid", "4242"], ("SELECT 1", 4242)),
        (["SELECT 1"], ("SELECT 1", None)),
        (["4242"], (None, 4242)),
        (["-"], ("-", None)),
        ([], (None, None)),
    ],
)
def test_a_query(words: list[str], expected: tuple[str | None, int | None]) -> None:
    parser = argparse.ArgumentParser()
    add_query(parser)
    options = parser.parse_args(words)
    assert _words(options.words, options.pid) == expected


def test_words_without_quotes() -> None:
    with pytest.raises(ValueError, match="one statement is wanted, in quotes, not 2 words: 1"):
        _words(["SELECT", "1"], None)


def test_cells_are_cut_for_a_terminal_only() -> None:
    rows = [{"n": 1, "attributes": "x" * 200}]
    assert "x" * 200 in "\n".join(_table(["n", "attributes"], rows, None))
    lines = list(_table(["n", "attributes"], rows, 80))
    assert max(map(len, lines)) == 80
    assert lines[2].endswith("xxx...")
