"""`PipelineParallelism`: a network whose layers are on several meshes, trained in micro-batches.

The script issues the steps of all stages in one order (`core.schedule`), and never waits. Each
stage computes on one stream, and passes activations and gradients on by another one. A tensor that
is passed on stays borrowed until the next stage takes it, so the copy runs beside computation.

A schedule may divide a backward: `GradientGenerator` gives the gradient of the stage's input, which
is passed on, and does the rest of its work when the gradients of the weights are asked for. The
first stage passes nothing on, and its input may be integers. Its backward is divided at the output
of its first module that has a gradient, so a stage of one module has no first part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from monarch._tensors.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    SCHEDULES,
    WEIGHTS,
    Action,
    schedule,
)
from monarch._tensors.fetch import inspect
from monarch._tensors.gradient import grad_generator
from monarch._tensors.mesh import no_mesh
from monarch._tensors.opaque_module import OpaqueModule
from monarch._tensors.opaque_ref import OpaqueRef
from monarch._tensors.remote import remote
from monarch._tensors.transfer import to_mesh

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.stream import Stream

__all__ = ["PipelineParallelism", "get_parameter_udf"]


class PipelineParallelism:
    """A network divided into stages, each on the processes of a mesh.

    Args:
        meshes: meshes of the same shape, which share no process.
        stages: the modules of each stage, which are applied in order. Stage number i is on the mesh
            number ``i % len(meshes)``. An `OpaqueModule`, or an `OpaqueRef` of modules, was made on
            that mesh and on the compute stream.
        compute_stream: where the stages compute.
        p2p_stream: where tensors are passed on; it may be the same.
        schedule: "zero-bubble" or "dora-dfs" (the same), "1f1b", or "gpipe".
        batch_size: the length of the first dimension of what `run` gets.
        microbatch_size: the same of the parts into which that is divided.
        loss_fn: called with the output of the last stage and what is expected; without it the
            output of the last stage is the loss.
        loss_list: the loss of each micro-batch is appended to it.

    Raises ValueError for an unknown schedule, and for sizes that do not divide.
    """

    def __init__(
        self,
        meshes: list[DeviceMesh],
        stages: list[list[torch.nn.Module | OpaqueModule | OpaqueRef]],
        compute_stream: Stream,
        p2p_stream: Stream,
        schedule: str = "dora-dfs",
        batch_size: int = 4,
        microbatch_size: int = 1,
        loss_fn: Any = None,
        loss_list: list[Any] | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: use one of {', '.join(SCHEDULES)}")
        if microbatch_size < 1 or batch_size % microbatch_size:
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of microbatch_size {microbatch_size}"
            )
        for module in (module for stage in stages for module in stage):
            if not isinstance(module, torch.nn.Module | OpaqueModule | OpaqueRef):
                raise TypeError(f"a stage is a list of modules of torch, and has {module!r}")
        self.meshes = list(meshes)
        self.stages = [_Stage(stage) for stage in stages]
        self.compute_stream = compute_stream
        self.p2p_stream = p2p_stream
        self.schedule = schedule
        self.batch_size = batch_size
        self.microbatch_size = microbatch_size
        self.loss_fn = loss_fn
        self.loss_list = loss_list
        self.optimizers: list[Any] = []

    def stage_to_rank(self, stage: int) -> int:
        """Return the number of the mesh that has a stage."""
        return stage % len(self.meshes)

    def initialize(self) -> None:
        """Move the parameters and buffers of each stage to its mesh; once, before the first run.

        They may be ordinary tensors, or be on a mesh of which that of the stage is a part: then
        each process keeps its own. Blocks for an `OpaqueModule`, to fetch the shapes of its
        parameters. Raises ValueError for one that is elsewhere.
        """
        with self.compute_stream.activate():
            for number, stage in enumerate(self.stages):
                mesh = self._mesh(number)
                for module in stage.modules:
                    if isinstance(module, OpaqueModule):
                        _check_place(module, number, mesh)
                    else:
                        to_mesh(module, mesh, self.compute_stream)

    def configure_optimizers(self, config: Any, fn: Callable[[Any, Any], Any]) -> list[Any]:
        """Make the optimizer of each stage, ``fn(parameters, config)``; return them.

        From then on each run begins with their ``zero_grad()`` and ends with their ``step()``.
        """
        with self.compute_stream.activate():
            self.optimizers = [fn(list(stage.parameters()), config) for stage in self.stages]
        return self.optimizers

    def copy_params_to_new_model(self, model: torch.nn.Module) -> None:
        """Copy all parameters into those of a local module, in order; blocks."""
        with self.compute_stream.activate():
            own = [each for stage in self.stages for each in stage.parameters()]
        theirs = list(model.parameters())
        if [each.shape for each in own] != [each.shape for each in theirs]:
            raise ValueError("the module does not have the parameters of the stages, in order")
        with self.compute_stream.activate():
            values = [inspect(each.detach()) for each in own]
        with no_mesh.activate(), torch.no_grad():
            for target, value in zip(theirs, values, strict=True):
                target.copy_(value)

    def split_inputs_outputs(self, x: Any, y: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the micro-batches of what is given and of what is expected."""
        if x.shape[0] != self.batch_size:
            raise ValueError(f"the batch has {x.shape[0]} rows, and batch_size={self.batch_size}")
        return x.split(self.microbatch_size), y.split(self.microbatch_size)

    def generate_pipeline_ir_schedule(self, name: str | None = None) -> list[Action]:
        """Return the steps of a run, in the order in which they are issued."""
        count = self.batch_size // self.microbatch_size
        return schedule(name or self.schedule, len(self.stages), count)

    def run(self, x: Any, y: Any) -> Any:
        """Take a batch forward and backward; return the mean of the losses of its micro-batches.

        `x` is on the mesh of the first stage, `y` on that of the last; both are on the compute
        stream. Gradients are added to those of the parameters. Does not block: the loss is a
        distributed tensor, on the mesh of the last stage.
        """
        with self.compute_stream.activate():
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.dispatch_pp_schedule(self.generate_pipeline_ir_schedule(), x, y)
            with no_mesh.activate():  # counters of steps are tensors of this script
                for optimizer in self.optimizers:
                    optimizer.step()
        return loss

    def dispatch_pp_schedule(self, actions: Iterable[Action], x: Any, y: Any) -> Any:
        """Issue the steps of a run; see `run`."""
        batch = _Batch(*self.split_inputs_outputs(x, y))
        for action in actions:
            self.run_action(action, batch)
        return torch.stack(batch.losses).mean()

    def run_action(self, action: Action, batch: Any) -> None:
        """Issue one step of a run."""
        with self._mesh(action.stage).activate(), self.compute_stream.activate():
            self._steps[action.kind](self, action, batch)

    def _forward(self, action: Action, batch: _Batch) -> None:
        stage, _, number = action
        passed = batch.passed.pop(action, None)
        given = batch.x[number] if passed is None else passed.take().requires_grad_()
        entry, output = self.stages[stage].run(given)
        if stage + 1 < len(self.stages):
            target = Action(stage + 1, FORWARD, number)
            batch.passed[target] = _Passed(self, output.detach(), target.stage)
        else:
            loss = output if self.loss_fn is None else self.loss_fn(output, batch.y[number])
            batch.losses.append(loss.detach())
            if self.loss_list is not None:
                self.loss_list.append(loss.detach())
            output = loss / len(batch.x)
        batch.kept[stage, number] = entry, output

    def _backward(self, action: Action, batch: _Batch) -> None:
        stage, _, number = action
        entry, output = batch.kept.pop((stage, number))
        passed = batch.passed.pop(action, None)
        torch.autograd.backward(output, None if passed is None else passed.take())
        if stage:
            self._pass_back(action, entry.grad, batch)

    def _input(self, action: Action, batch: _Batch) -> None:
        """Do the part of a backward that the stage before waits for."""
        stage, _, number = action
        entry, output = batch.kept.pop((stage, number))
        passed = batch.passed.pop(action, None)
        weights = [each for each in self.stages[stage].parameters() if each.requires_grad]
        inputs = [] if entry is None else [entry]
        gradients = grad_generator(
            output, [*inputs, *weights], [None if passed is None else passed.take()]
        )
        batch.begun[stage, number] = weights, gradients
        for gradient in itertools.islice(gradients, len(inputs)):
            if stage:
                self._pass_back(action, gradient, batch)

    def _weights(self, action: Action, batch: _Batch) -> None:
        """Do the rest of a backward."""
        weights, gradients = batch.begun.pop((action.stage, action.micro_batch))
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _pass_back(self, action: Action, gradient: Any, batch: _Batch) -> None:
        target = Action(action.stage - 1, action.kind, action.micro_batch)
        batch.passed[target] = _Passed(self, gradient, target.stage)

    _steps: ClassVar[dict[str, Callable[[Any, Action, Any], None]]] = {
        FORWARD: _forward,
        BACKWARD: _backward,
        INPUT: _input,
        WEIGHTS: _weights,
    }

    def _mesh(self, stage: int) -> DeviceMesh:
        return self.meshes[self.stage_to_rank(stage)]


