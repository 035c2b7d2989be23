"""The work of an operation: its name, the tensors that it reads and writes, its operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.template import Operand, Plan
from monarch._tensors.simulator.commands import CallFunction

__all__ = ["work_of"]


def work_of(plan: Plan, given: list[Metadata], operands: tuple[Any, ...]) -> CallFunction | None:
    """Return the work of an operation; None for a view, which takes no time on a device.

    Args:
        plan: the plan.
        given: the metadata of its tensor arguments.
        operands: the operands of the command; references stand for tensors.
    """
    made = [output.metadata for output in plan.outputs if output.argument is None]
    is_operator = isinstance(plan.function, torch._ops.OpOverload)
    is_view = plan.outputs and not plan.written and all(o.alias is not None for o in plan.outputs)
    if is_operator and is_view:
        return None
    written = [given[number] for number in plan.written]
    fresh = [
        output.metadata
        for output in plan.outputs
        if output.argument is None and output.alias is None and output.metadata is not None
    ]
    flops, call = 0, None
    if is_operator:
        args, kwargs = _arguments(plan, given, operands)
        flops = _flops(plan, args, kwargs, made)
        call = (str(plan.function), args, kwargs)
    return CallFunction(_name(plan.function), tuple(given), (*fresh, *written), flops, call)


def _name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return str(function._schema.name).replace("::", ".")
    resolved = function.resolve()
    return str(getattr(resolved, "__qualname__", resolved))


def _arguments(plan: Plan, given: list[Metadata], operands: tuple[Any, ...]) -> Any:
    """Return the arguments of an operator, with metadata in place of tensors."""
    numbers = {operand: number for number, operand in enumerate(plan.tensors)}

    def value(leaf: Operand) -> Any:
        number = numbers.get(leaf.index)
        return operands[leaf.index] if number is None else given[number]

    return pytree.tree_map_only(Operand, value, (plan.args, plan.kwargs))


def _flops(plan: Plan, args: Any, kwargs: Any, made: list[Any]) -> int:
    """Return the operations of an operator as torch counts them; 0 if it does not."""
    count = flop_registry.get(plan.function._overloadpacket)
    if count is None:
        return 0
    args, kwargs = pytree.tree_map_only(Metadata, _shape, (args, kwargs))
    shapes = tuple(_shape(meta) for meta in made)
    counted: Any = count(*args, **kwargs, out_val=shapes[0] if len(shapes) == 1 else shapes)
    return int(counted)


def _shape(meta: Metadata) -> torch.Size:
    return torch.Size(meta.size)
