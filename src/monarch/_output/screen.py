r"""The unfinished lines of one stream, as a terminal would show them: `Screen`.

Progress bars write over their line: a carriage return leads back to its start, and a bar of several
lines moves the cursor up. Each text that is written over is a *state*. Only the last one is worth a
line in a log, and on a terminal only the newest is shown (see `footer`). So a screen takes states
out of a stream. What remains passes unchanged and at once.

A line that no program can come back to is *final*. When a line with states is final, its last state
is passed on as a `State`. A terminal never knows; here a line is final when

- text without a carriage return begins on a line below it,
- a line below it gets a second state without a move up in between: the bar below is another one,
- the cursor was moved up, but not as far, before text came: bars of several lines return to their
  first line,
- nothing has come back to it between two calls of `settle`, or the stream ends.

While a program hides the cursor, as rich does while it draws, lines without carriage returns can be
come back to as well. A blank line is held until more text comes or `settle` is called, since bars
of ``tqdm(position=2)`` move down by line ends.

`\r\n` is a line end. A `\r` at the end of the data waits for the next byte. Memory is bounded: at
most `MOST_LINES` unfinished lines, of `LINE_LIMIT` bytes each. The work per call is in proportion
to the bytes, and small for states that the same bytes write over.

Rejected: to overwrite character by character as a terminal does. A state that is shorter than the
one before would keep its end, for which programs write spaces, if they think of it.
"""

from __future__ import annotations

import re

from monarch._output.lines import LINE_LIMIT

__all__ = ["MOST_LINES", "Screen", "State"]

MOST_LINES = 32

_SPECIAL = re.compile(rb"\r(?!\n)|\x1b\[(?:[0-9]*[AF]|\?25[hl])")
_TOKEN = re.compile(
    rb"\r?\n"
    rb"|[^\n\x1b]*\r(?!\n)"  # states that are written over
    rb"|\x1b\[[0-?]*[ -/]*[@-~]"
    rb"|\x1b\][^\n\x07\x1b]*(?:\x07|\x1b\\)?"  # a title, or a link
    rb"|\x1b[^\[\]\r\n\x1b]?"
    rb"|\x1b\["
    rb"|[^\r\n\x1b]+"
)
_MOVE = re.compile(rb"\x1b\[([0-9]{0,4})([ABEFGJK])")
_STYLE = re.compile(rb"\x1b\[[0-9;:]*m")
_UNFINISHED = re.compile(rb"(?:\r|\x1b(?:\[[0-?]{0,16})?)\Z")
_PATIENCE = 2  # calls of `settle` after which a line above the cursor is final
_HIDDEN_PATIENCE = 10  # the same, while the cursor is hidden
_LONGEST_STYLE = 64
_RESETS = (b"\x1b[0m", b"\x1b[m")


class State(bytes):
    """The last state of a line, without a line end."""

    __slots__ = ()


class _Line:
    """A line that may still be written over."""

    __slots__ = ("age", "at_start", "end", "is_state", "states", "text")

    def __init__(self) -> None:
        self.text = b""
        self.end = b"\n"
        self.is_state = False  # it was written over, or may be soon
        self.at_start = False  # the cursor is at its start: text replaces it
        self.states = 0  # since the cursor came to this line
        self.age = 0  # calls of `settle` since then


