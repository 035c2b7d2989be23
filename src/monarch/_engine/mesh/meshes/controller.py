"""Controllers: one actor per name, in the client's process, found from every proc of the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from monarch._engine.mesh.call.context import as_process
from monarch._engine.mesh.call.endpoint import endpoint
from monarch._engine.mesh.meshes.actor import Actor
from monarch._engine.mesh.meshes.actor_mesh import ActorMesh, spawn_actors
from monarch._engine.mesh.meshes.host_mesh import HostMesh, before_spawn, own_proc_mesh
from monarch._engine.mesh.meshes.proc_mesh import ProcMesh, check_constructor, this_proc
from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.shapes import Shape

__all__ = ["get_or_spawn_controller", "start_controllers"]

P = ParamSpec("P")
TActor = TypeVar("TActor", bound=Actor)
_NAME = "controller_controller"


class _ControllerController(Actor):
    """The owner of all controllers; one per client. Its mesh uid is the client's uid plus one."""

    def __init__(self) -> None:
        self._controllers: dict[str, Any] = {}
        self._classes: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    @endpoint
    def get_or_spawn(
        self, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in self._failures:
            raise ValueError(f"Failure on {name}: {self._failures[name]}")
        if name not in self._controllers:
            mesh = spawn_actors(this_proc(), name, cls, args, kwargs)
            self._controllers[name] = mesh
            self._names[mesh._name.get()] = name
            self._classes[name] = _class_name(cls)
        elif self._classes[name] != _class_name(cls):
            raise TypeError(
                f"the controller {name!r} is a {self._classes[name]}, not a {_class_name(cls)}; "
                "ask for that class, or use another name"
            )
        return self._controllers[name]

    def __supervise__(self, failure: Any) -> bool:
        name = self._names.get(failure.mesh_name)
        if name is not None:
            self._failures.setdefault(name, str(failure))
        return True


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_ControllerController.__module__ = "monarch._src.actor.proc_mesh"


def start_controllers() -> None:
    """In the client: spawn the owner of controllers, unless that has been done.

    Called before procs are spawned, which may call it.
    """
    proc = client_proc()
    if proc.client and proc.uid + 1 not in proc.cells and proc.uid + 1 not in proc.graves:
        with as_process():
            spawn_actors(own_proc_mesh(), _NAME, _ControllerController, (), {}, uid=proc.uid + 1)


before_spawn.append(start_controllers)


def _get_controller_controller() -> Any:
    """Return the mesh of the owner of controllers; works in the client and in every proc."""
    client = client_proc().spec.get("client")
    if client is None:
        start_controllers()
        client = client_proc().uid
    display = f"<root>.<{_ControllerController.__module__}._ControllerController {_NAME}"
    procs = ProcMesh(client, "local", Shape.unity(), HostMesh(Shape.unity()), per_host=0)
    return ActorMesh(
        _ControllerController,
        _NAME,
        client + 1,
        Shape.unity(),
        procs,
        display,
        client_proc(),
        None,
    )


def get_or_spawn_controller(
    name: str,
    Class: Callable[P, TActor],  # noqa: N803 - the interface's name
    *args: P.args,
    **kwargs: P.kwargs,
) -> Future[TActor]:
    """Return a future of the controller called `name`; does not block.

    A controller is an actor in the client's process, constructed as ``Class(*args, **kwargs)`` by
    the first call with its name. It outlives the actor that asked for it. Later calls return the
    same actor, and their arguments are ignored. The result is a mesh of one, to be used with
    `call_one`. The future raises `ActorError` if the controller of that name has another class or
    has failed. Raises ValueError or TypeError like `ProcMesh.spawn`.
    """
    cls = check_constructor(Class, args, kwargs)
    found: Future[TActor] = _get_controller_controller().get_or_spawn.call_one(
        name, cls, args, kwargs
    )
    return found
