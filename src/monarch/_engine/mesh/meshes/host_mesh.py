"""`HostMesh`: a mesh of hosts, on which processes are spawned.

The host agents identify each host by a name; the client's own host is `HOME`. A spawn request names
the host of each process, and the agents start the processes there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from monarch._engine.base import instrument
from monarch._engine.base.bootstrap_command import BootstrapCommand
from monarch._engine.base.error_page import see_page
from monarch._engine.base.features import find, hook, picture
from monarch._engine.base.home import HOME
from monarch._engine.base.identity import normalize_label
from monarch._engine.base.settings import settings
from monarch._engine.launch.binding import parse_cpu_list
from monarch._engine.mesh.call import context as contexts
from monarch._engine.mesh.call.context import context
from monarch._engine.mesh.call.endpoint import endpoint, is_async
from monarch._engine.mesh.call.misuse import NoSubscript
from monarch._engine.mesh.meshes.actor import Actor
from monarch._engine.mesh.meshes.actor_mesh import replacements, spawn_actors
from monarch._engine.mesh.meshes.attachment import check
from monarch._engine.mesh.meshes.proc_mesh import ProcMesh, Recipe, announce
from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.actor.spawn import SETUP
from monarch._engine.runtime.agent.client import (
    client_proc,
    expect_async_actors,
    inheritance,
    launch_spec,
    save_handle,
    start_agent,
)
from monarch._engine.runtime.proc.proc import new_uid
from monarch._engine.shapes import Extent, MeshTrait, Point, Shape, Slice
from monarch._engine.shapes.shape import shape_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from monarch._engine.mesh.meshes.attachment import Attachment

__all__ = ["HostMesh", "default_bootstrap_cmd", "local_host", "own_proc_mesh", "this_host"]

before_spawn: list[Callable[[], None]] = []  # called before each spawn: what procs rely on
_MAIN_MODULE = "monarch._src.actor.bootstrap_main"


class HostMesh(MeshTrait):
    """A mesh of hosts. `this_host()` is the local one, of extent ``{}``.

    Two meshes of the same hosts in the same shape are equal and have the same hash, however they
    were obtained.

    Args:
        shape: a shape over the ranks of `hosts`.
        python: the path of the interpreter that processes run, or None for that of the script.
        hosts: the names of the hosts in this job (see `attach_to_workers`).
    """

    def __init__(
        self, shape: Shape, python: str | None = None, hosts: tuple[str, ...] = (HOME,)
    ) -> None:
        self._shape = shape
        self._python = python
        self._hosts = hosts
        self._stream_logs = False
        self._attachment: Attachment | None = None  # None for this host and for received meshes
        self._is_slice = False

    # -- mesh ------------------------------------------------------------------------------------

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return self._shape._labels

    def _new_with_shape(self, shape: Shape) -> HostMesh:
        mesh = HostMesh(shape, self._python, self._hosts)
        mesh._attachment = self._attachment
        mesh._is_slice = True
        return mesh

    def _host_at(self, rank: int) -> HostMesh:
        """Return the host at `rank` of this mesh, as a mesh of one."""
        return HostMesh(Shape.unity(), self._python, (self._hosts[self._shape.ndslice[rank]],))

    def _names(self) -> list[str]:
        """Return the names of the hosts of this mesh, by rank."""
        return [self._hosts[rank] for rank in self._shape.ranks()]

    @property
    def region(self) -> Any:
        """The region of this mesh's shape."""
        return self._shape.region

    @property
    def stream_logs(self) -> bool:
        """Whether output of procs is streamed to the client from their start."""
        return self._stream_logs

    @property
    def is_fake_in_process(self) -> bool:
        """Always False: every host is real."""
        return False

    if not TYPE_CHECKING:  # for type checkers it is not there
        __getitem__ = NoSubscript()

    @property
    def _hy_host_mesh(self) -> HostMesh:
        return self

    # -- processes -------------------------------------------------------------------------------

    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        **misplaced: NoReturn,
    ) -> ProcMesh:
        """Start processes on every host; return the mesh of them at once.

        Args:
            per_host: names and sizes of the dimensions to add per host; None: one process.
            bootstrap: called without arguments in each process, once, before any actor runs there;
                may be async. If it fails, everything on the mesh fails with its error.
            name: the processes are labelled ``<name>-<rank>``.
            proc_bind: CPU and memory bindings, applied before user code runs: one dict per process
                of a host, with the keys ``cpus`` or ``physcpubind``, ``cpunodebind``, ``membind``.
            bootstrap_command: a command to execute instead of forking, or a function that returns
                the command for the `Point` of a process.
            **misplaced: none; for an error that says where the sizes belong.

        The processes inherit environment, working directory and ``sys.path`` as they are at this
        call. `ProcMesh.initialized` resolves when they have started. Raises TypeError,
        AttributeError or ValueError for impossible arguments, and RuntimeError if a host has been
        released (see `shutdown` and `stop`).
        """
        extent = self._extent_with(per_host)
        if misplaced:
            raise _unexpected(per_host, misplaced)
        count = extent.nelements
        on_each = count // max(1, len(self))
        if proc_bind is not None:
            _check_binding(proc_bind, on_each)
        if bootstrap is not None and not callable(bootstrap):
            raise TypeError(f"bootstrap must be a callable without arguments, not {bootstrap!r}")
        if bootstrap is not None and is_async(bootstrap):
            expect_async_actors()
        owner = context().actor_instance
        proc = client_proc()
        start_agent()
        for prepare in before_spawn:
            prepare()
        if settings.driver_grace and proc.client:
            hook("keep_job")(proc)
        if settings.telemetry:
            hook("record")(proc)
        hosts = self._names()
        if self._attachment is not None:
            self._attachment.check()
        check(hosts)
        base = new_uid()
        label = normalize_label(name) if name is not None else "anon"
        capture_options = find("capture_options")
        bindings = [] if proc_bind is None else _bindings(proc_bind)
        spec = {
            **launch_spec(),
            "python_override": self._python,
            "on_each": on_each,
            "bindings": bindings,
            "logs": None if capture_options is None else capture_options(hosts),
            **_inherited_fields(),
            **({"mocks": hook("inherited_mocks")()} if replacements else {}),
        }
        procs: list[dict[str, Any]] = []
        for rank in range(count):
            entry: dict[str, Any] = {"uid": base + rank, "rank": rank, "label": f"{label}-{rank}"}
            entry["host"] = hosts[rank // on_each]
            command = self._command_for(rank, extent, bootstrap_command)
            if command is not None:
                entry["command"] = {
                    "program": command.program,
                    "arg0": command.arg0,
                    "args": list(command.args),
                    "env": dict(command.env),
                    "inherit_env": command.inherit_env,
                }
            if bindings:
                entry["bind"] = bindings[rank % len(bindings)]
            procs.append(entry)
        shape = shape_of(extent._labels, Slice.new_row_major(extent.sizes))
        mesh = ProcMesh(base, label, shape, self, owner, on_each)
        save_handle(owner, base, mesh)
        proc.spawn_procs(spec, procs)
        mesh._recipe = Recipe(spec, procs)
        owner._own(base, mesh)
        if bootstrap is not None:
            kind = _AsyncSetup if is_async(bootstrap) else _Setup

            def set_up(procs: ProcMesh) -> Future[Any]:
                args = (bootstrap,)
                setup = spawn_actors(procs, "setup", kind, args, {}, SETUP, owner=owner)
                answer: Future[Any] = setup.setup.call()
                return answer

            try:
                mesh._setup = set_up(mesh)
            except BaseException:  # the callable cannot be pickled, and the mesh is not returned
                mesh.stop()
                raise
            mesh._recipe.set_up = set_up
        announce(mesh)
        traffic = instrument.traffic
        if traffic is not None:
            traffic.spawned(mesh)
        if self._attachment is not None:
            self._attachment.procs.append(mesh)
        return mesh

    def _extent_with(self, per_host: dict[str, int] | None) -> Extent:
        if per_host is None:
            per_host = {}
        if not isinstance(per_host, dict):
            raise AttributeError(  # noqa: TRY004 - the interface's choice
                f"per_host must be a dict of sizes such as {{'gpus': 8}}, not {per_host!r}"
            )
        overlap = [label for label in per_host if label in self._labels]
        if overlap:
            raise ValueError(f"per_host labels {overlap} overlap with host labels {self._labels}")
        for label, size in per_host.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"per_host[{label!r}] must be an int, not {size!r}")
            if size < 1:
                raise ValueError(f"per_host[{label!r}] must be at least 1, not {size}")
        sizes = [*self.extent.sizes, *per_host.values()]
        return Extent([*self._labels, *per_host], sizes)

    def _command_for(self, rank: int, extent: Extent, given: Any) -> BootstrapCommand | None:
        if given is None:
            if self._python is None:
                return None
            return BootstrapCommand(self._python, None, ["-m", _MAIN_MODULE], {})
        command = given if isinstance(given, BootstrapCommand) else given(Point(rank, extent))
        if not isinstance(command, BootstrapCommand):
            raise TypeError(
                "bootstrap_command must be a BootstrapCommand or a function of a Point that "
                f"returns one, not {command!r}"
            )
        return command

    def with_python_executable(self, path: str) -> HostMesh:
        """Return a mesh of the same hosts whose processes run the interpreter at `path`.

        That interpreter must have monarch installed.
        """
        mesh = HostMesh(self._shape, os.fspath(path), self._hosts)
        mesh._attachment = self._attachment
        return mesh

    # -- life ------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[Literal[True]]:
        """A future that is True once processes can be spawned on all hosts.

        The future raises RuntimeError if workers could not be reached, with their names and the
        reasons, and after `shutdown` or `stop`.
        """
        if self._attachment is not None:
            return self._attachment.ready()
        start_agent()
        return Future._of(True)

    def shutdown(self, *, timeout: float | None = None) -> Future[None]:
        """Stop all meshes of this program on these hosts, then end the hosts' worker loops.

        Return a future at once. It resolves when each host has received the order or is known to be
        lost; the program may exit after that.

        Args:
            timeout: seconds, as in `ProcMesh.stop`.

        All meshes are stopped, including those spawned through other handles; this is not reported
        as a failure. Other clients of these workers lose their processes, too. Afterwards
        `spawn_procs` raises RuntimeError until the program attaches to the workers again.

        Raises RuntimeError unless this is the mesh that attached to the hosts. (The local host
        cannot be shut down; its agent exits with the client.)
        """
        return self._own("shut down").leave(shutdown=True, timeout=timeout)

    def stop(self, *, timeout: float | None = None) -> Future[None]:
        """Stop the meshes that were spawned through this mesh or its slices.

        Return a future at once. It resolves when these meshes have stopped and the hosts that are
        released (see below) have received the order.

        Args:
            timeout: seconds, as in `ProcMesh.stop`.

        The workers keep serving other clients. A host to which this program has no other mesh
        attached is released: all other meshes of the program there are stopped as well, which is
        not reported as a failure. Raises RuntimeError unless this is the mesh that attached to the
        hosts.
        """
        return self._own("stop").leave(shutdown=False, timeout=timeout)

    def _own(self, what: str) -> Attachment:
        if self._attachment is None or self._is_slice:
            raise RuntimeError(
                f"cannot {what} `HostMesh` that is a reference instead of owned: only the mesh "
                "that attach_to_workers() returned can do that, and this_host() ends with the "
                "program; to end the processes there, stop their proc meshes"
            )
        return self._attachment

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def sync_workspace(
        self, workspace: Any, conda: bool = False, auto_reload: bool = False
    ) -> None:
        """Make directories on the hosts equal to those of this machine; send only what differs.

        Args:
            workspace: a `monarch.tools.config.Workspace`. Each of its directories is copied to
                ``$WORKSPACE_DIR/<destination>`` of every host, once per host. Files that differ in
                size or modification time are copied, with their modes; links are copied as links;
                entries that do not exist here are removed there.
            conda: also copy the active conda environment to the hosts' ``$CONDA_PREFIX``, and
                replace its path in the files. Directories that packages are installed from
                (``pip install -e``) are copied as well, below ``$CONDA_PREFIX/monarch-projects``,
                unless they are part of the workspace.
            auto_reload: afterwards, have the processes spawned on these hosts reload the modules
                whose files have changed.

        A host that sees the very directory of this machine, as on a shared file system, keeps it
        as it is.

        Raises RuntimeError on any mesh but the one that `attach_to_workers` or a job returned:
        slices, received meshes, and `this_host`, which has the workspace anyway. Raises
        RuntimeError if a host lacks the variable, ValueError and OSError for directories that
        cannot be copied.
        """
        if self._attachment is None or self._is_slice:
            raise RuntimeError(
                "cannot call sync_workspace on a sliced host mesh or one that was sent over an "
                "actor endpoint; it needs hosts that were attached"
            )
        await hook("sync_workspace")(self, self._attachment, workspace, conda, auto_reload)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        """Return what identifies the hosts and their shape, for comparisons."""
        return self.extent, self._python, tuple(self._names())

    _repr_html_ = picture

    def __repr__(self) -> str:
        return f"<HostMesh {self.extent}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh, (self._shape, self._python, self._hosts)


