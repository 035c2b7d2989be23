"""Endpoints: the methods of an actor that others may call, and the adverbs that call them.

`@endpoint` makes an `EndpointProperty` of a method. On a mesh, the property's name gives an
`ActorEndpoint`, made once per mesh and kept. It resolves everything that is the same for every call
(links, frame meta, the signature check), so a call only has to check, encode, pack and send. The
objects that wait for answers are in `reply`.

Path of a call (see docs/design.md): `call_one` here -> `Link.send` (by way of `Proc.send` if the
payload is big, or the actor is in this process) -> the peer's reactor -> `Cell.put` -> `dispatch`
-> reply -> this process's reactor -> `deliver` of the sink -> the thread in `Future.get`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from monarch._engine.base import instrument
from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import PayloadTooLarge
from monarch._engine.base.features import hook
from monarch._engine.base.verdict import ELSEWHERE
from monarch._engine.mesh.call.context import context
from monarch._engine.mesh.call.deferred import defer, has_futures
from monarch._engine.mesh.call.misuse import Misused
from monarch._engine.mesh.call.undeliverable import ReturnPort, give_back
from monarch._engine.mesh.results.future import PENDING, RAW, Future, begins_wait
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.mesh.results.reply import (
    Arrival,
    Arrivals,
    PartialReplies,
    Replies,
    Reply,
    ValueStream,
    lost_error,
)
from monarch._engine.mesh.results.value_mesh import ValueMesh
from monarch._engine.runtime.agent.client import expect_async_actors
from monarch._engine.runtime.cast.sender import gathers
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.links import LocalLink, LostLink
from monarch._engine.runtime.proc.ownership import CallSink
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.runtime.proc.time_limit import TimeLimit
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.call_meta import call_meta
from monarch._engine.wire.codec import Payload
from monarch._engine.wire.frame import ALONE, CALL, FIRST, ONCE, pack

if TYPE_CHECKING:
    import inspect
    from types import EllipsisType

    from monarch._engine.mesh.call.port import Port, PortRef
    from monarch._engine.mesh.meshes.actor_mesh import ActorMesh
    from monarch._engine.runtime.cast.sender import Plan

__all__ = [
    "ActorEndpoint",
    "Endpoint",
    "EndpointProperty",
    "NotAnEndpoint",
    "ValueStream",
    "as_endpoint",
    "concurrent_endpoint",
    "endpoint",
    "send",
]

_COROUTINE = 0x80  # `inspect.CO_COROUTINE`

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Propagator = Literal["cached", "inspect", "mocked"] | Callable[..., Any] | None


_NAMED = 8  # at most so many ranks are listed in an error


class _Adverbs(Protocol[P, R_co]):
    """The adverbs that all endpoints have, whatever their options."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> ValueStream[R_co]: ...
    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...


class Endpoint(_Adverbs[P, R_co], Protocol[P, R_co]):
    """The type of ``mesh.method``, for annotations."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., on_failure: Literal["partial"]
    ) -> PartialEndpoint[P, R_co]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., on_failure: Literal["raise"] = ...
    ) -> Endpoint[P, R_co]: ...


class PartialEndpoint(_Adverbs[P, R_co], Protocol[P, R_co]):
    """The type of ``mesh.method.options(on_failure="partial")``."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co | Exception]]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., on_failure: Literal["raise"]
    ) -> Endpoint[P, R_co]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., on_failure: Literal["partial"] = ...
    ) -> PartialEndpoint[P, R_co]: ...


class EndpointProperty(Generic[P, R_co]):
    """A method marked as an endpoint. It is not callable: actors are called through their mesh."""

    def __init__(
        self,
        method: Callable[..., Any],
        propagator: Propagator = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        if (
            isinstance(method, FunctionType)
            and method.__code__.co_flags & _COROUTINE
            and not method.__module__.startswith("monarch._engine.")  # see `spawn_procs`
        ):
            expect_async_actors()
        self._method = method
        self._propagator = propagator
        self._explicit_response_port = explicit_response_port
        self._instrument = instrument
        # A concurrent endpoint answers when its task is done, not when dispatch returns.
        self._concurrent = concurrent
        self._user_port = explicit_response_port
        if concurrent:
            self._explicit_response_port = True
        self._name: str | None = None
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name in the class. Programs that add an endpoint later call it themselves."""
        self._name = name

    # A mesh is annotated with the actor's class, so a type checker must see the mesh's endpoint as
    # the attribute of an instance. At run time a mesh is no instance of that class, and the
    # attribute is the property itself.
    @overload
    def __get__(self, instance: None, owner: type) -> EndpointProperty[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Endpoint[P, R_co]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = self._name or self._method.__name__
        raise TypeError(
            f"'EndpointProperty' object is not callable: {self._method.__qualname__} is an "
            "endpoint, which is called through a mesh. Inside its own actor, move the code to a "
            f"plain method and call that (or type(self).{name}._method(self, ...))"
            f"{see_page('own-endpoint')}"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._method.__qualname__}>"


class _Decorator(Protocol):
    """The type of ``@endpoint(...)``."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...


class _PortDecorator(Protocol):
    """The type of ``@endpoint(explicit_response_port=True)``."""

    def __call__(
        self, method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, None] | None], /
    ) -> EndpointProperty[P, R]: ...


