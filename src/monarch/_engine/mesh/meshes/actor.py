"""`Actor`, and how a class becomes a running one.

`ActorSpec` is the content of a SPAWN frame. On the actor's own thread it constructs the user's
object and returns the `_Behaviour` that the runtime's loop drives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._engine.base import features
from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import format_remote, headline
from monarch._engine.base.settings import settings
from monarch._engine.mesh.call.context import CreatorInstance, Instance, context, enter
from monarch._engine.mesh.call.endpoint import EndpointProperty, is_async
from monarch._engine.mesh.call.undeliverable import ReturnPort
from monarch._engine.runtime.actor.cell import Cell, Handler
from monarch._engine.runtime.actor.dispatch import Died, end_by
from monarch._engine.runtime.actor.spawn import READY
from monarch._engine.shapes import Extent, MeshTrait, Point, Shape, Slice
from monarch._engine.transport.frame_link import FrameLink

if TYPE_CHECKING:
    import logging

    from typing_extensions import Self

    from monarch._engine.base.failure import MeshFailure, UndeliverableMessageEnvelope
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
    from monarch._engine.mesh.results.future import Future
    from monarch._engine.wire.frame import Frame

__all__ = ["Actor", "ActorSpec", "Restart", "check_actor_class", "endpoints_of"]


class _NotAMesh:
    """A member that only meshes have."""

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        if instance is None:
            return self
        raise NotImplementedError(
            "actor implementations are not meshes, but this class has the members of one so that "
            "type checkers accept them on a mesh annotated with the actor's class"
        )


class Actor(MeshTrait):
    """Base class of actors: a class whose endpoints are called through a mesh of its instances.

    An actor is *sync* if all its endpoints are plain functions: it has a thread. It is *async* if
    all are ``async def`` (or there are none): it has a thread with an event loop. Mixing both is an
    error at spawn. Messages are handled one at a time.

    >>> class Counter(Actor):
    ...     def __init__(self, start): self.n = start
    """

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """The logger named after the class, at level DEBUG."""
        import logging  # loaded late: many programs do not need it

        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    def __supervise__(self, failure: MeshFailure) -> Any:
        """Handle the failure of a mesh that this actor spawned; a truthy result means handled."""

    def __cleanup__(self, exc: Exception | None) -> Any:
        """Release resources when the actor ends; `exc` is None on a normal stop."""

    def __restart__(self, restart: Restart) -> Any:
        """Restore the state of the rank that this actor replaces (see `Supervisor`).

        Runs after the constructor and before the first message; async actors may make it ``async
        def``. If it raises, the actor fails.
        """

    def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> Any:
        """Handle a one-way message of this actor that could not be delivered.

        `message` has ``sender()``, ``dest()`` and ``error_msg()``, all texts. The method runs on
        this actor's thread between messages, or as a task of its loop; it may be async if the
        endpoints are. A truthy result settles the matter. All other messages are counted, and
        logged once per receiver: a sender never fails because of its receivers.

        One-way messages are those of `broadcast`, of `send` without a port, and of `Port.send` (for
        a port whose `return_undeliverable` is True). A call that cannot be delivered fails its own
        future only.
        """
        return False

    # Meshes of actors are annotated with the actor's class, so that type checkers know the
    # endpoints. These members make type checkers accept `mesh.slice(...)`, too. They are no
    # properties, since an actor may have attributes of these names.
    if TYPE_CHECKING:

        @property
        def _ndslice(self) -> Slice: ...

        @property
        def _labels(self) -> tuple[str, ...]: ...

        def _new_with_shape(self, shape: Shape) -> Self: ...

        @property
        def initialized(self) -> Future[None]: ...

        def stop(
            self, reason: str = "stopped by client", *, timeout: float | None = None
        ) -> Future[None]: ...

    else:
        _ndslice = _NotAMesh()
        _labels = _NotAMesh()
        _new_with_shape = _NotAMesh()
        initialized = _NotAMesh()
        stop = _NotAMesh()


Actor.__module__ = "monarch._src.actor.actor_mesh"


@functools.lru_cache(maxsize=4096)
def endpoints_of(cls: type) -> dict[str, EndpointProperty[Any, Any]]:
    """Return the endpoints of a class by name, inherited ones included."""
    found: dict[str, EndpointProperty[Any, Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, EndpointProperty):
                found[name] = value
            elif name in found:  # overridden by an attribute that is no endpoint
                del found[name]
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=4096)
def check_actor_class(cls: type) -> bool:
    """Whether actors of `cls` are async. Raises ValueError for a class that mixes both kinds."""
    endpoints = endpoints_of(cls)
    asyncs = [name for name, prop in endpoints.items() if is_async(prop._method)]
    syncs = [name for name in endpoints if name not in asyncs]
    if asyncs and settings.mixed_endpoints:
        syncs = []  # the event loop calls them
    if asyncs and syncs:
        raise ValueError(
            f"{cls} mixes both async and sync endpoints. Make them all async or all sync.\n"
            f"sync: {syncs}\nasync: {asyncs}{see_page('mixed-endpoints')}"
        )
    cleanup = hook(cls, "__cleanup__")
    if cleanup is not None and is_async(cleanup) != (not syncs):
        if syncs:
            raise ValueError(
                f"{cls} has sync endpoints, but an async __cleanup__. "
                "Make sure __cleanup__ is also synchronous."
            )
        if asyncs:
            raise ValueError(
                f"{cls} has async endpoints, but a synchronous __cleanup__. "
                "Make sure __cleanup__ is also async."
            )
    for name in ("__supervise__", "__restart__", "_handle_undeliverable_message"):
        function = hook(cls, name)
        if syncs and function is not None and is_async(function):
            raise ValueError(f"{cls} has sync endpoints, but an async {name}. Make it a plain def.")
    return not syncs


def hook(cls: type, name: str) -> Any:
    """Return an optional method, or None when the class only has the base's stub."""
    function = getattr(cls, name, None)
    return None if function is getattr(Actor, name) else function


