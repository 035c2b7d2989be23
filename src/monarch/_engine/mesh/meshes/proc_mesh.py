"""`ProcMesh`: processes arranged in a mesh, on which actors are spawned.

The processes of one `spawn_procs` have consecutive uids (``base + rank``). So a mesh of any size,
and every slice of it, is a base, a shape and a reference to its hosts, and is cheap to pickle.
Links are looked up when first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.base.features import hook, picture
from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.mesh.call.context import Instance, context
from monarch._engine.mesh.call.misuse import Misused, NoSubscript, constructor_signature
from monarch._engine.mesh.meshes.actor import Actor
from monarch._engine.mesh.meshes.actor_mesh import ActorMesh, spawn_actors
from monarch._engine.mesh.meshes.busy import who_is_busy
from monarch._engine.mesh.results.future import RAISED, VALUE, Future, _check_timeout
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.mesh.results.progress import tell_while
from monarch._engine.runtime.agent.client import client_proc, save_handle
from monarch._engine.runtime.cast.sender import Plan
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.shapes import MeshTrait, Shape, Slice
from monarch._engine.shapes.point import point_of
from monarch._engine.shapes.shape import shape_of
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import QUERY, STOP

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from monarch._engine.mesh.meshes.host_mesh import HostMesh
    from monarch._engine.runtime.io.reactor import Timer

__all__ = [
    "ProcMesh",
    "Recipe",
    "announce",
    "check_constructor",
    "get_active_proc_meshes",
    "meshes_on",
    "register_proc_mesh_spawn_callback",
    "this_proc",
    "unregister_proc_mesh_spawn_callback",
]

P = ParamSpec("P")
TActor = TypeVar("TActor", bound=Actor)

_INFO = 20  # `logging.INFO`; the module is not loaded for it


class Recipe:
    """How to make the processes of one `spawn_procs`; kept by the spawning process for restarts."""

    __slots__ = ("before_stop", "entries", "set_up", "spec", "stopped")

    def __init__(self, spec: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        self.spec = spec  # the fields that all processes share
        self.entries = entries  # the further fields of each process
        self.set_up: Callable[[ProcMesh], Any] | None = None  # runs the bootstrap callable
        self.stopped = False
        self.before_stop: list[Callable[[], None]] = []  # called while all processes still run


class ProcMesh(MeshTrait):
    """A mesh of processes, as `HostMesh.spawn_procs` returns it.

    Two meshes of the same processes in the same shape are equal and have the same hash.
    """

    def __init__(
        self,
        base: int,
        name: str,
        shape: Shape,
        host_mesh: HostMesh | None,
        owner: Instance | None = None,
        per_host: int = 1,
    ) -> None:
        self._base = base
        self._proc_name = name
        self._shape = shape
        self._hosts = host_mesh
        self._owner = owner
        self._per_host = per_host  # 0: a process's own mesh, which has the name of the process
        self._uid_list: list[int] | None = None
        self._links: list[FrameLink] | None = None
        self._moves = 0  # `Proc.moves` when `_links` was made
        self._recipe: Recipe | None = None  # None if another process spawned the mesh
        self._setup: Future[Any] | None = None
        self._stopping: Future[None] | None = None

    # -- mesh ------------------------------------------------------------------------------------

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return self._shape._labels

    def _new_with_shape(self, shape: Shape) -> ProcMesh:
        mesh = ProcMesh(self._base, self._proc_name, shape, self._hosts, None, self._per_host)
        mesh._setup = self._setup
        mesh._recipe = self._recipe
        return mesh

    def _uids(self) -> list[int]:
        if self._uid_list is None:
            base = self._base
            self._uid_list = [base + rank for rank in self._shape.ranks()]
        return self._uid_list

    def _links_of(self, shape: Shape) -> list[FrameLink]:
        """Return the links to the ranks in `shape`, a shape over this mesh's ranks 0 .. len - 1."""
        links = self._links
        if links is None or self._moves != client_proc().moves:
            proc = client_proc()
            self._moves = proc.moves
            links = self._links = [proc.link_to(uid) for uid in self._uids()]
        ranks = shape.ndslice
        if len(ranks) == len(links) and ranks.offset == 0 and ranks.is_contiguous:
            return links
        return [links[rank] for rank in ranks]

    def _host_names(self, shape: Shape) -> list[str]:
        """Return the names of the hosts of the ranks in `shape`, see `_links_of`."""
        assert self._hosts is not None
        names = self._hosts._names()
        own = self._shape.ranks()
        return [names[own[rank] // (self._per_host or 1)] for rank in shape.ndslice]

    def _proc_labels(self, shape: Shape) -> list[str]:
        """Return the labels of the processes of the ranks in `shape`, see `_links_of`."""
        own = self._shape.ranks()
        ends = [f"-{own[rank]}" if self._per_host else "" for rank in shape.ndslice]
        return [f"{self._proc_name}{end}" for end in ends]

    def _plan_of(self, shape: Shape, links: list[FrameLink]) -> Plan | None:
        """Return the plan of a cast to the ranks in `shape`, behind `links`.

        None if sending to each rank is cheaper.
        """
        hosts = self._hosts
        proc = client_proc()
        here = proc.spec.get("host", HOME)
        if hosts is None or hosts._hosts == (here,):
            return None
        each = self._host_names(shape)
        for link, host in zip(links, each, strict=True):
            if host != here:
                proc.directs.count(link)
                proc.agent_watch.far.add(link.uid)
        return Plan.of(links, each, here)

    def _rank_text(self, rank: int) -> str:
        extent = self.extent
        return str(point_of(rank, extent)) if len(extent) else ""

    def _dense_shape(self) -> Shape:
        extent = self.extent
        return shape_of(extent._labels, Slice.new_row_major(extent.sizes))

    @property
    def _stopped(self) -> bool:
        """Whether the whole mesh was stopped here."""
        return self._recipe is not None and self._recipe.stopped

    def _replace(self, rank: int) -> tuple[Any, Callable[[], None]]:
        """Prepare a process that replaces that of `rank`; return its link and what launches it.

        The new process runs the bootstrap callable before anything else. Raises RuntimeError if
        another process spawned the mesh.
        """
        recipe = self._recipe
        if recipe is None:
            raise RuntimeError(
                f"{self} was spawned by another process; only its owner can replace a process of it"
            )
        proc = client_proc()
        index = self._shape.ndslice[rank]
        old = proc.newest(self._base + index)
        entry = recipe.entries[index]
        entry["former"] = [*entry.get("former", ()), old]
        link, launch = proc.replace_proc(old, recipe.spec, entry)
        if recipe.set_up is not None:
            alone = shape_of((), Slice(offset=index, sizes=[], strides=[]))
            recipe.set_up(self._new_with_shape(alone))
        return link, launch

    # -- actors ----------------------------------------------------------------------------------

    def spawn(
        self,
        name: str,
        Class: Callable[P, TActor],  # noqa: N803 - the interface's name
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TActor:
        """Run ``Class(*args, **kwargs)`` on every proc; return the mesh of actors at once.

        Constructors run in parallel, each on its actor's own thread; the first call waits for
        them. Raises ValueError for a class that is not an actor class, mixes sync and async
        endpoints, or has an endpoint named like a mesh member; TypeError for arguments that do not
        fit the constructor; and the errors of pickling the arguments.
        """
        cls = check_constructor(Class, args, kwargs, name)
        mesh: Any  # to a type checker a mesh of actors is what its class says
        if self._stopping is not None:
            mesh = _StoppedMesh(cls, name, self)
        else:
            mesh = spawn_actors(self, name, cls, args, kwargs)
            save_handle(mesh._owner, mesh._uid, mesh)
        actors: TActor = mesh
        return actors

    if not TYPE_CHECKING:  # for type checkers it is not there
        __getitem__ = NoSubscript()

    # -- life ------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[Literal[True]]:
        """A future that is True once every process runs and its bootstrap callable has returned.

        The future raises the error of the bootstrap callable, ValueError if a process could not be
        started, `SupervisionError` if one has exited, and RuntimeError after `stop`.
        """
        if self._stopping is not None:
            return Future._failed(_already_stopped())
        return _Ready.of(self)

    @property
    def host_mesh(self) -> HostMesh:
        """The host of the proc; NotImplementedError for a mesh of more than one."""
        if len(self) != 1 or self._hosts is None:
            raise NotImplementedError(
                "`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes."
            )
        return self._hosts._host_at(self._shape.ndslice[0] // (self._per_host or 1))

    @property
    def _host_mesh(self) -> HostMesh | None:
        return self._hosts

    @property
    def _proc_mesh(self) -> ProcMesh:
        return self

    def stop(
        self, reason: str = "stopped by client", *, timeout: float | None = None
    ) -> Future[None]:
        """Stop the actors, whose `__cleanup__` runs, and end the processes.

        Return a future at once; it resolves when every process has exited.

        Args:
            reason: the text of the error that later callers get.
            timeout: seconds until a process that has not exited is killed (default: the sum of the
                settings `stop_actor_timeout` and `stop_grace_period`).

        Actors handle earlier messages before they stop. In a process whose actors take longer than
        `stop_actor_timeout`, the endpoint on the main thread is interrupted and has
        `cleanup_timeout` to end; then the process exits without waiting for them. If a stop takes
        longer than 2 seconds, a line on stderr names the actors, the lines that they execute, and
        when they end. Operations on distributed tensors are waited for before anything is stopped,
        at most `stop_actor_timeout`. A second call returns the same future. Raises ValueError on a
        slice or a received mesh, and for an impossible timeout.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if self._owner is None:
            raise ValueError(
                "ProcMesh is not owned; must be stopped by an owner: call stop() on the whole "
                "mesh, as spawn_procs() returned it, in the process that spawned it"
            )
        if self._stopping is None:
            if self._recipe is not None:
                for prepare in list(self._recipe.before_stop):
                    prepare()
                self._recipe.stopped = True
            self._stopping = _Stopped.of(self, reason, timeout)
            self._owner._disown(self._base)
            _active.pop(self._base, None)
        return self._stopping

    async def __aenter__(self) -> Self:
        if self._stopping is not None:
            raise _already_stopped()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stopping is None:
            await self.stop()

    async def logging_option(
        self,
        stream_to_client: bool = False,
        aggregate_window_sec: int | None = None,
        level: int = _INFO,
    ) -> None:
        """Set how the procs log from now on.

        Args:
            stream_to_client: print their lines in the process of the script, each as
                ``[<host> <proc>] [<rank>] <line>``. Needs
                ``configure(enable_log_forwarding=True)`` before the procs are spawned; without
                it the only effect is a UserWarning.
            aggregate_window_sec: seconds within which similar lines are folded into one; None
                prints every line at once.
            level: records of Python's logging below this level are not shown; 0 .. 255.

        Returns when all procs apply the new settings. Raises ValueError for an impossible level,
        OverflowError for a negative window, RuntimeError for a window without streaming and for a
        mesh that was stopped.
        """
        await hook("set_logging")(self, stream_to_client, aggregate_window_sec, level)

    @property
    def _logging_manager(self) -> Any:
        return hook("logging_manager")(self)

    async def sync_workspace(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: workspaces are synchronised per host, not per proc."""
        raise NotImplementedError(
            "sync_workspace is not implemented for ProcMesh. Use HostMesh.sync_workspace instead."
        )

    # -- tensor engine ---------------------------------------------------------------------------

    def activate(self) -> Any:
        """Make this the active mesh of distributed tensors, from this call on.

        Operations of torch in this thread then run on all processes. Leaving a ``with`` block ends
        that. The first use starts a worker on each process. Raises ModuleNotFoundError without
        torch.
        """
        return self._device_mesh().activate()

    def rank_tensor(self, dim: str | Sequence[str]) -> Any:
        """Return a distributed int64 scalar: the coordinate of each process along `dim`."""
        return self._device_mesh().rank(dim)

    def rank_tensors(self) -> dict[str, Any]:
        """Return `rank_tensor` of each dimension, by its name."""
        ranks: dict[str, Any] = self._device_mesh().ranks
        return ranks

    def _device_mesh(self) -> Any:
        return hook("tensor_mesh")(self)

    def to_table(self) -> str:
        """Return coordinates and the uids of procs as text, a line each."""
        return self._in_columns("proc", [f"{uid:x}" for uid in self._uids()])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        """Return what identifies the processes and their shape, for comparisons."""
        return self.extent, tuple(self._uids())

    _repr_html_ = picture

    def __repr__(self) -> str:
        return f"<ProcMesh {self._proc_name} {self.extent}>"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self._base, self._proc_name, self._shape, self._hosts, self._per_host)
        return _rebuild, fields


ProcMesh.__module__ = "monarch._src.actor.proc_mesh"


def _rebuild(base: int, name: str, shape: Shape, hosts: HostMesh | None, per_host: int) -> ProcMesh:
    return ProcMesh(base, name, shape, hosts, None, per_host)


def _already_stopped() -> RuntimeError:
    return RuntimeError(f"`ProcMesh` has already been stopped{see_page('mesh-stopped')}")


def check_constructor(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: Any = None
) -> type[Actor]:
    """Return `cls` if it is an actor class that takes these arguments.

    Raises ValueError if it is not an actor class, TypeError if the arguments do not fit. `name` is
    what was passed as the name of the actors.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise _no_actor_class(cls, name)
    if "__init__" in cls.__dict__ or cls.__init__ is not object.__init__:
        signature = constructor_signature(cls)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Misused(error).told(cls.__qualname__, signature) from None
    return cls


def _no_actor_class(given: Any, name: Any) -> ValueError:
    """Return the error for `given` in the place of an actor class."""
    kind: Any = type(given)  # pyright: ignore[reportUnknownVariableType] - it is any
    if issubclass(kind, Actor):
        return ValueError(
            f"spawn takes a class of actors and the arguments of its constructor, not an object of "
            f"{kind.__qualname__}, since each actor is constructed in its own process: "
            f"spawn('name', {kind.__qualname__}, ...){see_page('object-instead-of-class')}"
        )
    must = f"{given!r} must subclass monarch.service.Actor to spawn it."
    if isinstance(given, str) or isinstance(name, type):
        page = see_page("name-comes-first")
        return ValueError(f"{must} The name comes first: spawn('name', Class, ...).{page}")
    page = see_page("not-an-actor")
    return ValueError(f"{must} Derive it from monarch.actor.Actor, which is the same.{page}")


class _StoppedMesh(ActorMesh):
    """The result of spawning on a stopped proc mesh: every use raises RuntimeError."""

    def __init__(self, cls: type, name: str, proc_mesh: ProcMesh) -> None:
        shape = proc_mesh._dense_shape()
        super().__init__(cls, name, 0, shape, proc_mesh, name, client_proc(), proc_mesh._owner)

    def _resolve_links(self) -> NoReturn:
        raise _already_stopped()

    @property
    def initialized(self) -> Future[None]:
        return Future._failed(_already_stopped())


class _Ready(Gather[Any]):
    """Queries whether every proc runs; the bootstrap callable counts as one rank more."""

    __slots__ = ()

    @classmethod
    def of(cls, mesh: ProcMesh) -> Future[Any]:
        self: _Ready = cls._new()
        proc = client_proc()
        links = mesh._links_of(mesh._dense_shape())
        self._open(proc, [*links, proc.local])
        self._ask(links, mesh._plan_of(mesh._dense_shape(), links), QUERY, 0, b"")
        setup = mesh._setup
        if setup is None:
            self.deliver(len(links), 0, None, proc.local)
        else:
            setup._notify(lambda: self._set_up(setup))
        return self

    def _set_up(self, setup: Future[Any]) -> None:
        try:
            setup.get()
        except Exception as error:
            self._end(RAISED, error)
        else:
            self.deliver(len(self._links) - 1, 0, None, self._links[-1])

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        if self._book(rank, True) and not self._missing:
            self._resolve(VALUE, True)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._end(RAISED, _proc_lost(rank, verdict))


def _proc_lost(rank: int, verdict: Verdict) -> BaseException:
    if verdict.never_began:
        return ValueError(verdict.error)
    return SupervisionError.of(Failure(f"proc {rank}", verdict, ranks=(rank,)))


class _Stopped(Future[None]):
    """Resolves when every process of a mesh has exited."""

    __slots__ = ("_timer",)

    _timer: Timer | None

    @classmethod
    def of(cls, mesh: ProcMesh, reason: str, timeout: float | None) -> Future[None]:
        self: _Stopped = cls._new()
        proc = client_proc()
        uids = [proc.newest(uid) for uid in mesh._uids()]
        missing = set(uids)
        if not missing:
            self._resolve(VALUE, None)
            return self

        def gone(uid: int, _verdict: Verdict) -> None:
            missing.discard(uid)
            if not missing:
                if self._timer is not None:
                    self._timer.cancel()
                # All output of the processes has arrived by now. Print it before `stop` resolves.
                printer = proc.printer
                if printer is None:
                    self._resolve(VALUE, None)
                else:
                    printer.call(lambda: self._resolve(VALUE, None))

        self._timer = None
        links = mesh._links_of(mesh._dense_shape())
        plan = mesh._plan_of(mesh._dense_shape(), links)
        left = uids
        if plan is not None:
            proc.expected.update({uids[rank]: reason for rank in plan.ranks})
            missed = proc.casting.say(plan, STOP, 0, 0, reason.encode())
            left = [uids[rank] for rank in (*plan.direct, *missed)]
        for uid in left:
            proc.stop_proc(uid, reason)
        for uid in uids:
            proc.when_gone(uid, functools.partial(gone, uid))
        grace = timeout
        if grace is None:
            grace = settings.stop_actor_timeout + settings.stop_grace_period
        now = environments.current.now()
        # First a process gives up its actors and exits; one that cannot even do that is killed.
        ends = now + min(grace, settings.stop_actor_timeout), now + grace

        def waiting_for() -> str:
            left = list(missing)
            what = who_is_busy(left) or f"{len(left)} processes of {mesh!r} to end"
            now = environments.current.now()
            end = next((end for end in ends if end > now), now)
            return f"waiting for {what}; killed in {end - now:.0f} s" if missing else ""

        tell_while(self, waiting_for)
        self._timer = proc.reactor.call_later(grace, lambda: proc.kill_procs(list(missing)))
        if not missing:  # the last one exited meanwhile
            self._timer.cancel()
        return self


# -- this process --------------------------------------------------------------------------------


def this_proc() -> ProcMesh:
    """Return the process of the current actor, or of the client, as a mesh of one."""
    return context().actor_instance.proc


# -- observers -----------------------------------------------------------------------------------

_callbacks: list[Callable[[ProcMesh], None]] = []
_active: dict[int, ProcMesh] = {}


def register_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Call `callback(mesh)` synchronously for every mesh that this process spawns from now on."""
    _callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Undo `register_proc_mesh_spawn_callback`; ValueError if `callback` is not registered."""
    _callbacks.remove(callback)


def get_active_proc_meshes() -> list[ProcMesh]:
    """Return the meshes that this process has spawned and not stopped."""
    return list(_active.values())


def meshes_on(hosts: Collection[str], owner: Instance) -> list[ProcMesh]:
    """Return the proc meshes of `owner` whose processes all run on these hosts."""
    return [
        mesh
        for mesh in list(owner._meshes.values())
        if isinstance(mesh, ProcMesh) and mesh._hosts and {*mesh._hosts._names()} <= {*hosts}
    ]


def announce(mesh: ProcMesh) -> None:
    """Record a new mesh as active and notify the observers."""
    _active[mesh._base] = mesh
    for callback in list(_callbacks):  # noqa: PERF101 - a callback may unregister itself
        callback(mesh)
