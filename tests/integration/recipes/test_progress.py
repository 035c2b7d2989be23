"""`progress`: what it counts, and how it looks in a log and in a terminal."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from monarch.recipes import progress
from tests.terminal import Terminal


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stderr, without times."""
    shown = capsys.readouterr()
    assert shown.out == ""
    return [re.sub(r" in \d+ s, .*?(/s|each)", "", line) for line in shown.err.splitlines()]


def test_a_log_has_a_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), "letters", total=3)) == ["a", "b", "c"]
    assert said(capsys) == ["letters: 3/3"]
    assert sum(progress(range(4))) == 6
    assert said(capsys) == ["4/4"]
    assert list(progress(iter("ab"))) == ["a", "b"]
    assert said(capsys) == ["2"]


def test_and_lines_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    list(progress(range(1, 3), every=0.0))
    assert said(capsys) == ["0/2 in 0 s", "1/2, 0 s left", "2/2, 0 s left", "2/2"]


def test_failed_futures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    futures: list[Future[int]] = [Future() for _ in range(4)]
    for number, future in enumerate(progress(futures)):  # settled in the body, as by `get`
        if number == 0:
            future.set_exception(ValueError("no"))
        elif number == 1:
            future.cancel()
        elif number == 2:
            future.set_result(1)
    assert said(capsys) == ["4/4, 2 failed"]


def test_a_loop_that_is_left_and_an_iteration_that_raises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in progress(range(9)):
        if number == 3:
            break
    assert said(capsys) == ["3/9"]

    def numbers() -> Iterator[int]:
        yield 1
        raise ValueError("of the iteration")

    with pytest.raises(ValueError, match="of the iteration"):
        list(progress(numbers()))
    assert said(capsys) == ["1"]


def test_asynchronous_items(capsys: pytest.CaptureFixture[str]) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def main() -> list[int]:
        return [number async for number in progress(numbers(), total=3)]

    assert asyncio.run(main()) == [0, 1, 2]
    assert said(capsys) == ["3/3"]


SCRIPT = """
import sys
from monarch.recipes import progress
for word in progress(iter(sys.stdin.readline, ""), "words", total=2):
    print("said", word.strip())
print("end")
"""


def test_a_terminal_shows_a_bar_below_what_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    script.write_text(SCRIPT)
    screen = Terminal(sys.executable, str(script), TERM="xterm")
    try:
        screen.expect(r"words.*━.*0/2 in \d+ s")
        screen.type("one\n")
        screen.expect("said one")
        screen.expect(r"words.*━.*1/2 in \d+ s, .* left")
        screen.type("two\n")
        screen.expect("said two")
        screen.type("\x04")
        screen.expect(r"words.*━.*2/2 in \d+ s")
        screen.expect("end")
        assert screen.process.wait(60) == 0
    finally:
        screen.close()


def test_a_terminal_needs_rich(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["rich"] = None
sys.modules["rich.console"] = None
sys.stderr.isatty = lambda: True
from monarch.recipes import progress
list(progress([]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "a progress bar in a terminal needs rich: pip install 'pymonarch[progress]'" in done.stderr
    )
