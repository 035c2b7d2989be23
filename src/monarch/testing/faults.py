"""Faults, and plans of them: plain values, so that a plan can be printed, kept and replayed.

A fault happens at a moment of virtual time, or at a place in the life of a request (`Request`).
What it names is found when it happens: a process by its label (``<name>-<rank>``), or by its
number in the order of spawns. A fault that finds no target then changes nothing, and `simulate`
raises `MissedFaultError` for it unless it was called with ``strict=False``.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, cast

__all__ = [
    "Crash",
    "CrashAgent",
    "CrashHost",
    "Delay",
    "Drop",
    "Duplicate",
    "Fault",
    "FaultPlan",
    "NetworkFault",
    "Partition",
    "Pause",
    "Rates",
    "Reorder",
    "Request",
    "Slow",
    "random_faults",
]

RequestPlace = Literal["before_arrival", "while_running", "before_reply"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A place in the life of the `nth` request (from 1) to the actors of one name, or to any.

    ``before_arrival``: it was sent, and is under way. ``while_running``: the endpoint runs; the
    fault strikes when it next touches the world (sends, waits, awaits) and at the latest before
    its answer leaves. ``before_reply``: the endpoint is done, the answer was made but is not out.

    >>> Request(3, actor="trainers", place="while_running").nth
    3
    """

    nth: int
    actor: str | None = None
    place: RequestPlace = "before_arrival"


When = float | Request


@dataclasses.dataclass(frozen=True)
class Fault:
    """Base of all faults. `at`: seconds of virtual time, or a `Request`."""

    at: When


@dataclasses.dataclass(frozen=True)
class Crash(Fault):
    """A process ends by a signal. `proc` None: the one that serves the request of `at`.

    >>> Crash(at=1.5, proc="trainers-3")
    Crash(at=1.5, proc='trainers-3', signal=9)
    """

    proc: str | int | None = None
    signal: int = 9


@dataclasses.dataclass(frozen=True)
class Pause(Fault):
    """A process does nothing for a while, as if stopped by SIGSTOP."""

    proc: str | int | None = None
    seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class Slow(Fault):
    """A process takes `lag` seconds more for everything it does, `seconds` long."""

    proc: str | int | None = None
    lag: float = 0.01
    seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class CrashHost(Fault):
    """A host loses power: its processes end and nobody is left to say so."""

    host: int = 1


@dataclasses.dataclass(frozen=True)
class CrashAgent(Fault):
    """The agent of a host ends, with all processes there; the host's worker loop lives on."""

    host: int = 1


@dataclasses.dataclass(frozen=True)
class NetworkFault(Fault):
    """Base of what happens to packets between hosts `a` and `b` for a while; None: any host.

    `one_way`: only to those from `a` to `b`.
    """

    a: int | None = None
    b: int | None = None
    seconds: float = 1.0
    one_way: bool = False


@dataclasses.dataclass(frozen=True)
class Partition(NetworkFault):
    """Packets are lost, all of them."""


@dataclasses.dataclass(frozen=True)
class Drop(NetworkFault):
    """Packets are lost with this probability."""

    probability: float = 0.1


@dataclasses.dataclass(frozen=True)
class Duplicate(NetworkFault):
    """Packets arrive twice with this probability."""

    probability: float = 0.1


@dataclasses.dataclass(frozen=True)
class Delay(NetworkFault):
    """Packets take so many seconds more."""

    by: float = 0.1


@dataclasses.dataclass(frozen=True)
class Reorder(NetworkFault):
    """Packets take up to so many seconds more, each its own time."""

    by: float = 0.1


_KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind
    for kind in (
        Crash,
        Pause,
        Slow,
        CrashHost,
        CrashAgent,
        Partition,
        Drop,
        Duplicate,
        Delay,
        Reorder,
    )
}


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """What goes wrong in a simulation: a tuple of faults. Picklable, comparable, JSON both ways.

    >>> plan = FaultPlan.of(Crash(Request(2, place="while_running")), Pause(0.5, "workers-1"))
    >>> FaultPlan.from_json(plan.to_json()) == plan
    True
    """

    faults: tuple[Fault, ...] = ()
    version: ClassVar[int] = 1

    @staticmethod
    def of(*faults: Fault) -> FaultPlan:
        """A plan of these faults."""
        return FaultPlan(tuple(faults))

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps([_to_fields(fault) for fault in self.faults])

    @staticmethod
    def from_json(text: str) -> FaultPlan:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        return FaultPlan(tuple(_from_fields(fields) for fields in json.loads(text)))

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    def __repr__(self) -> str:
        return f"FaultPlan.of({', '.join(map(repr, self.faults))})"


