"""`explore`: run a program under many seeds and fault plans; shrink the plan that fails.

A failing case is shrunk in two ways, as long as it fails with the same type of exception. First
faults are dropped (delta debugging: halves first, then smaller parts; Zeller and Hildebrandt,
*Simplifying and isolating failure-inducing input*, TSE 2002). Then the remaining faults are
simplified: rounder numbers, earlier requests. The result is a `Case`, which should be kept: a seed
stands for another run once the code changes, a plan of one or two faults seldom does.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from monarch.testing.errors import SimulationError
from monarch.testing.faults import Fault, FaultPlan, Rates, Request, random_faults
from monarch.testing.invariants import Invariant
from monarch.testing.simulation import Simulation, simulate

__all__ = ["Case", "Exploration", "ExplorationError", "explore", "replay"]

Main = Callable[..., Any]
Faults = FaultPlan | Rates | Callable[[int], FaultPlan]

_SHRINKING_RUNS = 300
"""The most simulations that are run to shrink one failure."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The inputs that make a simulation repeatable, apart from the program."""

    seed: int
    hosts: int = 1
    plan: FaultPlan = dataclasses.field(default_factory=FaultPlan)

    def to_json(self) -> str:
        """Return the case as one line of JSON."""
        plan = json.loads(self.plan.to_json())
        return json.dumps({"seed": self.seed, "hosts": self.hosts, "plan": plan})

    @staticmethod
    def from_json(text: str) -> Case:
        """Return the case from its JSON."""
        fields = json.loads(text)
        plan = FaultPlan.from_json(json.dumps(fields["plan"]))
        return Case(fields["seed"], fields["hosts"], plan)


class ExplorationError(SimulationError):
    """A program failed under a seed and a plan; the cause is the exception that it raised.

    Attributes:
        case: the shrunk case, which fails with the same type of exception.
        found: the case as it was found.
    """

    def __init__(self, case: Case, found: Case, error: BaseException) -> None:
        self.case = case
        self.found = found
        faults = "".join(f"\n  {fault!r}" for fault in case.plan) or " none"
        super().__init__(
            f"seed {found.seed} with {len(found.plan)} faults fails with "
            f"{type(error).__name__}: {error}\n"
            f"shrunk to {len(case.plan)} faults:{faults}\n"
            f"replay it with: replay(main, {case.to_json()!r})"
        )


class Exploration:
    """The result of `explore` when no case failed.

    Attributes:
        runs: how many simulations were run.
        steps: how many steps they took in all.
        faults: how many faults found their targets, by kind.
        seconds: of real time.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.steps = 0
        self.faults: dict[str, int] = {}
        self.seconds = 0.0

    def __repr__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"<Exploration of {self.runs} runs, {self.steps} steps, {self.seconds:.1f} s; "
            f"faults: {faults or 'none'}>"
        )


def explore(
    main: Main,
    *,
    seeds: Iterable[int] = range(100),
    hosts: int = 1,
    faults: Faults | None = None,
    invariants: Sequence[Invariant] = (),
    **options: Any,
) -> Exploration:
    """Simulate `main` once for each seed; raise `ExplorationError` for the first that fails.

    Args:
        main: the program, see `simulate`. It fails by raising, and catches what it can survive.
        seeds: the seeds to run.
        hosts: how many hosts there are.
        faults: a plan for all seeds, `Rates` for random plans, or a function of the seed.
        invariants: called after each step, see `View`.
        options: more arguments of `simulate`. Faults may miss, unless `strict` is among them.

    >>> explore(lambda: None, seeds=range(3)).runs
    3
    """
    __tracebackhide__ = True  # pytest shows the frames of the program
    exploration = Exploration()
    started = time.perf_counter()
    for seed in seeds:
        case = Case(seed, hosts, _plan_for(seed, hosts, faults))
        try:
            done = _run(main, case, invariants, options)
        except Exception as error:
            shrunk = _shrink(main, case, type(error), invariants, options)
            raise ExplorationError(shrunk, case, error) from error
        exploration.runs += 1
        exploration.steps += done.steps
        for fault in done.faults:
            kind = type(fault).__name__
            exploration.faults[kind] = exploration.faults.get(kind, 0) + 1
    exploration.seconds = time.perf_counter() - started
    return exploration


def replay(
    main: Main, case: Case | str, *, invariants: Sequence[Invariant] = (), **options: Any
) -> Simulation:
    """Run a case again; `case` may be the JSON that an `ExplorationError` shows.

    Raises what the program raises in this case.

    >>> replay(lambda: 7, '{"seed": 3, "hosts": 1, "plan": []}').value
    7
    """
    if isinstance(case, str):
        case = Case.from_json(case)
    return _run(main, case, invariants, options)


def _plan_for(seed: int, hosts: int, faults: Faults | None) -> FaultPlan:
    if faults is None:
        return FaultPlan()
    if isinstance(faults, Rates):
        return random_faults(seed, faults, hosts)
    return faults if isinstance(faults, FaultPlan) else faults(seed)


def _run(
    main: Main, case: Case, invariants: Sequence[Invariant], options: dict[str, Any]
) -> Simulation:
    return simulate(
        main,
        seed=case.seed,
        hosts=case.hosts,
        faults=case.plan,
        invariants=invariants,
        **{"strict": False, **options},
    )


# -- shrinking -----------------------------------------------------------------------------------


def _shrink(
    main: Main,
    case: Case,
    kind: type[Exception],
    invariants: Sequence[Invariant],
    options: dict[str, Any],
) -> Case:
    """Return the simplest case that was found to fail with `kind`."""
    runs = _SHRINKING_RUNS

    def fails(plan: Sequence[Fault]) -> bool:
        nonlocal runs
        if runs <= 0:
            return False
        runs -= 1
        try:
            candidate = dataclasses.replace(case, plan=FaultPlan(tuple(plan)))
            _run(main, candidate, invariants, options)
        except kind:
            return True
        except Exception:  # another failure than the one that is being shrunk
            return False
        return False

    faults = _drop(list(case.plan), fails)
    faults = _simplify(faults, fails)
    return dataclasses.replace(case, plan=FaultPlan(tuple(faults)))


def _drop(faults: list[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Return as few of the faults as still fail: smaller and smaller parts are left out."""
    size = max(1, len(faults) // 2)
    while faults:
        for at in range(0, len(faults), size):
            rest = faults[:at] + faults[at + size :]
            if fails(rest):
                faults = rest
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(faults)))
    return faults


def _simplify(faults: list[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Return the same faults with simpler numbers, as far as they still fail."""
    for index in range(len(faults)):
        improved = True
        while improved:
            improved = False
            for candidate in _simpler(faults[index]):
                changed = [*faults[:index], candidate, *faults[index + 1 :]]
                if fails(changed):
                    faults = changed
                    improved = True
                    break
    return faults


def _simpler(fault: Fault) -> Iterator[Fault]:
    """Yield faults with one number of `fault` made simpler."""
    for name, value in vars(fault).items():
        if isinstance(value, Request) and value.nth > 1:
            for nth in sorted({1, value.nth // 2, value.nth - 1}):
                yield dataclasses.replace(fault, **{name: dataclasses.replace(value, nth=nth)})
        elif isinstance(value, float):
            for digits in range(4):
                rounder = round(value, digits)
                if rounder != value and (rounder > 0 or name == "at"):
                    yield dataclasses.replace(fault, **{name: rounder})


for _public in (Case, Exploration, ExplorationError):
    _public.__module__ = "monarch.testing"
