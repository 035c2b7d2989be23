"""`ActorMesh`: the same actor on every proc of a mesh, called through its endpoints.

A mesh consists of a shape over ranks of the proc mesh that it was spawned on, and a uid that names
the actor in each of those processes. A slice has the same uid and proc mesh with a smaller shape;
slices are cheap and send to their own ranks only.
"""

from __future__ import annotations

import json
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.base import instrument
from monarch._engine.base.errors import PayloadTooLarge, SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.base.features import picture
from monarch._engine.base.identity import normalize_label, to_base58
from monarch._engine.mesh.call.context import Instance, context
from monarch._engine.mesh.call.endpoint import ActorEndpoint, NotAnEndpoint
from monarch._engine.mesh.call.misuse import (
    Misused,
    NoSubscript,
    constructor_signature,
    no_such_endpoint,
)
from monarch._engine.mesh.meshes.actor import ActorSpec, check_actor_class, endpoints_of
from monarch._engine.mesh.meshes.busy import who_is_busy
from monarch._engine.mesh.results.future import RAISED, RAW, VALUE, Future, _check_timeout
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.mesh.results.progress import tell_while
from monarch._engine.runtime.actor.spawn import ASYNC
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.ownership import OwnedMesh, Owner, Verdict
from monarch._engine.runtime.proc.proc import Proc, new_uid
from monarch._engine.shapes import Extent, MeshTrait, Shape, Slice
from monarch._engine.shapes.point import point_of
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import FAILURE, HURRY, QUERY, SPAWN, STOP

if TYPE_CHECKING:
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
    from monarch._engine.runtime.cast.sender import Plan
    from monarch._engine.wire.codec import Payload

__all__ = ["ActorMesh", "Blueprint", "replacements", "spawn_actors"]

replacements: dict[Any, Any] = {}
"""Classes of actors that are spawned in place of others, by the class that a program names.

For `monarch._tensors` also the factories of device meshes, by the names of classes.
"""


