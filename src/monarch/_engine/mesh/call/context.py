"""The current context: the actor, or the script, on whose behalf this code executes.

`context()` is a context variable, set per message by the actor's loop. A thread without a value
gets the process's own instance: in the client the root, in a worker a stand-in for the process
(never a second client). An `Instance` also owns the meshes that its code spawns: their failures are
passed to `child_failed`, and they are stopped when the instance ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.features import hook
from monarch._engine.base.identity import normalize_label
from monarch._engine.base.verdict import FAILED, STOPPED
from monarch._engine.mesh.results.faults import Faults, set_is_script
from monarch._engine.runtime.actor.dispatch import Died, End, end_by
from monarch._engine.runtime.agent.client import (
    client_proc,
    current_proc,
    forget_saved,
    when_forked,
)
from monarch._engine.runtime.io import environment as environments
from monarch._engine.shapes import Extent, Point
from monarch._engine.shapes.extent import extent_of
from monarch._engine.shapes.point import point_of

if TYPE_CHECKING:
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
    from monarch._engine.mesh.results.future import Future
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.proc.ownership import OwnedMesh


__all__ = [
    "Context",
    "CreatorInstance",
    "Instance",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "enter",
]

NO_EXTENT = extent_of((), ())
NO_POINT = point_of(0, NO_EXTENT)


class CreatorInstance:
    """An actor's record of the one that spawned it; plain data, picklable."""

    __slots__ = ("class_name", "creator", "name", "proc_mesh", "rank")

    def __init__(
        self,
        rank: Point,
        proc_mesh: ProcMesh,
        name: str,
        class_name: str | None,
        creator: CreatorInstance | None,
    ) -> None:
        self.rank = rank
        self.proc_mesh = proc_mesh
        self.name = name
        self.class_name = class_name
        self.creator = creator

    @property
    def proc(self) -> ProcMesh:
        """The singleton proc of this actor."""
        return self.proc_mesh.slice(**self.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.rank, self.proc_mesh, self.name, self.class_name, self.creator)
        return CreatorInstance, fields

    def __repr__(self) -> str:
        return display_of(self)


def display_of(instance: Any) -> str:
    """Return the ownership chain: ``<root>.<module.Class name{'gpus': 1/2}>``."""
    rank = str(instance.rank) if len(instance.rank) else ""
    if instance.class_name is None:
        return f"<{instance.name}{rank}>"
    own = f"<{instance.class_name} {instance.name}{rank}>"
    return own if instance.creator is None else f"{display_of(instance.creator)}.{own}"


