"""The error of an operation whose tensors cannot be used together, or not here.

It shows the call with a mark for each culprit, what is active, and one line for each mark.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.active import active
from monarch._tensors.core.template import Plan
from monarch._tensors.errors import Misplaced
from monarch._tensors.stream import main
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import is_in_operator, program_level, text_of

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place

__all__ = ["explain", "place_at", "place_of_call", "refuse"]


def place_at(tensors: Sequence[Tensor], mesh: DeviceMesh | None) -> Place | None:
    """Return where an operation runs: at its first tensor, on the active stream."""
    stream = active().stream or main
    if tensors:
        place: Place = tensors[0]._place
        if place.stream is not stream:
            place = place.engine.place(place.mesh, stream)
        return place
    if mesh is None:
        return None
    return mesh.client.place(mesh, stream)


def place_of_call(name: str, args: Any, kwargs: Any, tensors: list[Any]) -> Place:
    """Return where a remote function runs; raises `Misplaced` unless its tensors are there."""
    distributed = [tensor for tensor in tensors if type(tensor) is Tensor]
    place = place_at(distributed, active().mesh)
    if place is None:
        raise explain(name, args, kwargs, None, None)
    for tensor in tensors:
        if (
            type(tensor) is not Tensor
            or tensor._place is not place
            or not tensor._aliases.may_read()
        ):
            raise explain(name, args, kwargs, active().mesh, place)
    return place


def explain(
    function: Any,
    args: Any,
    kwargs: Any,
    mesh: DeviceMesh | None,
    place: Place | None,
    plan: Plan | None = None,
) -> Misplaced:
    """Return the error of ``function(*args, **kwargs)``, with the reason for each tensor."""
    leaves = pytree.tree_leaves((args, kwargs))
    written: set[int] = set()
    if plan is not None:
        tensors = [leaf for leaf in leaves if type(leaf) is Tensor]
        written = {id(tensors[number]) for number in plan.written}
    reasons: dict[int, str] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            reason = _reason(leaf, place, id(leaf) in written)
            if reason:
                reasons.setdefault(id(leaf), reason)
    overall = ""
    if place is None and mesh is None:
        overall = "Remote functions require an active device mesh, use `with mesh.activate():`"
    error = _error(_name(function), args, kwargs, mesh, reasons, overall)
    if reasons and not any(type(leaf) is Tensor for leaf in leaves) and is_in_operator():
        # Operators of ordinary tensors make "unsupported operand type(s)" of each TypeError.
        warnings.warn(str(error), UserWarning, stacklevel=program_level())
    return error


def refuse(function: str, tensor: Any, keyword: str, reason: str) -> Misplaced:
    """Return the error that `tensor` is no argument for `function`, for one reason."""
    return _error(function, (tensor,), {}, active().mesh, {id(tensor): f"{keyword}: {reason}"}, "")


def _error(
    name: str,
    args: Any,
    kwargs: Any,
    mesh: DeviceMesh | None,
    reasons: dict[int, str],
    overall: str,
) -> Misplaced:
    marks = {key: f"ERROR_{number}" for number, key in enumerate(reasons)}
    shown = [_show(value, marks) for value in args]
    shown += [f"{key}={_show(value, marks)}" for key, value in kwargs.items()]
    lines = [
        "Incorrect arguments to monarch operation:",
        f"  {name}({', '.join(shown)})",
        f"  active_mesh = {mesh if mesh is not None else active().mesh!r}",
        f"  active_stream = {active().stream or main}",
    ]
    lines += [f"  {marks[key]}: {reason}" for key, reason in reasons.items()]
    if overall:
        lines.append(f"  {overall}")
    return Misplaced("\n".join(lines))


def _reason(tensor: torch.Tensor, place: Place | None, is_written: bool) -> str:
    if type(tensor) is not Tensor:
        return (
            "LOCAL_TENSOR: an ordinary tensor of this process. Make it while the mesh is active, "
            "or leave the mesh with `with no_mesh.activate():`"
        )
    aliases = tensor._aliases
    if aliases.dropped is not None:
        return f"DROPPED: tensor {tensor._ref} is dropped at:\n{text_of(aliases.dropped)}"
    if place is not None and tensor.mesh is not place.mesh:
        is_foreign = tensor.mesh.client is not place.engine
        other = " of another proc mesh" if is_foreign else ""
        return (
            f"WRONG_MESH: it is on {tensor.mesh!r}{other}, the operation is on {place.mesh!r}; "
            "copy it there with tensor.to_mesh(mesh)"
        )
    if place is not None and tensor.stream is not place.stream:
        return (
            f"WRONG_STREAM: it is on {tensor.stream}, the active one is {place.stream}; use "
            "stream.borrow(tensor)"
        )
    if not aliases.readable:
        return f"BORROWED: it is mutably borrowed since:\n{_borrowed(tensor)}"
    if is_written and not aliases.writable:
        since = _borrowed(tensor)
        if not since:
            return (
                "MUTATING_BORROW: it would be mutated, and it is borrowed for reading only; use "
                "stream.borrow(tensor, mutable=True)"
            )
        return f"MUTATING_BORROW: it would be mutated while it is borrowed, since:\n{since}"
    return ""


def _borrowed(tensor: Tensor) -> str:
    return "".join(text_of(where) for where in tensor._aliases.borrows.values())


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or str(function)


def _show(value: Any, marks: dict[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        return marks.get(id(value), ".")
    if isinstance(value, list | tuple):
        inner = ", ".join(_show(item, marks) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key!r}: {_show(item, marks)}" for key, item in value.items()) + "}"
        )
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