class _ConcurrentDecorator(Protocol):
    """The type of ``@concurrent_endpoint(...)``."""

    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> EndpointProperty[P, R]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: Callable[Concatenate[Any, P], R],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, None] | None],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _Decorator: ...
@overload
def endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortDecorator: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark a method of an `Actor` as callable from elsewhere; bare or with options.

    Args:
        propagate: how the tensor engine finds the shape of the results of ``.rref``.
        explicit_response_port: the method is ``(self, port, *args)`` and answers by
            ``port.send(value)`` or ``port.exception(error)``, now or later, from any thread.
        instrument: report each call as a span named after the method, while telemetry is on.

    >>> class Adder:
    ...     @endpoint
    ...     def add(self, x): return x + 1
    >>> Adder.add
    <endpoint Adder.add>
    """

    def decorate(method: Callable[..., Any]) -> EndpointProperty[..., Any]:
        _check_propagate(propagate)
        return EndpointProperty(method, propagate, explicit_response_port, instrument)

    return decorate if method is None else decorate(method)


@overload
def concurrent_endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _ConcurrentDecorator: ...
@overload
def concurrent_endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortDecorator: ...
def concurrent_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark an ``async def`` method that runs as a task, so that the actor takes further messages.

    Callers notice no difference. The calls of one sender start in the order of sending. Raises
    ValueError for a plain method, and for a method that is an `endpoint` already.
    """

    def decorate(method: Any) -> EndpointProperty[..., Any]:
        if isinstance(method, EndpointProperty):
            raise ValueError(  # noqa: TRY004 - the interface's choice
                "concurrent_endpoint does not wrap @endpoint; pass endpoint options to "
                "@concurrent_endpoint"
            )
        if not is_async(method):
            raise ValueError("concurrent_endpoint can only wrap async endpoints")
        _check_propagate(propagate)
        return EndpointProperty(
            method, propagate, explicit_response_port, instrument, concurrent=True
        )

    return decorate if method is None else decorate(method)


def _check_propagate(propagate: Propagator) -> None:
    if propagate == "mocked":
        raise NotImplementedError("propagate='mocked' is not implemented")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of `function` returns a coroutine."""
    # `inspect` costs more to import than the rest of this module, and is right for wrappers, too.
    if type(function) is FunctionType and not vars(function):
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function)


def signature_of(prop: EndpointProperty[Any, Any]) -> inspect.Signature:
    """Return the signature for callers: the method's, without `self` and an explicit port."""
    import inspect

    signature = inspect.signature(prop._method)
    skip = 2 if prop._user_port else 1
    return signature.replace(parameters=list(signature.parameters.values())[skip:])


def _pick(links: list[FrameLink]) -> int:
    """Return one of the ranks behind `links`, uniformly at random."""
    if not links:
        raise ValueError("choose requires at least 1 actor, but the mesh is empty")
    return environments.current.chance(len(links))


class _Check:
    """The argument check of one method: a comparison for plain calls, `inspect` for the rest.

    A call without keywords is right if it has from `least` to `most` positional arguments.
    """

    __slots__ = ("_signature", "least", "most")

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        parameters = list(signature.parameters.values())
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.least = sum(p.default is p.empty for p in positional)
        self.most = len(positional)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            self.most = sys.maxsize
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
            self.most = -1  # a call without keywords is never right

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not kwargs and self.least <= len(args) <= self.most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Misused(error) from None


_checks: dict[Any, _Check] = {}


