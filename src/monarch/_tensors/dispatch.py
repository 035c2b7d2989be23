"""`dispatch`: issue one operation of torch to the processes of a mesh.

One pass over the arguments gives the key of the operation's plan, its operands, and its tensors.
The plan is looked up, or computed with fake tensors at the first time (`propagate`). Then the
rights are checked, the results get references, and the command joins the engine's batch. No step
waits.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import active, recording
from monarch._tensors.core.absent_device import CPU, GPU, is_shown_as_meta, true_devices
from monarch._tensors.core.aliases import Aliases, Stack
from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.core.special import CONSTANT
from monarch._tensors.core.template import Command, Operand, Plan
from monarch._tensors.function import resolvable_function
from monarch._tensors.misplaced import explain, place_at
from monarch._tensors.numbers import Number, plain
from monarch._tensors.propagate import NeedsShape, NeedsValue, plan_of_operator, written_leaves
from monarch._tensors.script_value import are_known, follow, is_computable, learn
from monarch._tensors.stream import main
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.torch_operator import name_of
from monarch._tensors.where import here

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place

__all__ = ["CONSTANTS", "NUMBERS", "constant", "copy_on_part", "dispatch", "issue", "operator_of"]

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
NUMBERS = frozenset({int, float, bool, complex})
CONSTANTS = _PLAIN | NUMBERS
"""Types of arguments that are parts of a key, together with their type."""


class _Operator:
    """Facts from the schema of an operator, looked up once; it stands for it in keys of plans."""

    __slots__ = ("function", "is_local", "varying")

    def __init__(self, function: Any) -> None:
        arguments = function._schema.arguments
        self.function = function
        self.is_local = function.namespace == "profiler"  # spans of the client's own profile
        varying: set[int | str] = set()
        if any(str(argument.type).find("Tensor") >= 0 for argument in arguments):
            for index, argument in enumerate(arguments):
                # None of these has an influence on a shape, if it is a number. A number in the
                # place of a tensor, as in `x / 2`, is for torch a tensor without dimensions.
                if str(argument.type) in (
                    "number",
                    "Scalar",
                    "float",
                    "Tensor",
                    "Optional[Tensor]",
                    "Optional[number]",
                    "Optional[float]",
                ):
                    varying.add(argument.name if argument.kwarg_only else index)
        self.varying = frozenset(varying)


_operators: dict[int, _Operator] = {}
"""By the identity of the operator, whose own hash is computed in Python."""


def operator_of(function: Any) -> Any:
    """Return what stands for an operator in the keys of plans."""
    return _operators.setdefault(id(function), _Operator(function))


def _other(
    value: Any,
    kind: type,
    key: list[Any],
    operands: list[Any],
    tensors: list[Tensor],
    local: list[torch.Tensor],
) -> None:
    """Add an argument that is neither a tensor nor a plain constant."""
    if kind is list or kind is tuple:
        key.append(len(value))
        for item in value:
            kind = type(item)
            if kind is Tensor:
                tensors.append(item)
                operands.append(item._ref)
                key.append(item._meta)
            elif kind in NUMBERS:
                key.append(kind)
                key.append(item)
            elif kind in _PLAIN:
                key.append(item)
            else:
                _other(item, kind, key, operands, tensors, local)
    elif kind is torch.Size:
        _other(tuple(value), tuple, key, operands, tensors, local)
    elif isinstance(value, torch.Tensor):
        local.append(value)
        key.append(None)
    elif isinstance(value, torch.SymInt):
        raise TypeError("symbolic shapes are not supported in distributed operations")
    elif kind in _SYMBOLIC:
        _number(value, False, key, operands)
    else:
        key.append(kind)
        key.append(value)


_SYMBOLIC = frozenset({torch.SymFloat, Number})


def _number(value: Any, may_vary: bool, key: list[Any], operands: list[Any]) -> None:
    """Add a number of a recording: as an operand that varies, or by its value."""
    session = recording()
    numbers = value.node.numbers
    number = plain(value)
    if session is None or numbers is not session.numbers:
        pass  # the function has ended, and has left it somewhere
    elif may_vary and type(number) is float:
        key.append(float)
        operands.append(numbers.place(value))
        return
    else:
        number = numbers.fixed(value.node)
    key.append(type(number))
    (operands if may_vary else key).append(number)


def _pattern(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return which tensors share a storage, as a part of a key."""
    numbers: dict[Aliases, int] = {}
    return tuple([numbers.setdefault(tensor._aliases, len(numbers)) for tensor in tensors])


_storage = attrgetter("_aliases")


