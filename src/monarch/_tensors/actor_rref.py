"""`rref` of endpoints: actors compute on their local tensors, and the results are distributed.

The endpoint is an operation of a stream: its command hands the arguments to the actor, waits for
the result, and keeps it by its references. The call itself is an ordinary message, so the actor
handles it in the order of the program. Both are sent under one lock; otherwise another thread could
send a call in between that the actor cannot finish before it has done this one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.active import active
from monarch._tensors.actor_argument import ranks_of_actors
from monarch._tensors.core.cache import structure_key
from monarch._tensors.core.template import Operand, Plan
from monarch._tensors.dispatch import issue
from monarch._tensors.mesh import mesh_of
from monarch._tensors.misplaced import explain, place_of_call
from monarch._tensors.propagate import propagate
from monarch._tensors.where import here, lines_of
from monarch._tensors.worker.late import Late, StandIn
from monarch.actor import Point
from monarch.actor import Slice as NDSlice

if TYPE_CHECKING:
    from monarch._tensors.engine import Engine
    from monarch._tensors.place import Place
    from monarch._tensors.tensor import Tensor

__all__ = ["rref"]


def rref(endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an endpoint of every actor of its mesh; return what its `propagate` says, at once.

    Args:
        endpoint: the `ActorEndpoint`.
        args: the arguments; a distributed tensor is the local one there.
        kwargs: the same.

    The results are on the processes of the actors. Raises `Misplaced` (a TypeError) for tensors
    that cannot be used together, ValueError if an actor is on a process that does not have them,
    and NotImplementedError for an endpoint without a propagate function.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    place = place_of_call(endpoint._call, args, kwargs, tensors)
    _check(endpoint, args, kwargs)
    engine: Engine = place.engine
    place = _place_of_actors(endpoint.mesh, place)
    plan, is_cached = _plan(endpoint, engine, leaves, spec, tensors)
    for number in plan.written:
        if not tensors[number]._aliases.writable:
            raise explain(endpoint._call, args, kwargs, active().mesh, place, plan)
    where = here()
    with engine.lock:
        call = engine.new_call()
        operands = [*(tensor._ref for tensor in tensors), call]
        result = issue(plan, place, tensors, operands, where)
        try:
            _send(endpoint, place, call, leaves, spec, tuple(lines_of(where)))
        except BaseException as error:  # Ctrl-C, too: the streams would wait for the actors
            _give_up(place, call, RuntimeError(f"{endpoint._call} was not sent: {error}"))
            raise
    for number in plan.written:
        torch.autograd.graph.increment_version(tensors[number])
    if not is_cached:
        engine.forget(plan)
    return result


def _check(endpoint: Any, args: Any, kwargs: Any) -> None:
    if endpoint.prop._propagator in (None, "cached"):
        raise NotImplementedError(
            f"{endpoint._call}.rref() cannot know what the endpoint returns: declare it with "
            "@endpoint(propagate=function), where the function computes on fake tensors, or "
            "propagate='inspect' for no result"
        )
    try:
        endpoint._check(args, kwargs)
    except Exception as misused:
        told = getattr(misused, "told", None)
        if told is None:
            raise
        raise told(endpoint._call, endpoint._check._signature) from None


def _place_of_actors(mesh: Any, place: Place) -> Place:
    """Return the place of the results: the part of `place` where the actors are."""
    engine = place.engine
    ranks = ranks_of_actors(mesh, range(len(mesh)), place)
    if ranks == tuple(place.mesh.processes):
        return place
    shape = mesh._shape
    if len(ranks) == len(place.mesh.processes):
        raise ValueError(
            f"the actors of {mesh!r} are on the processes of {place.mesh!r} in another order; use "
            "a mesh of actors that was spawned on it"
        )
    names = tuple(shape.labels)
    processes = _slice_of(ranks, shape.ndslice)
    part: Place = engine.place(mesh_of(engine, processes, names), place.stream)
    return part


def _slice_of(ranks: tuple[int, ...], actors: NDSlice) -> NDSlice:
    """Return `ranks` as a slice with the sizes and strides of that of the actors."""
    shifted = NDSlice(offset=ranks[0], sizes=list(actors.sizes), strides=list(actors.strides))
    if tuple(shifted) != ranks:
        raise ValueError(f"the actors are on the processes {ranks}, which are no slice of a mesh")
    return shifted


def _plan(
    endpoint: Any, engine: Engine, leaves: list[Any], spec: Any, tensors: list[Tensor]
) -> tuple[Plan, bool]:
    """Return the plan, and whether it is kept for the next call of the same kind."""
    propagator = endpoint.prop._propagator
    constants: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            constants.append(cast("Tensor", leaf)._meta)
        else:
            constants += (type(leaf), leaf)
    storages = [id(tensor._aliases) for tensor in tensors]
    first = {storage: number for number, storage in reversed(list(enumerate(storages)))}
    pattern = tuple(first[storage] for storage in storages)
    key = ("rref", propagator, endpoint.method, structure_key(spec), tuple(constants), pattern)
    try:
        plan = engine.cache.get(key)
        is_cached = True
    except TypeError:  # an argument that cannot be hashed
        plan, is_cached = None, False
    if plan is None:
        numbers = iter(range(len(tensors)))
        shown = [Operand(next(numbers)) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(shown, spec)
        run = _nothing if propagator == "inspect" else propagator
        metas = [tensor._meta for tensor in tensors]
        plan = propagate(run, endpoint.method, args, kwargs, metas, storages)
        # The arguments travel in the message to the actor.
        engine.learn(plan, ("actor", f"{endpoint._call}.rref()", None, *plan.definition()))
        if is_cached:
            plan = engine.keep(key, plan)
    return plan, is_cached


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Propagate to no results."""


def _send(
    endpoint: Any,
    place: Place,
    call: int,
    leaves: list[Any],
    spec: Any,
    where: tuple[tuple[str, int, str], ...],
) -> None:
    """Send the call to the actors; if one of them cannot answer, its stream stops waiting."""
    engine = place.engine
    numbers = iter(range(len(leaves)))
    filled = [
        StandIn(engine.name, (call, next(numbers))) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    engine.flush()
    kwargs = {**kwargs, _spi.LATE: Late(engine.name, where, call)}
    answers = endpoint._call_prepared(args, kwargs)
    answers.add_done_callback(functools.partial(_ended, place, call))


def _ended(place: Place, call: int, answers: Any) -> None:
    """Look at the answers, which are None; the streams have the results."""
    if answers._has_error():
        error = answers.exception()
        # On a thread of its own, since this one is the reactor's.
        _spi.start_thread("monarch-tensors-rref", lambda: _give_up(place, call, error))


def _give_up(place: Place, call: int, error: Exception) -> None:
    """End the waits of the streams for the actors."""
    engine: Engine = place.engine
    for rank in place.mesh.processes:
        engine.workers.slice(**Point(rank, engine.procs.extent)).give_up.broadcast(call, error)