class Screen:
    r"""Takes states out of the bytes of a stream.

    >>> screen = Screen()
    >>> screen.feed(b"begin\n\r 0%"), screen.states()
    ([b'begin\n'], [' 0%'])
    >>> screen.feed(b"\r 50%\r100%"), screen.states()
    ([], ['100%'])
    >>> screen.feed(b"\nend\n"), screen.states()
    ([b'100%', b'end\n'], [])
    """

    __slots__ = (
        "_at",
        "_has_come_down",
        "_has_moved_up",
        "_is_hidden",
        "_is_open",
        "_lines",
        "_out",
        "_rest",
        "_style",
    )

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._at = 0  # where the cursor is among them
        self._rest = b""  # the end of the data, whose meaning the next byte decides
        self._is_open = False  # the line of what was passed on last has no end yet
        self._is_hidden = False  # the cursor
        self._style = b""  # of the text to come
        self._has_moved_up = False  # since text came
        self._has_come_down = False  # by a line end, and no text has come since
        self._out: list[bytes] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, and the next byte begins a line."""
        return not (self._lines or self._rest or self._is_open)

    @property
    def is_waiting(self) -> bool:
        """Whether there are states, or text that `settle` may find final."""
        return bool(self._lines)

    def feed(self, data: bytes) -> list[bytes]:
        """Accept `data`; return what passes, and a `State` for each line that is final.

        Text without a line end is kept, see `release`.
        """
        data = self._rest + data
        self._rest = b""
        begun = self._begun()
        if begun is not None and not (
            ((b"\r" in data or b"\x1b" in data) and _SPECIAL.search(data))
            or not (begun or self._is_open or data[: MOST_LINES + 1].strip(b"\n"))  # blank lines
        ):
            self._lines.clear()
            data = begun + data
            end = data.rfind(b"\n") + 1
            if end:
                self._out.append(data[:end])
                self._is_open = False
            data = data[end:]
        unfinished = _UNFINISHED.search(data)
        if unfinished:
            self._rest = unfinished[0]
            data = data[: unfinished.start()]
        for token in _TOKEN.findall(data):
            self._take(token)
        self._pass_on(len(self._lines) - MOST_LINES)
        return self._passed()

    def release(self) -> list[bytes]:
        """Return text without a line end, if no carriage return has come for it.

        It can no longer become a state: a carriage return begins another line.
        """
        self._release()
        return self._passed()

    def settle(self, *, at_once: bool = False) -> list[bytes]:
        """Return lines above the cursor that nothing has come back to since the last calls.

        Text without a line end that has been there for as long is returned, too. `at_once`: return
        all of this, unless the cursor is hidden.
        """
        patience = _HIDDEN_PATIENCE if self._is_hidden else 0 if at_once else _PATIENCE
        final = 0
        for place, line in enumerate(self._lines[: self._at]):
            line.age += 1
            if final == place and line.age >= patience:
                final += 1
        self._pass_on(final)
        if final and self._has_come_down and not self._at:
            self._lines.clear()  # see `close`
        if self._at < len(self._lines):
            line = self._lines[self._at]
            line.age += 1
            if line.age >= patience:
                self._release()
        return self._passed()

    def close(self) -> list[bytes]:
        """Return all that is held, at the end of the stream, and the line end that is missing.

        Not lines below the last line end: bars that have several lines end with one, on the first.
        The screen is empty then, and takes more bytes as a new one does.
        """
        if self._rest == b"\r":
            self._carriage_return()
        above, others = self._lines[: self._at], self._lines[self._at :]
        if self._has_come_down:
            others = []
        self._lines = [*above, *(line for line in others if line.text)]
        self._pass_on(len(self._lines))
        if self._is_open:
            self._out.append(b"\n")
        self._at = 0
        self._rest = self._style = b""
        self._is_open = self._is_hidden = False
        self._has_moved_up = self._has_come_down = False
        return self._passed()

    def states(self) -> list[str]:
        """Return the newest state of each line that has one, without spaces at its end."""
        newest = self._at if self._rest == b"\r" else -1
        return [
            line.text.decode("utf-8", "replace").rstrip()
            for place, line in enumerate(self._lines)
            if (line.is_state or self._is_hidden or place == newest) and not _is_blank(line.text)
        ]

    # -- tokens ----------------------------------------------------------------------------------

    def _take(self, token: bytes) -> None:
        if token.endswith(b"\n"):
            self._line_end(token)
        elif token.endswith(b"\r"):
            first, _, others = token[:-1].partition(b"\r")
            last = others.rstrip(b"\r").rpartition(b"\r")[2]
            for text in (first, last):
                if text:
                    self._text(text)
                self._carriage_return()
        elif _STYLE.fullmatch(token):
            self._set_style(token)
        elif token.startswith(b"\x1b"):
            self._escape(token)
        else:
            self._text(token)

    def _text(self, text: bytes) -> None:
        if self._is_open and not self._lines:
            self._out.append(text)
            return
        line = self._line()
        self._has_come_down = False
        if self._has_moved_up:
            self._has_moved_up = False
            self._pass_on(self._at)
        if line.at_start:
            line.is_state = line.is_state or bool(line.text)
            line.text = self._style
            self._style = b""
            line.at_start = False
            if line.states:
                self._pass_on(self._at)
            line.states += 1
        elif not (line.text or line.is_state or self._is_hidden):
            self._pass_on(self._at)
        line.age = 0
        if line.is_state:
            text = text[: LINE_LIMIT - len(line.text)]
        line.text += text
        if len(line.text) > LINE_LIMIT and not line.is_state:
            self._release()

    def _set_style(self, sequence: bytes) -> None:
        """Accept a colour. At the start of a line it is that of the text to come."""
        line = self._lines[self._at] if self._at < len(self._lines) else None
        if line is not None and line.at_start:
            self._style = (self._style + sequence)[-_LONGEST_STYLE:]
        else:
            self._text(sequence)

    def _carriage_return(self) -> None:
        self._end_open_line()
        self._has_come_down = False
        line = self._line()
        line.is_state = line.at_start = True

    def _line_end(self, end: bytes) -> None:
        if self._is_open and not self._lines:
            self._is_open = False
            self._out.append(end)
            return
        line = self._line()
        if self._has_moved_up:
            self._has_moved_up = False
            self._pass_on(self._at)
        line.end = end
        if line.text and not (line.is_state or self._is_hidden):
            self._pass_on(self._at + 1)
            if self._lines:
                self._go(0)
        else:
            self._go(1)
            self._has_come_down = True

    def _escape(self, sequence: bytes) -> None:
        """Carry out what a control sequence does to lines, if they have states.

        Other sequences are dropped there, since they would move the cursor of the real terminal. In
        lines without states they pass.
        """
        if sequence in (b"\x1b[?25l", b"\x1b[?25h"):
            self._is_hidden = sequence.endswith(b"l")
            if not self._is_hidden:
                self._pass_on(self._at)
            return
        move = _MOVE.fullmatch(sequence)
        kind = move[2] if move is not None else b"other"
        count = int(move[1] or b"0") if move is not None else 0
        if kind in (b"A", b"F"):
            self._end_open_line()
            self._has_moved_up = True
            self._has_come_down = False
            self._go(-max(1, count))
            return
        line = self._lines[self._at] if self._at < len(self._lines) else None
        if kind in (b"B", b"E") and self._lines:
            self._go(min(max(1, count), len(self._lines) - 1 - self._at))
        elif kind == b"G" and self._lines:
            self._carriage_return()
        elif kind in (b"J", b"K") and line is not None and (count or line.at_start):
            line.text = b""  # all of the line, or from its start to its end
            line.is_state = True
            if kind == b"J":
                del self._lines[self._at + 1 :]
        elif line is None or not (line.is_state or self._is_hidden):
            self._text(sequence)

    # -- lines -----------------------------------------------------------------------------------

    def _begun(self) -> bytes | None:
        """Return the text of a line that has begun, if it is all that is held; else None."""
        if self._is_hidden or len(self._lines) > 1:
            return None
        if not self._lines:
            return b""
        line = self._lines[0]
        is_text = bool(line.text) and not (line.is_state or line.at_start)
        return line.text if is_text and self._at == 0 else None

    def _line(self) -> _Line:
        """Return the line of the cursor."""
        while len(self._lines) <= self._at:
            self._lines.append(_Line())
        return self._lines[self._at]

    def _end_open_line(self) -> None:
        """End a line of which a part was passed on: it is a line of its own."""
        if self._is_open and not self._lines:
            self._is_open = False
            self._out.append(b"\n")

    def _go(self, count: int) -> None:
        """Move the cursor down so many lines; less than 0: up."""
        self._line()
        self._style = b""
        self._at = max(0, self._at + count)
        if self._at < len(self._lines):
            line = self._lines[self._at]
            line.at_start = True
            line.states = 0

    def _pass_on(self, count: int) -> None:
        """Pass on the first lines, which are final."""
        count = max(0, count)
        for line in self._lines[:count]:
            if not line.is_state:
                self._out.append(line.text + line.end)
            elif not _is_blank(line.text):  # otherwise the program has erased it
                self._out.append(State(_ended(line.text)))
        del self._lines[:count]
        self._at = max(0, self._at - count)

    def _release(self) -> None:
        if len(self._lines) != self._at + 1 or self._is_hidden or self._rest:
            return
        line = self._lines[self._at]
        if line.text and not line.is_state:
            self._pass_on(self._at)
            self._lines.clear()
            self._at = 0
            self._is_open = True
            self._out.append(line.text)

    def _passed(self) -> list[bytes]:
        out, self._out = self._out, []
        return out


def _is_blank(text: bytes) -> bool:
    return not _STYLE.sub(b"", text).strip()


def _ended(text: bytes) -> bytes:
    """Return a state without spaces at its end, after which colours are as before."""
    styles = _STYLE.findall(text)
    reset = b"" if not styles or styles[-1] in _RESETS else _RESETS[0]
    return text.rstrip() + reset
