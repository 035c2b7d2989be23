"""Gradients one by one: each next one does the backward work that it still needs, and no more.

A training loop that reduces gradients over a mesh wants the first gradient while the others are
still to be computed. `torch.autograd.grad` computes all of them or none; a call per gradient
computes shared parts again. `GradientGenerator` computes the graph in stages, one for each
requested gradient:

- A stage runs the nodes on the way to its gradient whose outputs are not there yet, each for the
  outputs that are due. A node may run in several stages, and computes no output twice.
- Each node runs in the context in which its operation was recorded: `context_restorer` gives it,
  by the sequence number of the node. Mesh and stream of distributed tensors come from there.
- Gradients are those of `torch.autograd.grad`, hooks of tensors and nodes included. They are not
  added to `grad` of any tensor, and record no graph of their own.
- Saved tensors are released as soon as their node has run for the last time.

Torch computes the outputs of a node that the pass of its engine needs; there is no other way to
choose them. So a stage is a pass of the engine over one node of ours (`_Stage`), which declares the
edges that the stage fills, and runs the nodes of the stage in its backward. Such a pass is on the
calling thread, costs about as much as two nodes, and has the further use that a checkpointed region
is computed again once for the stage rather than once for each saved tensor.

Known limits. A region under `torch.utils.checkpoint` is computed again in each stage that runs
nodes of it; the reentrant kind is refused, as `torch.autograd.grad` does. Nodes run on the CUDA
stream that is current. The hooks of a tensor are run by torch's engine, which has to know the
tensor's device.

Rejected: an extension in C++, which has to be built for one version of torch exactly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.autograd_graph import AutogradGraph
from monarch._tensors.backward_step import GradientSum, engine_pass, run_tensor_hooks
from monarch._tensors.context_history import ContextHistory

__all__ = [
    "ContextRestorer",
    "GradGenerator",
    "GradientGenerator",
    "context_history",
    "grad_generator",
    "gradient_execution_order",
]


class ContextRestorer(Protocol):
    """Gives the context in which a node is to run, by its sequence number."""

    def __call__(self, sequence_number: int, /) -> AbstractContextManager[Any]: ...


context_history = ContextHistory()
"""The meshes and streams that were active: activating one notes it here."""


class GradientGenerator(Iterator[Any]):
    """Iterate over the gradients of `roots`, one for each entry of `with_respect_to`, in order.

    Roots and entries are tensors or gradient edges; each may be a single one, too. `grad_roots` are
    the gradients of the roots: ones where they are missing or None. An entry that does not depend
    on the roots has None. `context_restorer` returns, for the sequence number of a node, the
    context in which the node runs.

    Each step blocks until its operations are issued. An exception of a node or a hook ends the
    iteration. The saved tensors of nodes that have run are released, so the same graph can be
    differentiated once.

    With ``TORCH_MONARCH_GRAD_GENERATOR_DUMP=1`` in the environment the graph is written to the
    standard error, in the language of Graphviz.

    >>> import torch
    >>> w, b = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    >>> loss = (3 * w + b).sum()
    >>> for gradient in GradientGenerator(loss, [b, w]):
    ...     print(gradient)
    tensor([1., 1.])
    tensor([3., 3.])
    """

    def __init__(
        self,
        roots: Any,
        with_respect_to: Any,
        grad_roots: Any = (),
        context_restorer: ContextRestorer | None = None,
    ) -> None:
        starts, given = _several(roots), _several(grad_roots)
        if len(given) > len(starts):
            raise ValueError(f"{len(given)} gradients for {len(starts)} roots")
        given += [None] * (len(starts) - len(given))
        seeds = [_seed(root, gradient) for root, gradient in zip(starts, given, strict=True)]
        graph = AutogradGraph(starts, _several(with_respect_to))
        if os.environ.get("TORCH_MONARCH_GRAD_GENERATOR_DUMP") == "1":
            sys.stderr.write(graph.dot())
        # Neither refers to this object, so a generator that is dropped frees its graph at once.
        self._gradients = _Pass(graph, starts, context_restorer or _no_context).run(seeds)

    def __next__(self) -> Any:
        return next(self._gradients)


class _Pass:
    """The stages of a backward pass over a graph."""

    def __init__(self, graph: AutogradGraph, roots: list[Any], restore: ContextRestorer) -> None:
        self._graph = graph
        self._roots = roots  # some versions of torch keep nodes in Python alive by tensors only
        self._restore = restore

    def run(self, seeds: list[Callable[[], Any]]) -> Iterator[Any]:
        """Return an iterator over the gradients of the requests of the graph."""
        try:
            with torch.no_grad():
                for root, fed, seed in zip(self._roots, self._graph.roots, seeds, strict=True):
                    if fed is not None:
                        with self._context_of(root):
                            fed.add(seed())
            stage = _Stage()
            for request in self._graph.requests:
                if request is not None:
                    self._complete(request, stage)
                # Not by a local variable, which would hold the gradient until the next one.
                yield _hand_over(request)
        finally:
            self._graph.clear()
            self._roots.clear()

    def _complete(self, request: GradientSum, stage: _Stage) -> None:
        """Run the work that a request still needs, as one stage."""
        work = self._graph.work_for(request)

        def run() -> None:
            for step, outputs in work:
                with self._restore(step.node._sequence_nr()):
                    step.run(outputs)
            with nullcontext() if request.leaf is not None else self._context_of(request.edge):
                run_tensor_hooks(request.group)

        fed = {id(each): each for step, outputs in work for each in step.fed_by(outputs)}
        stage.run(run, [each.edge for each in fed.values()])

    def _context_of(self, entry: Any) -> AbstractContextManager[Any]:
        node = entry.node if isinstance(entry, GradientEdge) else entry.grad_fn
        return nullcontext() if node is None else self._restore(node._sequence_nr())


class _Stage:
    """A pass of torch's engine that runs a function of ours, and declares what that computes."""

    def __init__(self) -> None:
        # Local tensors of the CPU, whatever mode or mesh is active; the engine runs them here.
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            self._token = torch.zeros((), device="cpu", requires_grad=True)
            self._gradient = torch.ones((), device="cpu")
            self._work: list[Callable[[], None]] = []
            self._root = _Body.apply(self._token, self._work)

    def run(self, work: Callable[[], None], edges: list[Any]) -> None:
        """Call `work()`; the nodes that it runs compute what goes along these edges."""
        self._work.append(work)
        try:
            engine_pass((self._root,), (self._gradient,), (self._token, *edges))
        finally:
            self._work.clear()


