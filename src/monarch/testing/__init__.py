"""Run a program of actors on simulated hosts: in virtual time, from a seed, with faults.

The program is an ordinary one: it spawns processes and actors, calls them, and supervises them. The
actors are ordinary, too. So are the runtime under them and the cores of protocol and supervision.
Simulated is the world below: hosts, processes, networks, clocks, randomness. An hour of sleep takes
no real time, the same seed gives the same run, and each fault can be placed exactly, at a moment or
at a request.

Each module of the world below replaces a part of the real one: `driver` threads, waits, time and
chance (`monarch._engine.runtime.io.environment`), `proc` a process, `stream` a socket, `loop` an
event loop, `host` the processes of a host, `worker` its worker loop, `network` what happens to
connections between hosts. `patches` replaces the clocks of the standard library for user code.
Links, tunnels, sessions and handshakes are the real ones, on simulated sockets.

>>> import time
>>> from monarch.actor import Actor, SupervisionError, endpoint, this_host
>>> from monarch.testing import Crash, Request, simulate
>>> class Worker(Actor):
...     @endpoint
...     def work(self, hours): time.sleep(3600 * hours); return hours
>>> def main():
...     workers = this_host().spawn_procs({"n": 2}).spawn("w", Worker)
...     return list(workers.work.call(2).get().values())
>>> simulate(main, time_limit=1e5).value
[2, 2]

A fault occurs at a moment of virtual time, or at a place in the life of a request:

>>> class Owner(Actor):
...     @endpoint
...     def run(self):
...         workers = this_host().spawn_procs().spawn("w", Worker)
...         try:
...             return workers.work.call_one(2).get()
...         except SupervisionError:
...             return "lost"
...     def __supervise__(self, failure): return True
>>> def main(): return this_host().spawn_procs().spawn("owner", Owner).run.call_one().get()
>>> simulate(main, faults=[Crash(Request(1, "w", place="while_running"))]).value
'lost'

`explore` runs a program under many seeds and random plans, and shrinks a plan that fails.
"""

from __future__ import annotations

from monarch.testing.errors import (
    InvariantError,
    MissedFaultError,
    SimulationError,
    StepBlockedError,
    StuckError,
    TimeLimitError,
    UnhandledFaultError,
)
from monarch.testing.explore import Case, Exploration, ExplorationError, explore, replay
from monarch.testing.faults import (
    Crash,
    CrashAgent,
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
from monarch.testing.invariants import View
from monarch.testing.simulation import Simulation, simulate

__all__ = [
    "Case",
    "Crash",
    "CrashAgent",
    "CrashHost",
    "Delay",
    "Drop",
    "Duplicate",
    "Exploration",
    "ExplorationError",
    "Fault",
    "FaultPlan",
    "InvariantError",
    "MissedFaultError",
    "Partition",
    "Pause",
    "Rates",
    "Reorder",
    "Request",
    "Simulation",
    "SimulationError",
    "Slow",
    "StepBlockedError",
    "StuckError",
    "TimeLimitError",
    "UnhandledFaultError",
    "View",
    "explore",
    "random_faults",
    "replay",
    "simulate",
]
