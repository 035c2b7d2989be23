"""Actors whose owner's process ended are stopped, `mesh_orphan_timeout` later."""

from __future__ import annotations

import os
import signal
import time

import monarch.actor
from monarch.actor import Actor, Channel, endpoint, this_host
from monarch.config import configured
from monarch.testing import simulate


class Orphan(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def there(self):
        return True

    def __cleanup__(self, error):
        self.port.send(time.time())


class Owner(Actor):
    @endpoint
    def spawn(self, procs, port):
        self.mesh = procs.spawn("orphan", Orphan, port)
        return self.mesh

    @endpoint
    def pid(self):
        return os.getpid()


def test_orphans_end_when_their_time_is_over_and_not_before(monkeypatch):
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)

    def main():
        owner = this_host().spawn_procs(name="home").spawn("owner", Owner)
        port, ended = Channel.open()
        orphan = owner.spawn.call_one(this_host().spawn_procs(name="abroad"), port).get()
        assert orphan.there.call_one().get()
        killed = time.time()
        os.kill(owner.pid.call_one().get(), signal.SIGKILL)
        time.sleep(40)
        alive = orphan.there.call_one().get()
        return alive, ended.recv().get() - killed

    with configured(mesh_orphan_timeout="45s"):
        alive, seconds = simulate(main).value
    assert alive
    assert 45 <= seconds < 46