def dispatch(function: Any, args: Any, kwargs: dict[str, Any], mesh: DeviceMesh | None) -> Any:
    """Issue ``function(*args, **kwargs)``; `mesh` is the active one, for functions without tensors.

    Returns at once, with `Tensor` objects for what is a tensor. Raises `Misplaced` (a TypeError)
    for tensors that cannot be used together, and the errors of the operator for arguments that do
    not fit.
    """
    operator = _operators.get(id(function)) or operator_of(function)
    if operator.is_local:
        return function(*args, **kwargs)
    # One loop in one frame, though it is long: each call costs as much as two of its steps.
    key: list[Any] = [operator]
    operands: list[Any] = []
    tensors: list[Tensor] = []
    local: list[torch.Tensor] = []
    varying = operator.varying
    is_symbolic = False
    index = 0
    for value in args:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            operands.append(value._ref)
            key.append(value._meta)
        elif kind in NUMBERS:
            key.append(kind)
            if index in varying:
                operands.append(value)
            else:
                key.append(value)
        elif kind in _PLAIN:
            key.append(value)
        elif kind in _SYMBOLIC:
            is_symbolic = True
            _number(value, index in varying, key, operands)
        else:
            _other(value, kind, key, operands, tensors, local)
        index += 1  # noqa: SIM113 - `enumerate` makes a tuple for each
    for name, value in kwargs.items():
        key.append(name)
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            operands.append(value._ref)
            key.append(value._meta)
        elif kind in NUMBERS:
            key.append(kind)
            if name in varying:
                operands.append(value)
            else:
                key.append(value)
        elif kind in _PLAIN:
            key.append(value)
        elif kind in _SYMBOLIC:
            is_symbolic = True
            _number(value, name in varying, key, operands)
        else:
            _other(value, kind, key, operands, tensors, local)
    given = args, kwargs
    if is_symbolic:
        args, kwargs = pytree.tree_map(plain, given)
    if local:
        if tensors:
            args, kwargs = _with_numbers(function, args, kwargs, local, tensors, mesh)
            return dispatch(function, args, kwargs, mesh)
        if function is aten.lift_fresh.default and mesh is not None:
            return constant(local[0], mesh.client.place(mesh, active().stream or main))
        with _disable_current_modes():  # an operation runs where its tensors are
            return function(*args, **kwargs)
    place = tensors[0]._place if tensors else None
    if place is None or place.stream is not (active().stream or main):
        place = place_at(tensors, mesh)
    if place is None:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        raise explain(function, args, kwargs, mesh, None)
    if function is aten._local_scalar_dense.default:
        return _answered(function, args, kwargs, tensors, place, None)
    if len(tensors) == 2:
        if tensors[0]._aliases is tensors[1]._aliases:
            key.append(True)
    elif len(tensors) > 2:
        apart = len(set(map(_storage, tensors))) == len(tensors)
        key.append(None if apart else _pattern(tensors))
    is_known = not tensors
    for tensor in tensors:
        if tensor._place is not place or not tensor._aliases.usable:
            _check(tensors, function, args, kwargs, mesh, place)
            is_known = are_known(tensors)
            break
    engine = place.engine
    known = tuple(key)
    plan = engine.cache.young.get(known) or engine.cache.get(known)
    if plan is None:
        try:
            plan = _miss(operator, tensors, args, kwargs, place, known)
        except (NeedsValue, NeedsShape) as error:
            return _answered(function, args, kwargs, tensors, place, error)
    written = plan.written
    if written:
        for number in written:
            if not tensors[number]._aliases.writable:
                raise explain(function, args, kwargs, mesh, place, plan)
    if is_known and plan.is_computable:
        where = here()
        session = recording()

        def issued() -> Any:
            return issue(plan, place, tensors, operands, where)

        if session is None:
            return follow(plan, args, kwargs, tensors, issued)
        return session.numbers.follow(plan, *given, tensors, issued) if tensors else issued()
    return issue(plan, place, tensors, operands, here())


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
        shared = plan.shared
        aliases = Aliases() if shared is None else tensors[shared]._aliases
        return new_tensor(only, place, ref, aliases)
    refs = [engine.new_ref() for _ in range(plan.new)]
    command: Command = (plan.number, *refs, *operands)
    if plan.written:
        is_shared = False
        for number in plan.written:
            aliases = tensors[number]._aliases
            if aliases.known is not None:
                aliases.forget()
            if len(aliases.refs) > 1:
                is_shared = True
        if is_shared:
            command = (*command, _others(plan, tensors))
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


