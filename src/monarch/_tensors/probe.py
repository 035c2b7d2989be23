"""Probes: a function runs on the processes, its results stay there, and the client learns of them.

That is for functions whose results cannot be known before: the processes say what came out, and a
second command gives references to the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from monarch._tensors.core.special import PROBE
from monarch._tensors.core.template import Plan
from monarch._tensors.fetch import ask
from monarch._tensors.pickled import pickled

if TYPE_CHECKING:
    from monarch._tensors.core.aliases import Stack
    from monarch._tensors.function import ResolvableFunction
    from monarch._tensors.place import Place
    from monarch._tensors.tensor import Tensor

__all__ = ["plan_of", "probe"]


def probe(
    function: ResolvableFunction,
    place: Place,
    args: Any,
    kwargs: Any,
    tensors: Sequence[Tensor],
    ranks: tuple[int, ...],
    where: Stack,
) -> tuple[int, list[Any]]:
    """Run a function on all processes of `place`, and keep its results there; blocks.

    Args:
        function: the function.
        place: where.
        args: its arguments, with an `Operand` for each tensor.
        kwargs: its keyword arguments, the same.
        tensors: the tensors.
        ranks: the processes that report.
        where: the line of the program.

    Returns the reference of what is kept, which `BIND` or a deletion ends, and the report of each
    of `ranks` for `plan_of`: the metadata of what the function returned, what of that shares a
    storage with an argument, and which arguments it wrote to. Raises `RemoteException`.
    """
    engine = place.engine
    call = pickled((function, args, kwargs))
    with engine.lock:
        kept = engine.new_ref()
        refs = tuple(tensor._ref for tensor in tensors)
        others = {ref for tensor in tensors for ref in tensor._aliases.refs}
        engine.emit(place, (PROBE, kept, call, refs, tuple(others)), where)
    answers = ask(place, ("probed", ranks, kept), (kept,)).get()
    return kept, [answers.of(rank) for rank in ranks]


def plan_of(pattern: Any, function: Any, args: Any, kwargs: Any, count: int) -> Plan:
    """Return the plan of a function that had such results, for `count` tensors."""
    outputs, shape, picks, written = pattern
    structure = None
    if shape is not None:
        shown, spec = pytree.tree_flatten(*shape)
        structure = (spec, tuple(shown))
    return Plan(
        *(function, args, kwargs, tuple(range(count))),
        *(tuple(outputs), tuple(written), structure),
        picks=tuple(picks),
    )
