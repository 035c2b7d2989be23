"""Pipelines of stages: the same losses and gradients as the whole network in one process."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from monarch import OpaqueRef, Stream, inspect, no_mesh, remote
from monarch._tensors.opaque_module import OpaqueModule
from monarch._tensors.pipelining import PipelineParallelism, get_parameter_udf

pytestmark = pytest.mark.torch


def network() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]


def sgd(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=lr)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("streams", [1, 2])
def test_losses_and_gradients_are_those_of_one_process(
    mesh: Any, schedule: str, streams: int
) -> None:
    layers = network()
    whole = nn.Sequential(*copy.deepcopy(layers))
    optimizer = sgd(whole.parameters(), 0.1)
    compute = Stream("compute")
    other = compute if streams == 1 else Stream("p2p")
    meshes = [mesh.slice(host=0), mesh.slice(host=1)]
    losses: list[Any] = []
    pipeline = PipelineParallelism(
        meshes,
        [layers[:2], layers[2:3], layers[3:]],
        compute,
        other,
        schedule,
        batch_size=8,
        microbatch_size=2,
        loss_fn=nn.CrossEntropyLoss(),
        loss_list=losses,
    )
    pipeline.initialize()
    pipeline.configure_optimizers(0.1, sgd)
    assert [pipeline.stage_to_rank(stage) for stage in range(3)] == [0, 1, 0]
    for _ in range(3):
        x, y = torch.randn(8, 5), torch.randint(3, (8,))
        with meshes[0].activate(), compute.activate():
            given, expected = torch.tensor(x.tolist()), torch.tensor(y.tolist())
        loss = pipeline.run(given, expected)
        optimizer.zero_grad()
        alone = nn.functional.cross_entropy(whole(x), y)
        alone.backward()
        optimizer.step()
        with compute.activate():
            torch.testing.assert_close(inspect(loss, gpu=1), alone.detach())
            parameters = [each for stage in pipeline.stages for each in stage.parameters()]
            for own, theirs in zip(parameters, whole.parameters(), strict=True):
                torch.testing.assert_close(inspect(own.grad), theirs.grad)
    assert len(losses) == 12
    copied = nn.Sequential(*network())
    pipeline.copy_params_to_new_model(copied)
    for own, theirs in zip(copied.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, theirs)


class Noted(torch.autograd.Function):
    """The identity; its backward notes in which steps it is done."""

    steps: ClassVar[list[str]] = []
    step = ""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        Noted.steps.append(Noted.step)
        return gradient


class Note(nn.Module):
    def forward(self, x: Any) -> Any:
        return Noted.apply(x)


class Following(PipelineParallelism):
    """Notes which step is being issued."""

    def run_action(self, action: Any, batch: Any) -> None:
        Noted.step = f"{action.kind}{action.stage}"
        super().run_action(action, batch)


def test_every_stage_divides_its_backward(mesh: Any) -> None:
    """The first one too, whose input is integers: behind the first output with a gradient."""
    layers = [nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    compute = Stream("compute")
    meshes = [mesh.slice(host=0), mesh.slice(host=1)]
    stages: Any = [[layers[0], Note(), layers[1]], [Note(), layers[2]]]
    pipeline = Following(
        *(meshes, stages, compute, compute, "zero-bubble"),
        batch_size=4,
        microbatch_size=2,
        loss_fn=nn.CrossEntropyLoss(),
    )
    pipeline.initialize()
    Noted.steps.clear()
    with compute.activate():
        with meshes[0].activate():
            given = torch.tensor([1, 2, 3, 4])
        with meshes[1].activate():
            expected = torch.tensor([0, 1, 2, 0])
        pipeline.run(given, expected)
        own = [inspect(each.grad) for stage in pipeline.stages for each in stage.parameters()]
    assert sorted(Noted.steps) == ["I0", "I0", "I1", "I1"]
    nn.functional.cross_entropy(
        whole(torch.tensor([1, 2, 3, 4])), torch.tensor([0, 1, 2, 0])
    ).backward()
    for mine, parameter in zip(own, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_modules_that_are_in_the_processes_or_on_the_whole_mesh(mesh: Any) -> None:
    """The first stage is of `OpaqueModule`s, the second has an `OpaqueRef`, the third is moved."""
    compute = Stream("compute")
    meshes = [mesh.slice(host=0), mesh.slice(host=1)]

    def made(layer: Any) -> Any:
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 0.25)
        return layer

    with compute.activate():
        with meshes[0].activate():
            first = OpaqueModule(lambda: made(nn.Linear(2, 3)))
        with meshes[1].activate():
            second = remote(
                lambda: OpaqueRef(made(nn.Linear(3, 3))), propagate=lambda: OpaqueRef(None)
            )()
        with mesh.activate():
            third = made(nn.Linear(3, 1))
    stages: Any = [[first, nn.Tanh()], [second], [third]]
    pipeline = PipelineParallelism(
        *(meshes, stages, compute, compute, "dora-dfs"), loss_fn=nn.functional.mse_loss
    )
    pipeline.initialize()
    pipeline.configure_optimizers(0.1, sgd)
    with meshes[0].activate(), compute.activate():
        given, expected = torch.ones(4, 2), torch.ones(4, 1)
        losses = [inspect(pipeline.run(given, expected)).item() for _ in range(3)]
    alone = nn.Sequential(
        made(nn.Linear(2, 3)), nn.Tanh(), made(nn.Linear(3, 3)), made(nn.Linear(3, 1))
    )
    optimizer = sgd(alone.parameters(), 0.1)
    for loss in losses:
        optimizer.zero_grad()
        own = nn.functional.mse_loss(alone(torch.ones(4, 2)), torch.ones(4, 1))
        assert loss == pytest.approx(own.item(), rel=1e-4)
        own.backward()
        optimizer.step()


def test_an_opaque_module_on_another_mesh_than_its_stage(mesh: Any) -> None:
    compute = Stream("compute")
    with mesh.activate(), compute.activate():
        module = OpaqueModule(nn.ReLU)
    stages: Any = [[module]]
    pipeline = PipelineParallelism([mesh.slice(host=0)], stages, compute, compute)
    with pytest.raises(ValueError, match="OpaqueModule of stage 0 is on"):
        pipeline.initialize()


def test_a_parameter_of_a_module_in_the_processes(active: Any) -> None:
    made = remote(lambda: OpaqueRef(nn.Linear(2, 3)), propagate=lambda: OpaqueRef(None))
    found = get_parameter_udf(made(), "weight", (3, 2))
    assert tuple(inspect(found).shape) == (3, 2)


def test_what_a_pipeline_refuses(mesh: Any) -> None:
    stream = Stream("compute")
    with pytest.raises(ValueError, match="unknown schedule 'best'"):
        PipelineParallelism([mesh], [[nn.ReLU()]], stream, stream, "best")
    with pytest.raises(ValueError, match="multiple of microbatch_size"):
        PipelineParallelism([mesh], [[nn.ReLU()]], stream, stream, batch_size=3, microbatch_size=2)
    with pytest.raises(TypeError, match="list of modules"):
        PipelineParallelism([mesh], [[torch.relu]], stream, stream)  # type: ignore[list-item]
    pipeline = PipelineParallelism([mesh], [[nn.ReLU()]], stream, stream)
    with no_mesh.activate(), pytest.raises(ValueError, match="has 3 rows"):
        pipeline.run(torch.ones(3, 1), torch.ones(3))
