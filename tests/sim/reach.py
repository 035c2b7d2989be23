"""The actors of `test_reach`, in a module that their processes import quickly."""

from __future__ import annotations

import os
import signal
import time

from monarch.actor import (
    Actor,
    Channel,
    SupervisionError,
    Supervisor,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)

WAIT = 60.0


class Target(Actor):
    """An actor of the mesh whose handles are tried."""

    def __init__(self):
        self.count = 0

    @endpoint
    def where(self):
        return current_rank().rank, this_host()

    @endpoint
    def add(self):
        self.count += 1

    @endpoint
    def counted(self):
        return self.count

    @endpoint
    def post(self, port):
        port.send((current_rank().rank, this_host()))

    @endpoint
    def die(self, whole):
        if whole:
            os.kill(os.getpid(), signal.SIGKILL)
        context().actor_instance.abort("as told")


class Family:
    """The mesh of a spawner, and the failures of it that reached the spawner."""

    def __init__(self):
        self.failures = []
        self.procs = self.mesh = self.supervisor = None

    def spawn(self, place, given, supervised):
        """Spawn the mesh: on the `given` hosts if there are any, and `supervised` or not."""
        if place == "this_proc()":
            where = this_proc()
        else:
            where = self.procs = (given or this_host()).spawn_procs({"gpus": 2})
        if supervised:
            self.supervisor = Supervisor(backoff=0.01)
            self.mesh = self.supervisor.spawn(where, "target", Target)
        else:
            self.mesh = where.spawn("target", Target)
        return self.mesh

    def await_health(self):
        self.supervisor.healthy.get(timeout=WAIT)
        return [restart.rank for restart in self.supervisor.restarts]

    def stop(self):
        (self.mesh if self.procs is None else self.procs).stop().get(timeout=WAIT)


class Spawner(Actor):
    def __init__(self):
        self.family = Family()

    @endpoint
    def nest(self, where):
        self.nested = (where or this_host()).spawn_procs().spawn("nested", Spawner)
        return self.nested

    @endpoint
    def spawn(self, *how):
        return self.family.spawn(*how)

    @endpoint
    def await_health(self):
        return self.family.await_health()

    @endpoint
    def stop_mesh(self):
        self.family.stop()

    @endpoint
    def failures(self):
        return self.family.failures

    @endpoint
    def end(self, killed):
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        context().actor_instance.stop("as told")

    def __supervise__(self, failure):
        self.family.failures.append(failure.report())
        return True


class Holder(Actor):
    """An actor that uses meshes, and that obtains one itself."""

    @endpoint
    def fetch(self, spawner, *how):
        self.mesh = spawner.spawn.call_one(*how).get(timeout=WAIT)

    @endpoint
    def keep(self, mesh):
        self.mesh = mesh

    @endpoint
    def hand_on(self, user, what, third):
        return user.use.call_one(self.mesh, what, third).get(timeout=WAIT)

    @endpoint
    def give(self):
        return self.mesh

    @endpoint
    def have_posted(self, mesh, port):
        mesh.post.broadcast(port)

    @endpoint
    def use(self, mesh, what, third):
        return use(mesh, what, third)


def use(mesh, what, third):
    """Use the mesh in one of the ways of the table. `third` is a `Holder` on another host."""
    last = {label: size - 1 for label, size in mesh.extent.items()}
    if what == "call_one of an item":
        return [mesh.slice(**last).where.call_one().get(timeout=WAIT)]
    if what == "call of a slice":
        part = mesh.slice(**{label: slice(at, at + 1) for label, at in last.items()})
        return list(part.where.call().get(timeout=WAIT).values())
    if what == "broadcast and count":
        mesh.add.broadcast()
        mesh.slice(**last).add.broadcast()
        return list(mesh.counted.call().get(timeout=WAIT).values())
    if what == "argument between hosts":
        return third.use.call_one(mesh, "call of all", None).get(timeout=WAIT)
    if what == "its host mesh":
        procs = mesh._proc_mesh.slice(**last)
        beside = procs.host_mesh.spawn_procs().spawn("beside", Target)
        answer = beside.where.call_one().get(timeout=WAIT)
        beside._proc_mesh.stop().get(timeout=WAIT)
        return [answer, procs.host_mesh]
    if what == "spawn on its procs":
        more = mesh._proc_mesh.spawn("more", Target)
        answers = list(more.where.call().get(timeout=WAIT).values())
        more.stop().get(timeout=WAIT)
        return answers
    if what == "a port, through a third":
        port, receiver = Channel.open()
        third.have_posted.call_one(mesh, port).get(timeout=WAIT)
        posts = [receiver.recv().get(timeout=WAIT) for _ in range(len(mesh))]
        return sorted(posts, key=lambda post: post[0])
    if what == "one of it dies":
        mesh.slice(**last).die.broadcast(bool(last))
        return loss(mesh)
    if what == "one of it is restarted":
        return losses([mesh.slice(**last).die.call_one(bool(last)), mesh.where.call()])
    if what == "loss":
        return loss(mesh)
    return list(mesh.where.call().get(timeout=WAIT).values())


def losses(calls):
    """Wait for the calls, and return the texts of the errors.

    A replacement may serve a call that was sent after the failure, so that call may have an answer.
    """
    texts = []
    for call in calls:
        try:
            call.get(timeout=WAIT)
        except SupervisionError as error:
            texts.append(str(error))
    return texts


def loss(mesh):
    """Wait until a call of the mesh fails, and return the error's text, or "it answers"."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        try:
            mesh.where.call().get(timeout=WAIT)
        except SupervisionError as error:
            return str(error)
        time.sleep(0.02)
    return "it answers"
