"""The errors of a simulation, apart from those that the program raises."""

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
    """The simulated program did something that it must not do."""


class StuckError(SimulationError):
    """The script waits, and no step is left that could end the wait.

    A cycle of actors that wait for each other raises ``monarch.actor.DeadlockError`` first.
    """


class TimeLimitError(SimulationError):
    """The program did not end within the virtual `time_limit`."""


class MissedFaultError(SimulationError):
    """A fault of the plan found no target, or its time did not come, so it tested nothing."""


class InvariantError(SimulationError):
    """An invariant did not hold."""


class StepBlockedError(SimulationError):
    """A step blocked outside the simulation: on a socket, a lock of `threading`, a subprocess."""


class UnhandledFaultError(SimulationError):
    """A failure reached the script without being handled on its way."""


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
