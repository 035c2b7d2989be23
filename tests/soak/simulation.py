"""`python tests/soak/simulation.py [N=1000]`: N seeds of the simulated programs, with faults.

Each seed selects a program of ``tests/sim/programs.py``, one to three hosts and a random plan of
faults. The runtime's invariants are checked after each step. Two interpreters share the work. A
failure is shrunk, and printed with the command to replay it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import count, end

from monarch.testing import ExplorationError, explore
from tests.sim.programs import PROGRAMS, cases, rates

WORKERS = 2
CHUNK = 25


def run(first: int, last: int) -> tuple[int, Counter[str], list[str]]:
    """Run these seeds; return the number of steps, the faults that occurred, and the failures."""
    steps = 0
    struck: Counter[str] = Counter()
    failures: list[str] = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for seed, name, hosts in cases(range(first, last)):
            try:
                done = explore(PROGRAMS[name], seeds=[seed], hosts=hosts, faults=rates(hosts))
            except ExplorationError as error:
                failures.append(f"{name} on {hosts} hosts: {error}")
            else:
                steps += done.steps
                struck.update(done.faults)
    return steps, struck, failures


def main() -> None:
    seeds = count(1000)
    start = time.perf_counter()
    firsts = range(0, seeds, CHUNK)
    lasts = [min(first + CHUNK, seeds) for first in firsts]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(run, firsts, lasts))
    seconds = time.perf_counter() - start
    struck: Counter[str] = Counter()
    for _, faults, _ in outcomes:
        struck.update(faults)
    steps = sum(outcome[0] for outcome in outcomes)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(struck.items()))
    print(f"faults that struck: {kinds}")
    failures = [failure for outcome in outcomes for failure in outcome[2]]
    end(f"{seeds} seeds simulated, {steps} steps", seconds, failures)


if __name__ == "__main__":
    main()
