"""The rank whose error is the cause of a failed attempt. Pure.

An error of a rank that uses `monarch.spmd.restarts` may be its own, or the effect of the failure of
another rank or host, which closes connections. The rank waits for the verdict. A failure that is
reported ends the attempt, so it needs none. Otherwise all hosts are asked for failures that they
have not reported yet. When all have answered, the first of the ranks that had an error before the
question is the cause. If that rank ends well in spite of its error, the next one is.
"""

from __future__ import annotations

__all__ = ["Errors"]


class Errors:
    """The errors of the ranks of one attempt, on so many hosts.

    >>> errors = Errors(hosts=1)
    >>> errors.raised(1, certain=False)
    >>> errors.take_question(), errors.take_culprit()
    (True, None)
    >>> errors.settled()
    >>> errors.take_culprit()
    1
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._silent = 0
        self._waiting: list[int] = []
        self._asked_for = 0
        self._judged = 0
        self._culprit: int | None = None
        self._is_certain = False

    def raised(self, rank: int, *, certain: bool) -> None:
        """Note the error of a rank, which exits by it if `certain`, and else waits."""
        if certain:
            self._is_certain = True
        else:
            self._waiting.append(rank)

    def settled(self) -> None:
        """Note that a host has reported all failures that happened before the question."""
        self._silent -= 1
        if not self._silent:
            self._judged = self._asked_for

    def exited(self, rank: int) -> None:
        """Note that a rank has ended well."""
        if rank == self._culprit:
            self._culprit = None

    def take_question(self) -> bool:
        """Return whether to ask the hosts now; there is one question at a time."""
        if self._silent or len(self._waiting) == self._asked_for:
            return False
        self._silent, self._asked_for = self._hosts, len(self._waiting)
        return True

    def take_culprit(self) -> int | None:
        """Return the rank whose error is the cause, once; None as long as this is not known."""
        if self._is_certain or self._culprit is not None or not self._judged:
            return None
        self._culprit = self._waiting.pop(0)
        self._judged -= 1
        self._asked_for -= 1
        return self._culprit
