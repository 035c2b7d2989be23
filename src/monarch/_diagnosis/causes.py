"""The causes of waits, found by following each wait from actor to actor. Pure.

An actor that waits is followed to the actors that it waits for, until one does not wait: that one
is a cause. It is busy, its process does not answer, or it is idle and owes the answer to code that
this search cannot see. A chain that comes back to itself is a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._diagnosis.account import Account, Activity, ActorAccount

__all__ = ["Cause", "Place", "Search", "compact"]

_SCRIPT = 0


@dataclass(frozen=True)
class Place:
    """An actor in its process; the script is `mesh` 0 of the client's process."""

    process: int
    mesh: int


@dataclass
class Cause:
    """The end of one or more chains of waits.

    Attributes:
        kind: ``busy``, ``debugged`` (a debugger has stopped it), ``silent`` (its process does not
            answer), ``queued`` (it has messages and handles none), ``idle``, ``unknown`` (there is
            no such actor now), or ``circle``.
        place: the actor.
        through: the actors of the chain, from the first wait to the cause.
        activity: what the actor does, if it is busy.
    """

    kind: str
    place: Place
    through: list[Place] = field(default_factory=list["Place"])
    activity: Activity | None = None


class Search:
    """Finds the causes of waits among the processes of a job.

    Args:
        accounts: those of all processes that answered.
        silent: the uids of processes that did not.
    """

    def __init__(self, accounts: Iterable[Account], silent: Iterable[int] = ()) -> None:
        self._actors: dict[Place, ActorAccount] = {}
        self._scripts: dict[Place, Activity] = {}
        self._silent = set(silent)
        for account in accounts:
            for actor in account["actors"]:
                self._actors[Place(account["uid"], actor["uid"])] = actor
            if account["script"] is not None:
                self._scripts[Place(account["uid"], _SCRIPT)] = account["script"]

    @property
    def actors(self) -> Mapping[Place, ActorAccount]:
        """The actors, by place."""
        return self._actors

    @property
    def scripts(self) -> Mapping[Place, Activity]:
        """The activity of the script, by place; empty if it did not answer."""
        return self._scripts

    def name_of(self, mesh: int) -> str:
        """Return the name of an actor mesh; empty if none of its actors is known."""
        return next((actor["name"] for at, actor in self._actors.items() if at.mesh == mesh), "")

    def waits_of(self, place: Place) -> list[Place]:
        """Return the actors whose answers the one at `place` waits for."""
        return [
            Place(process, mesh)
            for activity in self._activities(place)
            if activity["wait"] is not None
            for process, mesh in activity["wait"]["on"]
        ]

    def causes(self, *starts: Place) -> list[Cause]:
        """Return the causes of the waits of `starts`, each place once, the longest first."""
        found: dict[tuple[str, Place], Cause] = {}
        visited: set[Place] = set()
        # Depth first without recursion, since chains can be as long as there are actors.
        stack: list[tuple[Place, list[Place]]] = [(start, []) for start in reversed(starts)]
        while stack:
            place, path = stack.pop()
            if place in path:
                circle = path[path.index(place) :]
                if not any(kind == "circle" and at in circle for kind, at in found):
                    found["circle", place] = Cause("circle", place, circle)
                continue
            if place in visited:
                continue
            targets = self.waits_of(place)
            if not targets and not path:  # a start that waits for nothing; others may wait for it
                continue
            visited.add(place)
            stack += [(target, [*path, place]) for target in reversed(targets)]
            if not targets:
                cause = self._cause(place, path)
                found.setdefault((cause.kind, place), cause)
        return sorted(found.values(), key=_seconds, reverse=True)

    def _cause(self, place: Place, path: list[Place]) -> Cause:
        if place.process in self._silent:
            return Cause("silent", place, path)
        actor = self._actors.get(place)
        if actor is None:
            return Cause("unknown", place, path)
        if actor["doing"]:
            longest = max(
                actor["doing"],
                key=lambda activity: (activity.get("debugged", False), activity["seconds"] or 0.0),
            )
            kind = "debugged" if longest.get("debugged", False) else "busy"
            return Cause(kind, place, path, longest)
        return Cause("queued" if actor["queued"] else "idle", place, path)

    def _activities(self, place: Place) -> list[Activity]:
        if place.mesh == _SCRIPT:
            script = self._scripts.get(place)
            return [] if script is None else [script]
        actor = self._actors.get(place)
        return [] if actor is None else actor["doing"]


def _seconds(cause: Cause) -> float:
    if cause.kind in ("circle", "silent"):
        return float("inf")
    return (cause.activity["seconds"] or 0.0) if cause.activity is not None else -1.0


def compact(numbers: Iterable[int]) -> str:
    """Return sorted numbers as ranges.

    >>> compact([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