def check_of(prop: EndpointProperty[Any, Any]) -> _Check:
    check = _checks.get(prop)
    if check is None:
        check = _checks[prop] = _Check(signature_of(prop))
    return check


# -- calling -------------------------------------------------------------------------------------


class ActorEndpoint(Generic[P, R_co]):
    """One endpoint of one mesh. The adverbs send at once; results come through futures.

    Args:
        mesh: the (sliced) actor mesh.
        method: the endpoint's name.
        prop: its property on the class.
        proc: the calling process.
    """

    __slots__ = ("_check", "_links", "_meta", "_plan", "mesh", "method", "proc", "prop")

    _gathers: type[Replies] = Replies
    _timeout: float | None = None

    def __init__(
        self, mesh: ActorMesh, method: str, prop: EndpointProperty[P, R_co], proc: Proc
    ) -> None:
        self.mesh = mesh
        self.method = method
        self.prop = prop
        self.proc = proc
        self._check = check_of(prop)
        self._meta = call_meta(method, mesh._shape.extent.to_bytes())
        self._links: list[FrameLink] | None = None
        self._plan: Plan | None = None  # made with the links; None: no rank gets a cast

    @property
    def name(self) -> str:
        """The name of this call in errors: ``mesh.method()``."""
        return f"{self.mesh._mesh_name}.{self.method}()"

    @begins_wait
    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call the only actor of the mesh and return a future of its result.

        Raises ValueError at once unless the mesh has exactly one element.
        """
        links = self._links or self._resolve()
        if len(links) != 1:
            raise ValueError(
                f"call_one requires exactly 1 actor, but mesh has {len(links)}: use "
                f"{self._call}.call(...) for all, .choose(...) for any of them, or a slice of one"
                f"{see_page('call-one-of-several')}"
            )
        try:
            return self._one(links, 0, args, kwargs)
        except Misused as misused:
            if (deferred := self._deferred(misused, self.call_one, args, kwargs)) is not None:
                return deferred
            raise misused.told(self._call, self._check._signature) from misused.cause

    @begins_wait
    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call one actor, picked uniformly at random, and return a future of its result."""
        links = self._links or self._resolve()
        try:
            return self._one(links, _pick(links), args, kwargs)
        except Misused as misused:
            if (deferred := self._deferred(misused, self.choose, args, kwargs)) is not None:
                return deferred
            raise misused.told(self._call, self._check._signature) from misused.cause

    @begins_wait
    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]:
        """Call every actor and return a future of all results, in the mesh's shape.

        The first error settles the call.
        """
        links = self._links or self._resolve()
        future: Replies = self._gathers._new()
        future._endpoint = self
        try:
            self._check(args, kwargs)
            if links:
                self._collect(future, links, args, kwargs, ONCE)
                return future
        except Misused as misused:
            if (deferred := self._deferred(misused, self.call, args, kwargs)) is not None:
                return deferred
            raise misused.told(self._call, self._check._signature) from misused.cause
        future._outcomes = []
        future._resolve(RAW, (0, None))
        return future

    @begins_wait
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> ValueStream[R_co]:
        """Call every actor and return an iterator of one future each, in order of answers."""
        links = self._links or self._resolve()
        futures: list[Arrival[R_co]] = [Arrival._new() for _ in links]
        try:
            self._check(args, kwargs)
            if links:
                arrivals: Arrivals = Arrivals._new()
                arrivals._endpoint = self
                arrivals._line = deque(futures)
                for future in futures:
                    future._endpoint = self
                    future._arrivals = arrivals
                self._collect(arrivals, links, args, kwargs, FIRST)
        except Misused as misused:
            raise misused.told(self._call, self._check._signature) from misused.cause
        return ValueStream(futures)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor without waiting: no result, no acknowledgement, no error."""
        links = self._links or self._resolve()
        try:
            self._check(args, kwargs)
            self._send_all(links, args, kwargs, 0, None, 0, self._one_way_meta())
        except Misused as misused:
            raise misused.told(self._call, self._check._signature) from misused.cause

    def options(
        self,
        *,
        timeout: float | EllipsisType | None = ...,
        on_failure: Literal["raise", "partial"] | None = None,
    ) -> ActorEndpoint[P, R_co]:
        """Return the same endpoint with options; options that are not given stay as they are.

        Args:
            timeout: seconds from the send after which the caller stops waiting; None: no limit.
                The wait then ends with a TimeoutError that names the actors without an answer. They
                are not interrupted, and their later answers are dropped.
            on_failure: ``"raise"``: the first failure is raised by the future of a `call`;
                ``"partial"``: it resolves when each actor has answered, failed or run out of time,
                to a mesh with an exception in the place of each value that is missing (see
                `ValueMesh.failures`). The other adverbs have one result per future, which raises.

        The returned endpoint is cheap to make and can be used for many calls. Raises TypeError or
        ValueError for impossible options. `broadcast` and `send` wait for no answer: with a timeout
        they raise ValueError.

        >>> class Adder(Actor):
        ...     @endpoint
        ...     def inverse(self, x): return 1 / (x - current_rank()["gpus"])
        >>> procs = this_host().spawn_procs({"gpus": 2})
        >>> inverse = procs.spawn("adder", Adder).inverse
        >>> answers = inverse.options(timeout=30, on_failure="partial").call(1).get()
        >>> answers.successes()
        [({'gpus': 0/2}, 1.0)]
        >>> [(point["gpus"], error.exception) for point, error in answers.failures()]
        [(1, ZeroDivisionError('division by zero'))]
        >>> procs.stop().get()
        """
        gathers = self._gathers
        if on_failure == "partial":
            gathers = PartialReplies
        elif on_failure == "raise":
            gathers = Replies
        elif on_failure is not None:
            raise ValueError(f"on_failure must be 'raise' or 'partial', not {on_failure!r}")
        seconds = self._timeout if timeout is ... else _checked(timeout)
        return _OptionedEndpoint(self, seconds, gathers)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call every actor, and return at once distributed tensors that its results define.

        `propagate` of the endpoint says what comes back: a function of fake tensors, or "inspect"
        for no result. A fetch of a result raises the error of an endpoint that failed. Raises
        TypeError without a tensor argument and an active mesh, NotImplementedError without
        `propagate`, and ValueError if an actor is on a process without the tensors.
        """
        try:
            rref = hook("rref")
        except ModuleNotFoundError:  # without torch no mesh is active
            raise TypeError(
                f"Incorrect arguments to monarch operation:\n  {self.name} with rref\n"
                "Remote functions require an active device mesh, use `with mesh.activate():`"
            ) from None
        return rref(self, args, kwargs)

    def _call_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replies:
        """Call every actor with arguments that a feature has checked and prepared."""
        links = self._links or self._resolve()
        future: Replies = Replies._new()
        future._endpoint = self
        self._collect(future, links, args, kwargs, ONCE)
        return future

    def _send(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: PortRef | None,
        selection: str,
    ) -> None:
        """Send to the selected actors; their answers go to `port`, if there is one."""
        links = self._links or self._resolve()
        if selection not in ("all", "choose"):
            raise ValueError(f"Invalid selection: {selection}; use 'all' or 'choose'")
        try:
            self._check(args, kwargs)
        except Misused as misused:
            raise misused.told(self._call, self._check._signature) from misused.cause
        inbox = None if port is None else port.inbox()
        meta = self._one_way_meta() if port is None else self._meta
        number = 0 if port is None else port.port if inbox is None else inbox.port
        ranks = list(range(len(links))) if selection == "all" else [_pick(links)]
        if inbox is not None:
            inbox.expect(self, links, ranks)
        try:
            if selection == "all":
                self._send_all(links, args, kwargs, number, inbox, 0, meta)
            else:
                self._send_one(links, ranks[0], args, kwargs, number, inbox, 0, meta)
        except BaseException as error:
            if inbox is not None:
                for rank in ranks:
                    inbox.expect_nothing(links[rank], rank)
            if isinstance(error, Misused):
                raise error.told(self._call, self._check._signature) from error.cause
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle 'ActorEndpoint' object {self.name}; send the mesh instead")

    def __repr__(self) -> str:
        return f"<endpoint {self.name} of {self.mesh!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        adverb = "call_one" if len(self.mesh) == 1 else "call"
        raise TypeError(
            f"'ActorEndpoint' object is not callable: {self._call} is an endpoint; call it with "
            f"{self._call}.{adverb}(...){see_page('endpoint-as-function')}"
        )

    if not TYPE_CHECKING:  # for type checkers it is not there

        @property
        def remote(self) -> NoReturn:
            adverbs = "call_one(...)" if len(self.mesh) == 1 else "call(...), or call_one(...)"
            raise AttributeError(
                f"'ActorEndpoint' object has no attribute 'remote': write {self._call}.{adverbs}"
                f"{see_page('not-an-adverb')}"
            )

    @property
    def _call(self) -> str:
        """The expression that a program writes for this endpoint."""
        return f"{self.mesh._mesh_name}.{self.method.partition(':')[2] or self.method}"

    # -- the path --------------------------------------------------------------------------------

    def _resolve(self) -> list[FrameLink]:
        self._links = links = self.mesh._resolve_links()
        self._plan = self.mesh._plan(links)
        return links

    def _deferred(
        self,
        misused: Misused,
        adverb: Callable[..., Future[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Future[Any] | None:
        """Return the future of a call that was refused since arguments of it are futures."""
        return None if misused.arguments is None else defer(self, adverb, args, kwargs)

    def _one(
        self, links: list[FrameLink], rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reply[R_co]:
        check = self._check
        if kwargs or not check.least <= len(args) <= check.most:
            check(args, kwargs)
        proc = self.proc
        future: Reply[R_co] = Reply._new()
        future._endpoint = self
        future._link = links[rank]
        future._rank = rank
        future._port = port = next(proc.port_ids)
        flags = ONCE
        if proc.asks_ahead or port - 1 in proc.ports:
            proc.expects = None
        else:
            flags = ONCE | ALONE
            proc.expects = links[rank]
            proc.asks_ahead = True
        proc.ports[port] = future
        try:
            self._send_one(links, rank, args, kwargs, port, future, flags, self._meta)
        except BaseException:
            proc.close_port(port)
            raise
        return future

    def _collect(
        self,
        calls: Gather[Any],
        links: list[FrameLink],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        """Call every actor; `calls` receives the answers."""
        port = calls._open(self.proc, links)
        try:
            self._send_all(links, args, kwargs, port, calls, flags, self._meta)
        except BaseException:
            calls._close()
            raise

    def _silence(self, seconds: float, ranks: list[int], count: int) -> str:
        """Return the text that `ranks`, of `count` called, did not answer within `seconds`."""
        if len(ranks) == 1:
            who = self.mesh.display_of_rank(ranks[0])
        else:
            named = ", ".join(self.mesh.rank_text(rank) for rank in ranks[:_NAMED])
            more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
            who = f"{len(ranks)} of {count} actors: {named}{more}"
        return f"Endpoint call {self.name} failed, no answer within {seconds:g} s from {who}"

    def _late(self, ranks: list[int], count: int, instead: str = "") -> TimeoutError:
        """Return the error of a call whose deadline passed before `ranks`, of `count`, answered.

        `instead` names another remedy than more time, if there is one.
        """
        hint = f", or {instead}" if instead else ""
        return TimeoutError(
            f"{self._silence(self._timeout or 0, ranks, count)}. "
            "The endpoint goes on running there, and what it still answers is dropped. "
            f"Give it more time with options(timeout=...){hint}.{see_page('no-answer')}"
        )

    def _send_one(
        self,
        links: list[FrameLink],
        rank: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: int,
        sink: CallSink | None,
        flags: int,
        meta: bytes,
    ) -> None:
        proc = self.proc
        link = links[rank]
        uid = self.mesh._uid
        traffic = instrument.traffic
        if traffic is not None and not has_futures(args, kwargs):
            kwargs = traffic.sent(self, rank, port, kwargs)
        try:
            payload = proc.encode_call(args, kwargs)
        except PayloadTooLarge:
            raise
        except Exception as error:
            payload = self._prepared(error, [rank], args, kwargs)
        if link.paused and uid in link.paused:
            proc.wait_for_gate(link, uid, self.name, self._timeout)
        stream = payload.stream
        if stream is not None and link is not proc.local and link.queued <= link.queue_limit:
            if not link.send(pack(CALL, uid, port, rank, meta, stream, flags)):
                self._resend(link, rank, payload, port, sink, flags, meta)
            return
        try:
            if not proc.send(link, CALL, uid, port, rank, meta, payload, flags):
                self._resend(link, rank, payload, port, sink, flags, meta)
        finally:
            proc.sent(payload)

    def _send_all(
        self,
        links: list[FrameLink],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: int,
        sink: CallSink | None,
        flags: int,
        meta: bytes,
    ) -> None:
        """Send to every rank: by casts where there is a plan for them, else one by one."""
        proc = self.proc
        uid = self.mesh._uid
        traffic = instrument.traffic
        if traffic is not None and not has_futures(args, kwargs):
            kwargs = traffic.sent(self, None, port, kwargs)
        try:
            payload = proc.encode_call(args, kwargs)
        except PayloadTooLarge:
            raise
        except Exception as error:
            payload = self._prepared(error, range(len(links)), args, kwargs)
        for link in links:
            if link.paused and uid in link.paused:
                proc.wait_for_gate(link, uid, self.name, self._timeout)
        try:
            if self._plan is None or links is not self._links:
                stream, local = payload.stream, proc.local
                for rank, link in enumerate(links):
                    if stream is not None and link is not local and link.queued <= link.queue_limit:
                        sent = link.send(pack(CALL, uid, port, rank, meta, stream, flags))
                    else:
                        sent = proc.send(link, CALL, uid, port, rank, meta, payload, flags)
                    if not sent:
                        self._resend(link, rank, payload, port, sink, flags, meta)
            else:
                self._send_by_plan(self._plan, links, payload, port, sink, flags, meta)
        finally:
            proc.sent(payload)

    def _prepared(
        self,
        error: Exception,
        called: Sequence[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Payload:
        """Encode arguments that a feature prepares, if `error` of their pickling says so.

        A distributed tensor is such an argument: stand-ins travel, and become the local tensors
        before the endpoint runs.
        """
        prepare = getattr(error, "prepare_call", None)
        if prepare is None:
            raise Misused(error, (args, kwargs)) from None
        return self.proc.encode_call(*prepare(self.mesh, called, args, kwargs))

    def _send_by_plan(
        self,
        plan: Plan,
        links: list[FrameLink],
        payload: Payload,
        port: int,
        sink: CallSink | None,
        flags: int,
        meta: bytes,
    ) -> None:
        """Send to all ranks: through the agents to other hosts, one by one to the rest."""
        proc, uid = self.proc, self.mesh._uid
        waits = (self.name, self._timeout)
        once = gathers(port, flags)
        casting = proc.casting
        missed = casting.send(plan, CALL, uid, port, meta, payload, flags, *waits, gathers=once)
        for rank in (*plan.direct, *missed):
            link = links[rank]
            if not proc.send(link, CALL, uid, port, rank, meta, payload, flags):
                self._resend(link, rank, payload, port, sink, flags, meta)

    def _resend(
        self,
        link: FrameLink,
        rank: int,
        payload: Payload,
        port: int,
        sink: CallSink | None,
        flags: int,
        meta: bytes,
    ) -> None:
        """Repeat a send that was refused, to the process that replaced the lost one.

        A refused message was not executed, so repeating it is safe. If there is no replacement, the
        sink is notified: now if the reason of the loss is known, otherwise by `_bury`. Without a
        sink no caller waits, and the message is given back to the sender.
        """
        proc = self.proc
        # A forked child is no longer the process that the link of the parent to itself leads to.
        while proc.newest(link.uid) != link.uid or isinstance(link, LocalLink):
            old, link = link, self._resolve()[rank]
            if link is old:
                break
            if sink is not None:
                sink.peer_moved(rank, old, link)
            if proc.send(link, CALL, self.mesh._uid, port, rank, meta, payload, flags):
                return
        verdict = link.verdict if isinstance(link, LostLink) else proc.verdicts.get(link.uid)
        if not port and verdict is not None and verdict.code == ELSEWHERE:
            raise lost_error(self, rank, verdict)
        if not port:
            give_back(link, functools.partial(self.mesh.failure_of_rank, rank))
        elif sink is not None and verdict is not None:
            sink.peer_lost(link, verdict)

    def _one_way_meta(self) -> bytes:
        """Return the meta of a message without a reply port, maybe with a return port."""
        if self.proc.returns:
            back: ReturnPort | None = context().actor_instance._returns
            if back is not None:
                return call_meta(self.method, self.mesh._shape.extent.to_bytes(), back.number)
        return self._meta


class _OptionedEndpoint(ActorEndpoint[P, R_co]):
    """An endpoint with options: overrides the two places where calls begin, to set their deadline.

    A deadline is a timer of the caller's reactor, set by the send and cancelled when the call is
    settled. Time in which a debugger has stopped the program is added (`TimeLimit`). The called
    actors do not learn of it; a later answer finds its port closed. Calls without options have no
    code for deadlines.
    """

    __slots__ = ("_gathers", "_timeout")

    _gathers: type[Replies]
    _timeout: float | None

    def __init__(
        self, endpoint: ActorEndpoint[P, R_co], timeout: float | None, gathers: type[Replies]
    ) -> None:
        for name in ActorEndpoint.__slots__:
            setattr(self, name, getattr(endpoint, name))
        self._timeout = timeout
        self._gathers = gathers

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._timeout is not None:
            self._refuse("broadcast", "call")
        super().broadcast(*args, **kwargs)

    def _send(self, args: Any, kwargs: Any, port: Any, selection: str) -> None:
        if self._timeout is not None:
            self._refuse("send", "the receiver's recv().get(timeout=...)")
        super()._send(args, kwargs, port, selection)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise ValueError(
            f"{self.name}: {what} waits for no answer, so it cannot have a timeout; use {instead}, "
            f"or {what} without options(timeout=...)"
        )

    def _one(
        self, links: list[FrameLink], rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reply[R_co]:
        began = environments.current.now()
        future = super()._one(links, rank, args, kwargs)
        self._limit(future, began)
        return future

    def _collect(
        self,
        calls: Gather[Any],
        links: list[FrameLink],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        began = environments.current.now()
        super()._collect(calls, links, args, kwargs, flags)
        self._limit(calls, began)

    def _limit(self, waiting: Reply[Any] | Gather[Any], began: float) -> None:
        if self._timeout is None or waiting._phase != PENDING:
            return
        # The send itself may have waited.
        due = functools.partial(self._due, waiting, self._timeout, began)
        timer = self.proc.reactor.call_at(began + self._timeout, due)
        waiting._notify(timer.cancel)

    def _due(self, waiting: Reply[Any] | Gather[Any], timeout: float, began: float) -> None:
        if waiting._phase == PENDING:
            limit = TimeLimit(self.proc.reactor, timeout, began, waiting._expire)
            limit.examine()
            waiting._notify(limit.cancel)


def _checked(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a number of seconds, or None for no deadline, not {timeout!r}"
        )
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(
            f"invalid timeout {timeout}: it must be a finite, non-negative number of seconds, or "
            "None for no deadline"
        )
    return seconds


class NotAnEndpoint:
    """A public method without a decorator: calling it raises an error that says what to do."""

    def __init__(self, mesh: ActorMesh, name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        cls, method = self._mesh._class.__qualname__, self._name
        raise AttributeError(
            f"{cls}.{method} is not an endpoint: add @endpoint to it, or use "
            f"as_endpoint({self._mesh._mesh_name}.{method}).{name}{see_page('not-an-endpoint')}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Actor {self._mesh._class}.{self._name} is not annotated as an endpoint. To call it "
            "as one, add a @endpoint decorator to it, or directly wrap it in one "
            "as_endpoint(obj.method).call(...)"
        )


def as_endpoint(
    not_an_endpoint: Any,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
) -> Any:
    """Return an endpoint for ``mesh.plain_method``, without decorating the class.

    Raises ValueError for anything but an undecorated method of a spawned mesh.
    """
    if not isinstance(not_an_endpoint, NotAnEndpoint):
        raise ValueError(  # noqa: TRY004 - the interface's choice
            "expected an method of a spawned actor"
        )
    mesh = not_an_endpoint._mesh
    method = getattr(mesh._class, not_an_endpoint._name)
    prop: EndpointProperty[Any, Any] = EndpointProperty(method, propagate, explicit_response_port)
    name = f"{'port:' if explicit_response_port else 'plain:'}{not_an_endpoint._name}"
    return ActorEndpoint(mesh, name, prop, mesh._proc)


def send(
    endpoint: Endpoint[..., R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Send to the selected actors; their results, or errors, go to `port` if there is one."""
    target: Any = endpoint  # at run time an ActorEndpoint; the protocol is for annotations
    target._send(args, kwargs, None if port is None else port._passed_on(), selection)


ActorEndpoint.__module__ = "monarch._rust_bindings.monarch_hyperactor.endpoint"
_OptionedEndpoint.__module__ = ActorEndpoint.__module__
_OptionedEndpoint.__name__ = _OptionedEndpoint.__qualname__ = ActorEndpoint.__name__
EndpointProperty.__module__ = "monarch._src.actor.endpoint"
NotAnEndpoint.__module__ = "monarch._src.actor.endpoint"
ValueStream.__module__ = "monarch._rust_bindings.monarch_hyperactor.endpoint"