def _others(plan: Plan, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the references that share a storage with what `plan` writes to."""
    others: set[int] = set()
    for number in plan.written:
        others |= tensors[number]._aliases.refs
    for number in plan.written:
        others.discard(tensors[number]._ref)
    return tuple(others)


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
    operator: _Operator,
    tensors: list[Tensor],
    args: Any,
    kwargs: Any,
    place: Place,
    key: tuple[Any, ...],
) -> Plan:
    """Compute the plan of an operation that is not in the cache, and keep it there."""
    function = operator.function
    if any(isinstance(value, torch.UntypedStorage) for value in args):
        raise RuntimeError(
            f"{function} would give data of this process to a distributed tensor. torch.load and "
            "copies of ordinary tensors make new tensors, which are distributed while a mesh is "
            "active: load within `with no_mesh.activate():`, then use monarch.to_mesh"
        )
    device = tensors[0]._meta.device if tensors else CPU
    if not is_shown_as_meta(device) and place.engine.is_simulated:
        device = GPU  # torch made an operator of the device of another tensor
    if is_shown_as_meta(device):
        args, kwargs = true_devices(args, device), true_devices(kwargs, device)
    template_args, template_kwargs, values = _with_operands(args, kwargs, operator.varying)
    plan = plan_of_operator(
        function,
        template_args,
        template_kwargs,
        [tensor._meta for tensor in tensors],
        [id(tensor._aliases) for tensor in tensors],
        values,
    )
    plan.is_computable = is_computable(function, plan)
    constants = pickle.dumps((resolvable_function(function), plan.args, plan.kwargs), protocol=5)
    engine = place.engine
    engine.learn(plan, ("operator", name_of(function), constants, *plan.definition()))
    kept: Plan = engine.keep(key, plan)
    return kept


def _with_operands(
    args: Any, kwargs: Any, varying: frozenset[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return the arguments with an `Operand` for each tensor and varying number, and the values.

    The value of a tensor is None.
    """
    values: list[Any] = []
    # `visit` refers to itself, so what it refers to lives until a garbage collection: no tensor.

    def visit(value: Any, name: int | str | None) -> Any:
        kind = type(value)
        if kind is Tensor or (kind in NUMBERS and name in varying):
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


def copy_on_part(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target` on the processes of its mesh, a part of the one of `target`."""
    operator = operator_of(aten.copy_.default)
    place = source._place
    key = (operator, target._meta, source._meta)
    plan = place.engine.cache.get(key)
    if plan is None:
        plan = _miss(operator, [target, source], (target, source), {}, place, key)
    issue(plan, place, (target, source), (target._ref, source._ref), here())


def constant(value: torch.Tensor, place: Place) -> Tensor:
    """Return a distributed tensor with the value of an ordinary one on all processes of `place`."""
    engine = place.engine
    with _disable_current_modes():
        sent = value.detach().clone()
    tensor: Tensor = engine.tensor(metadata_of(sent), place)
    engine.emit(place, (CONSTANT, tensor._ref, sent), here())
    learn(tensor, sent)
    return tensor


def _with_numbers(
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    local: Sequence[torch.Tensor],
    tensors: Sequence[Tensor],
    mesh: DeviceMesh | None,
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with distributed tensors for ordinary ones, if these may be moved.

    As between the devices of torch, ordinary tensors without dimensions are numbers, and ``copy_``
    moves what it copies, so that a module can load a state. Raises `Misplaced` for others, and for
    one that would be written or needs a gradient.
    """
    place = place_at(tensors, mesh)
    if place is not None and function is aten.copy_.default and type(args[0]) is Tensor:
        from monarch._tensors.scatter import send

        return (args[0], send(args[1].detach(), place.mesh, place.stream, {}), *args[2:]), kwargs
    written = {id(leaf) for leaf in written_leaves(function, args, kwargs)}
    if place is None or any(
        tensor.dim() or tensor.requires_grad or id(tensor) in written for tensor in local
    ):
        raise explain(function, args, kwargs, mesh, place)
    made = {id(tensor): constant(tensor, place) for tensor in local}

    def moved(leaf: Any) -> Any:
        return made.get(id(leaf), leaf)

    return pytree.tree_map(moved, args), pytree.tree_map(moved, kwargs)


def _answered(*call: Any) -> Any:
    """Return what an operator returns that needs values in the script; see `answer.answer`."""
    from monarch._tensors.answer import answer

    return answer(*call)


def _resize(tensor: Tensor, metadata: Any) -> None:
    """Give the client's object the metadata that an operation in place has given the data."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
        torch.Tensor.as_strided_(tensor, metadata.size, metadata.stride, metadata.offset)
    tensor._meta = metadata
