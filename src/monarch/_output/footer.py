r"""The footer of a terminal: lines below what is printed, which are redrawn in place.

The last rows of the terminal are taken out of the region that scrolls (DECSTBM). So all else that
is written to the terminal scrolls above the footer, whichever process writes it, at any time and
without knowing of the footer: prints of the script and of actors, bars of the script itself, an
``input()`` that waits. Each draw saves the cursor and restores it.

Before rows are taken, the text scrolls up as far as necessary: "index" (``ESC D``) moves down, and
scrolls at the last row, without leaving the column; then the cursor moves up again.

Terminals reset the region when their size changes. The footer then erases what is below the cursor,
where its old lines are, and begins anew.

Rejected: to draw below the cursor without a region. What other processes print before the next draw
would overwrite the lines of the footer in part, and the remains would scroll away with it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLEAR", "Footer", "chosen", "fit", "plain", "room"]

CLEAR = "\x1b7\x1b[r\x1b8\x1b[J"
"""Gives all rows back, and erases what is below the cursor: for a footer whose size is unknown."""

_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
_OTHER = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_RUN = re.compile(r"([^\x1b0-9a-zA-Z])\1{4,}")
_PLAIN = "\x1b[0m"
_LONGEST = 1000  # characters of a text that are looked at


class Footer:
    """The footer of one terminal. It returns what is to be written, and does no I/O."""

    __slots__ = ("_columns", "_height", "_rows")

    def __init__(self) -> None:
        self._height = 0
        self._rows = self._columns = 0

    @property
    def height(self) -> int:
        """How many rows the footer takes now."""
        return self._height

    def draw(self, lines: Sequence[str], columns: int, rows: int) -> str:
        """Return what shows these lines, at most `room`, in a terminal of this size."""
        parts: list[str] = []
        if self._height and (columns, rows) != (self._columns, self._rows):
            parts.append(CLEAR)
            self._height = 0
        self._columns, self._rows = columns, rows
        height = len(lines)
        more = height - self._height
        if more > 0:
            parts.append("\x1bD" * more + f"\x1b[{more}A")
        if not (height or self._height):
            return "".join(parts)
        parts.append("\x1b7")
        if more:
            parts += [f"\x1b[{row};1H{_PLAIN}\x1b[K" for row in self._own(self._height - height)]
            parts.append(f"\x1b[1;{rows - height}r" if height else "\x1b[r")
        self._height = height
        for row, line in zip(self._own(height), lines, strict=True):
            parts.append(f"\x1b[{row};1H{_PLAIN}{fit(line, columns - 1)}{_PLAIN}\x1b[K")
        parts.append("\x1b8")
        return "".join(parts)

    def _own(self, count: int) -> range:
        """Return the first so many rows of the footer, counted from 1."""
        first = self._rows - self._height + 1
        return range(first, first + max(0, count))


def room(rows: int) -> int:
    """Return how many lines of footer a terminal has room for: half of its rows at most."""
    return max(0, min(rows // 2, rows - 3))


def chosen(lines: Sequence[str], most: int) -> list[str]:
    """Return the lines; if there are more than `most`, the first ones and how many more."""
    if len(lines) <= most:
        return list(lines)
    shown = max(0, most - 1)
    return [*lines[:shown], f"and {len(lines) - shown:,} more"][:most]


def fit(text: str, columns: int) -> str:
    r"""Return a text of at most so many columns, with its colours, that moves no cursor.

    A bar that is too long becomes shorter: runs of equal characters shrink, in proportion. What is
    too long after that is cut.

    >>> fit("rank 3:  50%|##########          | 5/10", 29)
    'rank 3:  50%|#####     | 5/10'
    >>> fit("a\tlong\x1b[2J text\x1b[31m in red", 8)
    'a long t'
    """
    text = _printable(text[:_LONGEST])
    excess = _width_of(text) - columns
    runs = sum(match.end() - match.start() - 1 for match in _RUN.finditer(text))
    if excess > 0 and runs:
        text = _shrunk(text, min(excess, runs), runs)
    parts: list[str] = []
    left = columns
    for piece in re.split(rf"({_STYLE.pattern})", text):
        if piece.startswith("\x1b"):
            parts.append(piece)
            continue
        for char in piece:
            left -= _width(char)
            if left < 0:
                return "".join(parts)
            parts.append(char)
    return "".join(parts)


def plain(text: str) -> str:
    """Return a text without colours and control characters."""
    return _STYLE.sub("", _printable(text))


def _width_of(text: str) -> int:
    """Return how many columns a text takes, without its colours."""
    return sum(map(_width, _STYLE.sub("", text)))


def _width(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _printable(text: str) -> str:
    """Return a text without control characters, and without escape sequences but colours."""
    text = _OTHER.sub(lambda match: match[0] if _STYLE.fullmatch(match[0]) else "", text)
    return "".join(
        char if char == "\x1b" or unicodedata.category(char) not in _CONTROLS else " "
        for char in text
    )


_CONTROLS = ("Cc", "Zl", "Zp", "Cs")


def _shrunk(text: str, excess: int, runs: int) -> str:
    """Take `excess` characters out of runs, of which `runs` can be taken."""
    seen = taken = 0

    def shorter(match: re.Match[str]) -> str:
        nonlocal seen, taken
        run = match[0]
        seen += len(run) - 1
        goal = excess * seen // runs
        taken, count = goal, goal - taken
        return run[count:]

    return _RUN.sub(shorter, text)
