"""`dispatch`: issue one operation of torch to the processes of a mesh.

One pass over the arguments gives the key of the operation's plan, its operands, and its tensors.
The plan is looked up, or computed with fake tensors at the first time (`propagate`). Then the
rights are checked, the results get references, and the command joins the engine's batch. No step
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.active import active
from monarch._tensors.core.aliases import Aliases, Stack
from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.core.special import CONSTANT
from monarch._tensors.core.template import Command, Operand, Plan
from monarch._tensors.misplaced import explain, place_at
from monarch._tensors.propagate import plan_of_operator
from monarch._tensors.stream import main
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place

__all__ = ["dispatch", "issue"]

aten = torch.ops.aten

_PLAIN = frozenset(
    {
        type(None),
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_NUMBERS = frozenset({int, float, bool, complex})


class _Operator:
    """Facts from the schema of an operator, looked up once."""

    __slots__ = ("is_local", "varying")

    def __init__(self, operator: Any) -> None:
        arguments = operator._schema.arguments
        self.is_local = operator.namespace == "profiler"  # spans of the client's own profile
        varying: set[int | str] = set()
        if any(str(argument.type).find("Tensor") >= 0 for argument in arguments):
            for index, argument in enumerate(arguments):
                # No Scalar or float of an operator with a tensor has an influence on a shape.
                if str(argument.type) in ("number", "Scalar", "float"):
                    varying.add(argument.name if argument.kwarg_only else index)
        self.varying = frozenset(varying)


_operators: dict[Any, _Operator] = {}


class _Call:
    """The arguments of one operation, taken apart."""

    __slots__ = ("key", "locals", "operands", "tensors", "varying")

    def __init__(self, function: Any, varying: frozenset[int | str]) -> None:
        self.key: list[Any] = [function]
        self.operands: list[Any] = []
        self.tensors: list[Tensor] = []
        self.varying = varying
        self.locals: list[torch.Tensor] = []

    def positional(self, args: Sequence[Any]) -> None:
        key, operands, tensors = self.key, self.operands, self.tensors
        varying = self.varying
        for index, value in enumerate(args):
            kind = type(value)
            if kind is Tensor:
                tensors.append(value)
                operands.append(value._ref)
                key.append(value._meta)
            elif kind in _NUMBERS:
                key.append(kind)
                if index in varying:
                    operands.append(value)
                else:
                    key.append(value)
            elif kind in _PLAIN:
                key.append(value)
            else:
                self.other(value, kind)

    def keywords(self, kwargs: dict[str, Any]) -> None:
        key = self.key
        for name, value in kwargs.items():
            key.append(name)
            kind = type(value)
            if kind is Tensor:
                self.tensors.append(value)
                self.operands.append(value._ref)
                key.append(value._meta)
            elif kind in _NUMBERS:
                key.append(kind)
                if name in self.varying:
                    self.operands.append(value)
                else:
                    key.append(value)
            elif kind in _PLAIN:
                key.append(value)
            else:
                self.other(value, kind)

    def other(self, value: Any, kind: type) -> None:
        key = self.key
        if kind is list or kind is tuple:
            key.append(len(value))
            for item in value:
                kind = type(item)
                if kind is Tensor:
                    self.tensors.append(item)
                    self.operands.append(item._ref)
                    key.append(item._meta)
                elif kind in _NUMBERS:
                    key.append(kind)
                    key.append(item)
                elif kind in _PLAIN:
                    key.append(item)
                else:
                    self.other(item, kind)
        elif kind is torch.Size:
            self.other(tuple(value), tuple)
        elif isinstance(value, torch.Tensor):
            self.locals.append(value)
            key.append(None)
        elif isinstance(value, torch.SymInt):
            raise TypeError("symbolic shapes are not supported in distributed operations")
        else:
            key.append(kind)
            key.append(value)

    def alias_pattern(self) -> None:
        """Add which tensors share a storage to the key; a lone tensor has no pattern."""
        tensors = self.tensors
        if len(tensors) == 2:
            if tensors[0]._aliases is tensors[1]._aliases:
                self.key.append(True)
        else:
            numbers: dict[Aliases, int] = {}
            pattern = tuple(numbers.setdefault(t._aliases, len(numbers)) for t in tensors)
            if len(numbers) != len(tensors):
                self.key.append(pattern)


_LOCAL = frozenset({aten._local_scalar_dense.default, aten.set_.source_Storage_storage_offset})
"""Run locally even while a mesh is active, if no distributed tensor is involved."""


def dispatch(function: Any, args: Any, kwargs: dict[str, Any], mesh: DeviceMesh | None) -> Any:
    """Issue ``function(*args, **kwargs)``; `mesh` is the active one, for functions without tensors.

    Returns at once, with `Tensor` objects for what is a tensor. Raises `Misplaced` (a TypeError)
    for tensors that cannot be used together, and the errors of the operator for arguments that do
    not fit.
    """
    operator = _operators.get(function)
    if operator is None:
        operator = _operators[function] = _Operator(function)
    if operator.is_local:
        return function(*args, **kwargs)
    call = _Call(function, operator.varying)
    call.positional(args)
    if kwargs:
        call.keywords(kwargs)
    tensors = call.tensors
    if call.locals:
        if not tensors:
            if function is aten.lift_fresh.default and mesh is not None:
                return _constant(call.locals[0], mesh)
            if function in _LOCAL:
                return function(*args, **kwargs)
        raise explain(function, args, kwargs, mesh, place_at(tensors, mesh))
    place = place_at(tensors, mesh)
    if place is None:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        raise explain(function, args, kwargs, mesh, None)
    if function is aten._local_scalar_dense.default:
        return _scalar(tensors[0])
    if len(tensors) > 1:
        call.alias_pattern()
    for tensor in tensors:
        if tensor._place is not place or not tensor._aliases.usable:
            _check(tensors, function, args, kwargs, mesh, place)
            break
    engine = place.engine
    key = tuple(call.key)
    plan = engine.cache.get(key)
    if plan is None:
        plan = _miss(call, function, args, kwargs, place, key)
    if plan.written:
        for number in plan.written:
            if not tensors[number]._aliases.writable:
                raise explain(function, args, kwargs, mesh, place, plan)
    return issue(plan, place, tensors, call.operands, here())


def issue(
    plan: Plan,
    place: Place,
    tensors: Sequence[Tensor],
    operands: Sequence[Any],
    where: Stack,
    bind: Command = (),
) -> Any:
    """Emit the command of `plan` with these operands, and return its results.

    With `bind` the function has run, and this command names its results.
    """
    engine = place.engine
    only = plan.only
    if only is not None and not bind:
        ref = engine.new_ref()
        engine.emit(place, (plan.number, ref, *operands), where)
        return new_tensor(only, place, ref, Aliases())
    refs = [engine.new_ref() for _ in range(plan.new)]
    command: Command = (plan.number, *refs, *operands)
    if plan.written:
        others = {ref for number in plan.written for ref in tensors[number]._aliases.refs}
        others.difference_update(tensors[number]._ref for number in plan.written)
        if others:
            command = (*command, tuple(others))
    if bind:
        command = (*bind, *refs)
    engine.emit(place, command, where)
    made: list[Tensor] = []
    leaves: list[Tensor] = []
    for output in plan.outputs:
        if output.argument is not None:
            leaves.append(tensors[output.argument])
            continue
        if output.alias is None:
            aliases = Aliases()
        elif output.alias >= 0:
            aliases = tensors[output.alias]._aliases
        else:
            aliases = leaves[-1 - output.alias]._aliases
        assert output.metadata is not None
        result = new_tensor(output.metadata, place, refs[len(made)], aliases)
        made.append(result)
        leaves.append(result)
    for number, metadata in plan.resized:
        _resize(tensors[number], metadata)
    if plan.structure is None:
        return leaves[0]
    spec, shown = plan.structure
    filled = [leaves[leaf.index] if type(leaf) is Operand else leaf for leaf in shown]
    return pytree.tree_unflatten(filled, spec)


def _check(
    tensors: Sequence[Tensor],
    function: Any,
    args: Any,
    kwargs: Any,
    mesh: DeviceMesh | None,
    place: Place,
) -> None:
    """Raise `Misplaced` unless all tensors may be read at `place`."""
    for tensor in tensors:
        if tensor._place is not place or not tensor._aliases.may_read():
            raise explain(function, args, kwargs, mesh, place)


def _miss(
    call: _Call, function: Any, args: Any, kwargs: Any, place: Place, key: tuple[Any, ...]
) -> Plan:
    """Compute the plan of an operation that is not in the cache, and keep it there."""
    template_args, template_kwargs, values = _with_operands(args, kwargs, call)
    plan = plan_of_operator(
        function,
        template_args,
        template_kwargs,
        [tensor._meta for tensor in call.tensors],
        [id(tensor._aliases) for tensor in call.tensors],
        values,
    )
    packet = f"{function._schema.name.replace('::', '.')}.{function._overloadname}"
    place.engine.learn(plan, ("aten", packet, *plan.definition()))
    place.engine.cache.put(key, plan)
    return plan


def _with_operands(
    args: Any, kwargs: Any, call: _Call
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return the arguments with an `Operand` for each tensor and varying number, and the values.

    The value of a tensor is None.
    """
    values: list[Any] = []

    def visit(value: Any, name: int | str | None) -> Any:
        kind = type(value)
        if kind is Tensor or (kind in _NUMBERS and name in call.varying):
            values.append(None if kind is Tensor else value)
            return Operand(len(values) - 1)
        if kind is list:
            return [visit(item, None) for item in value]
        if kind in (tuple, torch.Size):
            return tuple(visit(item, None) for item in value)
        return value

    shown = tuple(visit(value, index) for index, value in enumerate(args))
    named = {name: visit(value, name) for name, value in kwargs.items()}
    return shown, named, values


def _constant(value: torch.Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a distributed tensor with the same value on all processes."""
    place = mesh.client.place(mesh, active.stream or main)
    engine = place.engine
    tensor: Tensor = engine.tensor(metadata_of(value), place)
    engine.emit(place, (CONSTANT, tensor._ref, value.detach().clone()), here())
    return tensor


def _scalar(tensor: Tensor) -> Any:
    """Return the Python number of a one-element tensor, if the program has asked for that."""
    from monarch._tensors.fetch import item

    return item(tensor)


def _resize(tensor: Tensor, metadata: Any) -> None:
    """Give the client's object the metadata that an operation in place has given the data."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
        torch.Tensor.as_strided_(tensor, metadata.size, metadata.stride, metadata.offset)
    tensor._meta = metadata


Tensor._issue = staticmethod(dispatch)
