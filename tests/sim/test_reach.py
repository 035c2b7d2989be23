"""Handles work in every process: a table of spawners, places, holders of the handle, and uses.

Each row of the table is a program. All rows, `SPAWNERS` x `PLACES` x `HOLDERS` x `USES`, run in the
simulator. The rows in `CHOSEN`, in which each pair of entries of two columns occurs, run on the
real hosts of one job. A row spawns a mesh of its own, whose processes have no connections yet.
"""

from __future__ import annotations

import itertools
import time

import pytest

import monarch.actor
from monarch.actor import this_host
from monarch.job import ProcessJob
from monarch.testing import simulate
from tests.sim.reach import WAIT, Family, Holder, Spawner, use

SPAWNERS = {
    "the script": "own",
    "an actor on the client's host": "own",
    "an actor on host a": "a",
    "an actor on host b": "b",
    "an actor nested twice": "a",
    "an actor nested twice, there and back": "a",
}
"""Who spawns the mesh, and on which host that is."""

PLACES = ("this_host()", "this_proc()", "hosts passed in", "the other host")
"""Where its processes are, seen from the spawner."""

HOLDERS = ("the script", "an actor beside", "an actor on the other host", "through a third")
"""Who uses the handle; the last got it from an actor, which had it from the spawner."""

USES = (
    "call_one of an item",
    "call of all",
    "call of a slice",
    "broadcast and count",
    "argument between hosts",
    "its host mesh",
    "spawn on its procs",
    "a port, through a third",
    "one of it is restarted",
    "stopped by its owner",
    "its owner stops",
    "its owner is killed",
    "one of it dies",
)
"""What is done. In the last four the mesh, or some of it, ends, and callers have to learn why."""

ROWS = [
    row
    for row in itertools.product(SPAWNERS, PLACES, HOLDERS, USES)
    if row[0] != "the script" or not row[3].startswith("its owner")  # no caller would be left
]