HostMesh.__module__ = "monarch._src.actor.host_mesh"

_BINDINGS = ("cpus", "physcpubind", "cpunodebind", "membind")


def _unexpected(per_host: dict[str, int] | None, misplaced: dict[str, Any]) -> TypeError:
    """Return the error for keyword arguments that `spawn_procs` does not have."""
    name = next(iter(misplaced))
    text = f"HostMesh.spawn_procs() got an unexpected keyword argument {name!r}"
    if all(isinstance(size, int) for size in misplaced.values()):
        sizes = {**(per_host or {}), **misplaced}
        text += f": the sizes of dimensions go into a dict, spawn_procs({sizes!r})"
    return TypeError(f"{text}{see_page('sizes-as-keywords')}")


def _bindings(proc_bind: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{k: v for k, v in binding.items() if k in _BINDINGS} for binding in proc_bind]


def _check_binding(proc_bind: list[dict[str, str]], per_host: int) -> None:
    if len(proc_bind) != per_host:
        raise ValueError(
            f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({per_host})"
        )
    for binding in proc_bind:
        for key in _BINDINGS:
            if key in binding:
                parse_cpu_list(binding[key])


def _inherited_fields() -> dict[str, Any]:
    """Return the fields that all processes of one client share: the client, and the run's name."""
    spec = inheritance(client_proc())
    return {key: spec[key] for key in ("client", "execution_id")}


