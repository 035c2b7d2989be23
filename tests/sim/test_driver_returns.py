"""A driver that is cut off from its hosts attaches them again, at random moments.

The hosts cannot know whether it lives, so what they ran for it ends. Each wait of the script ends,
the last session works, and nothing of the former ones is left.
"""

from __future__ import annotations

import random
import socket
import time

import pytest

import monarch.actor
from monarch._engine.mesh.script import attach as attaching
from monarch.actor import Actor, SupervisionError, attach_to_workers, endpoint
from monarch.testing import Partition, simulate
from monarch.testing.network import PORT, address_of

WORKERS = [f"tcp://{address_of(host)}:{PORT}" for host in (1, 2, 3)]
SILENCE = 40.0
"""Seconds after which no outage is left, and every host has given up what it lost."""


class Worker(Actor):
    @endpoint
    def where(self):
        return socket.gethostname()


@pytest.fixture(params=["direct", "gateway"])
def way(request, monkeypatch):
    """Reach all hosts directly, or through the worker of host 1."""
    if request.param == "gateway":
        monkeypatch.setattr(attaching, "_gateway", WORKERS[0])
    return request.param


def outages(seed):
    """Return partitions of the driver's host: a long one from all others, and some of any kind."""
    chance = random.Random(seed)
    faults = [Partition(chance.uniform(0.0, 20.0), 0, seconds=chance.uniform(6.0, 10.0))]
    for _ in range(3):
        other = chance.choice([None, None, 1, 2, 3])
        seconds = chance.uniform(0.3, 10.0)
        one_way = chance.random() < 0.3
        faults.append(Partition(chance.uniform(0.0, 20.0), 0, other, seconds, one_way))
    return faults


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(6))
def test_a_driver_that_was_cut_off_attaches_again(seed, monkeypatch):
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    views = []
    sessions = []

    def attach():
        """Attach the hosts and spawn there, as often as outages make it necessary."""
        while True:
            mesh = attach_to_workers(ca="trust_all_connections", workers=WORKERS, timeout=30)
            try:
                mesh.initialized.get(timeout=600)
                actors = mesh.spawn_procs(name=f"p{len(sessions)}").spawn("w", Worker)
                sessions.append(actors)
                names(actors)
            except (RuntimeError, SupervisionError):
                mesh.stop().get(timeout=600)
            else:
                return mesh, actors

    def names(actors):
        return list(actors.where.call().get(timeout=600).values())

    def main():
        mesh, actors = attach()
        while time.monotonic() < SILENCE:
            try:
                assert names(actors) == ["host1", "host2", "host3"]
            except SupervisionError:
                mesh.stop().get(timeout=600)
                mesh, actors = attach()
            time.sleep(0.05)
        assert names(actors) == ["host1", "host2", "host3"]
        for former in sessions[:-1]:
            with pytest.raises(SupervisionError):
                names(former)
        last = f"p{len(sessions) - 1}"
        left = [name for name in views[-1].procs[1:] if not name.startswith(last)]
        mesh.stop().get(timeout=600)
        return left

    done = simulate(
        main,
        hosts=4,
        seed=seed,
        faults=outages(seed),
        invariants=[lambda view: views.append(view) if not views else None],
        time_limit=1e4,
    )
    assert done.value == []
    assert len(sessions) > 1
