"""The runtime against a model of plain dicts: any sequence of operations, in virtual time.

The sequences spawn, call, slice, kill, stop and supervise meshes, and the results must be those of
the model. A sequence is data, which hypothesis shrinks. An actor in a simulation executes it.
"""

from __future__ import annotations

import os
import signal
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.actor import Actor, ActorError, SupervisionError, context, endpoint, this_host
from monarch.testing import simulate

LOST = "lost"
RAISED = "raised"


class Counter(Actor):
    def __init__(self):
        self.value = 0

    @endpoint
    def add(self, amount):
        self.value += amount
        return self.value

    @endpoint
    def fail(self):
        raise ValueError

    @endpoint
    def abort(self):
        context().actor_instance.abort("as told")

    @endpoint
    def pid(self):
        return os.getpid()


class AsyncCounter(Actor):
    def __init__(self):
        self.value = 0

    @endpoint
    async def add(self, amount):
        self.value += amount
        return self.value

    @endpoint
    async def fail(self):
        raise ValueError

    @endpoint
    async def abort(self):
        context().actor_instance.abort("as told")

    @endpoint
    async def pid(self):
        return os.getpid()


class Model:
    """The expected state: for each mesh the value of each living rank, and the reported losses."""

    def __init__(self):
        self.meshes = []
        self.told = []

    def spawn(self, size):
        self.meshes.append({"values": dict.fromkeys(range(size), 0), "size": size, "on": True})

    def call(self, index, ranks, method, amount):
        mesh = self.meshes[index]
        alive = [rank for rank in ranks if mesh["on"] and rank in mesh["values"]]
        if method == "add":
            for rank in alive:
                mesh["values"][rank] += amount
        if len(alive) < len(ranks):
            return LOST
        return [mesh["values"][rank] for rank in ranks] if method == "add" else RAISED

    def die(self, index, rank):
        mesh = self.meshes[index]
        if mesh["on"] and mesh["values"].pop(rank, None) is not None:
            self.told.append((index, rank))

    def stop(self, index):
        self.meshes[index]["on"] = False


class Owner(Actor):
    """The actor that executes operations, and compares each result with the model."""

    def __init__(self):
        self.model = Model()
        self.procs = []
        self.meshes = []
        self.pids = []
        self.told = []

    def __supervise__(self, failure):
        names = [mesh._name.get() for mesh in self.meshes]
        self.told += [(names.index(failure.mesh_name), rank) for rank in failure.crashed_ranks]
        return True

    @endpoint
    def run(self, operations):
        for name, *arguments in operations:
            if name == "spawn" or self.meshes:
                getattr(self, name)(*arguments)

    @endpoint
    def check(self):
        assert sorted(self.told) == sorted(self.model.told)
        return len(self.told)

    def spawn(self, size, cls):
        procs = this_host().spawn_procs({"n": size})
        mesh = procs.spawn(f"mesh{len(self.meshes)}", cls)
        self.procs.append(procs)
        self.meshes.append(mesh)
        self.pids.append(list(mesh.pid.call().get().values()))
        self.model.spawn(size)

    def call(self, pick, first, count, method, amount):
        index = pick % len(self.meshes)
        mesh = self.meshes[index]
        size = self.model.meshes[index]["size"]
        ranks = list(range(size))[first % size :][:count]
        target = mesh.slice(n=slice(ranks[0], ranks[-1] + 1))
        expected = self.model.call(index, ranks, method, amount)
        arguments = (amount,) if method == "add" else ()
        try:
            outcome = list(getattr(target, method).call(*arguments).get().values())
        except SupervisionError:
            outcome = LOST
        except ActorError:
            outcome = LOST if expected == LOST else RAISED  # the first error settles a call
        assert outcome == expected

    def kill(self, pick, rank):
        index = pick % len(self.meshes)
        rank %= self.model.meshes[index]["size"]
        try:
            os.kill(self.pids[index][rank], signal.SIGKILL)
        except ProcessLookupError:
            assert (
                rank not in self.model.meshes[index]["values"] or not self.model.meshes[index]["on"]
            )
        self.model.die(index, rank)
        time.sleep(0.1)

    def abort(self, pick, rank):
        index = pick % len(self.meshes)
        rank %= self.model.meshes[index]["size"]
        self.meshes[index].slice(n=rank).abort.broadcast()
        self.model.die(index, rank)
        time.sleep(0.1)

    def stop(self, pick):
        index = pick % len(self.meshes)
        self.procs[index].stop().get()
        self.model.stop(index)


index = st.integers(0, 5)
operations = st.one_of(
    st.tuples(st.just("spawn"), st.integers(1, 4), st.sampled_from([Counter, AsyncCounter])),
    st.tuples(
        st.just("call"),
        index,
        index,
        st.integers(1, 4),
        st.sampled_from(["add", "add", "fail"]),
        st.integers(-9, 9),
    ),
    st.tuples(st.just("kill"), index, index),
    st.tuples(st.just("abort"), index, index),
    st.tuples(st.just("stop"), index),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=25), st.integers(0, 1 << 16))
def test_any_history_is_that_of_the_model(history, seed):
    def main():
        owner = this_host().spawn_procs().spawn("owner", Owner)
        owner.run.call_one(history).get()
        return owner.check.call_one().get()

    simulate(main, seed=seed)