class Instance:
    """An actor, or the script (`root`), seen from inside: identity, place, owned meshes."""

    __slots__ = (
        "__weakref__",
        "_cell",
        "_display",
        "_lock",
        "_meshes",
        "_returns",
        "_supervisor",
        "_turn",
        "_uid",
        "_unheard",
        "class_name",
        "creator",
        "name",
        "proc_mesh",
        "rank",
        "system",
    )

    def __init__(
        self,
        rank: Point,
        proc_mesh: ProcMesh,
        name: str,
        class_name: str | None,
        creator: CreatorInstance | None,
        cell: Cell | None,
    ) -> None:
        self.rank = rank
        self.proc_mesh = proc_mesh
        self.name = name
        self.class_name = class_name
        self.creator = creator
        self.system = False
        self._cell = cell
        self._uid = cell.uid if cell is not None else 0
        self._display: str | None = None
        self._returns: Any = None  # the `ReturnPort` of an actor that has one
        self._supervisor: Callable[[MeshFailure], Any] | None = None
        self._turn: Any = None  # of async actors: the lock held while the supervisor is asked
        self._unheard: deque[Failure] = deque()  # failures of owned meshes, not yet handled
        self._meshes: dict[int, Any] = {}  # owned meshes, stopped with this instance
        self._lock = threading.Lock()

    @property
    def proc(self) -> ProcMesh:
        """The singleton proc on which this actor runs."""
        return self.proc_mesh.slice(**self.rank)

    @property
    def actor_id(self) -> Any:
        """A unique address; treat it as opaque."""
        proc = client_proc()
        label = "client" if self._cell is None else normalize_label(self.name)
        return hook("actor_address")(self._uid, label, proc.uid, proc.label)

    @property
    def proc_id(self) -> str:
        """The process part of `actor_id`."""
        text: str = self.actor_id.proc_id
        return text

    def abort(self, reason: str | None = None) -> None:
        """Fail this actor and return at once.

        Its owner is notified, and its callers get `SupervisionError`.
        """
        cell = self._require_cell("abort")
        text = f"actor explicitly aborted due to: {reason or 'no reason provided'}"
        cell.abort(RuntimeError(text), cell.own_failure(text))

    def kill(self, reason: str | None = None) -> None:
        """Fail this actor, as `abort` does."""
        self.abort(reason)

    def stop(self, reason: str | None = None) -> None:
        """Stop this actor after the current message; a stop is not a failure."""
        cell = self._require_cell("stop")
        grave = cell.own_failure(reason or "no reason provided", STOPPED)

        def end() -> NoReturn:
            raise Died((grave, None))

        cell.interrupt(end)

    def _require_cell(self, what: str) -> Cell:
        if self._cell is None:
            raise RuntimeError(f"{what}() needs an actor; {self} is the process's own instance")
        return self._cell

    def set_system(self) -> None:
        """Hide this actor in tools that list actors."""
        self.system = True

    def __repr__(self) -> str:
        if self._display is None:
            self._display = display_of(self)
        return self._display

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "cannot pickle 'Instance' object; send context().actor_instance.creator "
            "or a mesh instead"
        )

    # -- ownership -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _acting(self) -> Generator[None, None, None]:
        """Run code on behalf of this instance, between its messages."""
        token = _context.set(Context(self, self.rank.rank, self.rank.extent))
        try:
            yield
        finally:
            _context.reset(token)

    def _as_creator(self) -> CreatorInstance:
        return CreatorInstance(self.rank, self.proc_mesh, self.name, self.class_name, self.creator)

    def _own(self, uid: int, mesh: Any) -> None:
        self._meshes[uid] = mesh

    def _disown(self, uid: int) -> None:
        self._meshes.pop(uid, None)
        if self._cell is None:
            forget_saved(uid)

    def _stop_meshes(self, timeout: float, reason: str = "") -> None:
        """Stop the meshes of this instance, newest first, and wait at most `timeout` seconds."""
        clock = environments.current
        deadline = clock.now() + timeout
        while self._meshes:
            with self._stopping_one(reason) as future:
                future.get(timeout=max(0.0, deadline - clock.now()))

    async def _stop_meshes_async(self, timeout: float) -> None:
        """Do the same on a loop, without a thread: at the script's exit none can be started."""
        import asyncio  # already loaded by the actor's loop

        clock = environments.current
        deadline = clock.now() + timeout
        while self._meshes:
            with self._stopping_one() as future:
                stopping = future.as_asyncio()
                left = max(0.0, deadline - clock.now())
                if (await asyncio.wait([stopping], timeout=left))[0]:
                    stopping.result()
                else:
                    stopping.cancel()

    @contextlib.contextmanager
    def _stopping_one(self, reason: str = "") -> Generator[Future[Any], None, None]:
        """Stop the newest mesh; an error is printed, and must not keep the remaining meshes."""
        _, mesh = self._meshes.popitem()
        try:
            yield mesh.stop(reason or f"its owner {self} ended")
        except TimeoutError:
            return
        except Exception as error:
            print(f"monarch: stopping {mesh!r} failed: {error}", file=sys.stderr)

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        """Record that a rank of an owned mesh ended; only failures are passed on (any thread)."""
        if failure.kind == FAILED:
            self.child_failed(failure)

    def child_failed(self, failure: Failure) -> None:
        """Handle the failure of a mesh that this instance owns (any thread)."""
        cell = self._cell
        if cell is None:
            Faults.current.add(failure)
        else:
            self._unheard.append(failure)
            cell.interrupt(self._supervise_async if cell.is_async else self._supervise)

    def _supervise(self) -> None:
        """Ask `__supervise__` about the next failure, if any; runs between messages."""
        if self._unheard and (end := self._judge()) is not None:
            raise Died(end)

    def _judge(self) -> End | None:
        """Return this actor's end by the next failure, or None if its supervisor handles it."""
        failure = self._unheard.popleft()
        handled: Any = None
        enter(self, self.rank.rank, self.rank.extent)
        try:
            handled = bool(self._supervisor and self._supervisor(MeshFailure(failure)))
        except BaseException as error:  # a supervisor that raises fails its actor
            return self._fallen(failure, error)
        return None if handled else self._fallen(failure, None)

    async def _supervise_async(self) -> None:
        """Do the same as a task, at any await of the actor; one failure after the other."""
        async with self._turn:
            if self._unheard and (end := await self._judge_async()) is not None:
                cell = self._require_cell("supervise")
                grave, told = end
                cell.abort(told or RuntimeError(grave.report()), grave)
                if cell.grave is not grave:  # the actor is stopping already
                    cell.missed = cell.missed or grave

    async def _judge_async(self) -> End | None:
        failure = self._unheard.popleft()
        handled: Any = None
        enter(self, self.rank.rank, self.rank.extent)
        try:
            handled = self._supervisor and self._supervisor(MeshFailure(failure))
            if hasattr(handled, "__await__"):
                handled = await handled
            handled = bool(handled)
        except BaseException as error:  # a supervisor that raises fails its actor
            return self._fallen(failure, error)
        return None if handled else self._fallen(failure, None)

    def _unhandled(self) -> Failure | None:
        """Return this actor's failure by one that arrived during its stop, if any is unhandled."""
        while self._unheard:
            if (end := self._judge()) is not None:
                return end[0]
        return None

    async def _unhandled_async(self) -> Failure | None:
        async with self._turn:
            while self._unheard:
                if (end := await self._judge_async()) is not None:
                    return end[0]
        return None

    def _fallen(self, child: Failure, raised: BaseException | None) -> End:
        cell = self._require_cell("supervise")
        if raised is None:
            grave = cell.own_failure("")
            grave.child = child
            return end_by(cell, RuntimeError(grave.report()), grave)
        grave = cell.failure_of(raised)
        grave.child, grave.raised = child, True
        return end_by(cell, raised, grave)


