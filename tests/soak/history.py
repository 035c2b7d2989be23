"""The history of a run, as written by its callers and actors, and the checks of its consistency.

Callers and actors of all processes append lines to one file (`Journal`). A line is one write to a
file opened for appending, so a line survives the SIGKILL of its writer, and lines have the order in
which they were written. Hence no clocks are needed: "before" means "above". Only the line that is
being written when its writer is killed may be cut, at the end of a page of the file. Such a line
lacks its end mark, and counts as if the writer had been killed before writing it.

The lines, words separated by blanks; ``call`` is the caller's name and a number that the caller
uses once::

    sent   call verb mesh ranks      a call will now be sent to these ranks (0,1,2)
    unsent call                      sending it raised an exception
    got    call rank outcome token   the outcome at one rank (* : of all ranks, or of one that the
                                     caller cannot name); a text may follow
    heard  call mesh rank token      the caller received an answer through a port of a channel
    end    caller                    this caller has received the outcomes of all its calls
    born   mesh rank token           an actor was constructed; the token is unique to it
    back   mesh rank token number    this actor replaces another; the number is its incarnation
    ran    mesh rank token call      an actor executes a message of a call
    note   ...                       a remark for the reader

Verbs: ``one``, ``calm`` (one that has to be answered), ``choose``, ``call``, ``partial`` (a call
with an outcome for each rank), ``stream``, ``tell`` (a broadcast) and ``port`` (a broadcast that is
answered through a channel). Outcomes: ``value``, ``error`` (the actor raised an exception),
``failed`` (there will be no answer, with the reason), ``timeout`` (that of the call itself). Any
other outcome is a violation.

`violations` checks these rules:

* **accounted**: a call has one outcome at each rank that it was sent to. A ``call`` may instead
  have one outcome for all ranks that is no value. Only callers without an ``end`` line may lack
  outcomes.
* **once**: no message is executed twice, neither by the same actor nor by a later incarnation, and
  no message is executed by an actor that it was not sent to.
* **order**: an actor executes the messages of one caller in the order of sending, without a gap.
* **answered**: a value comes from an execution of this call, at this rank, by the actor that the
  value names. The same holds for an answer through a port; such answers arrive once, in order, and
  without a gap.
* **incarnation**: an actor is born after the last execution of the actor that it replaces, and has
  the right incarnation number. It receives no message that was sent while an older actor still
  executed messages.
* **calm**: after the last failure every call is answered.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Journal", "Violation", "summary", "violations"]

ANSWERED_BY_EACH = ("call", "partial", "stream")
ANSWERED_BY_ONE = ("one", "calm", "choose")
SILENT = ("tell", "port")
EXPECTED = ("value", "error", "failed", "timeout")

_END = " ."

Number = tuple[str, int]
Place = tuple[str, int]


class Journal:
    """A writer that appends lines to the file of a run, from any process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, *words: object) -> None:
        line = " ".join(map(str, words)).replace("\n", "\\n")
        # The newline comes first, so that this line does not continue one that was cut.
        self._file.write(f"\n{line}{_END}".encode())

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def lines(path: Path) -> list[str]:
        """Return the complete lines of a file, oldest first."""
        lines = path.read_text(errors="replace").split("\n")
        return [line.removesuffix(_END) for line in lines if line.endswith(_END)]


class Violation(NamedTuple):
    """A broken rule; `lines` are the lines of the history that show it, oldest first."""

    rule: str
    what: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.rule}: {self.what}", *self.lines])


class _Call:
    """The lines about one call. Values of dicts are line numbers."""

    __slots__ = ("at", "heard", "number", "outcomes", "ranks", "returned", "runs", "unsent", "verb")

    def __init__(self, at: int, number: Number, verb: str, mesh: str, ranks: str) -> None:
        self.at = at
        self.number = number
        self.verb = verb
        self.ranks = [(mesh, int(rank)) for rank in ranks.split(",")]
        self.returned = 0  # number of the caller's next line, before which the call was sent
        self.unsent = False
        self.outcomes: list[tuple[str, str, str, int]] = []  # rank, outcome, token, line
        self.runs: list[tuple[Place, str, int]] = []  # place, token, line
        self.heard: list[tuple[Place, str, int]] = []


class _Actor:
    """The lines about one incarnation of an actor."""

    __slots__ = ("at", "heard", "incarnation", "last", "place", "runs", "token")

    def __init__(self, at: int, place: Place, token: str) -> None:
        self.at = at
        self.place = place
        self.token = token
        self.incarnation = 0
        self.runs: defaultdict[str, list[_Call]] = defaultdict(list)  # by caller
        self.heard: defaultdict[str, list[_Call]] = defaultdict(list)
        self.last = 0  # line of this actor's last execution


