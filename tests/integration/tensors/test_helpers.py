"""Device meshes that have their own processes, and the context of tests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect, remote, world_mesh
from monarch._src.actor.mock import (
    get_tensor_engine_factory,
    get_tensor_engine_mock_registry_state,
    patch_tensor_engine,
    set_tensor_engine_mock_registry_state,
)
from monarch._testing import TestingContext, mock_mesh
from monarch.actor import Actor, endpoint, this_host
from monarch.mesh_controller import RemoteException
from monarch.python_local_mesh import python_local_mesh

pytestmark = pytest.mark.torch


def test_local_meshes_end_their_processes() -> None:
    mesh = python_local_mesh(gpus=2)
    assert mesh.sizes == {"host": 1, "gpu": 2}
    with mesh.activate():
        assert inspect(mesh.rank("gpu"), host=0, gpu=1).item() == 1
    mesh.exit()
    with pytest.raises(RuntimeError, match="ended by exit"), mesh.activate():
        torch.ones(1)


def test_world_mesh_takes_hosts() -> None:
    mesh = world_mesh(None, [1], 1)
    assert mesh.sizes == {"host": 1, "gpu": 1}
    mesh.exit()
    with pytest.raises(TypeError, match="takes a HostMesh, or None"):
        world_mesh(object(), [1], 1)
    with pytest.raises(ValueError, match="hosts, not 3"):
        world_mesh(this_host(), 3, 1)


def test_a_testing_context_reuses_processes_and_raises_what_no_test_has_seen() -> None:
    with TestingContext() as testing:
        with testing.local_device_mesh(1, 2) as mesh:
            pids = remote(_pid).call().get(timeout=60)
            assert mesh.names == ("host", "gpu")
        with testing.local_device_mesh(1, 2, activate=False, backend="rs") as mesh, mesh.activate():
            assert list(remote(_pid).call().get(timeout=60).values()) == list(pids.values())
        with pytest.raises(RemoteException, match="unseen"), testing.local_device_mesh(1, 2):
            remote(_fail, propagate="inspect")(torch.ones(1))
        with pytest.raises(ValueError, match="backend"):
            testing.local_device_mesh(1, 1, backend="x").__enter__()


def test_a_mock_mesh_has_shapes_and_no_data() -> None:
    mesh = mock_mesh(2, 4)
    assert mesh.sizes == {"host": 2, "gpu": 4}
    with mesh.activate():
        x = torch.ones(2, 3)
        y = (x @ x.t()).reduce("gpu")
        assert inspect(y, host=1, gpu=3).tolist() == [[0, 0], [0, 0]]
    mesh.exit()


def _pid() -> int:
    import os

    return os.getpid()


def _fail(x: Any) -> None:
    raise ValueError("unseen")


# -- actors without devices ------------------------------------------------------------------------


class Trainer(Actor):
    """Computes on processes of its own."""

    @endpoint
    def total(self) -> tuple[tuple[str, ...], float]:
        procs = this_host().spawn_procs({"gpu": 2})
        with procs.activate():
            first = torch.ones(3)
            with procs.activate():
                both = first + torch.ones(3)
            found = both.sum()
            names = tuple(both.mesh.names)
            value = float(inspect(found))
        procs.stop().get()
        return names, value


class Other(Trainer):
    """Another class."""


def of_one_host(procs: Any) -> Any:
    """Return a simulated mesh of another shape."""
    from monarch import Simulator

    return Simulator(1, len(procs), simulate_mode="simulate_with_report_only").mesh


def test_actors_under_patch_tensor_engine_compute_on_simulated_devices() -> None:
    with patch_tensor_engine(Trainer):
        procs = this_host().spawn_procs()
        trainer = procs.spawn("trainer", Trainer)
        assert trainer.total.call_one().get(timeout=60) == (("gpu",), 0.0)
        assert procs.spawn("other", Other).total.call_one().get(timeout=60) == (("gpu",), 6.0)
        with patch_tensor_engine(Trainer, of_one_host):
            inner = this_host().spawn_procs()
            inside = inner.spawn("trainer", Trainer)
            assert inside.total.call_one().get(timeout=60) == (("host", "gpu"), 0.0)
            assert get_tensor_engine_factory(Trainer) is of_one_host
        assert get_tensor_engine_factory(Trainer) is None
    outside = this_host().spawn_procs()
    again = outside.spawn("trainer", Trainer)
    assert again.total.call_one().get(timeout=60) == (("gpu",), 6.0)
    for mesh in (procs, inner, outside):
        mesh.stop().get(timeout=60)


def test_the_factories_of_patch_tensor_engine_can_be_moved() -> None:
    before = get_tensor_engine_mock_registry_state()
    with patch_tensor_engine(Trainer, of_one_host):
        state = get_tensor_engine_mock_registry_state()
    set_tensor_engine_mock_registry_state(state)
    assert get_tensor_engine_factory(Trainer) is of_one_host
    set_tensor_engine_mock_registry_state(before)
    assert get_tensor_engine_factory(Trainer) is None
    with pytest.raises(TypeError, match="takes a ProcMesh"):
        patch_tensor_engine(Trainer, 5)  # type: ignore[arg-type]
