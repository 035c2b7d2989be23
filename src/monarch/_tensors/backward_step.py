"""One node of a backward graph, run outside torch's own backward pass, and the sums between nodes.

torch's engine runs a node as part of a pass over the whole graph. Here a `Step` runs one node, for
those of its outputs that are due, and everything that the engine does around a node is done here:

- A node reads the sums of its inputs (`GradientSum`) once, when the first of its outputs is due.
- Hooks of the tensor, then pre-hooks of the node see these gradients once, and may replace them.
- The node computes the outputs that the surrounding pass declares (see `gradient`).
- A gradient is brought to the shape and the dtype of the tensor that it belongs to.
- Post-hooks of the node see all outputs at once. So a node that has post-hooks runs one time, for
  all outputs. So does a Python function, which cannot leave out outputs.
- After its last output, saved tensors are released: a pack hook takes the place of each, and keeps
  nothing. A further backward pass then fails as it does after torch's own.

Two things cannot be seen from Python. A C++ node keeps its hooks of tensors to itself, so they are
run by torch: a pass of its engine from the input of a node to the same input runs them and not the
node. And a Python function does not say whether it asked for undefined gradients
(`set_materialize_grads(False)`): it gets zeros here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["GradientSum", "Step", "engine_pass", "run_tensor_hooks"]


class GradientSum:
    """The gradient of one input of a node, or of a leaf: the sum of what its feeders compute."""

    __slots__ = ("edge", "feeders", "group", "leaf", "reader", "requests", "seen_by_hooks", "total")

    def __init__(self, edge: Any, leaf: Any) -> None:
        self.edge = edge  # None for a leaf that no node feeds
        self.leaf = leaf  # the tensor if it is a leaf
        self.feeders: list[tuple[Step, int]] = []  # steps and the numbers of their outputs
        self.group = [self]  # the sums for all inputs of one node; hooks see them together
        self.reader: Step | None = None
        self.requests = 0  # entries of the caller that are still to be served
        self.seen_by_hooks = False
        self.total: Any = None

    def add(self, gradient: Any) -> None:
        """Add a gradient; None adds nothing."""
        if gradient is None:
            return
        if self.total is None:
            self.total = gradient
        elif self.total.is_sparse and not gradient.is_sparse:
            self.total = gradient + self.total  # torch has only this order
        else:
            self.total = self.total + gradient

    def metadata(self) -> Any:
        """Return what autograd knows of the tensor: shape, dtype, device."""
        return self.edge.node._input_metadata[self.edge.output_nr]


class Step:
    """A node, what it reads and what it feeds."""

    __slots__ = ("_gradients", "due", "inputs", "node", "order", "outputs", "whole")

    def __init__(self, node: Any, order: int, outputs: dict[int, GradientSum]) -> None:
        self.node: Any = node
        self.order = order
        self.inputs: list[GradientSum | None] = [None] * len(node._input_metadata)
        self.outputs = outputs
        self.due = set(outputs)  # outputs that some gradient needs and that are not computed yet
        self.whole = isinstance(node, torch.autograd.function.BackwardCFunction)
        self._gradients: tuple[Any, ...] | None = None

    @property
    def started(self) -> bool:
        """Whether the node has read its inputs."""
        return self._gradients is not None

    def outputs_for(self, wanted: set[int]) -> set[int]:
        """Return the outputs to compute if some are wanted: these, or all of them."""
        return set(self.due) if self.whole or _post_hooks(self.node) else wanted

    def fed_by(self, outputs: set[int]) -> list[GradientSum]:
        """Return the sums that these outputs go to."""
        return [self.outputs[number] for number in outputs]

    def run(self, wanted: set[int]) -> None:
        """Compute outputs and add them to the sums that they feed."""
        if self._gradients is None:
            self._gradients = self._read()
        call = _call_function if self.whole else _call_node
        outputs = list(call(self.node, self._gradients))
        for number, fed in self.outputs.items():
            outputs[number] = _fit(outputs[number], fed.metadata(), self.node, number)
        if hooks := _post_hooks(self.node):
            outputs = _run_post_hooks(hooks, outputs, self._gradients)
        for number in sorted(self.due):
            # A node may compute more than it was asked for. None then says that it did not.
            if number in wanted or outputs[number] is not None:
                self.outputs[number].add(outputs[number])
                self.due.remove(number)
        if not self.due:
            self._finish()

    def _read(self) -> tuple[Any, ...]:
        sums = self.inputs
        run_tensor_hooks([each for each in sums if each is not None])
        gradients = tuple(None if each is None else each.total for each in sums)
        for each in sums:
            if each is not None and not each.requests:
                each.total = None
        for hook in _hooks_of(self.node.register_prehook):
            replaced = hook(gradients)
            if replaced is not None:
                gradients = _checked(replaced, len(gradients), hook)
        return gradients

    def _finish(self) -> None:
        _release(self.node)
        self.clear()

    def clear(self) -> None:
        """Forget the node and the sums around it."""
        self._gradients, self.inputs, self.outputs, self.node = (), [], {}, None


def run_tensor_hooks(sums: Iterable[GradientSum]) -> None:
    """Let the hooks of tensors see their complete gradients, once, and replace them."""
    fresh = [each for each in sums if not each.seen_by_hooks and each.total is not None]
    for each in fresh:
        each.seen_by_hooks = True
        if each.leaf is not None:
            for hook in list((each.leaf._backward_hooks or {}).values()):
                replaced = hook(each.total)
                if replaced is not None:
                    each.total = replaced
    if inner := [each for each in fresh if each.leaf is None]:
        edges = tuple(each.edge for each in inner)
        totals = engine_pass(edges, tuple(each.total for each in inner), edges)
        for each, total in zip(inner, totals, strict=True):
            each.total = total


def engine_pass(
    roots: tuple[Any, ...], gradients: tuple[Any, ...], ends: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Let torch's engine run from `roots` to `ends`, and return the gradients that arrive.

    `torch.autograd.grad` does the same and takes five times as long to check its arguments.
    """
    engine = torch.autograd.Variable._execution_engine
    # The flags: keep the graph, record no graph of the pass, allow ends that are not reached.
    arrived: tuple[Any, ...] = engine.run_backward(
        roots, gradients, True, False, ends, True, accumulate_grad=False
    )
    return arrived