class _Stage:
    """The modules of one stage."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self.modules = [
            OpaqueModule(module) if isinstance(module, OpaqueRef) else module for module in modules
        ]

    def run(self, value: Any) -> tuple[Any, Any]:
        """Apply the modules in order; return the first value that has a gradient, and the last.

        The first may be `value` itself, or None if all parameters are frozen.
        """
        values = [value]
        for module in self.modules:
            values.append(module(values[-1]))
        entries = (each for each in values if getattr(each, "requires_grad", False))
        return next(entries, None), values[-1]

    def parameters(self) -> Iterator[Any]:
        """Return the parameters of all modules, each once."""
        found = {id(each): each for module in self.modules for each in module.parameters()}
        return iter(found.values())


def _check_place(module: OpaqueModule, number: int, mesh: DeviceMesh) -> None:
    """Raise ValueError unless the modules in the processes are those of the stage's mesh."""
    if module.mesh is not mesh:
        raise ValueError(
            f"the OpaqueModule of stage {number} is on {module.mesh!r}, and the stage on {mesh!r}; "
            "make it while that mesh is active"
        )


class _Batch:
    """The state of one run."""

    def __init__(self, x: Sequence[Any], y: Sequence[Any]) -> None:
        self.x = x
        self.y = y
        self.passed: dict[Action, _Passed] = {}  # by the step that takes it
        self.kept: dict[tuple[int, int], tuple[Any, Any]] = {}  # by stage and micro-batch
        self.begun: dict[tuple[int, int], tuple[list[Any], Iterator[Any]]] = {}  # the same
        self.losses: list[Any] = []


