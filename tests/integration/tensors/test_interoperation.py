"""Modules of torch, its distributed tensors, and its checkpoints, with the tensors of a mesh."""

from __future__ import annotations

import logging
import os
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from monarch import Stream, Tensor, get_active_mesh, inspect, no_mesh, remote, to_mesh
from monarch._tensors.checkpoint import load, save
from monarch._tensors.errors import RemoteException
from monarch._tensors.torch_mesh import TorchMesh, torch_mesh
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.config import configured

pytestmark = pytest.mark.torch


def network() -> torch.nn.Sequential:
    """Return a small network with parameters and buffers, the same each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )


def test_a_module_moves_to_a_mesh_in_one_call(mesh: Any) -> None:
    """It trains there as it does locally: outputs, gradients, buffers and a step are the same."""
    local, module = network(), network()
    assert to_mesh(module, mesh) is module
    assert all(type(value) is Tensor for value in module.state_dict().values())
    assert all(isinstance(value, torch.nn.Parameter) for value in module.parameters())
    data = torch.linspace(-1, 1, 18).reshape(6, 3)
    with mesh.activate():
        moved = torch.linspace(-1, 1, 18).reshape(6, 3)
    for net, batch in ((local, data), (module, moved)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch).pow(2).sum().backward()
        optimizer.step()
    state = inspect(module.state_dict(), host=1, gpu=0)
    for name, value in local.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


def test_a_module_moves_while_a_mesh_is_active(active: Any) -> None:
    with no_mesh.activate():
        module = network()
    to_mesh(module, active)
    assert tuple(module(torch.ones(5, 3)).shape) == (5, 2)


def test_a_moved_module_keeps_shared_parameters_gradients_and_frozen_ones(mesh: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module[1].bias.requires_grad_(False)
    module(torch.ones(1, 2)).sum().backward()
    gradient = module[0].weight.grad
    to_mesh(module, mesh)
    assert module[1].weight is module[0].weight
    assert [value.requires_grad for value in module.parameters()] == [True, False]
    assert torch.equal(inspect(module[0].weight.grad), gradient)


def test_a_module_moves_from_mesh_to_mesh(mesh: Any) -> None:
    """Between slices, and to another proc mesh, on the stream that is given."""
    module = to_mesh(network(), mesh.slice(host=0))
    weight = inspect(module[0].weight)
    to_mesh(module, mesh.slice(host=1))
    assert module[0].weight.mesh is mesh.slice(host=1)
    assert torch.equal(weight, inspect(module[0].weight, gpu=1))
    other = this_host().spawn_procs({"gpu": 2})
    try:
        stream = Stream("arriving")
        to_mesh(module, other, stream)
        assert {value.stream for value in module.parameters()} == {stream}
        with stream.activate():
            assert torch.equal(weight, inspect(module[0].weight, gpu=1))
    finally:
        other.stop().get(timeout=60)


def test_a_module_that_cannot_move_is_unchanged(mesh: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match="device 'meta'"):
        to_mesh(module, mesh)
    assert all(before[name] is value for name, value in module.named_parameters())


# -- distributed tensors of torch -----------------------------------------------------------------


@remote
def product(layout: TorchMesh, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a product, computed with DTensors."""
    device_mesh = layout.device_mesh()
    left = DTensor.from_local(rows, device_mesh, [Shard(0), Replicate()])
    right = DTensor.from_local(weight, device_mesh, [Replicate(), Shard(1)])
    return (left @ right).redistribute(placements=[Shard(0), Replicate()]).to_local()


