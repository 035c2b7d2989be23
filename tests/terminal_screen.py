"""What a terminal shows of the bytes that are written to it: rows, cursor, scrolling region."""

from __future__ import annotations

import re

__all__ = ["TerminalScreen"]

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b([78D])|([\r\n])|([^\x1b\r\n])", re.DOTALL)


class TerminalScreen:
    """A terminal of characters that are one column wide, without colours.

    Sequences that it does not know are errors, so that a test notices them.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.height, self.width = rows, columns
        self.cells = [[" "] * columns for _ in range(rows)]
        self.history: list[str] = []
        """Rows that have scrolled out at the top."""
        self.row = self.column = 0
        self.top, self.bottom = 0, rows - 1
        self._saved = 0, 0
        self._rest = ""

    @property
    def rows(self) -> list[str]:
        """The rows, without spaces at their ends."""
        return ["".join(row).rstrip() for row in self.cells]

    @property
    def text(self) -> list[str]:
        """All rows, with those that have scrolled out, without blank ones at the end."""
        found = [*self.history, *self.rows]
        while found and not found[-1]:
            found.pop()
        return found

    def resize(self, rows: int, columns: int) -> None:
        """Change the size, as terminals do: the cursor's row stays, and all rows scroll.

        Lines are not wrapped anew."""
        if (rows, columns) == (self.height, self.width):
            return
        while self.row >= rows:
            self.history.append(self.rows[0])
            del self.cells[0]
            self.row -= 1
        self.cells = self.cells[:rows]
        while len(self.cells) < rows:
            self.cells.append([])
        self.cells = [[*row[:columns], *[" "] * (columns - len(row))] for row in self.cells]
        self.height, self.width = rows, columns
        self.top, self.bottom = 0, rows - 1
        self.column = min(self.column, columns)

    def write(self, text: str) -> None:
        text = self._rest + text
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                assert len(text) - at < 20, f"unknown sequence {text[at : at + 20]!r}"
                break
            at = found.end()
            parameters, kind, short, control, char = found.groups()
            if kind:
                self._control(parameters, kind)
            elif short == "7":
                self._saved = self.row, self.column
            elif short == "8":
                self.row, self.column = self._saved
            elif short == "D" or control == "\n":
                self._down()
            elif control == "\r":
                self.column = 0
            else:
                self._put(char)
        self._rest = text[at:]

    def _put(self, char: str) -> None:
        if self.column == self.width:  # the last character has left the cursor at the edge
            self.column = 0
            self._down()
        self.cells[self.row][self.column] = char
        self.column += 1

    def _down(self) -> None:
        if self.row != self.bottom:
            self.row = min(self.row + 1, self.height - 1)
            return
        if self.top == 0:
            self.history.append(self.rows[0])
        del self.cells[self.top]
        self.cells.insert(self.bottom, [" "] * self.width)

    def _control(self, parameters: str, kind: str) -> None:
        if kind in "mhl":  # colours; whether the cursor is shown, and the like
            return
        numbers = [int(number or 0) for number in parameters.split(";")]
        count = max(1, numbers[0])
        if kind == "A":
            self.row = max(self.top if self.row >= self.top else 0, self.row - count)
        elif kind == "B":
            self.row = min(
                self.bottom if self.row <= self.bottom else self.height - 1, self.row + count
            )
        elif kind == "H":
            self.row = min(count, self.height) - 1
            self.column = min(max(1, numbers[1] if len(numbers) > 1 else 1), self.width) - 1
        elif kind == "K":
            start = 0 if numbers[0] == 2 else self.column
            self.cells[self.row][start:] = [" "] * (self.width - start)
        elif kind == "J" and not numbers[0]:
            self._control("", "K")
            for row in range(self.row + 1, self.height):
                self.cells[row] = [" "] * self.width
        elif kind == "r":
            self.top = count - 1
            self.bottom = (numbers[1] if len(numbers) > 1 else self.height) - 1
            self.row = self.column = 0
        else:
            raise AssertionError(f"unknown sequence CSI {parameters} {kind}")