def violations(lines: Iterable[str]) -> list[Violation]:
    """Return all violations of the rules in a history; an empty list if there are none.

    >>> violations([
    ...     "born mesh 0 t", "sent me 1 one mesh 0", "ran mesh 0 t me 1", "got me 1 0 value t",
    ...     "end me"])
    []
    >>> [found] = violations(["born mesh 0 t", "sent me 1 one mesh 0", "end me"])
    >>> print(found)
    accounted: one call, 0 outcomes
        sent me 1 one mesh 0
    """
    return _Checker(lines).check()


def summary(lines: Iterable[str]) -> dict[str, int]:
    """Return counts: calls by verb, outcomes, executions, restarts."""
    counts: Counter[str] = Counter()
    for line in lines:
        words = line.split()
        kind = words[0]
        if kind == "sent":
            counts[f"sent {words[3]}"] += 1
        elif kind == "got":
            counts[f"got {words[4]}"] += 1
        elif kind == "note":
            counts[words[1]] += 1
        else:
            counts[kind] += 1
    return dict(sorted(counts.items()))


class _Checker:
    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = [line.rstrip("\n") for line in lines]
        self._found: list[Violation] = []
        self._calls: dict[Number, _Call] = {}
        self._by_caller: defaultdict[str, list[_Call]] = defaultdict(list)
        self._ended: set[str] = set()
        self._actors: dict[str, _Actor] = {}
        self._places: defaultdict[Place, list[_Actor]] = defaultdict(list)  # in order of birth

    def check(self) -> list[Violation]:
        self._read()
        for call in self._calls.values():
            self._check_outcomes(call)
            self._check_runs(call)
        for actor in self._actors.values():
            self._check_order(actor)
        for actors in self._places.values():
            self._check_incarnations(actors)
        return self._found

    def _complain(self, rule: str, what: str, *at: int) -> None:
        shown = tuple(self._lines[line] for line in sorted(set(at)))
        self._found.append(Violation(rule, what, shown))

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        for at, line in enumerate(self._lines):
            kind, *words = line.split(" ")
            getattr(self, f"_read_{kind}")(at, *words)

    def _read_note(self, at: int, *words: str) -> None: ...

    def _read_sent(
        self, at: int, caller: str, number: str, verb: str, mesh: str, ranks: str
    ) -> None:
        call = _Call(at, (caller, int(number)), verb, mesh, ranks)
        before = self._by_caller[caller]
        if before and before[-1].number >= call.number:
            self._complain("accounted", "numbers do not ascend", before[-1].at, at)
        self._returned(caller, at)
        before.append(call)
        self._calls[call.number] = call

    def _returned(self, caller: str, at: int) -> None:
        sent = self._by_caller[caller]
        if sent and not sent[-1].returned:
            sent[-1].returned = at

    def _call_of(self, at: int, caller: str, number: str) -> _Call | None:
        call = self._calls.get((caller, int(number)))
        if call is None:
            self._complain("accounted", "nobody sent this", at)
        return call

    def _read_unsent(self, at: int, caller: str, number: str, *text: str) -> None:
        self._returned(caller, at)
        if call := self._call_of(at, caller, number):
            call.unsent = True

    def _read_got(
        self, at: int, caller: str, number: str, rank: str, outcome: str, token: str, *text: str
    ) -> None:
        self._returned(caller, at)
        if call := self._call_of(at, caller, number):
            call.outcomes.append((rank, outcome, token, at))

    def _read_heard(
        self, at: int, caller: str, number: str, mesh: str, rank: str, token: str
    ) -> None:
        self._returned(caller, at)
        call = self._call_of(at, caller, number)
        actor = self._actors.get(token)
        if call is not None and actor is not None:
            call.heard.append(((mesh, int(rank)), token, at))
            actor.heard[caller].append(call)

    def _read_end(self, at: int, caller: str) -> None:
        self._returned(caller, at)
        self._ended.add(caller)

    def _read_born(self, at: int, mesh: str, rank: str, token: str) -> None:
        actor = self._actors[token] = _Actor(at, (mesh, int(rank)), token)
        self._places[actor.place].append(actor)

    def _read_back(self, at: int, mesh: str, rank: str, token: str, number: str) -> None:
        self._actors[token].incarnation = int(number)

    def _read_ran(
        self, at: int, mesh: str, rank: str, token: str, caller: str, number: str
    ) -> None:
        actor = self._actors[token]
        actor.last = at
        if call := self._call_of(at, caller, number):
            call.runs.append((actor.place, token, at))
            actor.runs[caller].append(call)

    # -- checking --------------------------------------------------------------------------------

    def _check_outcomes(self, call: _Call) -> None:
        outcomes = call.outcomes
        at = [call.at, *(line for *_, line in outcomes)]
        if strange := [outcome for _, outcome, *_ in outcomes if outcome not in EXPECTED]:
            self._complain("accounted", f"an outcome that must not be: {strange[0]}", *at)
        values = [int(rank) for rank, outcome, *_ in outcomes if outcome == "value"]
        if call.unsent or call.verb in SILENT:
            expected, may_be_less = 0, False
        else:
            one_for_all = call.verb == "call" and len(outcomes) == 1 and not values
            each = call.verb in ANSWERED_BY_EACH and not one_for_all
            expected = len(call.ranks) if each else 1
            may_be_less = call.number[0] not in self._ended
        if len(outcomes) > expected or (len(outcomes) < expected and not may_be_less):
            self._complain("accounted", f"{call.verb} call, {len(outcomes)} outcomes", *at)
        named = [rank for rank, *_ in outcomes if rank != "*"]
        if len(set(named)) < len(named):
            self._complain("accounted", "two outcomes of one rank", *at)
        if call.verb == "partial" and len(named) < len(outcomes):
            self._complain("accounted", "an outcome of nobody", *at)
        if call.verb == "calm" and len(values) < len(outcomes):
            self._complain("calm", "not answered although nothing fails any more", *at)
        for rank, outcome, token, line in outcomes:
            place = (call.ranks[0][0], int(rank)) if rank != "*" else None
            if outcome == "value" and not self._did(call, place, token, line):
                self._complain("answered", "not by an execution at this rank", call.at, line)
        for place, token, line in call.heard:
            if not self._did(call, place, token, line):
                self._complain("answered", "heard of no execution at this rank", call.at, line)
        if len({place for place, *_ in call.heard}) < len(call.heard):
            heard = (line for *_, line in call.heard)
            self._complain("answered", "heard twice", call.at, *heard)

    @staticmethod
    def _did(call: _Call, place: Place | None, token: str, before: int) -> bool:
        return any(
            (where, who) == (place, token) and when < before for where, who, when in call.runs
        )

    def _check_runs(self, call: _Call) -> None:
        places = [place for place, *_ in call.runs]
        at = [call.at, *(line for *_, line in call.runs)]
        if not set(places) <= set(call.ranks):
            self._complain("once", "executed by somebody it was not sent to", *at)
        limit = 1 if call.verb in ANSWERED_BY_ONE else len(set(places))
        if len(places) > limit:
            self._complain("once", f"executed {len(places)} times", *at)

    def _check_order(self, actor: _Actor) -> None:
        for kind, by_caller in (("executed", actor.runs), ("heard", actor.heard)):
            for caller, calls in by_caller.items():
                at = actor.at
                for one, next_ in itertools.pairwise(calls):
                    if next_.number <= one.number:
                        what = f"{kind} out of order at {' '.join(map(str, actor.place))}"
                        self._complain("order", what, at, one.at, next_.at)
                        break
                else:
                    self._check_gaps(actor, caller, calls, kind)

    def _check_gaps(self, actor: _Actor, caller: str, calls: list[_Call], kind: str) -> None:
        """Check that no call between the first and the last from `caller` is missing."""
        first, last = calls[0].number, calls[-1].number
        there = {call.number for call in calls}
        sent = actor.runs[caller] if kind == "heard" else self._by_caller[caller]
        for call in sent:
            if not first < call.number < last or call.number in there:
                continue
            if call.verb == "port" if kind == "heard" else self._certain(call, actor.place):
                self._complain(
                    "order",
                    f"not {kind}, unlike what was sent before and after it",
                    actor.at,
                    calls[0].at,
                    call.at,
                    calls[-1].at,
                )
                return

    @staticmethod
    def _certain(call: _Call, place: Place) -> bool:
        """Whether the call was certainly sent to `place`, as far as its caller can know."""
        return place in call.ranks and not call.unsent and call.verb != "choose"

    def _check_incarnations(self, actors: list[_Actor]) -> None:
        before: _Actor | None = None  # the older incarnation with the latest execution
        incarnation = -1
        for actor in actors:
            if actor.runs:
                if actor.incarnation <= incarnation:
                    what = f"incarnation {actor.incarnation} after {incarnation}"
                    self._complain("incarnation", what, actors[0].at, actor.at, actor.last)
                incarnation = actor.incarnation
            if before is not None:
                if before.last > actor.at:
                    what = "an actor still executes when its successor is there"
                    self._complain("incarnation", what, before.at, actor.at, before.last)
                for calls in actor.runs.values():
                    for call in calls:
                        if call.returned and call.returned < before.last:
                            what = "sent to an older incarnation, executed by a newer one"
                            run = [line for _, token, line in call.runs if token == actor.token]
                            self._complain("incarnation", what, call.at, before.last, *run)
            if actor.last and (before is None or actor.last > before.last):
                before = actor
