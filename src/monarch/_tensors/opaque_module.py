"""`OpaqueModule`: a module of torch in each process, whose graph the processes keep.

For the autograd of the script a call of the module is one node. Its forward records the real graph
in each process, as an opaque object; its backward computes the gradients of the arguments and the
parameters there. So the script needs to know the shape of the result only, not the operations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.opaque_object import OpaqueObject
from monarch._tensors.opaque_ref import OpaqueRef
from monarch._tensors.remote import Remote, call_on_shard_and_fetch, remote
from monarch._tensors.second_derivative import without_second_derivative

__all__ = ["OpaqueModule"]

_KEPT = 256  # propagate functions whose remote functions are kept


class OpaqueModule:
    """A module in each process of the active mesh, made by ``constructor(*args, **kwargs)`` there.

    It is no `torch.nn.Module`: `parameters` and calls are what it has. For other methods use
    `call_method`.

    Args:
        constructor: a class, a function, or the path of one; or an `OpaqueRef` of modules.
        *args: arguments; a distributed tensor is the local one there.
        **kwargs: the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        constructor, *rest = args
        self._object = OpaqueObject(constructor, *rest, **kwargs)
        self._parameters: list[Any] | None = None
        self._learning = remote(_run)  # what it returns is remembered for this module

    def __repr__(self) -> str:
        return f"<OpaqueModule {self._object._key!r}>"

    @property
    def mesh(self) -> Any:
        """The mesh whose processes have the modules."""
        return self._object._key.mesh

    def parameters(self) -> list[Any]:
        """Return the parameters, as distributed tensors with the storage of the real ones.

        The first call blocks, to fetch their shapes. An optimizer may change them in place.
        """
        if self._parameters is None:
            handle = self._object._handle()
            shapes = tuple(call_on_shard_and_fetch(_shapes, handle).get())
            found = remote(_get_parameters, propagate=functools.partial(_like, shapes))(handle)
            self._parameters = [
                tensor.requires_grad_(needs)
                for tensor, (*_, needs) in zip(found, shapes, strict=True)
            ]
        return list(self._parameters)

    def call_method(self, method_name: str, propagator: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of each module; return what `propagator` says.

        Gradients flow to the arguments and the parameters. `propagator` is called with this object
        and the arguments, on fake tensors, as ``lambda self, x: x.clone()``. None: the first call
        of its kind shows what comes back, and blocks for that.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [leaves[number] for number in numbers]
        rest = [None if number in numbers else leaf for number, leaf in enumerate(leaves)]
        call = _Call(self, method_name, propagator, tuple(numbers), rest, spec)
        parameters = self.parameters()
        needs = tuple(tensor.requires_grad for tensor in (*parameters, *inputs))
        if torch.is_grad_enabled() and any(needs):
            outputs = _Node.apply(call, *parameters, *inputs)
        else:
            outputs, _ = call.run(needs, torch.is_grad_enabled(), inputs)
        return call.whole(outputs)

    def __call__(self, *args: Any, propagator: Any = None, **kwargs: Any) -> Any:
        """Call each module; see `call_method`."""
        return self.call_method("__call__", propagator, *args, **kwargs)


class _Call:
    """One call of a module, from the script."""

    def __init__(
        self,
        module: OpaqueModule,
        method: str,
        propagator: Any,
        numbers: tuple[int, ...],
        rest: list[Any],
        spec: Any,
    ) -> None:
        self._module = module
        self._method = method
        self._propagator = propagator
        self._numbers = numbers
        self._rest = rest
        self._spec = spec
        self._shape: Any = None

    def run(
        self, needs: tuple[bool, ...], is_recorded: bool, inputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Run the method; return its tensors, and the graph if an argument needs a gradient.

        Args:
            needs: which parameters and inputs require a gradient.
            is_recorded: whether gradients are enabled.
            inputs: the tensors among the arguments.
        """
        leaves = list(self._rest)
        for number, tensor in zip(self._numbers, inputs, strict=True):
            leaves[number] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        module = self._module
        function = module._learning
        if self._propagator is not None:
            function = _runner(weakref.ref(module), self._propagator)
        handle = module._object._handle()
        result, tape = function(handle, self._method, needs, is_recorded, args, kwargs)
        found, self._shape = pytree.tree_flatten(result)
        return tuple(found), tape

    def whole(self, outputs: Any) -> Any:
        """Return the structure of the result."""
        return pytree.tree_unflatten(list(outputs), self._shape)


class _Node(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    """The node of one call in the graph of the script."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        count = len(call._module.parameters())
        ctx.needs = tuple(ctx.needs_input_grad[1:])
        ctx.module = call._module
        outputs, ctx.tape = call.run(ctx.needs, True, tensors[count:])
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = list(ctx.saved_tensors)
        computed = _run_backward(ctx.tape, list(grads), saved, ctx.needs)
        found = iter(without_second_derivative(str(ctx.module), computed, (*grads, *saved)))
        return (None, *(next(found) if needs else None for needs in ctx.needs))


class _Tape:
    """The graph of one call, in a process: what went in and what came out."""

    def __init__(self, inputs: list[Any], outputs: list[Any]) -> None:
        self.inputs = inputs
        self.outputs = outputs


def _run(
    module: OpaqueRef,
    method: str,
    needs: tuple[bool, ...],
    is_recorded: bool,
    args: Any,
    kwargs: Any,
) -> tuple[Any, OpaqueRef]:
    """Call the method in a process; return its result, and the graph."""
    parameters = list(module.value.parameters())
    leaves, spec = pytree.tree_flatten((args, kwargs))
    flags = iter(needs[len(parameters) :])
    given = [
        leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(given, spec)
    with torch.set_grad_enabled(is_recorded):
        result = getattr(module.value, method)(*args, **kwargs)
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    inputs = [t for t, need in zip([*parameters, *tensors], needs, strict=True) if need]
    tape = OpaqueRef(_Tape(inputs, outputs) if is_recorded and inputs else None)
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result
    ), tape


class _Rule:
    """The rule for the results of `_run`, made of the propagator of the program."""

    def __init__(self, module: weakref.ref[OpaqueModule], propagator: Callable[..., Any]) -> None:
        self._module = module
        self._propagator = propagator

    def __call__(
        self,
        module: OpaqueRef,
        method: str,
        needs: tuple[bool, ...],
        is_recorded: bool,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return self._propagator(self._module(), *args, **kwargs), OpaqueRef(None)


@functools.lru_cache(maxsize=_KEPT)
def _runner(module: weakref.ref[OpaqueModule], propagator: Callable[..., Any]) -> Remote:
    """Return the remote function of a module that has the results of `propagator`.

    Each module has its own, since the results may depend on it. The cache does not keep it alive.
    """
    return remote(_run, propagate=_Rule(module, propagator))


def _gradients(
    tape: OpaqueRef, grads: list[Any], _tensors: list[Any], _needs: tuple[bool, ...]
) -> list[Any]:
    """Compute the gradients of what needs one, in a process; zeros for what was not used."""
    graph = tape.value
    pairs = [
        (output, grad)
        for output, grad in zip(graph.outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        graph.inputs,
        [grad for _, grad in pairs],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def _fake_gradients(
    _tape: OpaqueRef, _grads: list[Any], tensors: list[Any], needs: tuple[bool, ...]
) -> list[Any]:
    return [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need]


_run_backward = remote(_gradients, propagate=_fake_gradients)


def _get_parameters(module: OpaqueRef) -> list[Any]:
    return [parameter.detach() for parameter in module.value.parameters()]


def _like(shapes: tuple[Any, ...], _module: OpaqueRef) -> list[Any]:
    return [
        torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, stride, dtype, device, _ in shapes
    ]


def _shape_of_each(module: OpaqueRef) -> list[Any]:
    return [
        (tuple(p.shape), p.stride(), p.dtype, p.device, p.requires_grad)
        for p in module.value.parameters()
    ]


_shapes = remote(_shape_of_each, propagate="inspect")
