"""The combinations of a lost host: which party spawned, which party calls, what else is lost.

Host 1 is lost, with ranks of a supervised mesh on hosts 1 and 2. Its supervisor belongs to the
script, to an actor on host 3, or to an actor on host 1, which the script supervises. Calls come
from the script, from actors on the lost host and on others, and from ranks of the mesh to each
other; the actors hold handles that were sent to them before the loss. Hosts 4 and 5 are spare.

In each combination: every call ends, with all answers or a `SupervisionError`; once the supervisors
are healthy, all holders of a handle find the same ranks, on hosts that live; no message is executed
twice, and none of an old rank after its replacement answered.
"""

from __future__ import annotations

import functools
import itertools
import socket
import time

import pytest

import monarch.actor
from monarch.actor import (
    Actor,
    SupervisionError,
    Supervisor,
    current_rank,
    endpoint,
    this_host,
)
from monarch.testing import CrashAgent, CrashHost, Partition, simulate

LIMITS = {"max_restarts": 9, "within": 600}
NUMBERS = itertools.count()


def answers(mesh, number):
    """Return the answers of all ranks, or None if a rank failed; other errors are failures."""
    try:
        return list(mesh.write.call(number).get().values())
    except SupervisionError:
        return None


class Ledger(Actor):
    def __init__(self):
        self.entries = []

    @endpoint
    def add(self, mesh, rank, incarnation, number):
        self.entries.append((time.monotonic(), mesh, rank, incarnation, number))

    @endpoint
    def read(self):
        return self.entries


class Rank(Actor):
    """Notes each call in the ledger, and knows which spawn and which incarnation it is of."""

    def __init__(self, ledger, mesh):
        self.ledger = ledger
        self.mesh = mesh
        self.incarnation = 0

    def __restart__(self, restart):
        self.incarnation = restart.incarnation

    @endpoint
    def write(self, number):
        who = self.mesh, current_rank().rank, self.incarnation, number
        self.ledger.add.call_one(*who).get()
        return socket.gethostname()

    @endpoint
    def relay(self, others, number):
        return answers(others, number)


class Peer(Actor):
    """Calls a mesh of which it has a handle from the beginning."""

    def __init__(self, mesh):
        self.mesh = mesh

    @endpoint
    def call(self, number):
        return answers(self.mesh, number)


class Owner(Actor):
    """Supervises a mesh."""

    def __init__(self, hosts, spares, ledger):
        self.supervisor = Supervisor(spares=spares, **LIMITS)
        # The mesh of a new incarnation is another one: it has another number.
        self.mesh = self.supervisor.spawn(
            hosts.spawn_procs({"gpus": 2}), "ranks", Rank, ledger, next(NUMBERS)
        )

    @endpoint
    def handle(self):
        return self.mesh

    @endpoint
    def heal(self):
        self.supervisor.healthy.get()

    @endpoint
    def call(self, number):
        return answers(self.mesh, number)


def scenario(hosts, spawner, caller, seconds):
    """Run the combination; return where each holder of a handle found the ranks in the end."""
    ledger = this_host().spawn_procs().spawn("ledger", Ledger)
    team = hosts.slice(hosts=slice(1, 3))
    first = hosts.slice(hosts=slice(0, 4)).spawn_procs()  # the script's agent dials all hosts
    first.spawn("first", Ledger).read.call().get()
    first.stop().get()
    top = Supervisor(spares=hosts.slice(hosts=4), **LIMITS)

    def child(host, name, kind, *args):
        """Spawn an actor that comes back if its host is lost."""
        return top.spawn(hosts.slice(hosts=host).spawn_procs(), name, kind, *args)

    owner = None
    if spawner == "client":
        mesh = top.spawn(team.spawn_procs({"gpus": 2}), "ranks", Rank, ledger, next(NUMBERS))
    else:
        host = {"other": 3, "lost": 1}[spawner]
        owner = child(host, "owner", Owner, team, hosts.slice(hosts=5), ledger)
        mesh = owner.handle.call_one().get()
    # An owner that is lost takes its mesh along, and so the handles of others.
    lasting = spawner != "lost"
    near = child(1, "near", Peer, mesh)
    far = child(3, "far", Peer, mesh)

    part = mesh.slice(hosts=0)

    def calls(name, number):
        """Return the answers to a call by one of the callers, or None if a rank or it failed."""
        if name == "client":
            return answers(mesh, number)
        try:
            if name == "ranks":  # the other two cannot answer, while one of them waits
                found = mesh.slice(hosts=1, gpus=0).relay.call_one(part, number).get()
                return found and [*found, "host2", "host2"]
            caller = {"near": near, "far": far, "owner": owner}[name]
            return caller.call.call_one(number).get()
        except SupervisionError:
            return None

    def heal():
        top.healthy.get()
        if owner is not None:
            while True:
                try:
                    owner.heal.call_one().get()
                    break
                except SupervisionError:  # the owner itself is being replaced
                    top.healthy.get()
                    time.sleep(0.1)

    number = 0
    ended = []
    while time.monotonic() < seconds:
        number += 1
        ended.append(calls(caller, number))
        if ended[-1] is None and lasting:
            heal()
        time.sleep(0.2)
    heal()
    assert any(found is not None for found in ended)
    settled = time.monotonic()
    found = {}
    if owner is not None:
        found["owner"] = calls("owner", number + 1)
    if lasting:
        for offset, name in enumerate(("client", "near", "far", "ranks"), start=2):
            found[name] = calls(name, number + offset)
    else:
        assert calls("client", number + 2) is None
        mesh = owner.handle.call_one().get()
        found["client"] = calls("client", number + 3)
    stranger = hosts.slice(hosts=2).spawn_procs().spawn("stranger", Peer, mesh)
    found["stranger"] = stranger.call.call_one(number + 9).get()
    time.sleep(10)  # longer than the network of a host that was cut off takes to come back
    entries = ledger.read.call_one().get()
    written = [entry[1:] for entry in entries]
    assert len(written) == len(set(written)), "a message was executed twice"
    newest = {entry[1:3]: entry[3] for entry in entries}  # the last entry of each rank
    meshes = {entry[1] for entry in entries}
    for when, number_of_mesh, rank, incarnation, _ in entries:
        if when > settled:
            assert number_of_mesh == max(meshes), "a mesh of an owner that was lost has an effect"
            assert incarnation == newest[number_of_mesh, rank], "an old rank has an effect"
    return found


FAULTS = {
    "power": CrashHost(2.0, 1),
    "cut off": Partition(2.0, 1, None, seconds=9),
    "agent": CrashAgent(2.0, 1),
}
CALLERS = {
    "client": ("client", "near", "far", "ranks"),
    "other": ("client", "near", "far", "ranks", "owner"),
    "lost": ("client", "near", "far", "ranks", "owner"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("spawner", "caller"), [(one, other) for one in CALLERS for other in CALLERS[one]]
)
def test_a_host_is_lost(spawner, caller, fault, monkeypatch):
    seed = sorted(CALLERS).index(spawner) + 10 * sorted(FAULTS).index(fault) + 100 * len(caller)
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    main = functools.partial(scenario, spawner=spawner, caller=caller, seconds=8.0)
    found = simulate(lambda hosts: main(hosts), hosts=6, faults=[FAULTS[fault]], seed=seed).value
    first, *others = found.values()
    assert all(other == first for other in others), found
    assert first[2:] == ["host2"] * 2
    assert first[0] == first[1]
    assert first[0] in (("host1",) if fault == "agent" else ("host4", "host5"))
