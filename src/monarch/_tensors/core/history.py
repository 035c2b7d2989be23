"""`History`: commands that are not confirmed yet, and what their failures spoil.

Each command has a sequence number. A process that cannot execute one keeps a failure in the place
of the results and goes on; it reports the failure with its next confirmation. The client then
walks the commands after it, in order: what reads a spoilt value spoils its results, on whatever
process. So work that does not depend on the failure goes on everywhere, and a value that was
computed from a substitute (a reduction over processes, one of which has failed) is known to be
spoilt, although the processes that hold it have no failure.

A run is a list of commands with consecutive numbers for the same processes and stream. Runs are
kept until all processes have executed them. The record of a command is the command itself and where
the program was, so it costs the client two list appends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from monarch._tensors.core.aliases import Stack
from monarch._tensors.core.special import UNWRITTEN, references
from monarch._tensors.core.template import DELETE, FIRST, Command, Plan, reads, results, writes

__all__ = ["Failure", "History", "Run"]

_FAILURES = 256  # above that, those that the program knows are forgotten


@dataclass(eq=False)
class Failure:
    """The first cause of lost values: an exception on some processes.

    Attributes:
        seq: the sequence number of the command.
        ranks: the ranks on which it failed.
        text: the worker's text: type, message, traceback.
        pickled: the exception, if it can be pickled.
        where: where the program issued the command, innermost first.
        raised: whether the program got it as an exception.
        is_unwritten: whether the arguments of the command are as before, on all `ranks`.
    """

    seq: int
    ranks: list[int]
    text: str
    pickled: bytes | None = None
    where: Stack = ()
    raised: bool = False
    is_unwritten: bool = False


@dataclass(eq=False)
class Run:
    """Commands with consecutive sequence numbers, for one place (see `engine.Place`)."""

    place: int
    first: int
    commands: list[Command] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)


class History:
    """The unconfirmed commands of a client.

    Args:
        plans: the plans of the templates that the commands name.
    """

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self._plans = plans
        self._runs: deque[Run] = deque()
        self.recordings: dict[int, list[Stack]] = {}
        """Where the program issued the commands of each recording."""
        self.failures: dict[int, Failure] = {}
        """By sequence number; at exit those that the program does not know are reported."""
        self.spoilt: dict[int, Failure] = {}
        """References whose values are lost."""

    def add(self, run: Run) -> None:
        """Keep a run that is about to be sent. Runs come in the order of their numbers."""
        self._runs.append(run)
        if self.spoilt:
            for command in run.commands:
                self._spread(command)

    def confirm(self, done: int) -> None:
        """Forget the commands up to number `done`, which all processes have executed."""
        runs = self._runs
        while runs and runs[0].first + len(runs[0].commands) - 1 <= done:
            runs.popleft()
        if len(self.failures) > _FAILURES:
            needed = {failure.seq for failure in self.spoilt.values()}
            for seq, failure in list(self.failures.items()):
                if failure.raised and seq <= done and seq not in needed:
                    del self.failures[seq]

    def fail(
        self, rank: int, seq: int, text: str, pickled: bytes | None, index: int | None = None
    ) -> None:
        """Note that `rank` could not execute command `seq`; a report may come more than once.

        If the command replays a recording, `index` is the number of the command in that. For a
        `PROBE` see `UNWRITTEN`.
        """
        is_unwritten = index == UNWRITTEN
        known = self.failures.get(seq)
        if known is not None:
            if rank not in known.ranks:
                known.ranks.append(rank)
            if known.is_unwritten and not is_unwritten:
                known.is_unwritten = False
                self._spoil(known, None)
            return
        failure = Failure(seq, [rank], text, pickled, is_unwritten=is_unwritten)
        self.failures[seq] = failure
        self._spoil(failure, None if is_unwritten else index)

    def _spoil(self, failure: Failure, index: int | None) -> None:
        """Mark as spoilt what the command of a failure defines, and what depends on that."""
        seq = failure.seq
        for run in self._runs:
            for place in range(max(0, seq - run.first), len(run.commands)):
                command = run.commands[place]
                if run.first + place == seq:
                    failure.where = run.stacks[place]
                    if index is not None:
                        failure.where = self.recordings[command[1]][index]
                    defined = self.references(command)[1]
                    for ref in defined[:1] if failure.is_unwritten else defined:
                        self.spoilt.setdefault(ref, failure)
                else:
                    self._spread(command)

    def references(self, command: Command) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what a command reads, and what it defines or writes."""
        if command[0] < FIRST:
            return references(command)
        plan = self._plans[command[0]]
        return tuple(reads(plan, command)), (*results(plan, command), *writes(plan, command))

    def _spread(self, command: Command) -> None:
        """Mark what a command defines as spoilt, if it reads a spoilt value."""
        if command[0] == DELETE:
            for ref in command[1:]:
                self.spoilt.pop(ref, None)
            return
        used, defined = self.references(command)
        failure = next((self.spoilt[ref] for ref in used if ref in self.spoilt), None)
        if failure is not None:
            for ref in defined:
                self.spoilt.setdefault(ref, failure)

    def failure_of(self, ref: int) -> Failure | None:
        """Return the failure because of which the value of `ref` is lost, if it is."""
        return self.spoilt.get(ref)

    def unraised(self) -> list[Failure]:
        """Return the failures that no exception has reported to the program, in order."""
        return [
            self.failures[seq] for seq in sorted(self.failures) if not self.failures[seq].raised
        ]

    def __len__(self) -> int:
        return sum(len(run.commands) for run in self._runs)