def local_host() -> HostMesh:
    """Return the host of this process, with the interpreter that this process was given."""
    spec = client_proc().spec
    return HostMesh(Shape.unity(), spec.get("python_override"), (spec.get("host", HOME),))


def own_proc_mesh() -> ProcMesh:
    """Return this process as a mesh of one."""
    proc = client_proc()
    return ProcMesh(proc.uid, proc.label, Shape.unity(), local_host(), per_host=0)


contexts.set_own_proc_mesh(own_proc_mesh)


def this_host() -> HostMesh:
    """Return the host of the current actor, or of the script, as a mesh of one.

    In a script the first call starts the host agent in the background; it does not wait for it.
    """
    start = context().actor_instance  # makes the client if need be
    start_agent()
    return start.proc.host_mesh


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the command that starts a proc in a new interpreter, the one of this process."""
    return BootstrapCommand(sys.executable, None, ["-m", _MAIN_MODULE], {})


class _Setup(Actor):
    """Runs the bootstrap callable of `spawn_procs` before any other actor of its process."""

    def __init__(self, bootstrap: Callable[[], Any]) -> None:
        self._bootstrap = bootstrap

    @endpoint
    def setup(self) -> None:
        with _setup_gate():
            self._bootstrap()


class _AsyncSetup(Actor):
    """As `_Setup`, for an async callable."""

    def __init__(self, bootstrap: Callable[[], Any]) -> None:
        self._bootstrap = bootstrap

    @endpoint
    async def setup(self) -> None:
        with _setup_gate():
            await self._bootstrap()


def _setup_gate() -> Any:
    return client_proc().setup
