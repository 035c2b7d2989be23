"""The newest states of the lines of processes, as the client knows them (see `screen`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from monarch._output.lines import format_line

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

__all__ = ["Standing"]

_NUMBERS = re.compile(r"([0-9]+)")


class _Entry(NamedTuple):
    """The states of one stream of a process. `rank` is None where lines do not show it."""

    host: str
    label: str
    rank: int | None
    states: Sequence[str]


class Standing:
    """The states of all processes, the newest of each line.

    >>> standing = Standing()
    >>> for rank in (10, 9):
    ...     standing.update(rank, 2, "node7", f"trainer-{rank}", rank, [f"{rank} %"])
    >>> standing.lines({2})
    ['trainer-9   9 %', 'trainer-10  10 %']
    >>> standing.remove(9)
    [(2, '[node7 trainer-9] [9] 9 %')]
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}

    def uids(self) -> set[int]:
        """Return the processes that have states."""
        return {uid for uid, _ in self._entries}

    def update(
        self,
        uid: int,
        number: int,
        host: str,
        label: str,
        rank: int | None,
        states: Sequence[str],
    ) -> None:
        """Replace the states of stream `number` of process `uid`."""
        if states:
            self._entries[uid, number] = _Entry(host, label, rank, states)
        else:
            self._entries.pop((uid, number), None)

    def remove(self, uid: int) -> list[tuple[int, str]]:
        """Remove a process that has exited; return its last states as lines, with their streams."""
        found: list[tuple[int, str]] = []
        for key in [key for key in self._entries if key[0] == uid]:
            host, label, rank, states = self._entries.pop(key)
            found += [(key[1], format_line(host, label, rank, state)) for state in states]
        return found

    def lines(self, numbers: Container[int]) -> list[str]:
        """Return the states of these streams with the names of their processes, in order."""
        found = [
            (_natural(entry.label), entry.label, uid, number, entry.states)
            for (uid, number), entry in self._entries.items()
            if number in numbers
        ]
        found.sort()
        longest = max((len(label) for _, label, *_ in found), default=0)
        return [
            f"{label:{longest}}  {state}" for _, label, _, _, states in found for state in states
        ]


def _natural(label: str) -> list[tuple[int, str]]:
    """Return what sorts labels by their names, and those of one name by their numbers."""
    parts = _NUMBERS.split(label)
    return [(int(part[-18:]), "") if part.isdecimal() else (-1, part) for part in parts]
