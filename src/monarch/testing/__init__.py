"""Run a program of actors on simulated hosts, in virtual time, with faults."""

from __future__ import annotations

from monarch.testing.errors import (
    DeadlockError,
    InvariantError,
    SimulationError,
    StepBlockedError,
    TimeLimitError,
    UnhandledFaultError,
)
from monarch.testing.faults import (
    Crash,
    CrashHost,
    Delay,
    Drop,
    Duplicate,
    Fault,
    FaultPlan,
    Partition,
    Pause,
    Rates,
    Reorder,
    Request,
    Slow,
    random_faults,
)
from monarch.testing.simulation import Simulation, simulate

__all__ = [
    "Crash",
    "CrashHost",
    "DeadlockError",
    "Delay",
    "Drop",
    "Duplicate",
    "Fault",
    "FaultPlan",
    "InvariantError",
    "Partition",
    "Pause",
    "Rates",
    "Reorder",
    "Request",
    "Simulation",
    "SimulationError",
    "Slow",
    "StepBlockedError",
    "TimeLimitError",
    "UnhandledFaultError",
    "random_faults",
    "simulate",
]
