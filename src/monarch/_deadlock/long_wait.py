"""A wait that blocks an actor, of a thread (`watch`) or of a serving task (`awaits`)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from monarch._deadlock.search import Call

if TYPE_CHECKING:
    from types import CodeType

    from monarch._spi import Cell, DeadlockError, FrameLink, Parker

__all__ = ["Answer", "LongWait", "place_of"]


class Answer(Protocol):
    """The awaited object: the future of a call (`mesh/results/reply.py`)."""

    def _is_awaited(self, parker: Parker) -> bool:
        """Whether a thread waits for it at `parker`."""
        ...

    def _is_pending(self) -> bool:
        """Whether it is unresolved."""
        ...

    def _call_name(self) -> str:
        """Return the name of the call in errors."""
        ...

    def _unanswered(self) -> list[tuple[FrameLink, int, int]]:
        """Return the calls to actors that must all be answered before it is resolved.

        A call is its link, the callee and the port that receives the answer.
        """
        ...

    def _refuse(self, parker: Parker, error: BaseException) -> None:
        """End the wait at `parker`, if it goes on, and no other, with `error`."""


class LongWait:
    """A wait that blocks an actor; implements `search.Wait`."""

    number = 0  # set when the search begins

    def __init__(self, cell: Cell, answer: Answer, place: str) -> None:
        self.actor = cell.uid
        self.story = (cell.identity.display, answer._call_name(), place)
        self._cell = cell
        self._answer = weakref.ref(answer)  # weak, since the waiting code keeps it

    @property
    def standing(self) -> bool:
        answer = self._answer()
        return answer is not None and answer._is_pending() and self._cell.grave is None

    def unanswered(self) -> list[Call]:
        answer = self._answer()
        return [] if answer is None else [Call(*call) for call in answer._unanswered()]

    def owes(self, link: object, port: int) -> bool:
        return (link, port) not in self._cell.aside

    def fail(self, error: DeadlockError) -> None:
        """End the wait, and no other, with `error`; on the reactor."""
        raise NotImplementedError


def place_of(code: CodeType, line: int) -> str:
    """Return a place in the program, as text."""
    return f"{code.co_filename}:{line}, in {code.co_name}"