class _Passed:
    """A tensor on its way to the mesh of another stage."""

    def __init__(self, pipeline: PipelineParallelism, tensor: Any, stage: int) -> None:
        self._pipeline = pipeline
        self._borrow: Any = None
        mesh = pipeline._mesh(stage)
        if pipeline.p2p_stream is pipeline.compute_stream:
            self._tensor = to_mesh(tensor, mesh)
            return
        borrowed, self._borrow = pipeline.p2p_stream.borrow(tensor)
        with pipeline.p2p_stream.activate():
            self._tensor = to_mesh(borrowed, mesh)

    def take(self) -> Any:
        """Return the tensor, on the mesh and the stream of the stage that takes it."""
        if self._borrow is None:
            return self._tensor
        self._borrow.drop()
        lent, borrow = self._pipeline.compute_stream.borrow(self._tensor)
        with borrow:
            return lent.clone()


def get_parameter(module_ref: Any, param_name: str, param_shape: tuple[int, ...]) -> Any:
    """Return a parameter of a module of this process, or of the `OpaqueRef` of one."""
    module = module_ref.value if isinstance(module_ref, OpaqueRef) else module_ref
    found = module.get_parameter(param_name).detach()
    if tuple(found.shape) != tuple(param_shape):
        raise ValueError(f"{param_name} has the shape {list(found.shape)}, not {param_shape}")
    return found


def _fake_parameter(_module_ref: Any, _param_name: str, param_shape: tuple[int, ...]) -> Any:
    return torch.empty(param_shape)


get_parameter_udf = remote(get_parameter, propagate=_fake_parameter)
"""`get_parameter` as a remote function: it returns one parameter of a stage as a tensor."""