class Restart(NamedTuple):
    """Facts for an actor about the one that it replaces.

    Attributes:
        incarnation: how often this rank was started again; 1 for the first replacement.
        reason: the report of the previous actor's failure.
    """

    incarnation: int
    reason: str


class ActorSpec:
    """Everything needed to construct one rank of an actor mesh; picklable."""

    __slots__ = ("args", "cls", "creator", "kwargs", "name", "proc_mesh")

    def __init__(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        proc_mesh: ProcMesh,
        creator: CreatorInstance,
    ) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.name = name
        self.proc_mesh = proc_mesh
        self.creator = creator

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.cls, self.args, self.kwargs, self.name, self.proc_mesh, self.creator)
        return ActorSpec, fields

    def build(self, cell: Cell) -> _Behaviour:
        """Construct the user's object on the current thread."""
        cls = self.cls
        class_name = f"{cls.__module__}.{cls.__qualname__}"
        extent = self.proc_mesh.extent
        rank = Point(cell.rank, extent)
        instance = Instance(rank, self.proc_mesh, self.name, class_name, self.creator, cell)
        enter(instance, cell.rank, extent)
        args, kwargs = self.args, self.kwargs
        if features.LATE in kwargs:
            _, args, kwargs = features.hook("late_arguments")(None, args, kwargs)
        actor = cls(*args, **kwargs)
        return _Behaviour(instance, actor, cell)


