"""`answer`: operators whose result the script needs at once, as ``item()`` and ``x[mask]``.

A number, or the shape of a result, depends on values of distributed tensors. If the script knows
these (`script_value`) it computes the result. Otherwise it waits for the processes, as it would
for a CUDA tensor, and a note says so once for each line of the program.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch import _spi
from monarch._tensors.active import recording
from monarch._tensors.core.special import BIND
from monarch._tensors.core.template import DELETE, Operand
from monarch._tensors.dispatch import constant, issue
from monarch._tensors.fetch import rank_of, request
from monarch._tensors.function import resolvable_function
from monarch._tensors.pickled import pickled
from monarch._tensors.probe import plan_of, probe
from monarch._tensors.propagate import NeedsShape, NeedsValue
from monarch._tensors.script_value import value_of
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import here, program_level
from monarch._tensors.worker.template import Reference

if TYPE_CHECKING:
    from monarch._tensors.place import Place

__all__ = ["answer"]


def answer(
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    place: Place,
    error: Exception | None,
) -> Any:
    """Return what `function` returns; blocks unless the script knows the values.

    Args:
        function: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        tensors: the distributed ones among these.
        place: where they are.
        error: why it cannot be issued; None for ``item()``.

    Raises `error`, or for ``item()`` `NeedsValue`, if the setting `tensor_item` is "raise".
    """
    session = recording()
    if session is not None and error is None:
        number = session.numbers.item(tensors[0])
        if number is not None:
            return session.numbers.fixed(number.node)
    values = [value_of(tensor) for tensor in tensors]
    if all(value is not None for value in values):
        return _computed(function, args, kwargs, tensors, values, place)
    if _spi.settings.tensor_item != "fetch":
        raise error if error is not None else _no_item(function)
    begun = time.perf_counter()
    if isinstance(error, NeedsShape):
        result = _shaped(function, args, kwargs, tensors, place)
        what = f"the shape of the result of {function}"
    else:
        result = _value(function, args, kwargs, tensors, place)
        what = "item() (or float(), `if`, a format)" if error is None else f"{function}"
    _note(what, time.perf_counter() - begun)
    return result


_noted: set[tuple[str, int]] = set()
"""The lines of the program that a note has named."""


def _note(what: str, seconds: float) -> None:
    level = program_level()
    frame = sys._getframe(level - 1)
    line = frame.f_code.co_filename, frame.f_lineno
    if line in _noted:
        return
    _noted.add(line)
    warnings.warn(
        f"{what} of a distributed tensor waited {seconds * 1000:.1f} ms for the processes: as with "
        "a CUDA tensor, all operations before it have to be computed. In a loop, read it less "
        "often, or keep a future of it with monarch.fetch_shard; configure(tensor_item='raise') "
        "finds all such lines. This is said once for each line.",
        UserWarning,
        stacklevel=level,
    )


def _no_item(function: Any) -> NeedsValue:
    return NeedsValue(
        function,
        "item() of a distributed tensor (or float(), `if`, a format) needs its value, which is on "
        "the processes: use monarch.inspect(tensor).item(), or configure(tensor_item='fetch') to "
        "have it fetched from the first process each time",
    )


def _replaced(args: Any, kwargs: dict[str, Any], by: dict[int, Any]) -> tuple[Any, dict[str, Any]]:
    replaced: tuple[Any, dict[str, Any]] = pytree.tree_map(
        lambda leaf: by.get(id(leaf), leaf), (args, kwargs)
    )
    return replaced


def _computed(
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    values: Sequence[Any],
    place: Place,
) -> Any:
    """Return what the script computes from the values that it knows."""
    by = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
    given, named = _replaced(args, kwargs, by)
    with _disable_current_modes(), torch.no_grad():
        result = function(*given, **named)
    return pytree.tree_map_only(torch.Tensor, lambda leaf: constant(leaf, place), result)


def _value(
    function: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], place: Place
) -> Any:
    """Return what the function returns on the first process."""
    rank = rank_of(place.mesh, None, {})
    refs = tuple(tensor._ref for tensor in tensors)
    if function is torch.ops.aten._local_scalar_dense.default:
        value = request(place, ("value", (rank,), refs[0]), rank, refs).get()
        return value.item()
    by = {id(tensor): Reference(tensor._ref) for tensor in tensors}
    call = pickled((resolvable_function(function), *_replaced(args, kwargs, by)))
    return request(place, ("call", (rank,), call), rank, refs).get()


def _shaped(
    function: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], place: Place
) -> Any:
    """Run the function on all processes, and return its results if they have equal shapes."""
    where = here()
    by = {id(tensor): Operand(number) for number, tensor in enumerate(tensors)}
    given, named = _replaced(args, kwargs, by)
    resolvable = resolvable_function(function)
    ranks = tuple(place.mesh.processes)
    kept, patterns = probe(resolvable, place, given, named, tensors, ranks, where)
    refs = [tensor._ref for tensor in tensors]
    if any(pattern != patterns[0] for pattern in patterns):
        place.engine.emit(place, (DELETE, kept), where)
        shapes = "; ".join(
            f"{', '.join(str(list(out.metadata.size)) for out in pattern[0])} on rank {rank}"
            for rank, pattern in zip(ranks, patterns, strict=True)
        )
        raise NeedsShape(
            function,
            f"the result of {function} has another shape on each process: {shapes}. A distributed "
            "tensor has one shape on all: compute it in a function with "
            "monarch.remote(function, propagate=...) whose results have",
        )
    plan = plan_of(patterns[0], resolvable, given, named, len(tensors))
    return issue(plan, place, tensors, refs, where, bind=(BIND, kept, plan.picks))
