"""Handles of meshes still denote the right hosts and processes after any cuts and transfers."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.mesh.meshes.host_mesh import HostMesh
from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
from monarch._engine.shapes import Slice
from monarch._engine.shapes.shape import shape_of

BASE = 1 << 20


def hosts_of(names: tuple[str, ...]) -> HostMesh:
    return HostMesh(shape_of(("hosts",), Slice.new_row_major((len(names),))), None, names)


def procs_of(hosts: HostMesh, per_host: int) -> ProcMesh:
    extent = hosts._extent_with({"gpus": per_host})
    shape = shape_of(tuple(extent.labels), Slice.new_row_major(extent.sizes))
    return ProcMesh(BASE, "procs", shape, hosts, None, per_host)


def cut(mesh: Any, chance: random.Random) -> Any:
    """Apply one random operation to the mesh: pickle, slice or rename."""
    if chance.random() < 0.3 or not mesh.extent:
        return pickle.loads(pickle.dumps(mesh))
    label = chance.choice(list(mesh.extent))
    size = mesh.extent[label]
    at = chance.randrange(size)
    return chance.choice(
        [
            lambda: mesh.slice(**{label: at}),
            lambda: mesh.slice(**{label: slice(at, chance.randint(at + 1, size), 2)}),
            lambda: mesh.rename(**{label: f"{label}_"}),
        ]
    )()


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(1, 3))
def test_the_host_of_each_process(seed: int, count: int, per_host: int) -> None:
    chance = random.Random(seed)
    hosts: Any = hosts_of(tuple(f"host{number}" for number in range(count)))
    for _ in range(chance.randrange(3)):
        hosts = cut(hosts, chance)
    single = [hosts] if not hosts.extent else []
    for label in list(hosts.extent)[:1]:
        single = [hosts.slice(**{label: at}) for at in range(len(hosts))]
    procs: Any = procs_of(hosts, per_host)
    for _ in range(chance.randrange(3)):
        procs = cut(procs, chance)
    while procs.extent:
        label = next(iter(procs.extent))
        procs = procs.slice(**{label: chance.randrange(procs.extent[label])})
    host = procs.host_mesh
    assert host == single[(procs._uids()[0] - BASE) // per_host]
    assert hash(host) == hash(pickle.loads(pickle.dumps(host)))
    assert host != hosts_of(("another",)).slice(hosts=0)


def test_meshes_are_equal_that_denote_the_same() -> None:
    hosts = hosts_of(("a", "b"))
    procs = procs_of(hosts, 2)
    one = procs.slice(hosts=1, gpus=0)
    same = ProcMesh(BASE + 2, "procs", shape_of((), Slice.new_row_major(())), hosts.slice(hosts=1))
    assert one == same == pickle.loads(pickle.dumps(one))
    assert len({one, same, procs.slice(hosts=1).slice(gpus=0)}) == 1
    assert one != procs.slice(hosts=1, gpus=1)
    assert procs.slice(hosts=0) != procs.slice(hosts=0).rename(gpus="k")
    assert procs != hosts
    assert hosts.with_python_executable("other") != hosts


def test_processes_of_another_interpreter_are_executed_by_it() -> None:
    hosts = hosts_of(("a",))
    assert hosts._command_for(0, hosts.extent, None) is None, "a launcher forks them"
    command = hosts.with_python_executable("/opt/python")._command_for(0, hosts.extent, None)
    assert command is not None
    assert (command.program, command.args) == (
        "/opt/python",
        ["-m", "monarch._src.actor.bootstrap_main"],
    )


def test_a_dimension_of_procs_is_named_unlike_those_of_the_hosts() -> None:
    with pytest.raises(ValueError, match=r"per_host labels \['hosts'\] overlap with host labels"):
        hosts_of(("a", "b"))._extent_with({"hosts": 2, "gpus": 2})