def test_tensors_of_a_mesh_are_the_shards_of_a_dtensor_and_back(procs: Any, mesh: Any) -> None:
    """In a remote function: rows along one dimension times columns along the other."""
    layout = torch_mesh(procs)
    assert (layout.names, layout.sizes) == (("host", "gpu"), (2, 2))
    with mesh.activate():
        rows = torch.arange(6.0).reshape(2, 3) + 10 * mesh.rank("host")
        columns = torch.arange(12.0).reshape(3, 4) + mesh.rank("gpu")
        result = product(layout, rows, columns)
        assert tuple(result.shape) == (2, 8)
        again = product(layout, rows, columns) + result  # what it returns is known now
    for host in range(2):
        left = torch.arange(6.0).reshape(2, 3) + 10 * host
        right = torch.cat([torch.arange(12.0).reshape(3, 4) + gpu for gpu in range(2)], 1)
        for gpu in range(2):
            assert torch.equal(inspect(result, host=host, gpu=gpu), left @ right)
            assert torch.equal(inspect(again, host=host, gpu=gpu), 2 * (left @ right))


class Summer(Actor):
    """Sums DTensors."""

    @endpoint
    def total(self, layout: TorchMesh, part: torch.Tensor) -> float:
        whole = DTensor.from_local(part, layout.device_mesh(), [Shard(0), Replicate()])
        return float(whole.full_tensor().sum())

    @endpoint(propagate=lambda layout, part: part.clone())
    def doubled(self, layout: TorchMesh, part: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(part, layout.device_mesh(), [Shard(0), Replicate()])
        return (whole * 2).to_local()


def test_an_actor_takes_the_shards_of_a_dtensor_and_returns_them(procs: Any, mesh: Any) -> None:
    summer = procs.spawn("summer", Summer)
    layout = torch_mesh(mesh)
    with mesh.activate():
        part = torch.ones(3) * (1 + mesh.rank("host"))
        totals = summer.total.call(layout, part).get(timeout=60)
        doubled = summer.doubled.rref(layout, part)
    assert [total for _, total in totals.items()] == [9.0] * 4
    assert inspect(doubled, host=1, gpu=0).tolist() == [4.0] * 3


@remote(propagate=lambda layout, x: x.clone())
def rows_of_all(layout: TorchMesh, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows that the processes of a mesh have, computed with a DTensor."""
    device_mesh = layout.device_mesh()
    placements = [Shard(0)] * device_mesh.ndim
    whole = DTensor.from_local(x, device_mesh, placements)
    return whole.sum(0, keepdim=True).full_tensor()


@remote
def dtensor(layout: TorchMesh, x: torch.Tensor, dims: tuple[str, ...]) -> DTensor:
    """Return a DTensor on torch's mesh, or on a part of that."""
    device_mesh = layout.device_mesh()
    part = device_mesh[dims] if dims else device_mesh
    return DTensor.from_local(x, part, [Shard(0)] * part.ndim, run_check=False)


@pytest.mark.parametrize("dims", [(), ("gpu",)])
def test_a_dtensor_that_is_fetched_can_be_read(
    mesh: Any, dims: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Torch logs no warning about process groups, in which the script is not."""
    torch_log = logging.getLogger("torch.distributed.device_mesh")
    torch_log.addHandler(caplog.handler)
    try:
        with mesh.activate():
            answers = dtensor.call(torch_mesh(mesh), torch.ones(2), dims).get(timeout=60)
    finally:
        torch_log.removeHandler(caplog.handler)
    assert not caplog.records
    found = answers.values()[0]
    size = 2 * (2 if dims else 4)
    assert tuple(found.shape) == (size,)
    assert found.to_local().tolist() == [1.0, 1.0]
    assert "Shard(dim=0)" in repr(found)
    with pytest.raises(RuntimeError, match="resolve the process group"):
        found.redistribute(placements=[Replicate()] * len(found.placements))


def test_parts_of_a_mesh_are_meshes_of_torch(mesh: Any) -> None:
    """A part, whose other processes have nothing to do with it, before the whole mesh or after."""
    gpus = torch_mesh(mesh.slice(host=1))
    assert gpus.ranks == (2, 3)
    with mesh.slice(host=1).activate():
        part = rows_of_all(gpus, torch.ones(1, 2) + get_active_mesh().rank("gpu"))
        assert inspect(part, gpu=0).tolist() == [[3.0, 3.0]]
    layout = torch_mesh(mesh)
    with mesh.activate():
        total = rows_of_all(layout, torch.ones(1, 2) + mesh.process_idx())
        assert inspect(total, host=1, gpu=1).tolist() == [[10.0, 10.0]]
    one = mesh.slice(host=0, gpu=1)
    with one.activate():
        assert inspect(rows_of_all(torch_mesh(one), torch.ones(1, 1))).tolist() == [[1.0]]
    with mesh.slice(host=0).activate(), pytest.raises(RemoteException, match="is not in <Torch"):
        remote(sizes).call(gpus).get(timeout=60)


def test_a_default_group_is_made_anew_when_its_engine_has_ended(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpu": 2})
    try:
        for _ in range(2):
            with procs.activate():
                layout = torch_mesh(procs)
                value = rows_of_all(layout, torch.ones(1, 2))
                assert inspect(value, gpu=1).tolist() == [[2.0, 2.0]]
                get_active_mesh().exit()
        other = this_host().spawn_procs({"gpu": 2})
        with other.activate():
            remote(own_group).call(str(tmp_path / "store")).get(timeout=60)
            with pytest.raises(RuntimeError, match=r"\[0, 1\].*another default process group"):
                torch_mesh(other)
        other.stop().get(timeout=60)
    finally:
        procs.stop().get(timeout=60)


def own_group(path: str) -> None:
    """Make a default group, as a program may do."""
    store = torch.distributed.FileStore(path, 2)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)


def sizes(layout: TorchMesh) -> tuple[int, ...]:
    """Return the sizes of torch's mesh."""
    return tuple(layout.device_mesh().shape)


# -- checkpoints ----------------------------------------------------------------------------------


PLACEMENTS = {"model.0.weight": {"gpu": Shard(0)}, "model.3.weight": {"gpu": Shard(1)}}


def parts(module: torch.nn.Module, procs: Any) -> dict[str, Any]:
    """Return a state in which each process has rows of one weight and columns of the other."""
    count = len(procs)
    with procs.activate():
        rank = procs.rank_tensor("gpu").view(1)
        state = to_mesh(module, procs).state_dict()
        rows = state["0.weight"].view(count, -1, 3).index_select(0, rank)
        columns = state["3.weight"].t().reshape(count, -1, 2).index_select(0, rank)
        shards = {"0.weight": rows.squeeze(0), "3.weight": columns.squeeze(0).t().contiguous()}
    return {"model": {**state, **shards}, "step": 7, "mean": torch.ones(2)}


def test_a_checkpoint_of_two_processes_is_loaded_by_four(tmp_path: Path) -> None:
    """Replicated, sharded along either dimension of a tensor, buffers, numbers and nested names."""
    two, four = (this_host().spawn_procs({"gpu": count}) for count in (2, 4))
    try:
        save(parts(network(), two), tmp_path / "saved", PLACEMENTS)
        empty = parts(network(), four)
        for value in empty["model"].values():
            value.zero_()
        part = empty["model"]["0.weight"]
        empty.update(step=0, mean=torch.zeros(2))
        loaded = load(empty, tmp_path / "saved", PLACEMENTS)
        assert loaded["step"] == 7
        assert loaded["mean"].tolist() == [1.0, 1.0]
        assert loaded["model"]["0.weight"] is part
        expected = network().state_dict()
        for gpu in range(4):
            local = inspect(loaded["model"], gpu=gpu)
            mine = slice(gpu, gpu + 1)
            wanted = {
                **expected,
                "0.weight": expected["0.weight"][mine],
                "3.weight": expected["3.weight"][:, mine],
            }
            for name, value in wanted.items():
                assert torch.equal(local[name], value), name
    finally:
        two.stop().get(timeout=60)
        four.stop().get(timeout=60)
    # The format is that of torch, which makes an ordinary file of it.
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    plain = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert torch.equal(plain["model.0.weight"], expected["0.weight"])


@pytest.mark.skipif(
    "no_dist" not in signature(dcp.load).parameters,
    reason="this torch takes the first process of all for the first one of a part",
)
def test_a_part_of_a_mesh_saves_and_loads(mesh: Any, tmp_path: Path) -> None:
    with mesh.slice(host=0).activate():
        saved = torch.full((2,), 3.0)
        save({"x": saved, "step": 4}, tmp_path)
    with mesh.slice(gpu=1).activate():
        loaded = load({"x": torch.zeros(2), "step": 0}, tmp_path)
        assert inspect(loaded["x"], host=1).tolist() == [3.0, 3.0]
    assert loaded["step"] == 4


def test_a_fresh_optimizer_loads_its_state(procs: Any, tmp_path: Path) -> None:
    """As in torch: `get_optimizer_state_dict` makes the state that a checkpoint fills."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = to_mesh(network(), procs)
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    module, optimizer = made()
    again, fresh = made()
    with procs.activate(), configured(tensor_item="fetch"):
        module(torch.linspace(-1, 1, 18).reshape(6, 3)).pow(2).sum().backward()
        optimizer.step()
        save({"optimizer": get_optimizer_state_dict(module, optimizer)}, tmp_path)
        state = {"optimizer": get_optimizer_state_dict(again, fresh)}
        loaded = load(state, tmp_path)
        set_optimizer_state_dict(again, fresh, loaded["optimizer"])
    assert len(fresh.state) == len(optimizer.state) == len(list(module.parameters()))
    for mine, wanted in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        for name, value in inspect(wanted).items():
            torch.testing.assert_close(inspect(mine[name]), value)


def test_a_state_that_cannot_be_saved_or_loaded(mesh: Any, tmp_path: Path) -> None:
    with mesh.activate():
        tensor = torch.ones(2)
    with pytest.raises(ValueError, match="no distributed tensors"):
        save({"step": 1}, tmp_path)
    with pytest.raises(ValueError, match="in dicts only"):
        save({"parts": [tensor]}, tmp_path)
    with pytest.raises(ValueError, match="has no such tensors"):
        save({"x": tensor}, tmp_path, {"y": {"gpu": Shard(0)}})
    with pytest.raises(ValueError, match="does not have the dimensions"):
        save({"x": tensor}, tmp_path, {"x": {"tp": Shard(0)}})
    with pytest.raises(RemoteException):
        load({"x": tensor}, tmp_path / "nowhere")
    with mesh.activate():
        assert inspect(torch.ones(1)).tolist() == [1.0]


def test_torch_compile_stands_aside_while_a_mesh_is_active(procs: ProcMesh) -> None:
    built: list[Any] = []

    def backend(module: Any, _examples: Any) -> Any:
        built.append(module)
        return module

    @torch.compile(backend=backend)
    def function(x: Any) -> Any:
        return x.sin() + 1

    with procs.activate():
        for _ in range(2):
            assert inspect(function(torch.zeros(3))).tolist() == [1, 1, 1]
        layer = torch.nn.Linear(3, 2)
        layer.compile(backend=backend)
        layer(torch.ones(3)).sum().backward()
        assert inspect(layer.bias.grad).tolist() == [1, 1]
        assert built == []
    assert function(torch.zeros(3)).tolist() == [1, 1, 1]
    assert len(built) == 1


def test_torch_compile_works_in_the_processes(procs: ProcMesh) -> None:
    def compiled(x: Any) -> Any:
        calls: list[Any] = []

        def backend(module: Any, _examples: Any) -> Any:
            calls.append(module)
            return module

        return torch.compile(lambda x: x.cos(), backend=backend)(x) + len(calls)

    with procs.activate():
        made = remote(compiled, propagate=torch.empty_like)(torch.zeros(3))
        assert inspect(made).tolist() == [2, 2, 2]
