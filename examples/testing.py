"""Test actors with pytest: real processes, the simulator, crashes; leaks are errors.

The fixtures come with pymonarch: pytest finds them by itself. The subject is a counter that has
replicas, and survives the loss of some.

    python examples/testing.py
    pytest examples/testing.py --verbose
    pytest examples/testing.py -k crash --monarch-seed 7

Needs pytest: pip install 'pymonarch[pytest]'
"""

import contextlib
import os
import signal
import sys
import time

try:
    import pytest
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[pytest]'")

from monarch.actor import Actor, ActorError, HostMesh, ProcMesh, SupervisionError, endpoint
from monarch.integrations.pytest.failures import MeshFailures
from monarch.testing import Crash, Rates, Request


class Replica(Actor):
    def __init__(self) -> None:
        self.total = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError(f"cannot add {amount}")
        time.sleep(1)  # it works hard: in the simulator that takes no time
        self.total += amount
        return self.total


class Counter:
    """A number that replicas have, for as long as one of them is left."""

    def __init__(self, replicas: Replica) -> None:
        self.replicas = replicas

    def add(self, amount: int) -> int:
        totals: list[int] = []
        for answer in self.replicas.add.stream(amount):
            with contextlib.suppress(SupervisionError):  # this replica is lost
                totals.append(answer.get())
        return max(totals)


def test_on_processes(proc_mesh: ProcMesh) -> None:
    counter = Counter(proc_mesh.spawn("replicas", Replica))
    assert [counter.add(2), counter.add(3)] == [2, 5]


@pytest.mark.monarch_procs({"replicas": 3})
def test_an_error_is_raised_here(proc_mesh: ProcMesh) -> None:
    with pytest.raises(ActorError, match="cannot add -1"):
        proc_mesh.spawn("replicas", Replica).add.call(-1).get()


def test_a_loss_that_no_call_notices(proc_mesh: ProcMesh, mesh_failures: MeshFailures) -> None:
    replicas = proc_mesh.spawn("replicas", Replica)
    os.kill(replicas.slice(procs=0).pid.call_one().get(), signal.SIGKILL)
    assert mesh_failures.next().crashed_ranks == [0]


@pytest.mark.monarch_simulate(seeds=10, faults=[Crash(Request(3, actor="replicas"))])
def test_a_crash_costs_no_count(proc_mesh: ProcMesh) -> None:
    counter = Counter(proc_mesh.spawn("replicas", Replica))
    assert [counter.add(1) for _ in range(100)] == list(range(1, 101))


@pytest.mark.monarch_simulate(hosts=2, seeds=10, faults=Rates(crash=0, crash_host=1))
def test_one_of_two_hosts_is_enough(host_mesh: HostMesh) -> None:
    replicas = host_mesh.spawn_procs().spawn("replicas", Replica)
    assert Counter(replicas).add(1) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