class ActorMesh(MeshTrait):
    """A mesh of actors, as `ProcMesh.spawn` returns it; has one attribute per endpoint.

    Two meshes of the same actors in the same shape are equal and have the same hash.
    """

    def __class_getitem__(cls, item: Any) -> types.GenericAlias:
        """Return a generic alias for annotations such as ``ActorMesh[Trainer]``."""
        return types.GenericAlias(cls, item)

    __name__: str
    _class: type
    _mesh_name: str
    _uid: int
    _shape: Shape
    _proc_mesh: ProcMesh
    _display: str
    _proc: Proc
    _owner: Instance | None
    _stopping: Future[Any] | None
    _before_stop: Callable[[], None] | None

    def __init__(
        self,
        cls: type,
        name: str,
        uid: int,
        shape: Shape,
        proc_mesh: ProcMesh,
        display: str,
        proc: Proc,
        owner: Instance | None,
    ) -> None:
        own = vars(self)  # faster than `__setattr__` for each
        own["_class"] = cls
        own["__name__"] = cls.__name__
        own["_mesh_name"] = name
        own["_uid"] = uid
        own["_shape"] = shape
        own["_proc_mesh"] = proc_mesh
        own["_display"] = display
        own["_proc"] = proc
        own["_owner"] = owner
        own["_stopping"] = None
        own["_before_stop"] = None

    # -- endpoints -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if "_class" not in self.__dict__:
            raise AttributeError(name)
        prop = endpoints_of(self._class).get(name)
        if prop is not None:
            endpoint: ActorEndpoint[Any, Any] = ActorEndpoint(self, name, prop, self._proc)
            vars(self)[name] = endpoint  # later look-ups find it and do not call `__getattr__`
            return endpoint
        private = name.startswith("_")  # also what Python and libraries ask any object for
        if hasattr(self._class, name) and (not private or callable(getattr(self._class, name))):
            return NotAnEndpoint(self, name)
        if private:
            raise AttributeError(name)
        raise no_such_endpoint(self._class, name, list(endpoints_of(self._class)))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            warnings.warn(
                f"{self._mesh_name}.{name} is set on this handle only, and no actor sees it; "
                "write an endpoint that sets it",
                UserWarning,
                stacklevel=2,
            )
        object.__setattr__(self, name, value)

    # -- mesh ------------------------------------------------------------------------------------

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return self._shape._labels

    def _new_with_shape(self, shape: Shape) -> ActorMesh:
        return ActorMesh(
            self._class,
            self._mesh_name,
            self._uid,
            shape,
            self._proc_mesh,
            self._display,
            self._proc,
            None,
        )

    if not TYPE_CHECKING:  # for type checkers it is not there
        __getitem__ = NoSubscript()

    @property
    def _name(self) -> Future[str]:
        """The mesh's label and uid, as reports of failures name it."""
        return Future._of(_label(self._mesh_name, self._uid))

    @property
    def _inner(self) -> ActorMesh:
        return self

    # -- life ------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[None]:
        """A future that resolves when every actor of the mesh has been created.

        Constructors may still be running then. The future raises `SupervisionError` if an actor has
        failed, and ValueError if its process could not be started.
        """
        return self._ask(QUERY, b"")

    def stop(
        self, reason: str = "stopped by client", *, timeout: float | None = None
    ) -> Future[Any]:
        """Stop every actor, after it has handled earlier messages and run `__cleanup__`.

        Return a future at once; it resolves when every actor has stopped or is lost.

        Args:
            reason: the text of the error that later callers get.
            timeout: seconds until an actor that has not reached its stop is abandoned (default, and
                at most: the setting `stop_actor_timeout`). Its callers get the reason. Its endpoint
                is interrupted if it has the main thread of its process, and has `cleanup_timeout`
                to end; otherwise the thread runs on until the process exits.

        An actor that does not reach its stop within 2 seconds is named on stderr, with the line
        that it executes. A second call returns the same future. Raises NotImplementedError on a
        slice or a received mesh, since only the owner's handle may stop the actors, and ValueError
        for an impossible timeout.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if self._owner is None:
            raise NotImplementedError(
                "Cannot call stop on an ActorMeshRef, requires an owned ActorMesh; "
                "ask the actor that spawned this mesh to stop it"
            )
        if self._stopping is None:
            if self._before_stop is not None:
                self._before_stop()
            owned = self._proc.owned.get(self._uid)
            (self._owner if owned is None else owned.owner)._disown(self._uid)
            self._stopping = stopping = self._ask(STOP, reason.encode())
            if isinstance(stopping, _Acks):
                tell_while(stopping, stopping.waiting_for)
                if timeout is not None:
                    timer = self._proc.reactor.call_later(timeout, stopping.hurry)
                    stopping._notify(timer.cancel)
            self._stopping._notify(lambda: self._proc.owned.pop(self._uid, None))
        return self._stopping

    def _ask(self, kind: int, body: bytes) -> Future[Any]:
        """Send a frame to every rank; return a future that resolves when all have acknowledged."""
        links = self._resolve_links()
        if not links:
            return Future._of(None)
        future: _Acks = _Acks._new()
        future._mesh = self
        future._tolerant = kind == STOP
        future._open(self._proc, links)
        future._ask(links, self._plan(links), kind, self._uid, body)
        return future

    def _resolve_links(self) -> list[FrameLink]:
        return self._proc_mesh._links_of(self._shape)

    def _plan(self, links: list[FrameLink]) -> Plan | None:
        """Return the plan of a cast to all ranks, behind `links`; None to send to each rank."""
        return self._proc_mesh._plan_of(self._shape, links)

    def failure_of_rank(self, rank: int, verdict: Verdict) -> Failure:
        """Return the failure of the actor at `rank` of this mesh, whose process has exited."""
        base = self._shape.ndslice[rank]
        label = _label(self._mesh_name, self._uid)
        return Failure(self.display_of_rank(rank), verdict, label, (base,))

    def display_of_rank(self, rank: int) -> str:
        """Return the display chain of the actor at `rank` of this mesh."""
        return f"{self._display}{self.rank_text(rank)}>"

    def rank_text(self, rank: int) -> str:
        """Return the coordinates, in the mesh as spawned, of the actor at `rank` of this mesh."""
        return self._proc_mesh._rank_text(self._shape.ndslice[rank])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        """Return what identifies the actors and their shape, for comparisons."""
        procs = self._proc_mesh._uids()
        return self._uid, self.extent, tuple([procs[rank] for rank in self._shape.ranks()])

    _repr_html_ = picture

    def __repr__(self) -> str:
        name = _label(self._mesh_name, self._uid)  # as reports of failures name it
        return f"ActorMesh(class={self._class}, shape={self._shape}) {name}"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self._class,
            self._mesh_name,
            self._uid,
            self._shape,
            self._proc_mesh,
            self._display,
        )
        return _rebuild, fields


ActorMesh.__module__ = "monarch._src.actor.actor_mesh"


def _rebuild(
    cls: type, name: str, uid: int, shape: Shape, proc_mesh: ProcMesh, display: str
) -> ActorMesh:
    return ActorMesh(cls, name, uid, shape, proc_mesh, display, client_proc(), None)


class _Acks(Gather[Any]):
    """Resolves when every rank has acknowledged a request.

    The loss of a process counts as an acknowledgement of a stop; for other requests it is raised.
    """

    __slots__ = ("_mesh", "_tolerant")

    _mesh: ActorMesh
    _tolerant: bool

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        if flags & FAILURE and not self._tolerant:
            self._end(RAW, body)
        elif self._book(rank, True) and not self._missing:
            self._resolve(VALUE, None)

    def waiting_for(self) -> str:
        """Return a text that names the actors that delay a stop; empty if there are none."""
        uids = list(dict.fromkeys(link.uid for link in self._owing()))
        busy = who_is_busy(uids, self._mesh._uid)
        return f"waiting for {busy}" if busy else ""

    def hurry(self) -> None:
        """Have the processes abandon the actors that delay a stop."""
        for rank in self._owed():
            mesh, link = self._mesh, self._links[rank]
            self._proc.say(link, STOP, mesh._uid, self._port, rank, b"", HURRY)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        if self._tolerant:  # a stop: resolve after the loss has been reported to the owner
            self._proc.reactor.call_soon(self.deliver, rank, 0, None, None)
        else:
            self._end(RAISED, self._error(rank, verdict))

    def _error(self, rank: int, verdict: Verdict) -> BaseException:
        if verdict.never_began:
            return ValueError(verdict.error)
        return SupervisionError.of(self._mesh.failure_of_rank(rank, verdict))

    def _decode(self, content: Any) -> NoReturn:
        raise SupervisionError.of(Failure.from_bytes(content))


def _label(name: str, uid: int) -> str:
    return f"{normalize_label(name)}-{to_base58(uid & (1 << 63) - 1)}"


class Blueprint:
    """The recipe of the ranks of one actor mesh: creates a rank as often as needed."""

    __slots__ = ("_extent", "_flags", "_heads", "_payload", "_proc", "_uid")

    def __init__(
        self,
        proc: Proc,
        uid: int,
        flags: int,
        payload: Payload,
        heads: tuple[str, str, str],
        extent: Extent,
    ) -> None:
        self._proc = proc
        self._uid = uid
        self._flags = flags
        self._payload = payload
        self._heads = heads  # name, label, display chain up to the rank
        self._extent = extent

    def rank_text(self, rank: int) -> str:
        """Return the rank as the display chain shows it."""
        return str(point_of(rank, self._extent)) if len(self._extent) else ""

    def make(self, link: FrameLink, rank: int, first: tuple[Any, ...] = ()) -> bool:
        """Have the process behind `link` create the actor of `rank`; False if the link is lost.

        `first` describes the actor's first message, see `spawn_cell`.
        """
        proc = self._proc
        meta = self._meta(f"{self.rank_text(rank)}>", first)
        return proc.send(link, SPAWN, self._uid, proc.uid, rank, meta, self._payload, self._flags)

    def cast(self, plan: Plan) -> list[int]:
        """Cast a request to create actors; return the ranks that could not be reached."""
        proc = self._proc
        extent = self._extent
        # `spawn_cell` in the receiving process appends the rank to the display chain.
        meta = self._meta("", ([list(extent.labels), list(extent.sizes)],))
        return proc.casting.send(
            plan, SPAWN, self._uid, proc.uid, meta, self._payload, self._flags, None, gathers=False
        )

    def _meta(self, suffix: str, more: tuple[Any, ...]) -> bytes:
        name, label, display = self._heads
        return json.dumps([name, label, f"{display}{suffix}", *more]).encode()


def spawn_actors(
    proc_mesh: ProcMesh,
    name: str,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flags: int = 0,
    uid: int | None = None,
    owner: Instance | None = None,
    take_charge: Callable[[ActorMesh, Blueprint, OwnedMesh], None] | None = None,
    failures: Owner | None = None,
) -> ActorMesh:
    """Create an actor of `cls` on every proc of the mesh; return before any is constructed.

    With `take_charge`, a function of a supervisor, that sends the requests, and restarts the ranks.
    `failures` receives the ends of ranks in place of the owner.
    """
    cls = replacements.get(cls, cls)
    is_async = check_actor_class(cls)
    for endpoint_name in endpoints_of(cls):
        if endpoint_name in _TAKEN:
            raise ValueError(
                "ActorMesh has an attribute that collides with an endpoint name: "
                f"attribute={endpoint_name}, class={cls}; rename the endpoint"
            )
    owner = owner or context().actor_instance
    proc = client_proc()
    uid = new_uid() if uid is None else uid
    class_name = f"{cls.__module__}.{cls.__qualname__}"
    display = f"{owner}.<{class_name} {name}"
    shape = proc_mesh._dense_shape()
    mesh = ActorMesh(cls, name, uid, shape, proc_mesh, display, proc, owner)
    spec = ActorSpec(cls, args, kwargs, name, proc_mesh, owner._as_creator())
    # A supervisor keeps the payload for restarts, so it must not be in a shared segment.
    try:
        payload = proc.encode(spec) if take_charge is None else proc.encode(spec, inline=True)
    except PayloadTooLarge:
        raise
    except Exception as error:
        prepare = getattr(error, "prepare_call", None)
        if prepare is None or take_charge is not None:  # a restart has no value to wait for
            misused = Misused(error, (args, kwargs))
            told = misused.told(cls.__qualname__, constructor_signature(cls), cls)
            raise told from misused.cause
        spec.args, spec.kwargs = prepare(mesh, range(len(mesh)), args, kwargs)
        payload = proc.encode(spec)
    links = mesh._resolve_links()
    label = _label(name, uid)
    flags |= ASYNC if is_async else 0
    heads = (name, label, display)
    blueprint = Blueprint(proc, uid, flags, payload, heads, proc_mesh.extent)
    owned = OwnedMesh(uid, failures or owner, label, display, links, blueprint.rank_text)
    proc.owned[uid] = owned
    owner._own(uid, mesh)
    traffic = instrument.traffic
    if traffic is not None:
        traffic.spawned(mesh)
    if take_charge is not None:
        take_charge(mesh, blueprint, owned)
        return mesh
    plan = mesh._plan(links)
    ranks: Iterable[int] = range(len(links))
    if plan is not None:
        ranks = (*plan.direct, *blueprint.cast(plan))
    for rank in ranks:
        if not blueprint.make(links[rank], rank):
            proc.rank_unreachable(uid, rank, links[rank])
    proc.sent(payload)
    return mesh


# Names that no endpoint may have: attributes of the mesh class and of its instances.
_TAKEN = frozenset(name for base in ActorMesh.__mro__ for name in vars(base)) | {
    "_before_stop",
    "_class",
    "_display",
    "_mesh_name",
    "_owner",
    "_proc",
    "_proc_mesh",
    "_shape",
    "_stopping",
    "_uid",
}
