"""Log lines: process the output of a proc between its pipe and the client's terminal.

Five small machines, none of which reads a clock, a pipe or a terminal; the host agent and the
client drive them:

- `LineSplitter` turns the bytes of one stream into lines, in bounded memory.
- `format_line` lays out a forwarded line for the client.
- `Aggregator` folds similar lines of one window into one line each.
- `RateLimit` bounds what is forwarded by default.
- `Tail` remembers the last lines of a proc, for the report when it dies.

**Similar** means: the Levenshtein distance to the first line of a group, divided by the length of
the longer of the two, is below 0.15. If ten thousand ranks print at once, this comparison is the
cost of the whole feature. So it is the last of four steps, each cheaper than the next:

1. The very same line was seen in this window: one lookup.
2. The same line up to its numbers was seen: one lookup names the group to try first.
3. A group drops out if its length, or its pairs of neighbouring characters, differ by more than the
   allowed edits could make: one integer ``and`` per group (`_pairs`). No similar group can drop out
   here.
4. The distance to the four groups that are nearest by step 3 is computed, bit-parallel (Myers 1999,
   in Hyyrö's form for global distance): one step per character, a few operations on integers as
   wide as the other line. A table of cells would be 50 times slower in Python; a compiled library
   is not worth a dependency.

Stopping at four is the one approximation. It matters only for lines that differ from *each* other
by about 0.15, where a few more groups appear than necessary; trying all groups cost six times as
much on such a stream.

Of lines over 512 characters only the heads are compared (and the full lengths), which bounds the
cost of a hostile stream. A window holds at most 128 groups per stream; one more closes the block
early rather than dropping a line or growing without limit.

Unlike in the reference, a group that gathered several ranks lists them at the end of its line, and
colours are for terminals only.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from datetime import timedelta
from itertools import pairwise
from operator import ne
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from datetime import datetime

__all__ = [
    "LINE_LIMIT",
    "TRUNCATION_MARK",
    "Aggregator",
    "LineSplitter",
    "RateLimit",
    "Tail",
    "format_line",
]

LINE_LIMIT = 4096
"""The number of bytes of a line that are kept; the rest is discarded."""

TRUNCATION_MARK = "... [TRUNCATED]"

MAX_GROUPS = 128
"""The most groups of one stream in one window."""

_COMPARED = 512
_REMEMBERED = 1024
_TRIED = 4
_ALL_PAIRS = (1 << 1024) - 1
_NUMBER = re.compile(r"\d+")
_CYAN, _YELLOW, _PLAIN = "\x1b[36m", "\x1b[33m", "\x1b[0m"


class LineSplitter:
    r"""Splits a stream of bytes into complete lines, however the bytes arrive.

    A line ends at ``\n``; one ``\r`` before it is removed, too. Bytes that are not UTF-8 become
    replacement characters. Of a line longer than `LINE_LIMIT` bytes the head is kept, up to a whole
    character, and marked.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\r\ntw"), splitter.feed(b"o\nthr"), splitter.close()
    (['one'], ['two'], ['thr'])
    """

    __slots__ = ("_head", "_last", "_length")

    def __init__(self) -> None:
        self._head = bytearray()  # the first LINE_LIMIT bytes of the unfinished line
        self._length = 0  # its length so far
        self._last = b""  # its last byte, which may be a \r that does not count

    def feed(self, data: bytes) -> list[str]:
        """Accept ``data`` and return the lines that it completes."""
        pieces = data.split(b"\n")
        unfinished = pieces.pop()
        lines: list[str] = []
        if pieces:
            if self._length:
                self._hold(pieces[0])
                pieces[0] = b""
                lines = [self._finish(), *map(_text, pieces[1:])]
            else:
                lines = [_text(piece) for piece in pieces]
        self._hold(unfinished)
        return lines

    def close(self) -> list[str]:
        """Return the last line, if the stream ended in the middle of one."""
        return [self._finish()] if self._length else []

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._head += piece[: LINE_LIMIT - len(self._head)]
            self._length += len(piece)
            self._last = piece[-1:]

    def _finish(self) -> str:
        line = _cut(bytes(self._head), self._length - (self._last == b"\r"))
        self._head.clear()
        self._length = 0
        return line


def _text(line: bytes) -> str:
    return _cut(line, len(line) - line.endswith(b"\r"))


def _cut(head: bytes, length: int) -> str:
    """Decode a line of ``length`` bytes that begins with ``head``."""
    if length <= LINE_LIMIT:
        return head[:length].decode("utf-8", "replace")
    # An incremental decoder leaves out a character that the cut has split.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(head[:LINE_LIMIT]) + TRUNCATION_MARK


def format_line(hostname: str, proc: str, rank: int | None, line: str) -> str:
    """Lay out a forwarded line as the client prints it; ``rank`` None leaves the rank out.

    >>> format_line("node7", "trainer-3", 3, "loss 0.1")
    '[node7 trainer-3] [3] loss 0.1'
    """
    return f"[{hostname} {proc}] {_ranked(rank, line)}"


def _ranked(rank: int | None, line: str) -> str:
    return line if rank is None else f"[{rank}] {line}"


class Tail:
    """Keeps the last ``n`` lines of a stream; with ``n`` 0 it keeps none.

    >>> tail = Tail(2)
    >>> tail.extend(["a", "b", "c"])
    >>> tail.lines()
    ['b', 'c']
    """

    __slots__ = ("_lines",)

    def __init__(self, n: int) -> None:
        self._lines: deque[str] = deque(maxlen=n)

    def extend(self, lines: Iterable[str]) -> None:
        self._lines.extend(lines)

    def lines(self) -> list[str]:
        """Return the lines, oldest first."""
        return list(self._lines)


class RateLimit:
    """Admits ``rate`` lines a second; up to five seconds of silence may be made up for.

    >>> limit = RateLimit(10)
    >>> limit.admit(70, now=0.0), limit.admit(70, now=0.5), limit.admit(3, now=9.0)
    (50, 5, 3)
    """

    __slots__ = ("_left", "_rate", "_then")

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = 5.0 * rate
        self._then: float | None = None

    def admit(self, lines: int, now: float) -> int:
        """Return how many of so many lines may pass at the time ``now``, in seconds."""
        if self._then is not None:
            self._left = min(5.0 * self._rate, self._left + self._rate * (now - self._then))
        self._then = now
        admitted = min(lines, int(self._left))
        self._left -= admitted
        return admitted


class Aggregator:
    """Folds the lines of a window of ``window_seconds`` into one line per group of similar ones.

    A window opens with its first line. Feed lines with `add`; when `deadline` is reached, print
    what `flush` returns. Check `deadline` after every batch: a stream with too many different lines
    is due at once. All times are seconds of one monotonic clock.
    """

    __slots__ = ("_closed", "_due", "_open", "_window")

    def __init__(self, window_seconds: float) -> None:
        self._window = window_seconds
        self._open: dict[str, _Block] = {}
        self._closed: list[tuple[str, _Block, float]] = []
        self._due: float | None = None

    @property
    def deadline(self) -> float | None:
        """The time at which `flush` is due; None while no line waits."""
        return self._due

    def add(self, stream: str, rank: int | None, line: str, now: float) -> None:
        """Count a line of ``stream``, printed by ``rank`` (None: ranks are not shown)."""
        block = self._open.get(stream)
        if block is None:
            block = self._open[stream] = _Block(now)
            if self._due is None:
                self._due = now + self._window
        group = block.find(line)
        if group is None:
            if len(block.groups) == MAX_GROUPS:
                self._closed.append((stream, block, now))
                self._due = now
                block = self._open[stream] = _Block(now)
            group = block.start(rank, line)
        group.count += 1
        if rank is not None:
            group.ranks.add(rank)

    def flush(
        self, now: float, wall: datetime, terminals: Container[str] = ()
    ) -> list[tuple[str, str]]:
        """Return ``(stream, text)`` of each waiting block, oldest first, and start afresh.

        ``wall`` is the date and time of ``now``, which the blocks show. Blocks of the streams in
        ``terminals`` are coloured. The list is empty if no line waits.
        """
        blocks = [*self._closed, *((stream, block, now) for stream, block in self._open.items())]
        self._open = {}
        self._closed = []
        self._due = None
        return [
            (
                stream,
                block.text(
                    wall - timedelta(seconds=now - block.opened),
                    wall - timedelta(seconds=now - closed),
                    coloured=stream in terminals,
                ),
            )
            for stream, block, closed in blocks
        ]


class _Group:
    """A group of lines that are similar to ``first``."""

    __slots__ = ("absent", "count", "first", "head", "longest", "lost", "rank", "ranks", "shortest")

    def __init__(self, rank: int | None, first: str, pairs: int) -> None:
        self.rank = rank
        self.first = first
        self.count = 0
        self.ranks: set[int] = set()
        self.head = first[:_COMPARED]
        length = len(first)
        # The lengths that a similar line can have, and the pairs it can have that `first` lacks.
        self.shortest = length - _edits(length)
        self.longest = _longest(length)
        self.lost = 2 * _edits(_longest(len(self.head)))
        self.absent = _ALL_PAIRS & ~pairs

    def accepts(self, line: str) -> bool:
        """Whether ``line`` is similar to the first one."""
        if not self.shortest <= len(line) <= self.longest:
            return False
        head = line[:_COMPARED]
        return _within(self.head, head, _edits(max(len(head), len(self.head))))

    def text(self) -> str:
        text = _ranked(self.rank, self.first)
        return text if len(self.ranks) < 2 else f"{text} (ranks {_spans(self.ranks)})"


class _Block:
    """The groups of one stream and window, in the order of their first lines."""

    __slots__ = ("_seen", "_shapes", "groups", "opened")

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.groups: list[_Group] = []
        self._seen: dict[str, _Group] = {}
        self._shapes: dict[str, _Group] = {}

    def find(self, line: str) -> _Group | None:
        group = self._seen.get(line)
        if group is not None:
            return group
        shape = _NUMBER.sub("0", line)
        group = self._shapes.get(shape)
        if group is None or not group.accepts(line):
            length = len(line)
            pairs = _pairs(line[:_COMPARED])
            nearest = sorted(
                (lost, i)
                for i, group in enumerate(self.groups)
                if group.shortest <= length <= group.longest
                and (lost := (pairs & group.absent).bit_count()) <= group.lost
            )[:_TRIED]
            group = next((g for _, i in nearest if (g := self.groups[i]).accepts(line)), None)
        if group is not None:
            self._remember(line, shape, group)
        return group

    def start(self, rank: int | None, line: str) -> _Group:
        group = _Group(rank, line, _pairs(line[:_COMPARED]))
        self.groups.append(group)
        self._remember(line, _NUMBER.sub("0", line), group)
        return group

    def _remember(self, line: str, shape: str, group: _Group) -> None:
        if len(self._seen) < _REMEMBERED:
            self._seen[line] = group
            self._shapes.setdefault(shape, group)

    def text(self, opened: datetime, closed: datetime, *, coloured: bool) -> str:
        frame, mark, plain = (_CYAN, _YELLOW, _PLAIN) if coloured else ("", "", "")
        return "\n".join(
            [
                f"{frame}>>> Aggregated Logs ({opened:%Y-%m-%d %H:%M:%S}) >>>{plain}",
                *(f"{mark}[{g.count} similar log lines]{plain} {g.text()}" for g in self.groups),
                f"{frame}<<< Aggregated Logs ({closed:%Y-%m-%d %H:%M:%S}) <<<{plain}",
                "\n",
            ]
        )


def _spans(ranks: set[int]) -> str:
    """Write ``{0, 1, 2, 5}`` as ``0-2,5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("-".join(map(str, span)) for span in spans)


