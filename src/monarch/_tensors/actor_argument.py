"""Distributed tensors as arguments of endpoints: each actor gets the local tensor of its process.

The message has a stand-in in the place of each tensor. The stream of the tensor hands the value
over when it has come so far, and the endpoint runs when the actor has all values (`worker.late`).
No data pass through the client.
"""

from __future__ import annotations

import itertools
import traceback
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.engine import engines
from monarch._tensors.errors import CallFailed, RemoteActorError, rebuilt
from monarch._tensors.where import here, lines_of
from monarch._tensors.worker.late import Late, StandIn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from monarch._tensors.engine import Engine
    from monarch._tensors.place import Place
    from monarch.actor import ActorError

__all__ = ["error_of_call", "prepare", "ranks_of_actors"]


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
    where = here()
    used: dict[Engine, tuple[int, tuple[int, ...]]] = {}
    places = itertools.count()

    def stand_in(leaf: Any) -> Any:
        if type(leaf) is not kind:
            return leaf
        if not leaf._aliases.may_read():
            raise TypeError(f"{leaf!r} was dropped (DROPPED), or is mutably borrowed (BORROWED)")
        engine: Engine = leaf._place.engine
        ranks = ranks_of_actors(mesh, called, leaf._place)
        if engine not in used:
            used[engine] = engine.new_call(), ranks
        key = (used[engine][0], next(places))
        engine.share(leaf, key, ranks, where)
        return StandIn(engine.name, key)

    args, kwargs = pytree.tree_map(stand_in, (args, kwargs))
    if not used:
        raise TypeError(
            f"a message to {mesh!r} holds a distributed tensor where its actors cannot get their "
            "part of it: in an object that is no list, tuple or dict, or in a variable that a "
            "class or function uses. Pass the tensor as an argument of its own, or fetch it with "
            "monarch.inspect(tensor)"
        )
    for engine in used:
        engine.flush()
    return args, {**kwargs, _spi.LATE: Late(next(iter(used)).name, tuple(lines_of(where)))}


def ranks_of_actors(mesh: Any, called: Sequence[int], place: Place) -> tuple[int, ...]:
    """Return the ranks, in the engine of `place`, of the processes of actors.

    Raises ValueError if an actor is on a process that is no part of `place`.
    """
    engine: Engine = place.engine
    procs = mesh._proc_mesh._uids()
    own = mesh._shape.ranks()
    known = {uid: rank for rank, uid in enumerate(engine.procs._uids())}
    ranks = [known.get(procs[own[rank]], -1) for rank in called]
    if not set(ranks) <= set(place.mesh.processes):
        raise ValueError(
            "monarch Tensors sent to an actor must be located on the same process as the "
            f"actor: they are on {place.mesh!r} of {engine.procs!r}, and actors of {mesh!r} are "
            "elsewhere"
        )
    return tuple(ranks)


def error_of_call(failed: CallFailed, call: ActorError) -> RemoteActorError:
    """Return the error of a call with tensors.

    If an argument was lost, it is the error of the operation that failed.
    """
    if failed.lost is not None:
        name, rank, seq, index = failed.lost
        engine = next((engine for engine in engines() if engine.name == name), None)
        if engine is not None:
            root = engine.fail(rank, seq, failed.text, failed.pickled, index)
            fields = (root.controller_frames, root.rank, root.ranks, root.original)
            return RemoteActorError(root.worker_error_string, *fields, call)
    frames = [traceback.FrameSummary(*line) for line in failed.where]
    rank = failed.lost[1] if failed.lost is not None else call.rank or 0
    return RemoteActorError(failed.text, frames, rank, [rank], rebuilt(failed.pickled), call)
