"""The loan of a link: the reactor and the thread of an actor read the link in turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from monarch._engine.wire.frame import Frame

__all__ = ["Loan", "alone_with"]


class Loan:
    """The loan of one link; `runtime.actor.seat` has the rules."""

    __slots__ = ("left", "lock", "read", "taken")

    def __init__(self, read: Callable[[Any], object]) -> None:
        self.read = read  # reads the link on the reactor
        self.lock = threading.RLock()  # held by the thread that reads, and handles what it read
        self.taken = False  # a thread waits for the link in place of the reactor
        self.left: list[Frame] = []  # frames that were read, and are for the reactor


def alone_with(loan: Loan | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread reads the link of this loan."""
    return contextlib.nullcontext() if loan is None else loan.lock
