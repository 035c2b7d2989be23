"""Values that the script knows: those of small tensors that it has made from numbers alone.

Optimizers count their steps in such tensors, a `GradScaler` keeps its scale in one, and the
distributions of torch check their parameters. All of that reads numbers. The processes compute
these tensors like all others. The script computes them as well, so that ``item()`` answers without
a process, and any code that reads them works as it does with ordinary tensors.

A storage is known (`Aliases.known`) if the script has made its data from numbers, and has changed
it only by numbers and by tensors that are known. What else is written to it makes it unknown.
Random numbers, data of a process and uninitialised memory are never known. What a compiled
function counts stays known: see `numbers`.

To follow an operation costs as much as to issue it. So a value that was used for a while and never
read is forgotten, and the tensor is like all others. Results are as patient as what they are made
of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import recording
from monarch._tensors.core.aliases import PATIENCE
from monarch._tensors.core.metadata import Metadata, metadata_of
from monarch._tensors.core.template import Plan
from monarch._tensors.numbers import local_view
from monarch._tensors.tensor import Tensor

__all__ = ["are_known", "follow", "is_computable", "learn", "value_of"]

_LARGEST = 256  # bytes


def _fits(meta: Metadata | None) -> bool:
    return (
        meta is not None
        and meta.device.type == "cpu"
        and meta.layout is torch.strided
        and not meta.dtype.is_complex  # a conjugate bit is no part of the metadata
        and meta.extent() * meta.dtype.itemsize <= _LARGEST
    )


def is_computable(function: Any, plan: Plan) -> bool:
    """Whether the script can compute what an operator returns, if it knows all its tensors."""
    return (
        function.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in function.tags
        and "empty" not in function._schema.name
        and not plan.resized
        and all(out.argument is not None or _fits(out.metadata) for out in plan.outputs)
        and bool(plan.outputs)
    )


def value_of(tensor: Tensor) -> torch.Tensor | None:
    """Return the value of a tensor as an ordinary one that shares its data, or None."""
    aliases = tensor._aliases
    if aliases.known is None or recording() is not None:
        return None
    aliases.patience = PATIENCE
    return local_view(aliases.known, tensor._meta)


def are_known(tensors: Sequence[Tensor]) -> bool:
    """Whether an operation that uses these tensors can be followed; it costs some patience."""
    known = True
    for tensor in tensors:
        aliases = tensor._aliases
        if aliases.known is not None:
            aliases.patience -= 1
            if aliases.patience < 0:
                aliases.forget()
        known = known and aliases.known is not None
    return known


def learn(tensor: Tensor, value: torch.Tensor) -> None:
    """Take note that each process has `value`, an ordinary tensor, if that is small."""
    if recording() is None and _fits(tensor._meta) and metadata_of(value) is tensor._meta:
        with _disable_current_modes(), torch.no_grad():
            copied = value.detach().clone()
        tensor._aliases.know(copied.untyped_storage())


def follow(
    plan: Plan,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    issue: Callable[[], Any],
) -> Any:
    """Issue an operation whose tensors are known, compute it here too, and return its results.

    In this order: if an exception comes between, what is written is unknown.
    """
    storages = [tensor._aliases.known for tensor in tensors]
    patience = min((tensor._aliases.patience for tensor in tensors), default=PATIENCE)
    written = {tensors[number]._aliases for number in plan.written}
    if written:  # into a copy: other tensors may have the same storage, see `numbers`
        with _disable_current_modes():
            copies = {aliases: aliases.known.clone() for aliases in written}
        storages = [copies.get(tensor._aliases, tensor._aliases.known) for tensor in tensors]
    values = {
        id(tensor): local_view(storage, tensor._meta)
        for tensor, storage in zip(tensors, storages, strict=True)
    }

    def local(value: Any) -> Any:
        if type(value) is Tensor:
            return values[id(value)]
        return type(value)(map(local, value)) if type(value) in (list, tuple) else value

    result = issue()
    try:
        with _disable_current_modes(), torch.no_grad():
            computed = plan.function(
                *map(local, args), **{name: local(value) for name, value in kwargs.items()}
            )
    except Exception:  # the processes raise it, too, and say where
        for tensor in tensors:
            tensor._aliases.forget()
        return result
    for tensor, storage in zip(tensors, storages, strict=True):
        if tensor._aliases.known is None:
            tensor._aliases.know(storage, patience)
    _take(result, computed, patience)
    return result


def _take(result: Any, computed: Any, patience: int) -> None:
    """Let the new tensors in `result` have the values that are in `computed`."""
    if type(result) is Tensor:
        if result._aliases.known is None and metadata_of(computed) is result._meta:
            result._aliases.know(computed.untyped_storage(), patience)
    elif isinstance(result, list | tuple):
        for one, value in zip(result, computed, strict=True):
            _take(one, value, patience)