def _call_node(node: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a node of C++."""
    computed = node(*gradients)
    return computed if isinstance(computed, tuple) else (computed,)


def _call_function(node: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run the backward of an `autograd.Function`; return one gradient for each tensor it was given.

    A gradient that is returned for an argument that is no tensor has no place to go, as in torch.
    """
    filled = list(gradients)
    known = next((each for each in gradients if each is not None), None)
    for number, about in enumerate(node._input_metadata):
        if filled[number] is None:
            # From another gradient, so that zeros are the same kind of tensor.
            zeros = torch.zeros if known is None else known.new_zeros
            filled[number] = zeros(about.shape, dtype=about.dtype, device=about.device)
    computed = node.apply(*filled)
    if not isinstance(computed, tuple):
        computed = (computed,)
    # One gradient for each argument of forward; edges exist for its tensors only.
    needed = node.needs_input_grad
    surplus = computed[len(needed) :]
    if len(computed) < len(needed) or any(each is not None for each in surplus):
        raise RuntimeError(
            f"function {node.name()} returned an incorrect number of gradients (expected "
            f"{len(needed)}, got {len(computed)})"
        )
    for place, (each, need) in enumerate(zip(computed, needed, strict=False)):
        if need and not (each is None or isinstance(each, torch.Tensor)):
            raise TypeError(
                f"function {node.name()} returned a {type(each).__name__} as gradient {place}; "
                f"expected a tensor or None"
            )
    gradients_in_order = iter([each for each, need in zip(computed, needed, strict=False) if need])
    return tuple(
        None if fed is None else next(gradients_in_order) for fed, _ in node.next_functions
    )


def _fit(gradient: Any, about: Any, node: Any, number: int) -> Any:
    """Return a gradient in shape, dtype and device of the tensor it belongs to."""
    if gradient is None:
        return None
    if not about.is_nested_tensor and gradient.shape != about.shape:
        try:
            gradient = gradient.sum_to_size(about.shape)  # the tensor was broadcast
        except RuntimeError as error:
            raise RuntimeError(
                f"function {node.name()} returned an invalid gradient at index {number}: got shape "
                f"{list(gradient.shape)}, expected one compatible with {list(about.shape)}"
            ) from error
    if gradient.dtype != about.dtype:
        if gradient.is_complex() and not about.dtype.is_complex:
            gradient = torch.real(gradient)
        gradient = gradient.to(about.dtype)
    if gradient.device != about.device:
        if gradient.dim():
            raise RuntimeError(
                f"function {node.name()} returned an invalid gradient at index {number}: it is on "
                f"device {gradient.device}, expected {about.device}"
            )
        gradient = gradient.to(about.device)  # a scalar of the CPU may mix with any device
    return gradient


def _hooks_of(register: Any) -> list[Any]:
    """Return the hooks of a node, read from the dictionary that a handle of a hook refers to."""
    handle = register(_no_hook)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return list(hooks.values())


def _no_hook(*_: Any) -> None:
    """Change nothing."""


def _post_hooks(node: Any) -> list[Any]:
    return _hooks_of(node.register_hook)


def _run_post_hooks(hooks: list[Any], outputs: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
    given = tuple(outputs)
    for hook in hooks:
        replaced = hook(given, inputs)
        if replaced is not None:
            given = _checked(replaced, len(given), hook)
    return list(given)


def _checked(replaced: Any, count: int, hook: Any) -> tuple[Any, ...]:
    """Return what a hook returned as a tuple of as many gradients as it got."""
    several: tuple[Any, ...] = replaced if isinstance(replaced, tuple) else (replaced,)
    if len(several) != count:
        raise RuntimeError(
            f"hook {getattr(hook, '__name__', hook)!r} has returned an incorrect number of values "
            f"(got {len(several)}, but expected {count})"
        )
    return several


_saved: dict[type, list[str]] = {}  # names of the saved tensors of a class of nodes


def _release(node: Any) -> None:
    kind = type(node)
    if kind not in _saved:
        _saved[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    # Packing detaches the tensor, which is no operation of the program.
    with torch._C._DisableTorchDispatch():
        for name in _saved[kind]:
            # There is no data if the node saved None, or if hooks have packed the tensor: then it
            # belongs to these. Versions of torch without `data` raise RuntimeError in both cases.
            # All do for what an earlier pass has released.
            with suppress(RuntimeError):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, tuple) else (saved,):
                    if getattr(each, "data", each) is not None:
                        with suppress(RuntimeError):
                            each.register_hooks(_forget, _released)


def _forget(tensor: Any) -> None:
    """Keep nothing of a tensor that a node saved."""


def _released(_: None) -> Any:
    raise RuntimeError(
        "the saved tensors of this graph were released by a gradient generator after their last "
        "use; to differentiate again, run the forward pass again"
    )
