"""`python tests/soak/cluster.py [N=1000]`: N simulated hosts with 8 actors each, 1 % of them lost.

All actors are called; during a second call one host in a hundred loses power. Every rank has one
outcome, the right one, and each lost rank is reported to the owner.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import count, end

from monarch.testing import simulate
from tests.sim.cluster import ACTORS, check, losses, program


def main() -> None:
    hosts = count(1000)
    plan = losses(hosts)
    start = time.perf_counter()
    done = simulate(program, hosts=hosts, faults=plan)
    seconds = time.perf_counter() - start
    faults: list[str] = []
    try:
        check(done.value, hosts, plan)
    except AssertionError as error:
        faults.append(f"an outcome is wrong: {error}")
    what = f"{hosts} simulated hosts with {ACTORS} actors each, {len(plan)} hosts lost"
    end(f"{what}, {done.elapsed:.1f} virtual seconds, {done.steps} steps", seconds, faults)


if __name__ == "__main__":
    main()