class _Body(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The node whose backward is the work of a stage."""

    @staticmethod
    def forward(ctx: Any, token: Any, work: list[Callable[[], None]]) -> Any:
        ctx.work = work
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        for each in ctx.work:
            each()
        return gradient, None


def grad_generator(
    roots: Any = (), with_respect_to: Any = (), grad_roots: Any = ()
) -> GradientGenerator:
    """Return an iterator over gradients that does the work of each when that one is asked for.

    Every node runs with the mesh and stream that were active when its operation was recorded. See
    `GradientGenerator` for arguments and errors.

    >>> import torch
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    >>> weights = [layer.weight for layer in layers]
    >>> loss = torch.nn.Sequential(*layers)(torch.ones(1, 4)).sum()
    >>> for weight, gradient in zip(reversed(weights), grad_generator(loss, reversed(weights))):
    ...     weight.grad = gradient  # reduce it here: the backward of the layers below is to come
    """
    return GradientGenerator(roots, with_respect_to, grad_roots, context_history.restore)


def gradient_execution_order(roots: Any, with_respect_to: Any) -> list[int]:
    """Return the indices of the entries in the order in which a backward pass has their gradients.

    Asked for in this order, no gradient waits for work that only a later one needs. Entries that
    need no work come first: those which do not depend on the roots among them.

    >>> import torch
    >>> first, second = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    >>> gradient_execution_order((first * 2) * second, [first, second])
    [1, 0]
    """
    graph = AutogradGraph(_several(roots), _several(with_respect_to))

    def available(index: int) -> int:
        request = graph.requests[index]
        feeders = () if request is None else request.feeders
        return max((step.order for step, _ in feeders), default=-1)

    return sorted(range(len(graph.requests)), key=available)


class GradGenerator:
    """Collect roots and the trees of tensors to differentiate for, then iterate over gradients.

    Iteration gives a tree for each call of `grad`, the last one first: in a forward pass the last
    tensors used are the first whose gradients are there. A tree has the gradients in the places of
    its tensors, and None in all other places. Each step does the work that its tree still needs.

    >>> import torch
    >>> w, b = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    >>> gradients = GradGenerator()
    >>> gradients.grad({"w": w})
    >>> gradients.grad([b])
    >>> gradients.root((3 * w + b).sum())
    >>> list(gradients)
    [[tensor([1., 1.])], {'w': tensor([3., 3.])}]
    """

    def __init__(self, context_restorer: ContextRestorer | None = None) -> None:
        self._restore = context_restorer or context_history.restore
        self._roots: list[Any] = []
        self._grad_roots: list[Any] = []
        self._trees: list[Any] = []

    def root(self, tensor: Any, grad: Any = None) -> None:
        """Add a root and its gradient, by default ones."""
        self._roots.append(tensor)
        self._grad_roots.append(grad)

    def grad(self, tree: Any) -> None:
        """Ask for the gradients of the tensors in a tree (tuples, lists, dicts)."""
        self._trees.append(tree)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the trees of gradients that were asked for up to now."""
        flat = [pytree.tree_flatten(tree) for tree in reversed(self._trees)]
        tensors = [leaf for leaves, _ in flat for leaf in leaves if isinstance(leaf, torch.Tensor)]
        gradients = GradientGenerator(self._roots, tensors, self._grad_roots, self._restore)
        for leaves, shape in flat:
            yield pytree.tree_unflatten(
                [next(gradients) if isinstance(leaf, torch.Tensor) else None for leaf in leaves],
                shape,
            )


def _hand_over(request: GradientSum | None) -> Any:
    """Return the gradient of a request; forget it if this was its last use."""
    if request is None:
        return None
    gradient = request.total
    request.requests -= 1
    if not request.requests and (request.reader is None or request.reader.started):
        request.total = None
    return gradient


def _several(entries: Any) -> list[Any]:
    """Return the entries as a list; a single tensor or edge is a list of one."""
    if isinstance(entries, torch.Tensor | GradientEdge):
        return [entries]
    return list(entries)


def _no_context(_: int) -> AbstractContextManager[Any]:
    return nullcontext()


def _seed(root: Any, gradient: Any) -> Callable[[], Any]:
    """Return what makes the gradient of a root; raise if there can be none, or not the given."""
    about: Any = root
    if isinstance(root, GradientEdge):
        about = root.node._input_metadata[root.output_nr]
    elif not root.requires_grad:
        raise RuntimeError("a root does not require grad, so it has no gradients")
    if gradient is None:
        if not isinstance(root, GradientEdge):
            return lambda: torch.ones_like(root)  # a tensor of the same kind as the root
        return lambda: torch.ones(about.shape, dtype=about.dtype, device=about.device)
    if gradient.shape != about.shape:
        raise RuntimeError(
            f"the gradient of a root has shape {list(gradient.shape)}, and the root "
            f"{list(about.shape)}"
        )
    return lambda: gradient.to(about.dtype)
