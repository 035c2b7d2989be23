"""`Result.costs`: a launch's failures in one screen."""

from __future__ import annotations

from monarch.spmd.result import Failure, Result


def test_a_launch_without_failures_has_no_costs() -> None:
    assert Result(succeeded=True, attempts=1, seconds=3.0, max_restarts=2).costs() == []


def test_only_failures_that_an_attempt_followed_cost_a_restart() -> None:
    failures = [
        Failure(0, 3, "node1", "exited with status 1", at=2.0, cost=0.5),
        Failure(1, -1, "node2", "it is silent", at=9.0, cost=1.5),
        Failure(2, 0, "node1", "killed by SIGSEGV", at=20.0),
    ]
    assert Result(False, 3, failures, seconds=21.0, max_restarts=2).costs() == [
        "3 failures in 21.0 s; restarting took 2.00 s; no restarts left",
        "  at 2.0 s, attempt 1: rank 3 on node1: exited with status 1; started again after 0.50 s",
        "  at 9.0 s, attempt 2: host node2 was lost: it is silent; started again after 1.50 s",
        "  at 20.0 s, attempt 3: rank 0 on node1: killed by SIGSEGV; not started again",
    ]
