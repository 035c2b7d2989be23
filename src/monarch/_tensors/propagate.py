"""Propagation: what an operation returns, found by computing on fake tensors in the client.

A `FakeTensorMode` of torch runs the function on tensors that have metadata but no data. The result
is a `Plan`: the metadata of the outputs, which of them share a storage with which input, and which
inputs are written. For an operator of torch its schema says what is written; for a user's function
the version counters of the fakes do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.core.metadata import Metadata, metadata_of
from monarch._tensors.core.template import Operand, Output, Plan

__all__ = [
    "NeedsShape",
    "NeedsValue",
    "fake_of",
    "fakes_of",
    "is_propagating",
    "plan_of_operator",
    "propagate",
    "written_leaves",
]


class NeedsValue(DataDependentOutputException, ValueError):  # type: ignore[misc]  # of torch
    """An operator needs the values of a distributed tensor in the client."""

    def __init__(self, func: Any, text: str) -> None:
        super().__init__(func)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return type(self), (str(self.func), self.text)


class NeedsShape(DynamicOutputShapeException, ValueError):  # type: ignore[misc]  # of torch
    """The shape of what an operator returns depends on the values of a distributed tensor."""

    def __init__(self, func: Any, text: str) -> None:
        super().__init__(func)
        self.text = text

    __str__ = NeedsValue.__str__
    __reduce__ = NeedsValue.__reduce__


class _State(threading.local):
    propagating = False
    is_quiet = False
    mode: FakeTensorMode | None = None


_state = _State()


def is_propagating() -> bool:
    """Whether this thread runs a function of the program to find out what another one returns."""
    return _state.propagating


# Torch would write a page of text about each shape that does not fit.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not _state.is_quiet)


def fake_mode() -> FakeTensorMode:
    """Return the mode of this thread, to which all its fakes belong."""
    if _state.mode is None:
        _state.mode = FakeTensorMode()
    return _state.mode


def fake_of(meta: Metadata) -> torch.Tensor:
    """Return a fake tensor with these metadata and a storage of its own."""
    return fakes_of([meta], [0])[0]


def fakes_of(metas: Sequence[Metadata], storages: Sequence[object]) -> list[torch.Tensor]:
    """Return fakes with these metadata; those with equal `storages` share one."""
    bases: dict[object, torch.Tensor] = {}
    sizes: dict[object, int] = {}
    for meta, storage in zip(metas, storages, strict=True):
        need = meta.extent() * meta.dtype.itemsize
        sizes[storage] = max(sizes.get(storage, 0), need)
    fakes = []
    with _disable_current_modes(), torch.no_grad(), fake_mode():
        for meta, storage in zip(metas, storages, strict=True):
            if meta.layout is not torch.strided:
                fakes.append(torch.empty(meta.size, dtype=meta.dtype, device=meta.device))
                continue
            if storage not in bases:
                size = -(-sizes[storage] // meta.dtype.itemsize)
                bases[storage] = torch.empty(size, dtype=meta.dtype, device=meta.device)
            base = bases[storage]
            if base.dtype is not meta.dtype:
                base = base.view(meta.dtype)
            fakes.append(base.as_strided(meta.size, meta.stride, meta.offset))
    return fakes


def plan_of_operator(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: Sequence[Metadata],
    storages: Sequence[object],
    values: Sequence[Any],
) -> Plan:
    """Return the plan of an operator of torch.

    Args:
        function: the operator.
        args: its arguments, with an `Operand` for each that varies.
        kwargs: its keyword arguments, the same.
        metas: the metadata of the tensor arguments.
        storages: their storages, by identity.
        values: what varies, in order; None for a tensor.

    Raises the errors of the operator for arguments that do not fit, and `NeedsValue` or
    `NeedsShape` if its result depends on data.
    """
    fakes = fakes_of(metas, storages)
    positions = tuple(index for index, value in enumerate(values) if value is None)
    filled = list(values)
    for position, fake in zip(positions, fakes, strict=True):
        filled[position] = fake
    given = pytree.tree_map(
        lambda leaf: filled[leaf.index] if type(leaf) is Operand else leaf, (args, kwargs)
    )
    before, _state.is_quiet = _state.is_quiet, True
    try:
        with _disable_current_modes(), torch.no_grad(), fake_mode():
            returned = function(*given[0], **given[1])
    except DataDependentOutputException:
        raise NeedsValue(
            function,
            f"{function} needs the values of a distributed tensor, which are on the processes. "
            "Fetch it first, with monarch.inspect(tensor)",
        ) from None
    except DynamicOutputShapeException:
        raise NeedsShape(
            function,
            f"the shape of the result of {function} depends on the values of a distributed tensor, "
            "so it may differ from process to process. Compute it in a function with "
            "monarch.remote(function, propagate=...) that returns a shape known before, or fetch "
            "the tensor with monarch.inspect(tensor)",
        ) from None
    finally:
        _state.is_quiet = before
    written, same = _written_by(function, given, fakes)
    return _plan(function, args, kwargs, positions, fakes, metas, returned, written, same)


def propagate(
    propagator: Any,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: Sequence[Metadata],
    storages: Sequence[object],
) -> Plan:
    """Return the plan of a user's `function` whose results are those of `propagator` on fakes.

    In `args` and `kwargs` each tensor is an `Operand`.
    """
    fakes = fakes_of(metas, storages)
    given = pytree.tree_map(
        lambda leaf: fakes[leaf.index] if type(leaf) is Operand else leaf, (args, kwargs)
    )
    versions = [fake._version for fake in fakes]
    before, _state.propagating = _state.propagating, True
    try:
        with _disable_current_modes(), torch.no_grad(), fake_mode():
            returned = propagator(*given[0], **given[1])
    finally:
        _state.propagating = before
    written = tuple(i for i, fake in enumerate(fakes) if fake._version != versions[i])
    return _plan(
        function, args, kwargs, tuple(range(len(fakes))), fakes, metas, returned, written, set()
    )


def _written_by(
    operator: Any, given: Any, fakes: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], set[int]]:
    """Return which fakes an operator writes to, and the ids of those that it may return itself."""
    numbers = {id(fake): number for number, fake in enumerate(fakes)}
    leaves = written_leaves(operator, *given)
    written = [numbers[id(leaf)] for leaf in leaves if id(leaf) in numbers]
    return tuple(written), {id(fakes[number]) for number in written}


def written_leaves(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, by its schema."""
    written: list[Any] = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if index < len(args) and not argument.kwarg_only:
            value = args[index]
        else:
            value = kwargs.get(argument.name)
        written += pytree.tree_leaves(value)
    return written


