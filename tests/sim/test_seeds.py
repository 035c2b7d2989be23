"""Simulated programs with faults, for some seeds: the runtime and the programs keep their promises.

For a thousand seeds: ``python tests/soak/simulation.py``.
"""

from __future__ import annotations

import pytest

from monarch.testing import explore, random_faults, simulate
from tests.sim.programs import PROGRAMS, cases, rates

SEEDS = 60


@pytest.mark.parametrize(("seed", "name", "hosts"), list(cases(range(SEEDS))))
def test_promises_are_kept(seed, name, hosts):
    explore(PROGRAMS[name], seeds=[seed], hosts=hosts, faults=rates(hosts))


@pytest.mark.parametrize(("seed", "name", "hosts"), list(cases(range(15))))
def test_the_same_seed_is_the_same_run(seed, name, hosts):
    plan = random_faults(seed, rates(hosts), hosts)
    runs = []
    for run in range(3):
        # The addresses of objects, and so the order of a set, must not matter.
        shift = [object() for _ in range(1000 * run + seed)]
        runs.append(
            simulate(PROGRAMS[name], seed=seed, hosts=hosts, faults=plan, trace=True, strict=False)
        )
        del shift[::2]
    first, *others = runs
    for again in others:
        assert again.trace == first.trace
        assert again.steps == first.steps
        assert again.faults == first.faults