CHOSEN = [
    (spawner, PLACES[(s + u) % 4], HOLDERS[(s + u // 2) % 4], use)
    for (s, spawner), (u, use) in itertools.product(enumerate(SPAWNERS), enumerate(USES))
    if (spawner, PLACES[0], HOLDERS[0], use) in ROWS
]

OTHER = {"own": "a", "a": "b", "b": "a"}


# -- running the rows ------------------------------------------------------------------------------


class Stage:
    """Hosts, with actors that hold the handles that they receive.

    Args:
        hosts: the hosts a and b.
        faults: a list of the failures that reach the script.
    """

    def __init__(self, hosts, faults):
        self.faults = faults
        self.hosts = hosts
        self.at = {"own": this_host(), "a": hosts.slice(hosts=0), "b": hosts.slice(hosts=1)}
        self.procs = {name: host.spawn_procs() for name, host in self.at.items()}
        self.holders = {name: procs.spawn("holder", Holder) for name, procs in self.procs.items()}

    def run(self, spawner, place, holder, what):
        """Run one row, and check its results."""
        home = SPAWNERS[spawner]
        given = {
            "hosts passed in": self.hosts,
            "the other host": self.at[OTHER[home]],
        }.get(place)
        how = place, given, what == "one of it is restarted"
        procs = None
        if spawner == "the script":
            actor, family = None, Family()
        else:
            procs = self.at[home].spawn_procs()
            actor = procs.spawn("spawner", Spawner)
            if spawner.startswith("an actor nested twice"):
                back = spawner.endswith("there and back")
                for name in "ba":
                    where = self.at[name] if back else None
                    actor = actor.nest.call_one(where).get(timeout=WAIT)
        third = self.holders["own" if home != "own" else "b"]
        if holder != "through a third":
            mesh = (
                family.spawn(*how)
                if actor is None
                else actor.spawn.call_one(*how).get(timeout=WAIT)
            )
            user = {
                "the script": None,
                "an actor beside": self.holders[home],
                "an actor on the other host": self.holders[OTHER[home]],
            }[holder]
            elsewhere = self.holders["b" if user is self.holders["a"] else "a"]

            def run(what):
                if user is None:
                    return use(mesh, what, elsewhere)
                return user.use.call_one(mesh, what, elsewhere).get(timeout=WAIT)
        else:
            if actor is None:
                third.keep.call_one(family.spawn(*how)).get(timeout=WAIT)
            else:
                third.fetch.call_one(actor, *how).get(timeout=WAIT)
            user, elsewhere = self.holders[OTHER[home]], self.holders[home]

            def run(what):
                return third.hand_on.call_one(user, what, elsewhere).get(timeout=WAIT)

        where = self.expected(home, place)
        everybody = list(enumerate(where))
        if what in (
            "call of all",
            "argument between hosts",
            "spawn on its procs",
            "a port, through a third",
        ):
            assert run(what) == everybody
        elif what in ("call_one of an item", "call of a slice"):
            assert run(what) == [(0, where[-1])]
        elif what == "broadcast and count":
            assert run(what) == [1] * (len(where) - 1) + [2]
        elif what == "one of it is restarted":
            assert run("call of all") == everybody
            errors = run(what)
            assert errors
            for text in errors:
                self.explains(text, place, what)
            restarted = (
                actor.await_health.call_one().get(timeout=WAIT) if actor else family.await_health()
            )
            assert restarted == [len(where) - 1]
            assert run("call of all") == everybody
        elif what == "its host mesh":
            assert run(what) == [(0, where[-1]), where[-1]]
        else:
            if what != "its owner stops":  # (there the first call follows the owner's end)
                assert run("call of all") == everybody
            if what == "stopped by its owner":
                (actor.stop_mesh.call_one().get(timeout=WAIT) if actor else family.stop())
            elif what.startswith("its owner"):
                actor.end.broadcast(what == "its owner is killed")
            why = run("one of it dies" if what == "one of it dies" else "loss")
            if holder == "through a third":
                mesh = third.give.call_one().get(timeout=WAIT)
            for text in (why, use(mesh, "loss", None)):
                self.explains(text, place, what)
            if what == "one of it dies":
                self.await_news(actor, place)
        if procs is not None:
            procs.stop().get(timeout=WAIT)
        elif what != "stopped by its owner":
            family.stop()

    def expected(self, home, place):
        """Return the host of each rank."""
        if place == "this_proc()":
            return [self.at[home]]
        if place == "hosts passed in":
            return [self.at[name] for name in "aabb"]
        return [self.at[home if place == "this_host()" else OTHER[home]]] * 2

    def explains(self, text, place, what):
        assert "does not exist" not in text, text
        if what.startswith("one of it"):
            assert ("as told" if place == "this_proc()" else "SIGKILL") in text, text

    def await_news(self, actor, place):
        """Wait until the end of the mesh and its cause have been reported to the owner."""
        for _ in range(int(WAIT / 0.02)):
            if actor is None:
                told = [text for fault in self.faults if "Target" in (text := fault.report())]
            else:
                told = actor.failures.call_one().get(timeout=WAIT)
            if told:
                break
            time.sleep(0.02)
        assert len(told) == 1
        assert ("as told" if place == "this_proc()" else "SIGKILL") in told[0], told

    def close(self):
        for procs in self.procs.values():
            procs.stop().get(timeout=WAIT)


@pytest.fixture
def faults(monkeypatch):
    found = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", found.append)
    return found


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spawner", SPAWNERS)
def test_simulated(spawner, place, holder, faults):
    def main(hosts):
        stage = Stage(hosts.slice(hosts=slice(1, 3)), faults)
        for row in ROWS:
            if row[:3] == (spawner, place, holder):
                print(row[3], flush=True)  # shown with a failure
                faults.clear()
                stage.run(*row)
        stage.close()
        return "done"

    assert simulate(main, hosts=3).value == "done"


@pytest.fixture(scope="module")
def stage():
    job = ProcessJob({"hosts": 2})
    found = Stage(job.state(cached_path=None).hosts, [])
    yield found
    found.close()
    job.kill()


@pytest.mark.parametrize("row", CHOSEN, ids="-".join)
def test_real(row, stage, faults):
    stage.faults = faults
    stage.run(*row)


def test_what_is_chosen_has_every_pair_of_the_table():
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in CHOSEN} == {
            (row[one], row[other]) for row in ROWS
        }
