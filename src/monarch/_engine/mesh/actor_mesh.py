"""`ActorMesh`: the same actor on every proc of a mesh, called through its endpoints.

A mesh is a shape over ranks of the proc mesh it was spawned on, and a uid that names the actor in
each of those processes. Slices share both; they are cheap and send to their own ranks only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.base.identity import Uid, normalize_label
from monarch._engine.mesh.actor import ActorSpec, check_actor_class, endpoints_of
from monarch._engine.mesh.context import Instance, context
from monarch._engine.mesh.endpoint import ActorEndpoint, NotAnEndpoint
from monarch._engine.mesh.future import RAISED, RAW, VALUE, Future
from monarch._engine.mesh.mock import mock_of
from monarch._engine.mesh.roll_call import RollCall
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.ends import OwnedMesh, Verdict
from monarch._engine.runtime.proc import Proc, new_uid
from monarch._engine.runtime.spawn import ASYNC
from monarch._engine.shapes import MeshTrait, Shape, Slice
from monarch._engine.shapes.point import point_of
from monarch._engine.wire.frame import FAILURE, QUERY, SPAWN, STOP

if TYPE_CHECKING:
    from monarch._engine.mesh.proc_mesh import ProcMesh

__all__ = ["ActorMesh", "spawn_actors"]


class ActorMesh(MeshTrait):
    """A mesh of actors; `ProcMesh.spawn` returns it. One attribute per endpoint of the class."""

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
        self._class = cls
        self.__name__ = cls.__name__
        self._mesh_name = name
        self._uid = uid
        self._shape = shape
        self._proc_mesh = proc_mesh
        self._display = display
        self._proc = proc
        self._owner = owner
        self._stopping: Future[Any] | None = None

    # -- endpoints -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_class" not in self.__dict__:
            raise AttributeError(name)
        prop = endpoints_of(self._class).get(name)
        if prop is not None:
            endpoint: ActorEndpoint[Any, Any] = ActorEndpoint(self, name, prop, self._proc)
            vars(self)[name] = endpoint  # resolved once; later look-ups do not come here
            return endpoint
        if not name.startswith("_") and hasattr(self._class, name):
            return NotAnEndpoint(self, name)
        raise AttributeError(name)

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

    @property
    def _name(self) -> Future[str]:
        """The mesh's label and uid, as failures call it."""
        return Future._of(_label(self._mesh_name, self._uid))

    @property
    def _inner(self) -> ActorMesh:
        return self

    # -- life ------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[None]:
        """Resolves when every actor of the mesh has been created (not: constructed)."""
        return self._ask(QUERY, b"")

    def stop(self, reason: str = "stopped by client") -> Future[Any]:
        """Stop every actor: what was sent before is handled, `__cleanup__` runs. Starts at once.

        Stopping twice is fine. Raises NotImplementedError on a slice or a received mesh: only the
        owner's handle may stop.
        """
        if self._owner is None:
            raise NotImplementedError(
                "Cannot call stop on an ActorMeshRef, requires an owned ActorMesh; "
                "ask the actor that spawned this mesh to stop it"
            )
        if self._stopping is None:
            self._stopping = self._ask(STOP, reason.encode())
            self._owner._disown(self._uid)
            self._stopping._notify(lambda: self._proc.owned.pop(self._uid, None))
        return self._stopping

    def _ask(self, kind: int, body: bytes) -> Future[Any]:
        """Send a frame to every rank; resolves when all acknowledged."""
        links = self._resolve_links()
        if not links:
            return Future._of(None)
        proc = self._proc
        future: _Acks = _Acks._new()
        future._mesh = self
        future._tolerant = kind == STOP
        port = future._open(proc, links)
        for rank, link in enumerate(links):
            if not proc.say(link, kind, self._uid, port, rank, body):
                verdict = proc.verdicts.get(link.uid)
                if verdict is not None:
                    future.peer_lost(link, verdict)
        return future

    def _resolve_links(self) -> list[Any]:
        return self._proc_mesh._links_of(self._shape)

    def failure_of_rank(self, rank: int, verdict: Verdict) -> Failure:
        """The end of the actor at `rank` of this mesh, whose process is gone."""
        base = self._shape.ndslice[rank]
        display = self._display + self._proc_mesh._rank_text(base) + ">"
        return Failure(display, verdict, _label(self._mesh_name, self._uid), (base,))

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._class}, shape={self._shape})"

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


class _Acks(RollCall[Any]):
    """Resolves when every rank acknowledged, or its process is gone."""

    __slots__ = ("_mesh", "_tolerant")

    _mesh: ActorMesh
    _tolerant: bool

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if flags & FAILURE and not self._tolerant:
            self._end(RAW, body)
        elif self._book(rank, True) and not self._missing:
            self._resolve(VALUE, None)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        if self._tolerant:
            self.deliver(rank, 0, None, None)
        else:
            self._end(RAISED, self._error(rank, verdict))

    def _error(self, rank: int, verdict: Verdict) -> BaseException:
        if verdict.never_began:
            return ValueError(verdict.error)
        return SupervisionError(self._mesh.failure_of_rank(rank, verdict).report())

    def _decode(self, content: Any) -> NoReturn:
        failure = Failure.from_bytes(content)
        raise SupervisionError(failure.report())


def _label(name: str, uid: int) -> str:
    text = str(Uid.instance_from_value(uid & (1 << 63) - 1))
    return f"{normalize_label(name)}-{text.strip('<>')}"


def spawn_actors(
    proc_mesh: ProcMesh,
    name: str,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flags: int = 0,
    uid: int | None = None,
) -> ActorMesh:
    """Create `cls` on every proc of the mesh; returns before it is constructed."""
    cls = mock_of(cls)
    is_async = check_actor_class(cls)
    for endpoint_name in endpoints_of(cls):
        if endpoint_name in _TAKEN:
            raise ValueError(
                "ActorMesh has an attribute that collides with an endpoint name: "
                f"attribute={endpoint_name}, class={cls}; rename the endpoint"
            )
    owner = context().actor_instance
    proc = client_proc()
    uid = new_uid() if uid is None else uid
    class_name = f"{cls.__module__}.{cls.__qualname__}"
    display = f"{owner}.<{class_name} {name}"
    shape = proc_mesh._dense_shape()
    spec = ActorSpec(cls, args, kwargs, name, proc_mesh, owner._as_creator())
    payload = proc.encode(spec)
    mesh = ActorMesh(cls, name, uid, shape, proc_mesh, display, proc, owner)
    links = mesh._resolve_links()
    label = _label(name, uid)
    extent = proc_mesh.extent

    def rank_text(rank: int) -> str:
        return str(point_of(rank, extent)) if len(extent) else ""

    proc.owned[uid] = OwnedMesh(owner, label, display, links, rank_text)
    owner._own(uid, mesh)
    flags |= ASYNC if is_async else 0
    for rank, link in enumerate(links):
        meta = json.dumps([name, label, f"{display}{rank_text(rank)}>"]).encode()
        if not proc.send(link, SPAWN, uid, proc.uid, rank, meta, payload, flags):
            proc.rank_unreachable(uid, rank, link)
    proc.sent(payload)
    return mesh


# Names that a mesh has itself: its class's, and the attributes of instances.
_TAKEN = frozenset(name for base in ActorMesh.__mro__ for name in vars(base)) | {
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
