"""How a simulation fails, other than by what the program raises."""

from __future__ import annotations

__all__ = [
    "InvariantError",
    "MissedFaultError",
    "SimulationError",
    "StepBlockedError",
    "StuckError",
    "TimeLimitError",
    "UnhandledFaultError",
]


class SimulationError(AssertionError):
    """The simulated program did what it must not."""


class StuckError(SimulationError):
    """Everybody waits and nothing is left that could happen.

    Actors that wait for each other in a circle get their ``monarch.actor.DeadlockError`` first.
    """


class TimeLimitError(SimulationError):
    """The program was not over within the virtual `time_limit`."""


class MissedFaultError(SimulationError):
    """A fault of the plan found no target, or its moment did not come: nothing was tested by it."""


class InvariantError(SimulationError):
    """Something that must always hold did not."""


class StepBlockedError(SimulationError):
    """A step blocked outside the simulation: on a socket, a lock of `threading`, a subprocess."""


class UnhandledFaultError(SimulationError):
    """A failure reached the script, and nobody on its way handled it."""


_public: type
for _public in (
    StuckError,
    InvariantError,
    MissedFaultError,
    SimulationError,
    StepBlockedError,
    TimeLimitError,
    UnhandledFaultError,
):
    _public.__module__ = "monarch.testing"