def _edits(longest: int) -> int:
    """Return how many edits similar lines may differ by; ``longest`` is the longer one's length."""
    return (15 * longest - 1) // 100


def _longest(length: int) -> int:
    """Return the length of the longest line that can be similar to one of ``length``."""
    return (100 * length - 1) // 85 if length else 0


def _pairs(line: str) -> int:
    """Return the pairs of neighbouring characters of a line, as a set of bits.

    One edit brings in at most two pairs that were not there, so half the bits that only one line
    has are a lower bound of the distance (pairs that share a bit only make it weaker).
    """
    pairs = 0
    for first, second in pairwise(map(ord, line)):
        pairs |= 1 << ((first * 37 + second) & 1023)
    return pairs


def _within(a: str, b: str, edits: int) -> bool:
    """Whether the Levenshtein distance of two lines is at most ``edits``."""
    a, b = _differing(a, b)
    if not a or not b:
        return max(len(a), len(b)) <= edits
    if len(a) == len(b) and sum(map(ne, a, b)) <= edits:
        return True
    # Bit i of `plus` (`minus`): the distance to b so far grows (shrinks) from a[:i] to a[:i + 1].
    places: dict[str, int] = {}
    for i, char in enumerate(a):
        places[char] = places.get(char, 0) | 1 << i
    every = (1 << len(a)) - 1
    top = 1 << (len(a) - 1)
    plus, minus, distance, left = every, 0, len(a), len(b)
    for char in b:
        equal = places.get(char, 0)
        down = equal | minus
        across = (((equal & plus) + plus) ^ plus) | equal
        rises = minus | (every & ~(across | plus))
        falls = plus & across
        if rises & top:
            distance += 1
        elif falls & top:
            distance -= 1
        left -= 1
        if distance - left > edits:  # each character left can save one edit
            return False
        rises = (rises << 1) | 1
        plus = every & ((falls << 1) | ~(down | rises))
        minus = every & rises & down
    return distance <= edits


def _differing(a: str, b: str) -> tuple[str, str]:
    """Strip the common prefix and suffix, found by bisection, since slices compare in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    a, b = a[low:], b[low:]
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[-middle:] == b[-middle:]:
            low = middle
        else:
            high = middle - 1
    return (a[: len(a) - low], b[: len(b) - low])
