"""Many seeds: whatever goes wrong, the runtime and the programs keep what they promise.

A thousand of them: ``python tests/soak/simulation.py``.
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
    first, again = (
        simulate(PROGRAMS[name], seed=seed, hosts=hosts, faults=plan, trace=True) for _ in range(2)
    )
    assert first.trace == again.trace
    assert first.steps == again.steps
    assert first.faults == again.faults
