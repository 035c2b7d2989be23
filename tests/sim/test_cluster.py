"""Many hosts and the loss of some. A thousand: ``python tests/soak/cluster.py``."""

from __future__ import annotations

from monarch.testing import simulate
from tests.sim.cluster import check, losses, program

HOSTS = 40


def test_a_call_over_many_hosts_is_completed_when_some_are_lost():
    plan = losses(HOSTS)
    done = simulate(program, hosts=HOSTS, faults=plan)
    check(done.value, HOSTS, plan)
    assert len(done.faults) == len(plan) > 0
    assert 10 < done.elapsed < 15
