"""A program on many hosts, some of which are lost while it calls all actors."""

from __future__ import annotations

import time

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.testing import CrashHost

ACTORS = 8
"""On each host, each in a process of its own."""


class Worker(Actor):
    @endpoint
    def work(self, seconds):
        time.sleep(seconds)
        return current_rank().rank


class Owner(Actor):
    def __init__(self, hosts):
        self.lost = set()
        self.workers = hosts.spawn_procs({"gpus": ACTORS}).spawn("workers", Worker)

    @endpoint
    def run(self):
        """Call all actors; then call all again, while some hosts are lost."""
        ranks = sorted(self.workers.work.call(0).get().values())
        outcomes = self.workers.work.options(on_failure="partial").call(10).get().values()
        answered = {outcome for outcome in outcomes if isinstance(outcome, int)}
        return ranks, answered, len(outcomes) - len(answered)

    @endpoint
    def told(self):
        return self.lost

    def __supervise__(self, failure):
        self.lost.update(failure.crashed_ranks)
        return True


def program(hosts):
    """Return the ranks that answered each call, the lost ranks, and the reported failures."""
    owner = this_host().spawn_procs().spawn("owner", Owner, hosts)
    ranks, answered, lost = owner.run.call_one().get()
    return ranks, answered, lost, owner.told.call_one().get()


def losses(hosts):
    """Return crashes of one host in a hundred, all within the second call."""
    return [CrashHost(5.0 + host / 1000, host) for host in range(min(7, hosts - 1), hosts, 100)]


def check(value, hosts, plan):
    """Whether each rank has exactly one outcome, the right one."""
    ranks, answered, lost, told = value
    gone = {fault.host * ACTORS + actor for fault in plan for actor in range(ACTORS)}
    everybody = set(range(hosts * ACTORS))
    assert ranks == sorted(everybody)
    assert answered == everybody - gone
    assert lost == len(gone)
    assert told == gone
