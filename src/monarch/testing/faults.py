"""Faults and fault plans: plain values, so that a plan can be printed, kept and replayed.

A fault happens at a moment of virtual time, or at a place in the life of a request (`Request`). Its
target is looked up when it happens: a process by its label (``<name>-<rank>``), or by its number in
spawn order. A fault that finds no target changes nothing; then `simulate` raises
`MissedFaultError`, unless it was called with ``strict=False``.
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

    ``before_arrival``: the request was sent and has not arrived. ``while_running``: the endpoint
    runs; the fault happens when the endpoint next sends, waits or awaits, and at the latest before
    its reply is sent. ``before_reply``: the endpoint has returned, and its reply is not sent yet.

    >>> Request(3, actor="trainers", place="while_running").nth
    3
    """

    nth: int
    actor: str | None = None
    place: RequestPlace = "before_arrival"


When = float | Request


@dataclasses.dataclass(frozen=True)
class Fault:
    """The base class of all faults. `at`: seconds of virtual time, or a `Request`."""

    at: When


@dataclasses.dataclass(frozen=True)
class Crash(Fault):
    """A process is killed by a signal. `proc` None: the one that serves the request of `at`.

    >>> Crash(at=1.5, proc="trainers-3")
    Crash(at=1.5, proc='trainers-3', signal=9)
    """

    proc: str | int | None = None
    signal: int = 9


@dataclasses.dataclass(frozen=True)
class Pause(Fault):
    """A process does nothing for `seconds`, as if stopped by SIGSTOP."""

    proc: str | int | None = None
    seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class Slow(Fault):
    """Each step of a process is delayed by `lag` seconds, for `seconds`."""

    proc: str | int | None = None
    lag: float = 0.01
    seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class CrashHost(Fault):
    """A host loses power: its processes and its agent exit without a message."""

    host: int = 1


@dataclasses.dataclass(frozen=True)
class CrashAgent(Fault):
    """The agent of a host exits with all processes of the host; the worker loop continues."""

    host: int = 1


@dataclasses.dataclass(frozen=True)
class NetworkFault(Fault):
    """The base class of faults of packets between hosts `a` and `b`; None: any host.

    The fault lasts `seconds`. `one_way`: only packets from `a` to `b` are affected.
    """

    a: int | None = None
    b: int | None = None
    seconds: float = 1.0
    one_way: bool = False


@dataclasses.dataclass(frozen=True)
class Partition(NetworkFault):
    """All packets are lost."""


@dataclasses.dataclass(frozen=True)
class Drop(NetworkFault):
    """Packets are lost with this probability. TCP sends them again, after a pause."""

    probability: float = 0.1


@dataclasses.dataclass(frozen=True)
class Duplicate(NetworkFault):
    """Packets arrive twice with this probability. TCP drops the second one."""

    probability: float = 0.1


@dataclasses.dataclass(frozen=True)
class Delay(NetworkFault):
    """Packets take `by` seconds longer."""

    by: float = 0.1


@dataclasses.dataclass(frozen=True)
class Reorder(NetworkFault):
    """Packets take up to `by` seconds longer, each a random time. TCP restores their order."""

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
    """A tuple of faults for a simulation. Picklable, comparable, and convertible to JSON.

    >>> plan = FaultPlan.of(Crash(Request(2, place="while_running")), Pause(0.5, "workers-1"))
    >>> FaultPlan.from_json(plan.to_json()) == plan
    True
    """

    faults: tuple[Fault, ...] = ()
    version: ClassVar[int] = 1

    @staticmethod
    def of(*faults: Fault) -> FaultPlan:
        """Return a plan of these faults."""
        return FaultPlan(tuple(faults))

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps([_to_fields(fault) for fault in self.faults])

    @staticmethod
    def from_json(text: str) -> FaultPlan:
        """Return the plan from its JSON. Raises ValueError, KeyError or TypeError for others."""
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
    """The average numbers of faults that `random_faults` makes, by kind, and their limits.

    Attributes:
        within: virtual seconds from the start; a fault with a time happens within them.
        nth: a fault at a request happens at one of the first `nth` requests.
        at_requests: the share of process faults that happen at a request.
        longest: seconds that a pause, a partition or another network fault lasts at most.
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
    """Return a plan made from a seed: the same seed gives the same plan.

    >>> random_faults(7) == random_faults(7)
    True
    """
    rates = rates or Rates()
    chance = random.Random(f"{seed}/faults")  # noqa: S311 - must be repeatable
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
    """Return a random number with this mean, geometrically distributed: it may become large."""
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
    """Return the `faults` argument of `simulate` as a plan."""
    if faults is None:
        return FaultPlan()
    return faults if isinstance(faults, FaultPlan) else FaultPlan(tuple(faults))


for _public in (*_KINDS.values(), Fault, NetworkFault, FaultPlan, Rates, Request):
    _public.__module__ = "monarch.testing"
