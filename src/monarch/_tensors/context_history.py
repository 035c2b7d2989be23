"""Which mesh and stream were active when an operation was recorded by autograd.

Autograd numbers the operations of a thread. The code that activates a mesh or a stream notes how to
do so again (`note`). The note holds for all operations from the next number on, until another note.
`restore` finds the note of a number.

The notes of a thread are its own, since autograd counts by thread. Each thread keeps the last
`LIMIT` notes, so that a program which trains for weeks does not grow; graphs live much shorter.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["LIMIT", "ContextHistory"]

LIMIT = 1 << 16
"""Notes that a thread keeps."""


class ContextHistory(threading.local):
    """The notes of the threads of this process.

    >>> history = ContextHistory()
    >>> with history.restore(7):  # noted by no one: nothing to restore
    ...     pass
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self._forgotten = -1  # the operations up to this number have lost their note

    def note(
        self, context: Callable[[], AbstractContextManager[Any]], first: int | None = None
    ) -> None:
        """Let `context()` be what `restore` returns for the operations from `first`, or now, on."""
        now: int = torch.autograd._get_sequence_nr() if first is None else first
        if self._starts and self._starts[-1] == now:
            self._contexts[-1] = context  # no operation was recorded in between
            return
        self._starts.append(now)
        self._contexts.append(context)
        if len(self._starts) > self._limit:
            # Half at once, so that a note costs the same on average.
            half = len(self._starts) // 2
            self._forgotten = self._starts[half] - 1
            del self._starts[:half], self._contexts[:half]

    def restore(self, sequence_number: int) -> AbstractContextManager[Any]:
        """Return a context manager in which the operation of that number may be differentiated.

        Raise `RuntimeError` if the note is older than the ones that are kept.
        """
        place = bisect_right(self._starts, sequence_number) - 1
        if place >= 0:
            return self._contexts[place]()
        if sequence_number <= self._forgotten:
            raise RuntimeError(
                f"the mesh and stream of autograd operation {sequence_number} are no longer known: "
                f"this thread has changed them {self._limit:,} times since"
            )
        return nullcontext()
