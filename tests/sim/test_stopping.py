"""A stop that comes during a restart also stops the replacement, or prevents it."""

from __future__ import annotations

import contextlib
import time

from monarch.actor import Actor, SupervisionError, Supervisor, endpoint, this_host
from monarch.testing import simulate


class Slow(Actor):
    """An actor whose process takes a second to stop."""

    def __cleanup__(self, error):
        time.sleep(1)


class Other(Actor):
    """An actor in another process, which spawns on the process that is asked to stop."""

    @endpoint
    def spawn(self, procs):
        procs.spawn("late", Actor)


def test_an_actor_that_is_spawned_during_the_stop_is_stopped_as_well():
    def main():
        procs = this_host().spawn_procs()
        procs.spawn("slow", Slow).initialized.get()
        other = this_host().spawn_procs().spawn("other", Other)
        asked = time.monotonic()
        stopping = procs.stop()
        time.sleep(0.5)
        with contextlib.suppress(SupervisionError):  # its process has exited in good order
            other.spawn.call_one(procs).get()
        stopping.get()
        return time.monotonic() - asked

    assert simulate(main).value < 2


def test_no_rank_of_a_mesh_that_its_owner_stops_is_restarted():
    def main():
        supervisor = Supervisor()
        mesh = supervisor.spawn(this_host().spawn_procs(), "target", Actor)
        supervisor.healthy.get()
        known = supervisor._meshes[0]
        stopping = mesh.stop()
        supervisor._start(((0, 0),))  # decided on before the stop
        stopping.get()
        return known.incarnations

    assert simulate(main).value == [0]