class _Behaviour:
    """A constructed actor as the runtime's loop drives it."""

    __slots__ = ("_cleanup", "actor", "cell", "enter", "handlers", "instance", "routes")

    def __init__(self, instance: Instance, actor: Actor, cell: Cell) -> None:
        self.instance = instance
        self.actor = actor
        self.cell = cell
        self.handlers: dict[str, Handler] = {}
        self.routes: dict[bytes, tuple[Handler, Extent]] = {}
        self.enter = functools.partial(enter, instance)
        cls: type = type(actor)
        for name, prop in endpoints_of(cls).items():
            function: Any = prop._method
            method: Callable[..., Any] = function.__get__(actor, cls)
            self.handlers[name] = Handler(
                name,
                method,
                explicit=prop._user_port,
                concurrent=prop._concurrent,
                is_async=is_async(prop._method),
                instrument=prop._instrument,
            )
        self._cleanup = actor.__cleanup__ if hook(cls, "__cleanup__") is not None else None
        if hook(cls, "__supervise__") is not None:
            instance._supervisor = actor.__supervise__
        if cell.is_async:
            import asyncio  # already loaded by the actor's loop

            instance._turn = asyncio.Lock()
        if hook(cls, "_handle_undeliverable_message") is not None:
            returned = actor._handle_undeliverable_message
            instance._returns = ReturnPort(instance, cell, returned)

    @property
    def has_children(self) -> bool:
        return bool(self.instance._meshes)

    def extent_of(self, data: bytes) -> Extent:
        return Extent.from_bytes(data)

    def plain_handler(self, name: str) -> Handler | None:
        """Return a handler for a method wrapped by `as_endpoint`.

        Its name is ``plain:name`` or, with a port, ``port:name``.
        """
        if name == READY:
            return self._ready_handler()
        kind, _, method = name.partition(":")
        if kind not in ("plain", "port"):
            return None
        function = getattr(self.actor, method, None)
        if function is None:
            return None
        handler = Handler(method, function, explicit=kind == "port", is_async=is_async(function))
        self.handlers[name] = handler
        return handler

    def _ready_handler(self) -> Handler:
        """Return the handler of a supervisor's first message.

        It restores the state, if this actor replaces another one.
        """
        cls = type(self.actor)
        restore = self.actor.__restart__ if hook(cls, "__restart__") is not None else None
        rank = self.instance.rank

        def ready(incarnation: int, reason: str) -> None:
            if incarnation and restore is not None:
                enter(self.instance, rank.rank, rank.extent)
                try:
                    restore(Restart(incarnation, reason))
                except BaseException as error:  # an actor without its state must not serve
                    raise Died(end_by(self.cell, error)) from None

        async def ready_async(incarnation: int, reason: str) -> None:
            if incarnation and restore is not None:
                enter(self.instance, rank.rank, rank.extent)
                try:
                    await restore(Restart(incarnation, reason))
                except BaseException as error:  # see above
                    raise Died(end_by(self.cell, error)) from None

        waits = restore is not None and is_async(restore)
        return Handler(READY, ready_async if waits else ready, is_async=waits)

    def explicit_port(self, link: FrameLink, frame: Frame, endpoint: str) -> Any:
        from monarch._engine.mesh.call.response_port import ResponsePort

        port: ResponsePort[Any] = ResponsePort(self.cell, link, frame, endpoint)
        return port

    def call_ended(self, error: BaseException | None) -> None:
        for callback in self.cell.watchers.pop(id(context()), ()):
            callback(error)

    def stop_children(self) -> Any:
        instance = self.instance
        if self.cell.is_async:
            return instance._stop_meshes_async(settings.stop_actor_timeout)
        return instance._stop_meshes(settings.stop_actor_timeout)

    def unheard(self) -> Any:
        instance = self.instance
        return instance._unhandled_async() if self.cell.is_async else instance._unhandled()

    def cleanup(self, error: Exception | None) -> Any:
        if self._cleanup is None:
            return None
        extent = self.instance.rank.extent
        enter(self.instance, self.cell.rank, extent)
        return self._cleanup(error)

    def cleanup_failed(self, error: BaseException) -> None:
        import textwrap

        print(
            f"monarch: __cleanup__ of {self.instance} raised {headline(error)}\n"
            f"{textwrap.indent(format_remote(error), '  ')}",
            file=sys.stderr,
        )
