"""Distributed tensors as arguments of endpoints: each actor gets the local tensor of its process.

The message has a number in the place of each tensor. The stream of the tensor hands the value over
under that number when it has come so far, and the endpoint runs when the actor has all values.
Messages that come later to the actor wait behind it, so calls are handled in the order of the
program. No data pass through the client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.where import here
from monarch._tensors.worker.shares import take

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

__all__ = ["arrived", "arriving", "prepare"]


@dataclass(frozen=True)
class _StandIn:
    """Stands for a local tensor: the name of the engine, and the number of the value."""

    engine: str
    number: int


def prepare(
    kind: type[Any],
    mesh: Any,
    called: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with stand-ins for tensors.

    Args:
        kind: the class of distributed tensors.
        mesh: the mesh of actors.
        called: which of them are called.
        args: the arguments.
        kwargs: the keyword arguments.

    Raises ValueError if an actor is on a process that does not have a tensor, and TypeError for a
    tensor that was dropped.
    """
    procs = mesh._proc_mesh._uids()
    own = mesh._shape.ranks()
    uids = [procs[own[rank]] for rank in called]
    engines = set()

    def stand_in(leaf: Any) -> Any:
        if type(leaf) is not kind:
            return leaf
        place = leaf._place
        engine = place.engine
        if not leaf._aliases.may_read():
            raise TypeError(f"{leaf!r} was dropped (DROPPED), or is mutably borrowed (BORROWED)")
        ranks = {uid: rank for rank, uid in enumerate(engine.procs._uids())}
        inside = set(place.mesh.processes)
        if not all(ranks.get(uid) in inside for uid in uids):
            raise ValueError(
                "monarch Tensors sent to an actor must be located on the same process as the "
                f"actor: {leaf!r} is on {place.mesh!r} of {engine.procs!r}, and actors of {mesh!r} "
                "are elsewhere"
            )
        engines.add(engine)
        return _StandIn(engine.name, engine.share(leaf, tuple(ranks[uid] for uid in uids), here()))

    args, kwargs = pytree.tree_map(stand_in, (args, kwargs))
    for engine in engines:
        engine.flush()
    return args, {**kwargs, _spi.LATE: True}


def arrived(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with the local tensors; blocks the actor until they are there."""
    futures, rebuild = _taken_apart(args, kwargs)
    return rebuild([future.result(_spi.settings.tensor_collective_timeout) for future in futures])


async def arriving(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with the local tensors, as `arrived` does, on an event loop."""
    futures, rebuild = _taken_apart(args, kwargs)
    timeout = _spi.settings.tensor_collective_timeout
    waits = [asyncio.wait_for(asyncio.wrap_future(future), timeout) for future in futures]
    return rebuild([await wait for wait in waits])


def _taken_apart(
    args: Any, kwargs: dict[str, Any]
) -> tuple[list[Future[Any]], Callable[[list[Any]], tuple[Any, dict[str, Any]]]]:
    """Return a future for each stand-in, and what builds the arguments from their values."""
    kwargs = {name: value for name, value in kwargs.items() if name != _spi.LATE}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    futures = [take(leaf.engine, leaf.number) for leaf in leaves if type(leaf) is _StandIn]

    def rebuild(values: list[Any]) -> tuple[Any, dict[str, Any]]:
        rest = iter(values)
        filled = [next(rest) if type(leaf) is _StandIn else leaf for leaf in leaves]
        given, named = pytree.tree_unflatten(filled, spec)
        return given, named

    return futures, rebuild
