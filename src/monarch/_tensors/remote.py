"""`remote`: functions that run on every process of a mesh, on the local tensors there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.active import active
from monarch._tensors.core.cache import structure_key
from monarch._tensors.core.special import BIND
from monarch._tensors.core.template import Operand, Plan
from monarch._tensors.dispatch import CONSTANTS, issue
from monarch._tensors.fetch import Answers, ask, rank_of, request
from monarch._tensors.function import ResolvableFunction, resolvable_function
from monarch._tensors.misplaced import explain, place_at, place_of_call
from monarch._tensors.pickled import pickled
from monarch._tensors.probe import plan_of, probe
from monarch._tensors.propagate import propagate as propagate_fakes
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import here
from monarch._tensors.worker.template import Reference
from monarch.actor import Port, Shape, ValueMesh, context
from monarch.actor import Slice as NDSlice

if TYPE_CHECKING:
    from monarch._tensors.place import Place
    from monarch.actor import Future

__all__ = ["Remote", "call_on_shard_and_fetch", "remote"]


class Remote:
    """A function of the program, or of a module, that runs on all processes of a mesh.

    Calling it runs it on each process with the local tensors in the place of the distributed ones,
    and returns at once what propagation says it returns. The adverbs of endpoints return what the
    function itself returns.
    """

    def __init__(self, function: Any, propagator: Any) -> None:
        if propagator == "mocked":
            raise NotImplementedError("propagate='mocked' is not implemented")
        if not (propagator in (None, "cached", "inspect") or callable(propagator)):
            raise ValueError(
                f"propagate must be a function, 'cached', 'inspect' or None, not {propagator!r}"
            )
        self._function = function
        self._propagator = propagator
        self._resolvable: ResolvableFunction | None = None
        self._undecorated = function
        if callable(function) and not isinstance(function, torch._ops.OpOverload):
            functools.update_wrapper(self, function, updated=())

    def _resolved(self) -> ResolvableFunction:
        if self._resolvable is None:
            self._resolvable = resolvable_function(self._function)
        return self._resolvable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on all processes; see `rref`."""
        return self.rref(*args, **kwargs)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on all processes; return distributed tensors at once.

        The mesh is that of the first tensor, or the active one. Raises `Misplaced` for tensors that
        cannot be used together.
        """
        key: list[Any] = [self]
        tensors: list[Any] = []
        is_flat = _take_apart(args, key, tensors)
        if kwargs and is_flat:
            key.extend(kwargs)
            is_flat = _take_apart(kwargs.values(), key, tensors)
        if not is_flat:
            key, tensors = self._structured(args, kwargs)
        place = self._place(args, kwargs, tensors)
        if len(tensors) > 1:
            storages = [tensor._aliases for tensor in tensors]
            key.extend(map(storages.index, storages))
        engine = place.engine
        known = tuple(key)
        try:
            plan = engine.cache.get(known)
            is_cached = True
        except TypeError:  # an argument that cannot be hashed
            plan = None
            is_cached = False
            if self._propagator in (None, "cached"):
                raise TypeError(
                    f"{self._name()} has arguments that cannot be hashed, so what it returns for "
                    "them cannot be remembered; give it a propagate= function, or 'inspect'"
                ) from None
        if plan is None:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            plan = self._plan(place, [_on_worker(leaf) for leaf in leaves], spec, tensors)
            if isinstance(plan, _Probed):
                if is_cached:
                    engine.keep(known, plan.plan)
                return plan.result
            if is_cached:
                plan = engine.keep(known, plan)
        for number in plan.written:
            if not tensors[number]._aliases.writable:
                raise explain(self._name(), args, kwargs, active().mesh, place, plan)
        result = issue(plan, place, tensors, [t._ref for t in tensors], here())
        for number in plan.written:
            torch.autograd.graph.increment_version(tensors[number])
        if not is_cached:
            engine.forget(plan)
        return result

    def _structured(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
        """Return the key of a call and its tensors, if there are lists or dicts among arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key: list[Any] = [self, structure_key(spec)]
        tensors: list[Any] = []
        for leaf in map(_on_worker, leaves):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                key.append(leaf._meta if type(leaf) is Tensor else None)
            else:
                key.append(type(leaf))
                key.append(leaf)
        return key, tensors

    def _place(self, args: Any, kwargs: Any, tensors: list[Any]) -> Place:
        """Return where a call runs; raises `Misplaced` unless its tensors are there."""
        if tensors and type(tensors[0]) is Tensor:
            place = place_at(tensors, None)
            for tensor in tensors:
                if (
                    type(tensor) is not Tensor
                    or tensor._place is not place
                    or not tensor._aliases.usable
                ):
                    break
            else:
                return cast("Place", place)
        return place_of_call(self._name(), args, kwargs, tensors)

    def _plan(self, place: Place, leaves: list[Any], spec: Any, tensors: list[Any]) -> Any:
        engine = place.engine
        count = 0
        shown = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                shown.append(Operand(count))
                count += 1
            else:
                shown.append(leaf)
        args, kwargs = pytree.tree_unflatten(shown, spec)
        function = self._resolved()
        propagator = self._propagator
        if propagator == "inspect":
            propagator = _nothing
        elif propagator in (None, "cached"):
            return _probe(function, self._name(), place, args, kwargs, tensors)
        plan = propagate_fakes(
            propagator,
            function,
            args,
            kwargs,
            [tensor._meta for tensor in tensors],
            [id(tensor._aliases) for tensor in tensors],
        )
        engine.learn(plan, _definition(plan, self._name()))
        return plan

    # -- with the real result ---------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on all processes of the active mesh; return a future of all results."""
        place, ranks, mesh = self._asked(args, kwargs)
        reports = self._ask(place, ranks, args, kwargs)
        shape = Shape(mesh.names, NDSlice.new_row_major(mesh.processes.sizes))
        return _spi.then(
            reports, lambda answers: ValueMesh(shape, [answers.of(rank) for rank in ranks])
        )

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on the only process of the active mesh; ValueError if it has several."""
        _, ranks, mesh = self._asked(args, kwargs)
        if len(ranks) != 1:
            raise ValueError(f"call_one requires exactly 1 process, but {mesh!r} has {len(ranks)}")
        return self.choose(*args, **kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on one process of the active mesh; return a future of its result.

        That is the first process, always: a function that keeps state finds it again. (An endpoint
        chooses at random, since its actors stand for each other.)
        """
        place, ranks, _ = self._asked(args, kwargs)
        rank = ranks[0]
        reports = self._ask(place, (rank,), args, kwargs)
        return _spi.then(reports, lambda answers: answers.of(rank))

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on all processes; return an iterator of one future each."""
        place, ranks, _ = self._asked(args, kwargs)
        reports = self._ask(place, ranks, args, kwargs)
        return iter(
            [_spi.then(reports, functools.partial(Answers.of, rank=rank)) for rank in ranks]
        )

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Run the function on all processes of the active mesh, without a result.

        An error is reported when the script ends, as that of an operation which no fetch needed.
        """
        place, _, mesh = self._asked(args, kwargs)
        self._tell(place, mesh, args, kwargs)

    def _tell(self, place: Place, mesh: Any, args: Any, kwargs: Any) -> None:
        """Run the function on the processes of `mesh`, as an operation without results."""
        told = Remote(self._function, "inspect")
        told._resolvable = self._resolved()
        engine = place.engine
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        there = engine.place(mesh, place.stream)
        plan = told._plan(there, [_on_worker(leaf) for leaf in leaves], spec, tensors)
        issue(plan, there, tensors, [tensor._ref for tensor in tensors], here())
        engine.forget(plan)

    def _send(self, args: Any, kwargs: Any, port: Any, selection: str) -> None:
        """Run the function, and send what it returns to a port: `monarch.actor.send`.

        The port gets an answer of each process, with the rank in the active mesh, or the exception.
        """
        if selection not in ("all", "choose"):
            raise ValueError(f"selection must be 'all' or 'choose', not {selection!r}")
        place, ranks, mesh = self._asked(args, kwargs)
        if selection == "choose":
            ranks, mesh = ranks[:1], mesh.slice(**dict.fromkeys(mesh.names, 0))
        if port is None:
            self._tell(place, mesh, args, kwargs)
            return
        reports = self._ask(place, ranks, args, kwargs)
        instance = context().actor_instance

        def pass_on() -> None:
            for number, rank in enumerate(ranks):
                answered: Port[Any] = Port(port, instance, number)
                try:
                    value = reports.get().of(rank)
                except Exception as error:
                    answered.exception(error)
                else:
                    answered.send(value)

        _spi.start_thread("monarch-tensors-send", pass_on)

    def _asked(self, args: Any, kwargs: Any) -> tuple[Place, tuple[int, ...], Any]:
        mesh = active().mesh
        if mesh is None:
            raise ValueError(
                "Calling a 'remote' monarch function requires an active proc_mesh: use "
                "`with mesh.activate():`"
            )
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        place = place_of_call(self._name(), args, kwargs, tensors)
        ranks = tuple(mesh.processes)
        if mesh.client is not place.engine or not set(ranks) <= set(place.mesh.processes):
            raise ValueError(
                f"the active mesh {mesh!r} is no part of {place.mesh!r}, where the tensors are"
            )
        return place, ranks, mesh

    def _ask(self, place: Place, ranks: tuple[int, ...], args: Any, kwargs: Any) -> Future[Answers]:
        return ask(place, self._question(ranks, args, kwargs), self._refs(args, kwargs))

    def _question(self, ranks: tuple[int, ...], args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: Reference(leaf._ref) if type(leaf) is Tensor else _on_worker(leaf),
            (args, kwargs),
        )
        return ("call", ranks, pickled((self._resolved(), args, kwargs)))

    def _refs(self, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Return the tensors of a call, to which the function may write."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is Tensor]
        for tensor in tensors:
            tensor._aliases.forget()
        return tuple(tensor._ref for tensor in tensors)

    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", self._function))

    def __repr__(self) -> str:
        return f"<remote function {self._name()}>"


@overload
def remote(function: None = None, *, propagate: Any = None) -> Callable[[Any], Remote]: ...
@overload
def remote(function: Callable[..., Any] | str, *, propagate: Any = None) -> Remote: ...
def remote(function: Any = None, *, propagate: Any = None) -> Any:
    """Return a `Remote` for `function`; as a decorator, with or without `propagate`.

    Args:
        function: a function, an operator of torch, or the path of one ("module.function").
        propagate: how the results are known at once. A function is called on fake tensors, and its
            results have the shapes; "inspect" means no results; None or "cached" runs the function
            and remembers what it returned for arguments of the same kind.
    """
    if function is None:
        return functools.partial(remote, propagate=propagate)
    return Remote(function, propagate)


def call_on_shard_and_fetch(
    remote: Any, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """Run a remote function on one process only, and return a future of its result.

    Args:
        remote: the `Remote`.
        shard: the coordinates of the process; without them, the first one.
    """
    if not isinstance(remote, Remote):
        raise TypeError(
            f"call_on_shard_and_fetch needs a remote function, not {remote!r}: wrap it as "
            "monarch.remote(function)"
        )
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    place = place_of_call(remote._name(), args, kwargs, tensors)
    rank = rank_of(place.mesh, shard, {})
    question = remote._question((rank,), args, kwargs)
    return request(place, question, rank, remote._refs(args, kwargs))


def _take_apart(values: Iterable[Any], key: list[Any], tensors: list[Any]) -> bool:
    """Add arguments to the key of a call; return whether all are tensors and plain constants."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            key.append(value._meta)
        elif kind in CONSTANTS:
            key.append(kind)
            key.append(value)
        else:
            return False
    return True


def _on_worker(leaf: Any) -> Any:
    """Return what stands for an argument on its way: a mesh and a process group have stand-ins."""
    stand_in = getattr(type(leaf), "_on_worker", None)
    return leaf if stand_in is None else stand_in(leaf)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Propagate to no results."""


def _definition(plan: Plan, name: str) -> tuple[Any, ...]:
    """Return what the processes need for a plan; they unpickle its function at the first use."""
    return ("user", name, pickled((plan.function, plan.args, plan.kwargs)), *plan.definition())


class _Probed:
    """The plan of a function that ran for the first time, and what that call returns."""

    def __init__(self, plan: Plan, result: Any) -> None:
        self.plan = plan
        self.result = result


def _probe(
    function: ResolvableFunction,
    name: str,
    place: Place,
    args: Any,
    kwargs: Any,
    tensors: list[Any],
) -> _Probed:
    """Run a function on all processes, and learn what it returns; see `probe`."""
    where = here()
    kept, patterns = probe(
        function, place, args, kwargs, tensors, (place.mesh.processes.offset,), where
    )
    plan = plan_of(patterns[0], function, args, kwargs, len(tensors))
    place.engine.learn(plan, _definition(plan, name))
    bind = (BIND, kept, plan.picks)
    result = issue(plan, place, tensors, [t._ref for t in tensors], where, bind=bind)
    for number in plan.written:
        torch.autograd.graph.increment_version(tensors[number])
    return _Probed(plan, result)
