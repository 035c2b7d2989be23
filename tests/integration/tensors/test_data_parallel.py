"""`data_parallel` averages gradients as DistributedDataParallel does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from monarch import inspect, no_mesh, remote, to_mesh
from monarch._tensors.errors import Misplaced, RemoteException
from monarch.parallel import data_parallel

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

pytestmark = pytest.mark.torch

PLACES = [(host, gpu) for host in range(2) for gpu in range(2)]


def network() -> Any:
    with no_mesh.activate():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)
        )


X, Y = torch.randn(8, 4), torch.randn(8, 2)


def alone(steps: int) -> list[Any]:
    """Return the weights after steps with the whole batch, in plain torch."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 100, 25 << 20])
def test_parts_of_a_batch_train_as_the_whole(bucket_bytes: int, procs: ProcMesh) -> None:
    with procs.activate():
        model = data_parallel(to_mesh(network(), procs), ("host", "gpu"), bucket_bytes=bucket_bytes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        x, y = to_mesh((X, Y), procs, shard={"host": 0, "gpu": 0})
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        for host, gpu in PLACES:
            for found, wanted in zip(
                inspect(list(model.parameters()), host=host, gpu=gpu), alone(3), strict=True
            ):
                torch.testing.assert_close(found, wanted.detach())


def test_a_module_made_on_the_mesh_begins_alike(procs: ProcMesh) -> None:
    with procs.activate():
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        data_parallel(model, "gpu")
        state = [inspect(model.state_dict(), host=1, gpu=gpu) for gpu in (0, 1)]
        assert all(map(torch.equal, state[0].values(), state[1].values()))
        other = inspect(model[0].weight, host=0, gpu=0)
        with no_mesh.activate():
            assert not torch.equal(other, state[0]["0.weight"])


def test_gradients_add_up_without_being_averaged(procs: ProcMesh) -> None:
    with procs.activate():
        model = data_parallel(to_mesh(network(), procs), ())
        x, y = to_mesh((X, Y), procs, shard={"host": 0, "gpu": 0})
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        assert not torch.equal(*(inspect(model[0].weight.grad, host=0, gpu=g) for g in (0, 1)))
        F.mse_loss(model(x), y).backward()
        found = [inspect(model[0].weight.grad, host=h, gpu=g) for h, g in PLACES]
        with no_mesh.activate():
            plain = network()
            (2 * F.mse_loss(plain(X), Y)).backward()
            for gradient in found:
                torch.testing.assert_close(gradient, plain[0].weight.grad)


def test_parameters_that_are_not_used_keep_their_gradient(procs: ProcMesh) -> None:
    with procs.activate():
        model = data_parallel(to_mesh(network(), procs), "gpu")
        model[0](torch.ones(1, 4)).sum().backward()
        assert model[2].weight.grad is None
        assert inspect(model[0].bias.grad).tolist() == [1] * 6


def test_a_gradient_that_is_lost_is_lost_everywhere_and_the_next_is_not(procs: ProcMesh) -> None:
    def fail(x: Any) -> Any:
        if torch.distributed.is_available() and int(x[0, 0]) == 1:
            raise ValueError("no value on this process")
        return x.clone()

    with procs.activate():
        model = data_parallel(to_mesh(network(), procs), ("host", "gpu"))
        rank = 2 * procs.rank_tensor("host") + procs.rank_tensor("gpu")
        bad = remote(fail, propagate=lambda x: x.clone())(torch.ones(2, 4) * rank)
        model(bad).sum().backward()
        with pytest.raises(RemoteException, match="no value on this process"):
            inspect(model[0].weight.grad, host=1, gpu=1)
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert inspect(model[3].bias.grad, host=1, gpu=1).tolist() == [2, 2]


def test_mistakes_are_named(procs: ProcMesh) -> None:
    with pytest.raises(Misplaced, match="LOCAL_TENSOR"):
        data_parallel(network(), "gpu")
    with procs.activate():
        model = to_mesh(network(), procs)
        with pytest.raises(KeyError, match="dim other not found"):
            data_parallel(model, "other")
        data_parallel(model, "gpu")
        with pytest.raises(ValueError, match="is data parallel already"):
            data_parallel(model, "gpu")
        with pytest.raises(ValueError, match="require a gradient"):
            data_parallel(to_mesh(network(), procs).requires_grad_(False), "gpu")