class Context:
    """The current instance, and its rank in the message that it handles. See `context`."""

    __slots__ = ("_extent", "_rank", "actor_instance")

    def __init__(self, instance: Instance, rank: int, extent: Extent) -> None:
        self.actor_instance = instance
        self._rank = rank
        self._extent = extent

    @property
    def message_rank(self) -> Point:
        """The coordinates of this actor in the mesh that the caller used."""
        return point_of(self._rank, self._extent)

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'Context' object")

    def __repr__(self) -> str:
        return f"Context(actor_instance={self.actor_instance}, message_rank={self.message_rank})"


for _public in (Context, CreatorInstance, Instance):
    _public.__module__ = "monarch._src.actor.actor_mesh"

_context: ContextVar[Context | None] = ContextVar("monarch_context", default=None)
_new = object.__new__
_lock = threading.Lock()
_own_proc_mesh: Callable[[], ProcMesh]


def set_own_proc_mesh(make: Callable[[], ProcMesh]) -> None:
    """Set the function that returns this process as a mesh (meshes are built upon contexts)."""
    global _own_proc_mesh
    _own_proc_mesh = make


def context() -> Context:
    """Return the current actor's context; outside actors that of the process (the root client).

    The first call in a script starts the client. A thread that user code starts inside an actor has
    the context of the process, not of the actor.
    """
    found = _context.get()
    return found if found is not None else process_context()


def enter(instance: Instance, rank: int, extent: Extent) -> None:
    """Make `instance` current, handling a message for `rank` of `extent`."""
    current: Context = _new(Context)  # skips `__init__`, to save a call per message
    current.actor_instance = instance
    current._rank = rank
    current._extent = extent
    _context.set(current)


def process_context() -> Context:
    """Return the context of the process: the root client, or a worker's stand-in for it."""
    proc = client_proc()
    if proc.context is None:
        with _lock:
            if proc.context is None:
                mesh = _own_proc_mesh()
                root = Instance(NO_POINT, mesh, "root", None, None, None)
                proc.context = Context(root, 0, NO_EXTENT)
    known: Context = proc.context
    return known


@contextlib.contextmanager
def as_process() -> Generator[None, None, None]:
    """Act for the process, not for the actor whose code is running."""
    token = _context.set(process_context())
    try:
        yield
    finally:
        _context.reset(token)


def _is_script() -> bool:
    proc = current_proc()
    return proc is not None and proc.client and context().actor_instance._cell is None


set_is_script(_is_script)


def _forget() -> None:
    """Drop the parent's context in a forked child."""
    _context.set(None)


when_forked(_forget)


def current_rank() -> Point:
    """Return the rank of the current message: `context().message_rank`.

    >>> current_rank().rank
    0
    """
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return the sizes of the mesh that the current message was sent to; ``{}`` for singletons."""
    extent = context().message_rank.extent
    return {label: extent[label] for label in extent}


def current_actor_name() -> str:
    """Return a string that is unique to the current actor instance; treat it as opaque."""
    return str(context().actor_instance.actor_id)
