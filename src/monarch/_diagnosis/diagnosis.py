"""`Diagnosis`: the accounts of all processes, and the text that explains them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch._diagnosis.causes import Cause, Place, Search, compact

if TYPE_CHECKING:
    from monarch._diagnosis.account import Account, Activity, ActorAccount
    from monarch._diagnosis.census import Member

__all__ = ["Diagnosis", "crowds"]

_GROUPS = 12  # of one kind that are shown
_CAUSES = 6
_STACK = 6  # lines of the stack of a cause
_LONG = 100  # messages that make a mailbox worth a line

_STATES = {
    "R": "it runs: native code holds its interpreter, or it lacks processor time",
    "S": "it sleeps in native code that holds its interpreter",
    "D": "it waits for a disk or a device",
    "T": "it is stopped by a signal; continue it with: kill -CONT {pid}",
    "t": "a debugger has stopped it",
    "Z": "it has exited",
    "": "its state is unknown",
}


class Diagnosis:
    """The state of a job at one moment. `str` is the text, `to_dict` the data.

    Attributes:
        accounts: what each process that answered said, as plain dictionaries.
        processes: all processes, with pid, machine, state, memory (bytes) and processor time.
        missing_hosts: the names of hosts whose agents did not answer.
        pid: the script's process.
    """

    def __init__(
        self,
        accounts: list[Account],
        processes: list[Member],
        missing_hosts: set[str],
        pid: int,
    ) -> None:
        self.accounts = accounts
        self.processes = processes
        self.missing_hosts = missing_hosts
        self.pid = pid
        answered = {account["uid"] for account in accounts}
        self._members = {member.uid: member for member in processes}
        self._silent = [member for member in processes if member.uid not in answered]
        self._search = Search(accounts, [member.uid for member in self._silent])
        self._causes = {place: self._search.causes(place) for place in self._search.scripts}

    def to_dict(self) -> dict[str, Any]:
        """Return the data, of types that JSON has."""
        return {
            "pid": self.pid,
            "processes": [member._asdict() for member in self.processes],
            "missing_hosts": sorted(self.missing_hosts),
            "accounts": self.accounts,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Diagnosis:
        """Return the diagnosis with this data."""
        from monarch._diagnosis.census import Member

        members = [Member(**member) for member in data["processes"]]
        return cls(data["accounts"], members, set(data["missing_hosts"]), data["pid"])

    def __repr__(self) -> str:
        return f"<Diagnosis of {len(self.processes)} processes; print it>"

    def __str__(self) -> str:
        if len(self.processes) <= 1 and not self.missing_hosts:
            return "The script runs no mesh of processes."
        parts = [
            self._summary(),
            *self._of_script(),
            *self._of_silence(),
            *self._of_crowds(),
            *self._of_activities("At a breakpoint", self._debugged(), self._busy_line),
            *self._of_activities("Busy", self._busy(), self._busy_line),
            *self._of_activities("Waiting", self._waiting(), self._waiting_line),
            *self._of_mailboxes(),
            *self._of_failures(),
        ]
        return "\n".join(parts)

    # -- parts of the text -------------------------------------------------------------------------

    def _summary(self) -> str:
        hosts = {member.host for member in self.processes}
        actors = list(self._users())
        debugged = len({id(actor) for actor, _ in self._debugged()})
        between = [actor for actor in actors if actor["queued"] and not actor["doing"]]
        busy = len({id(actor) for actor, _ in self._busy()}) + len(between)
        waiting = len({id(actor) for actor, _ in self._waiting()})
        idle = max(0, len(actors) - debugged - busy - waiting)
        stopped = f"{debugged} at a breakpoint, " if debugged else ""
        return (
            f"{_count(len(self.processes), 'process')} on {_count(len(hosts), 'host')}, "
            f"{_count(len(actors), 'actor')}: {stopped}{busy} busy, {waiting} waiting, {idle} idle"
        )

    def _of_script(self) -> Iterator[str]:
        for place, script in self._search.scripts.items():
            wait = script["wait"]
            at = f", {_short(script['place'])}" if script["place"] else ""
            if wait is None:
                yield f"The script (pid {self.pid}) is busy{at}"
                continue
            since = "" if wait["seconds"] is None else f" since {_time(wait['seconds'])}"
            yield f"The script (pid {self.pid}) waits for {wait['call']}{since}{at}"
            if wait["asked"] > 1:
                late = len(wait["on"])
                have = "has" if late == 1 else "have"
                yield f"  {late} of {wait['asked']} actors {have} not answered yet"
            causes = self._causes[place]
            for cause in causes[:_CAUSES]:
                yield from self._of_cause(cause)
            if len(causes) > _CAUSES:
                yield f"  and {len(causes) - _CAUSES} further causes"

    def _of_cause(self, cause: Cause) -> Iterator[str]:
        name = self._name(cause.place)
        if cause.kind == "circle":
            around = " -> ".join(self._name(place) for place in [*cause.through, cause.place])
            yield f"  because these wait for each other: {around}"
        elif cause.kind == "busy" and cause.activity is not None:
            activity = cause.activity
            yield (
                f"  because {name} has been in {activity['endpoint']}() "
                f"for {_time(activity['seconds'])}{self._where(cause.place)}"
            )
            if activity["wait"] is not None:
                yield f"    it waits for {activity['wait']['call']}"
            for line in activity["stack"][:_STACK]:
                yield f"    {_short(line)}"
        elif cause.kind == "debugged" and cause.activity is not None:
            at = _short(cause.activity["place"])
            yield f"  because {name} is at a breakpoint, {at}{self._where(cause.place)}"
            yield "    to debug it: monarch debug"
        elif cause.kind == "silent":
            yield f"  because {self._silence(self._members[cause.place.process], cause.place)}"
        elif cause.kind == "queued":
            yield f"  because {name} has not taken its messages yet{self._where(cause.place)}"
        else:
            yield f"  {name} is idle{self._where(cause.place)}: its answer is owed by other code"
        if cause.kind != "circle" and len(cause.through) > 1:
            way = " -> ".join(self._name(place) for place in cause.through[1:])
            yield f"    found by way of {way}"

    def _of_silence(self) -> Iterator[str]:
        shown = {
            cause.place.process
            for causes in self._causes.values()
            for cause in causes[:_CAUSES]
            if cause.kind == "silent"
        }
        others = [member for member in self._silent if member.uid not in shown]
        for member in others[:_GROUPS]:
            text = self._silence(member, None)
            yield text[0].upper() + text[1:]
        if len(others) > _GROUPS:
            yield f"and {len(others) - _GROUPS} further processes that do not answer"
        for host in sorted(self.missing_hosts):
            yield f"Host {host} does not answer"

    def _of_crowds(self) -> Iterator[str]:
        for machine, (threads, cores) in sorted(crowds(self.accounts).items()):
            yield (
                f"On {machine} {threads} threads of this job want to compute, and there are "
                f"{_count(cores, 'core')}: they slow each other down. Set OMP_NUM_THREADS, or call "
                "torch.set_num_threads"
            )

    def _of_activities(
        self,
        title: str,
        found: Iterable[tuple[ActorAccount, Activity]],
        line: Callable[[Sequence[tuple[ActorAccount, Activity]]], str],
    ) -> Iterator[str]:
        groups: dict[tuple[str, ...], list[tuple[ActorAccount, Activity]]] = {}
        for actor, activity in found:
            wait = activity["wait"]
            key = (
                actor["name"],
                activity["endpoint"],
                activity["place"],
                wait["call"] if wait else "",
            )
            groups.setdefault(key, []).append((actor, activity))
        ordered = sorted(groups.values(), key=_longest, reverse=True)
        if ordered:
            yield f"{title}:"
        for group in ordered[:_GROUPS]:
            yield f"  {line(group)}"
        if len(ordered) > _GROUPS:
            yield f"  and {len(ordered) - _GROUPS} further groups"

    def _busy_line(self, group: Sequence[tuple[ActorAccount, Activity]]) -> str:
        return f"{_who(group)}: {_time(_longest(group))}{_at(group)}"

    def _waiting_line(self, group: Sequence[tuple[ActorAccount, Activity]]) -> str:
        wait = group[0][1]["wait"]
        call = wait["call"] if wait is not None else ""
        return f"{_who(group)}: {_time(_longest(group))} for {call}{_at(group)}"

    def _of_mailboxes(self) -> Iterator[str]:
        full = sorted(
            (actor for actor in self._users() if actor["queued"] >= _LONG),
            key=lambda actor: actor["queued"],
            reverse=True,
        )
        if full:
            yield "Mailboxes:"
        for actor in full[:_GROUPS]:
            size = f" ({actor['queued_bytes']:,} bytes)" if actor["queued_bytes"] else ""
            yield f"  {actor['display']}: {actor['queued']:,} messages wait{size}"

    def _of_failures(self) -> Iterator[str]:
        failures = {
            (failure["actor"], failure["error"], failure["replaced"]): failure["when"]
            for account in self.accounts
            for failure in account["failures"]
        }
        recent = sorted(failures.items(), key=lambda item: item[1])[-_CAUSES:]
        if recent:
            yield "Failures:"
        for (actor, error, replaced), when in recent:
            clock = time.strftime("%H:%M:%S", time.localtime(when))
            end = " (replaced since)" if replaced else ""
            yield f"  {clock} {actor}: {error.splitlines()[0] if error else 'failed'}{end}"

    def _silence(self, member: Member, place: Place | None) -> str:
        """Return the text about a process that does not answer, with one of its actors."""
        state = _STATES.get(member.state, f"its state is {member.state}").format(pid=member.pid)
        mesh = None if place is None else self._search.name_of(place.mesh)
        which = f" with an actor of {mesh}" if mesh else ""
        return f"process {member.pid} on {member.machine}{which} does not answer: {state}"

    # -- actors --------------------------------------------------------------------------------

    def _users(self) -> Iterator[ActorAccount]:
        """Yield the actors of the program, and those of the library that are busy."""
        for actor in self._search.actors.values():
            if not actor["system"]:
                yield actor

    def _debugged(self) -> Iterator[tuple[ActorAccount, Activity]]:
        for actor in self._users():
            for activity in actor["doing"]:
                if activity.get("debugged", False):
                    yield actor, activity

    def _busy(self) -> Iterator[tuple[ActorAccount, Activity]]:
        for actor in self._users():
            for activity in actor["doing"]:
                if activity["wait"] is None and not activity.get("debugged", False):
                    yield actor, activity

    def _waiting(self) -> Iterator[tuple[ActorAccount, Activity]]:
        for actor in self._users():
            for activity in actor["doing"]:
                if activity["wait"] is not None:
                    yield actor, activity

    def _name(self, place: Place) -> str:
        if place.mesh == 0:
            return "the script"
        actor = self._search.actors.get(place)
        if actor is not None:
            return actor["display"]
        member = self._members.get(place.process)
        return "an actor that has ended" if member is None else f"an actor in process {member.pid}"

    def _where(self, place: Place) -> str:
        member = self._members.get(place.process)
        return "" if member is None else f" (pid {member.pid} on {member.machine})"


def crowds(accounts: Iterable[Account]) -> dict[str, tuple[int, int]]:
    """Return the machines with more threads that want to compute than cores: both numbers.

    Processes with one such thread each are no crowd: the program has asked for them.
    """
    threads: dict[str, list[int]] = {}
    cores: dict[str, int] = {}
    for account in accounts:
        threads.setdefault(account["machine"], []).append(account.get("runnable", 0))
        cores[account["machine"]] = account.get("cores", 0)
    return {
        machine: (sum(counts), cores[machine])
        for machine, counts in threads.items()
        if max(counts) > 1 and sum(counts) > cores[machine] > 0
    }


def _who(group: Sequence[tuple[ActorAccount, Activity]]) -> str:
    actor, activity = group[0]
    if len(group) == 1:
        return f"{actor['display']}.{activity['endpoint']}()"
    places = {actor["display"] for actor, _ in group}
    if len(places) == 1:
        return f"{actor['display']}.{activity['endpoint']}(), {len(group)} calls"
    ranks = compact(actor["rank"] for actor, _ in group)
    return f"{actor['name']}.{activity['endpoint']}(), {len(places)} actors (ranks {ranks})"


def _at(group: Sequence[tuple[ActorAccount, Activity]]) -> str:
    place = group[0][1]["place"]
    return f", {_short(place)}" if place else ""


def _longest(group: Sequence[tuple[ActorAccount, Activity]]) -> float:
    return max(activity["seconds"] or 0.0 for _, activity in group)


def _short(line: str) -> str:
    """Return a line of a stack with its file relative to the working directory, if it is below."""
    what, _, where = line.partition(" at ")
    here = os.getcwd() + os.sep
    return f"{what} at {where.removeprefix(here)}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