def _plan(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: tuple[int, ...],
    fakes: Sequence[torch.Tensor],
    metas: Sequence[Metadata],
    returned: Any,
    written: tuple[int, ...],
    same: set[int],
) -> Plan:
    """Build a plan; `same` are the ids of fakes that are returned themselves, not as aliases."""
    numbers = {id(fake): number for number, fake in enumerate(fakes) if id(fake) in same}
    storages: dict[int, int] = {}
    for number, fake in enumerate(fakes):
        storages.setdefault(_storage(fake), number)
    outputs: list[Output] = []
    leaves, spec = pytree.tree_flatten(returned)
    shown: list[Any] = []
    new: list[int] = []  # the leaves that get a reference, by their numbers
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            shown.append(leaf)
            continue
        shown.append(Operand(len(outputs)))
        if id(leaf) in numbers:
            outputs.append(Output(argument=numbers[id(leaf)]))
            continue
        new.append(position)
        storage = _storage(leaf)
        outputs.append(Output(metadata_of(leaf), storages.get(storage)))
        storages.setdefault(storage, -len(outputs))
    alone = isinstance(returned, torch.Tensor)
    resized = tuple(
        (number, metadata_of(fake))
        for number, fake in enumerate(fakes)
        if metadata_of(fake) is not metas[number] and number in written
    )
    return Plan(
        function,
        args,
        kwargs,
        positions,
        tuple(outputs),
        written,
        None if alone else (spec, tuple(shown)),
        resized=resized,
        picks=tuple(new),
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)
