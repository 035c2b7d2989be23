"""Verdicts: why a process or actor ended, as far as one observer knows, without naming an actor.

A host agent observes that processes exit and reports it in these terms; every process that lost an
actor there makes a `Failure` of it. On the wire a verdict is a list of plain values (`to_fields`).
A reader accepts a shorter list, since not every observer knows everything, but no value of another
type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "CAUSES",
    "ELSEWHERE",
    "FAILED",
    "INFRASTRUCTURE",
    "INTERNAL",
    "NOT_CREATED",
    "STOPPED",
    "SYSTEM",
    "USER",
    "Verdict",
]

# The kinds of an end: a failure, or a deliberate or clean stop.
FAILED = "failed"
STOPPED = "stopped"

# The causes of a failure: the party that has to investigate.
USER = "user code"  # an exception, an abort
SYSTEM = "system"  # the process exited: exit code, signal, out of memory
INFRASTRUCTURE = "infrastructure"  # agent, launcher, host, network; or no response
INTERNAL = "internal"  # a bug in this library

CAUSES = frozenset({USER, SYSTEM, INFRASTRUCTURE, INTERNAL})

# The codes of ends that callers handle in a way of their own; other ends have none.
NOT_CREATED = "not created"  # the process could not be created

ELSEWHERE = "elsewhere"
"""The code of a process of a program that the asking process, a child, is no part of."""
_CODES = frozenset({"", ELSEWHERE, NOT_CREATED})

_TYPES: tuple[Any, ...] = (str, str, str, str, int, (int, float), (list, tuple), str, str, str)
_LATEST = 1e11  # later times, after the year 5000, are rejected


class Verdict(NamedTuple):
    """The facts about one end.

    >>> Verdict.from_fields(["failed", "its launcher ended"]).cause
    'infrastructure'
    """

    kind: str
    """FAILED or STOPPED."""
    error: str
    """A text that says what happened."""
    cause: str = INFRASTRUCTURE
    """One of `CAUSES`; without meaning if `kind` is STOPPED."""
    host: str = ""
    """The host on which it happened; empty if unknown."""
    pid: int = 0
    """The process id; 0 if unknown."""
    when: float = 0.0
    """The time of the end: seconds since 1970 by the clock of that host; 0 if unknown."""
    tail: tuple[str, ...] = ()
    """The last lines that the process printed, if they were kept."""
    trace: str = ""
    """The traceback of an exception, or of the crash of a process."""
    advice: str = ""
    """How to get a better report the next time; empty if no way is known."""
    code: str = ""
    """ELSEWHERE, NOT_CREATED, or empty: programs decide by it, never by the text."""

    @property
    def never_began(self) -> bool:
        """Whether the process could not be created: the caller's mistake, not a failure."""
        return self.code == NOT_CREATED

    def to_fields(self) -> list[Any]:
        """Return the wire form."""
        return list(self)

    @staticmethod
    def from_fields(fields: list[Any]) -> Verdict:
        """Return the inverse of `to_fields`; only kind and text are required.

        Raises ValueError, or TypeError, for anything else.
        """
        if not 2 <= len(fields) <= len(_TYPES):
            raise ValueError(f"not a verdict: {fields!r}")
        for value, types in zip(fields, _TYPES, strict=False):
            if not isinstance(value, types) or isinstance(value, bool):
                raise TypeError(f"not a verdict: {value!r}")
        verdict = Verdict(*fields)
        verdict = verdict._replace(tail=tuple(verdict.tail))
        if verdict.kind not in (FAILED, STOPPED) or verdict.cause not in CAUSES:
            raise ValueError(f"not a verdict: {verdict.kind!r}, {verdict.cause!r}")
        if verdict.code not in _CODES:
            raise ValueError(f"not a verdict: {verdict.code!r}")
        if not all(isinstance(line, str) for line in verdict.tail):
            raise TypeError("not a verdict: a tail is lines")
        if not 0 <= verdict.when < _LATEST:
            raise ValueError(f"not a verdict: {verdict.when!r} is no time")
        return verdict
