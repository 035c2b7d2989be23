"""The pid of a script on the command line, and the width of tables."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from monarch.cli import COMMANDS, add_options
from monarch.cli.debug import add_debug
from monarch.cli.query import _table, _words, add_query
from monarch.cli.script_pid import without_pid

ABOUT_A_SCRIPT = ("why", "top", "tui", "query", "dashboard", "profile", "debug")
WITHOUT_FURTHER_ARGUMENTS = ("why", "top", "tui", "dashboard", "profile")


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("monarch", formatter_class=argparse.RawTextHelpFormatter)
    add_options(command, parser)
    return parser


@pytest.mark.parametrize("command", WITHOUT_FURTHER_ARGUMENTS)
@pytest.mark.parametrize("words", [["4242"], ["--pid", "4242"], ["--pid=4242"], []])
def test_both_ways_to_give_it(command: str, words: list[str]) -> None:
    found = vars(parser_of(command).parse_args(words))
    value: Any = found.get("pid", found.get("source"))
    assert value in (([4242, "4242"]) if words else [None])


def test_all_commands_about_a_script_take_it_in_both_ways_and_say_so() -> None:
    """An example with a pid as the first argument, and the option."""
    shown = {name: parser_of(name).format_help() for name in COMMANDS}
    as_option = [name for name, text in shown.items() if "--pid PID" in text]
    as_argument = [name for name, text in shown.items() if re.search(rf"monarch {name} 4242", text)]
    assert sorted(as_option) == sorted(as_argument) == sorted(ABOUT_A_SCRIPT)


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["4242"], ([], 4242)),
        (["--pid", "4242"], ([], 4242)),
        (["--dap", "4242", "trainers", "0:4"], (["trainers", "0:4"], 4242)),
        (["--dap", "--pid", "4242", "trainers", "3"], (["trainers", "3"], 4242)),
        (["--dap", "trainers"], (["trainers"], None)),
        ([], ([], None)),
    ],
)
def test_a_debugger(words: list[str], expected: tuple[list[str], int | None]) -> None:
    parser = argparse.ArgumentParser()
    add_debug(parser)
    options = parser.parse_args(words)
    assert without_pid(options.words, options.pid) == expected


def test_words_without_quotes() -> None:
    with pytest.raises(ValueError, match="one statement is wanted, in quotes, not 2 words: 1"):
        _words(["SELECT", "1"], None)


LONG = "".join(f"<{number}>" for number in range(60))
"""A text of 230 characters, none of which may be lost."""


def test_cells_are_whole_where_the_output_is_no_terminal() -> None:
    lines = list(_table(["n", "attributes"], [{"n": 1, "attributes": LONG}], None))
    assert lines[2] == f"1  {LONG}"
    assert len(lines) == 4


def test_cells_are_wrapped_to_the_width_of_a_terminal() -> None:
    rows = [{"n": 1, "attributes": LONG, "m": 22}, {"n": 3, "attributes": "", "m": None}]
    lines = list(_table(["n", "attributes", "m"], rows, 80))
    assert max(map(len, lines)) == 80
    assert lines[0].split() == ["n", "attributes", "m"]
    first, *more = lines[2:-2]
    assert (first[:3], first[-6:]) == ("1  ", "    22")
    assert first[3:-6] + "".join(line.strip() for line in more) == LONG
    assert lines[-2].split() == ["3", "NULL"]
    assert lines[-1] == "(2 rows)"


def test_a_table_of_empty_texts() -> None:
    assert list(_table(["a", ""], [{"a": "", "": ""}], 80)) == ["a", "-  -", "", "(1 row)"]
