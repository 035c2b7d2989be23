"""A supervised mesh on many simulated hosts, which lose power one after the other; spares wait."""

from __future__ import annotations

import time

from monarch.actor import Actor, Supervisor, endpoint
from monarch.testing import CrashHost


class Rank(Actor):
    @endpoint
    def rank(self):
        return 1


def losses(hosts, count, every):
    """Return faults: each of `count` hosts, evenly chosen, loses power, one every so many seconds.

    Half of the hosts that are lost later are those that took the places of earlier ones.
    """
    plan = []
    spare = hosts
    for number in range(count):
        victim = spare - 1 if number % 2 else 1 + number * (hosts - 2) // max(1, count)
        plan.append(CrashHost((number + 1) * every, victim))
        spare += 1
    return plan


def program(hosts, plan, size, every, record):
    """Return the script: supervise a mesh on `size` hosts until all of `plan` has happened.

    `record` gets a pair for each replaced rank: seconds from the loss of power until its
    replacement ran, and seconds of these since the loss was reported.
    """
    lost_at = [fault.at for fault in plan]

    def note(event):
        now = time.monotonic()
        record.append((now - max(at for at in lost_at if at <= now), event.seconds))

    spares = hosts.slice(hosts=slice(size, len(hosts)))
    supervisor = Supervisor(
        max_restarts=len(plan), within=1e9, spares=spares, on_restart=note, backoff=0.0
    )
    ranks = supervisor.spawn(hosts.slice(hosts=slice(0, size)).spawn_procs(), "ranks", Rank)
    assert sum(ranks.rank.call().get().values()) == size
    time.sleep((len(plan) + 1) * every - time.monotonic())
    supervisor.healthy.get()
    answers = sum(ranks.rank.call().get().values())
    return answers, len(supervisor.restarts), supervisor.running(ranks) == list(range(size))
