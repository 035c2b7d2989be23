"""Commands that are not functions of the program: their numbers, and what they read and define.

Each is a tuple that begins with its number, which is less than `template.FIRST`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from monarch._tensors.core.template import DELETE, Command

__all__ = [
    "ASK",
    "BIND",
    "BORROW",
    "COMBINE",
    "COMBINED",
    "CONSTANT",
    "COORDINATE",
    "LEND",
    "PROBE",
    "RECEIVE",
    "RECLAIM",
    "REDUCE",
    "REPLAY",
    "RETURN",
    "SEND",
    "SHARE",
    "UNWRITTEN",
    "new_number",
    "number_of",
    "references",
    "renumbered",
]

new_number: Callable[[], int] = itertools.count().__next__
"""Return a number by which both ends of a copy, a borrow or a combination find each other."""

CONSTANT = 1
"""``(CONSTANT, ref, tensor)``: define a value that the client has."""
COORDINATE = 2
"""``(COORDINATE, ref, ranks, dims)``: the coordinate of the process; None: its rank."""
REDUCE = 3
"""``(REDUCE, result, source, out, aliases, reduction)``: combine along dimensions.

`out` is the tensor that is written, or 0; `aliases` are others that share its storage. `result` is
`out` if the operation is in place.
"""
SEND = 4
"""``(SEND, source, number, pairs, peers)``: send from the first rank of each pair to the second."""
RECEIVE = 5
"""``(RECEIVE, result, number, pairs, source, metadata, engine)``: take what was sent by an engine.

`source` is 0 if it is a tensor of another engine, or an ordinary one of the script, which is in no
pair.
"""
ASK = 6
"""``(ASK, ref, refs)``: a question about values, which has no effect; `ref` stands for it."""
PROBE = 7
"""``(PROBE, kept, call, refs, aliases)``: run a function of the program, keep its results.

If it raises it may have written to arguments, so all are lost. With `UNWRITTEN` as the index of the
failure it did not, and only `kept` is.
"""
UNWRITTEN = -1
BIND = 8
"""``(BIND, kept, picks, ref, ...)``: give references to parts of what a `PROBE` has kept."""
LEND = 9
"""``(LEND, number, ref)``: the stream has come so far that another one may use the value."""
BORROW = 10
"""``(BORROW, ref, number, source)``: wait for that, and use it."""
RETURN = 11
"""``(RETURN, number, ref)``: the other stream is done with it."""
RECLAIM = 12
"""``(RECLAIM, number, is_used, ref, source, aliases)``: wait for that.

`ref` is the borrowed value if it could be written, else 0.
"""
REPLAY = 13
"""``(REPLAY, number, results, given, changed, fresh, values)``: execute a recording.

`given` are the arguments and the captured tensors. `changed` are those that it writes to, with
aliases: a pair of a stream and references for each stream. `fresh` are the numbers of copies and
borrows in this call, and `values` those that commands have places for.
"""
SHARE = 14
"""``(SHARE, key, ref, ranks)``: let actors on some processes have the value."""

COMBINE = 15
"""``(COMBINE, number, refs, combination)``: begin to combine tensors; they are not written yet."""
COMBINED = 16
"""``(COMBINED, number, refs, aliases)``: wait for that, and write the results into the tensors."""


def references(command: Command) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the references that a special command reads, and those that it defines."""
    kind = command[0]
    if kind in (CONSTANT, COORDINATE):
        return (), (command[1],)
    if kind == REDUCE:
        _, result, source, out, aliases, _ = command
        return (source,), (result, out, *aliases) if out else (result,)
    if kind == SEND:
        return (command[1],), ()
    if kind == RECEIVE:
        return ((command[4],) if command[4] else ()), (command[1],)
    if kind == ASK:
        return command[2], (command[1],)
    if kind == PROBE:
        return command[3], (command[1], *command[4])
    if kind == BIND:
        return (command[1],), command[3:]
    if kind == BORROW:
        return (command[3],), (command[1],)
    if kind == RECLAIM:
        ref, source, aliases = command[3:]
        return ((ref,), (source, *aliases)) if ref else ((), ())
    if kind == REPLAY:
        return command[3], (*command[2], *(ref for _, refs in command[4] for ref in refs))
    if kind == COMBINE:
        return command[2], ()
    if kind == COMBINED:
        return command[2], (*command[2], *command[3])
    if kind in (LEND, SHARE):
        return (command[2],), ()
    if kind in (DELETE, RETURN):
        return (), ()
    raise ValueError(f"unknown command {command!r}")


_NUMBER_AT = {
    **dict.fromkeys((LEND, RETURN, RECLAIM, COMBINE, COMBINED), 1),
    **dict.fromkeys((SEND, RECEIVE, BORROW), 2),
}


def number_of(command: Command) -> int | None:
    """Return the number by which two commands find each other; None for other ones."""
    at = _NUMBER_AT.get(command[0])
    return None if at is None else command[at]


def renumbered(command: Command, numbers: Mapping[int, int]) -> Command:
    """Return a special command with another number of its copy or borrow, if it has one."""
    at = _NUMBER_AT.get(command[0])
    if at is None:
        return command
    return (*command[:at], numbers[command[at]], *command[at + 1 :])
