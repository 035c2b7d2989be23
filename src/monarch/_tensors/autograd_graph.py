"""The part of a backward graph that some gradients depend on, as steps in the order of execution.

torch offers its graph as nodes, each with the inputs of other nodes that its outputs go to.
`AutogradGraph` follows these edges from the roots once, puts the nodes in order, and keeps the
nodes from which a requested gradient is reached. The way back from a gradient to the work that it
needs is then a walk over these (`work_for`).

- The order is that of torch's engine: of the nodes whose inputs are complete, the one with the
  highest sequence number is next. So sums of floats have their terms in the same order, too.
- A leaf is known by its tensor. The node that would add to its `grad` is never run.
- Nodes are compared by identity. `AutogradGraph` holds all of them while it compares.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from monarch._tensors.backward_step import GradientSum, Step

__all__ = ["AutogradGraph"]


ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The name of the nodes that add to the `grad` of a leaf."""


class _Place(NamedTuple):
    """Where a gradient arrives: an input of a node, or a leaf."""

    owner: Any  # the node, or the tensor if it is a leaf
    number: int
    edge: Any  # None for a leaf whose node is not known

    @property
    def key(self) -> tuple[int, int]:
        return id(self.owner), self.number

    @property
    def is_leaf(self) -> bool:
        return isinstance(self.owner, torch.Tensor)


class AutogradGraph:
    """The steps from roots to requested gradients.

    Roots and requests are tensors or gradient edges. `roots` and `requests` have the sum of each
    entry. It is None if no request depends on that root, or if that request depends on no root.
    """

    def __init__(self, roots: Sequence[Any], requests: Sequence[Any]) -> None:
        starts = [_place(root) for root in roots]
        targets = [_place(request) for request in requests]
        order, edges = _walk([start for start in starts if start is not None])
        self._sums: dict[tuple[int, int], GradientSum] = {}
        self._steps: dict[int, Step] = {}  # by the identity of the node
        self._wanted = {target.key for target in targets if target is not None}
        reached = {start.key for start in starts if start is not None}
        # The last node first, since the steps that a node feeds have to be known.
        for number, node in reversed(list(enumerate(order))):
            places = edges[id(node)]
            reached.update(place.key for place in places if place is not None)
            fed = {output: self._sum(place) for output, place in enumerate(places)}
            outputs = {output: each for output, each in fed.items() if each is not None}
            if outputs:
                step = self._steps[id(node)] = Step(node, number, outputs)
                for output, each in outputs.items():
                    each.feeders.append((step, output))
        self.roots = [self._sum(start) for start in starts]
        self.requests = [
            self._sum(target) if target is not None and target.key in reached else None
            for target in targets
        ]
        for request in self.requests:
            if request is not None:
                request.requests += 1
        groups: dict[int, list[GradientSum]] = {}
        for (owner, _), each in self._sums.items():
            each.group = groups.setdefault(owner, [])
            each.group.append(each)

    def work_for(self, wanted: GradientSum) -> list[tuple[Step, set[int]]]:
        """Return the steps that complete a sum, in order, each with the outputs to compute."""
        work: dict[Step, set[int]] = {}
        pending = list(wanted.group)
        while pending:
            for step, output in pending.pop().feeders:
                if output not in step.due:
                    continue
                if step not in work:
                    work[step] = set()
                    if not step.started:
                        pending.extend(each for each in step.inputs if each is not None)
                work[step].add(output)
        ordered = sorted(work, key=lambda step: step.order)
        return [(step, step.outputs_for(work[step])) for step in ordered]

    def dot(self) -> str:
        """Return the graph in the language of Graphviz: nodes in their order, requests as boxes."""
        lines = ["digraph backward {"]
        for step in sorted(self._steps.values(), key=lambda step: step.order):
            lines.append(f'  n{step.order} [label="{step.order} {step.node.name()}"];')
            for number, fed in sorted(step.outputs.items()):
                if fed.reader is not None:
                    lines.append(f'  n{step.order} -> n{fed.reader.order} [label="{number}"];')
                lines += [
                    f'  n{step.order} -> r{index} [label="{number}"];'
                    for index, request in enumerate(self.requests)
                    if request is fed
                ]
        lines += [f'  r{n} [shape=box, label="gradient {n}"];' for n in range(len(self.requests))]
        return "\n".join([*lines, "}\n"])

    def clear(self) -> None:
        """Forget everything: steps and sums refer to each other."""
        for step in self._steps.values():
            step.clear()
        for each in self._sums.values():
            each.group, each.edge = [], None
        self._steps, self._sums, self.roots, self.requests = {}, {}, [], []

    def _sum(self, place: _Place | None) -> GradientSum | None:
        """Return the sum at a place, or None if no request depends on it."""
        if place is None:
            return None
        reader = self._steps.get(id(place.owner))
        if reader is None and place.key not in self._wanted:
            return None
        found = self._sums.get(place.key)
        if found is None:
            leaf = place.owner if place.is_leaf else None
            found = self._sums[place.key] = GradientSum(place.edge, leaf)
            if reader is not None:
                found.reader = reader
                reader.inputs[place.number] = found
        if found.edge is None:
            found.edge = place.edge
        return found


def _walk(starts: list[_Place]) -> tuple[list[Any], dict[int, list[_Place | None]]]:
    """Return all nodes in order, and by the identity of each node where its outputs go."""
    found = {id(start.owner): start.owner for start in starts if not start.is_leaf}
    edges: dict[int, list[_Place | None]] = {}
    arrivals = dict.fromkeys(found, 0)
    pending = list(found.values())
    while pending:
        node = pending.pop()
        edges[id(node)] = places = [_follow(*edge) for edge in node.next_functions]
        for place in places:
            if place is None or place.is_leaf:
                continue
            identity = id(place.owner)
            arrivals[identity] = arrivals.get(identity, 0) + 1
            if identity not in found:
                found[identity] = place.owner
                pending.append(place.owner)
    # The second number decides among equals, since nodes cannot be compared.
    ready = [
        (-node._sequence_nr(), turn, node)
        for turn, (identity, node) in enumerate(found.items())
        if not arrivals[identity]
    ]
    turn = len(found)
    heapq.heapify(ready)
    order: list[Any] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for place in edges[id(node)]:
            if place is None or place.is_leaf:
                continue
            arrivals[id(place.owner)] -= 1
            if not arrivals[id(place.owner)]:
                turn += 1
                heapq.heappush(ready, (-place.owner._sequence_nr(), turn, place.owner))
    return order, edges


def _follow(node: Any, number: int) -> _Place | None:
    """Return where an edge leads; None if the edge leads nowhere."""
    if node is None:
        return None
    edge = GradientEdge(node, number)
    if node.name() == ACCUMULATE:
        return _Place(node.variable, 0, edge)
    return _Place(node, number, edge)


def _place(entry: Any) -> _Place | None:
    """Return where the gradient of a tensor or an edge arrives; None if it needs no gradient."""
    if isinstance(entry, GradientEdge):
        return _follow(entry.node, entry.output_nr)
    if not isinstance(entry, torch.Tensor):
        raise TypeError(
            f"gradients are those of tensors and gradient edges, not of a {type(entry).__name__}"
        )
    if not entry.requires_grad:
        return None
    if entry.grad_fn is None:
        return _Place(entry, 0, None)
    return _follow(entry.grad_fn, entry.output_nr)