def _to_fields(fault: Fault) -> dict[str, Any]:
    fields = {name: value for name, value in vars(fault).items() if name != "at"}
    at = vars(fault.at) if isinstance(fault.at, Request) else fault.at
    return {"fault": type(fault).__name__, "at": at, **fields}


def _from_fields(fields: dict[str, Any]) -> Fault:
    fields = dict(fields)
    kind = _KINDS[fields.pop("fault")]
    at: Any = fields.pop("at")
    if isinstance(at, dict):
        return kind(Request(**cast("dict[str, Any]", at)), **fields)
    return kind(float(at), **fields)


@dataclasses.dataclass(frozen=True)
class Rates:
    """How many faults of each kind `random_faults` makes on average, and where.

    Attributes:
        within: virtual seconds from the start in which those happen that happen at a time.
        nth: those at a request happen at one of the first so many.
        at_requests: the share of faults of processes that happen at a request.
        longest: seconds that a pause, a partition or a bad network lasts at most.
    """

    crash: float = 0.5
    pause: float = 0.3
    slow: float = 0.3
    crash_host: float = 0.0
    partition: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    within: float = 1.0
    nth: int = 30
    at_requests: float = 0.5
    longest: float = 1.0


def random_faults(seed: object, rates: Rates | None = None, hosts: int = 1) -> FaultPlan:
    """A plan from a seed: same seed, same plan.

    >>> random_faults(7) == random_faults(7)
    True
    """
    rates = rates or Rates()
    chance = random.Random(f"{seed}/faults")  # noqa: S311 - it is to be repeatable
    faults: list[Fault] = []
    for name, kind in (
        ("crash", Crash),
        ("pause", Pause),
        ("slow", Slow),
        ("crash_host", CrashHost),
        ("partition", Partition),
        ("drop", Drop),
        ("duplicate", Duplicate),
        ("delay", Delay),
        ("reorder", Reorder),
    ):
        count = _count(chance, getattr(rates, name))
        faults += [_random_fault(chance, kind, rates, hosts) for _ in range(count)]
    return FaultPlan(tuple(faults))


def _count(chance: random.Random, mean: float) -> int:
    """How many, `mean` on average: geometrically distributed, so that a storm is possible."""
    count = 0
    while mean > 0 and chance.random() < mean / (1 + mean):
        count += 1
    return count


def _random_fault(chance: random.Random, kind: type[Fault], rates: Rates, hosts: int) -> Fault:
    at: When = round(chance.random() * rates.within, 6)
    seconds = round(chance.random() * rates.longest, 6)
    if issubclass(kind, NetworkFault):
        a, b = chance.sample(range(hosts), 2) if hosts > 1 else (0, None)
        fields: dict[str, Any] = {
            "a": a,
            "b": chance.choice((b, None)),
            "seconds": seconds,
            "one_way": chance.random() < 0.3,
        }
        if issubclass(kind, (Drop, Duplicate)):
            fields["probability"] = round(chance.random(), 2)
        elif issubclass(kind, (Delay, Reorder)):
            fields["by"] = round(chance.random() * rates.longest / 4, 6)
        return kind(at, **fields)
    if issubclass(kind, CrashHost):
        return CrashHost(at, chance.randrange(1, hosts) if hosts > 1 else 1)
    proc: int | None = chance.randrange(1 << 16)
    if chance.random() < rates.at_requests:
        places: tuple[RequestPlace, ...] = ("before_arrival", "while_running", "before_reply")
        at = Request(chance.randrange(rates.nth) + 1, None, places[chance.randrange(3)])
        proc = None if chance.random() < 0.7 else proc
    if kind is Crash:
        return Crash(at, proc)
    if kind is Pause:
        return Pause(at, proc, seconds)
    return Slow(at, proc, round(chance.random() * rates.longest / 20, 6), seconds)


def plan_of(faults: FaultPlan | Iterable[Fault] | None) -> FaultPlan:
    """What `simulate` was given, as a plan."""
    if faults is None:
        return FaultPlan()
    return faults if isinstance(faults, FaultPlan) else FaultPlan(tuple(faults))


for _public in (*_KINDS.values(), Fault, NetworkFault, FaultPlan, Rates, Request):
    _public.__module__ = "monarch.testing"
