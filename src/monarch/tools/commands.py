"""The commands as functions: those on jobs, and those on apps that torchx submits.

Functions on jobs do what ``monarch apply``, ``exec``, ``shell`` and ``context`` do, print the same,
and raise the errors that those commands report. Functions on apps need the extra ``torchx``.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from monarch.cli import execute
from monarch.cli.debug import connect
from monarch.job.current import FOLDER as MONARCH_DIR
from monarch.job.current import load_current_job
from monarch.job.saved import DEFAULT_JOB_PATH
from monarch.tools.config.config import NOT_SET, Config
from monarch.tools.config.defaults import scheduler_factories
from monarch.tools.launcher import torchx
from monarch.tools.mesh_spec import AppState, MeshSpec, ServerSpec, mesh_spec_from_metadata

__all__ = [
    "DEFAULT_JOB_PATH",
    "MONARCH_DIR",
    "apply_job",
    "context_create",
    "context_ls",
    "context_rm",
    "context_use",
    "create",
    "debug",
    "exec_on_job",
    "get_or_create",
    "info",
    "kill",
    "kill_and_confirm",
    "load_current_job",
    "server_ready",
    "shell_on_job",
    "torchx_runner",
]

_SESSION = "monarch"  # torchx has it in the handles of apps
_PAUSE = 1.0  # seconds between two looks at an app that is being killed
_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)

# -- jobs ------------------------------------------------------------------------------------------


def apply_job(module_path: str | None = None) -> None:
    """Start the job of ``"module.attr"``, or of the active context; see ``monarch apply``."""
    execute(["apply", *([module_path] if module_path else [])])


def exec_on_job(
    cmd: list[str],
    run_all: bool = False,
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: list[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
    script: str | None = None,
    per_host: dict[str, int] | None = None,
) -> int:
    """Run a command on hosts of the job; return its exit status; see ``monarch exec``.

    Raises ValueError if more than one of `run_all`, `mesh_name` and `point_str` is given.
    """
    places = [["--all"] * run_all, _option("--mesh", mesh_name), _option("--point", point_str)]
    if sum(map(bool, places)) > 1:
        raise ValueError("give at most one of run_all, mesh_name and point_str")
    words = [word for place in places for word in place]
    for name, size in (per_host or {}).items():
        words += ["--per-host", f"{name}={size}"]
    words += [*_where(env, workdir, kill), *_option("--script", script)]
    return execute(["exec", *words, *(["--", *cmd] if cmd else [])])


def shell_on_job(
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: list[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
) -> int:
    """Open a shell on a host of the job; return its exit status; see ``monarch shell``."""
    place = [*_option("--mesh", mesh_name), *_option("--point", point_str)]
    return execute(["shell", *place, *_where(env, workdir, kill)])


def context_create(name: str) -> None:
    """Make a context, if there is none of this name. The active one stays active."""
    execute(["context", "create", name])


def context_use(name: str) -> None:
    """Make a context the active one; make it if there is none of this name."""
    execute(["context", "use", name])


def context_rm(name: str) -> None:
    """Kill the job of a context, and remove the context."""
    execute(["context", "rm", name])


def context_ls() -> None:
    """Print the contexts of this directory."""
    execute(["context", "ls"])


def debug(host: str, port: int) -> None:
    """Connect this terminal to the debugger of a script; see ``monarch debug``.

    Blocks until the debugger closes the connection. Raises ConnectionError if none listens there.
    """
    connect(host, port)


def _option(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _where(env: Iterable[str] | None, workdir: str | None, kill: bool) -> list[str]:
    words = [word for variable in env or () for word in ("--env", variable)]
    return [*words, *_option("--workdir", workdir), *(["--kill"] if kill else [])]


# -- apps of torchx --------------------------------------------------------------------------------


@functools.cache
def torchx_runner() -> Any:
    """Return the runner of this process, with the schedulers of `config.defaults`.

    Apps of local schedulers end with it, at the exit of this process. Raises ImportError without
    torchx.
    """
    runner: Any = torchx("runner").Runner(_SESSION, scheduler_factories())
    atexit.register(runner.close)
    return runner


def create(config: Config, name: str | None = None) -> Any:
    """Submit the app of `config`; return its handle, or what a dry run returns.

    Raises ValueError for a `config` without scheduler or app, and ImportError without torchx.
    """
    no_app = getattr(config.appdef, "name", "") == NOT_SET
    if config.scheduler == NOT_SET or config.appdef is None or no_app:
        raise ValueError("Config needs a scheduler and an appdef")
    if name is not None:
        config.appdef.name = name
    workspace = config.workspace
    if workspace.dirs:
        workspace.set_env_vars(config.appdef)
    runner = torchx_runner()
    dry = runner.dryrun(config.appdef, config.scheduler, config.scheduler_args)
    return dry if config.dryrun else str(runner.schedule(dry))


def info(server_handle: str) -> ServerSpec | None:
    """Return the app of a handle with its meshes; None if the scheduler does not know it."""
    runner = torchx_runner()
    status = runner.status(server_handle)
    appdef = runner.describe(server_handle) if status is not None else None
    if status is None or appdef is None:
        return None
    scheduler, namespace, name = torchx("specs").parse_app_handle(server_handle)
    hosts: dict[str, list[str]] = {
        role.role: [replica.hostname for replica in role.replicas if replica.hostname]
        for role in status.roles
    }
    meshes: list[MeshSpec] = []
    for role in appdef.roles:
        mesh = mesh_spec_from_metadata(appdef, role.name)
        if mesh is not None:
            mesh.hostnames = hosts.get(role.name, [])
            if scheduler.startswith("local"):  # local schedulers report no hosts
                mesh.hostnames = ["localhost"] * mesh.num_hosts
            mesh.state = status.state
            meshes.append(mesh)
    return ServerSpec(
        name, status.state, meshes, scheduler, namespace, status.ui_url, dict(appdef.metadata)
    )


async def server_ready(
    server_handle: str, check_interval: timedelta = timedelta(seconds=5)
) -> ServerSpec | None:
    """Wait until the app runs on all its hosts, or has ended. None if it is not known.

    Waits as long as the scheduler says that the app is pending.
    """
    while True:
        spec = await asyncio.to_thread(info, server_handle)
        if spec is None or spec.state in _ENDED:
            return spec
        if spec.is_running and all(len(mesh.hostnames) >= mesh.num_hosts for mesh in spec.meshes):
            return spec
        await asyncio.sleep(check_interval.total_seconds())  # noqa: TID251 - polls a scheduler


async def get_or_create(
    name: str,
    config: Config,
    check_interval: timedelta = timedelta(seconds=5),
    force_restart: bool = False,
) -> ServerSpec:
    """Return the running app of this name; submit it if there is none, or with `force_restart`.

    An app is found by its name on schedulers that do not add a number to names. One that is pending
    is waited for; if it ends without having run, a new one is submitted. Waits until the app runs.
    Raises RuntimeError if the new one ends instead, and the errors of `create`.
    """
    if config.dryrun:
        raise ValueError("get_or_create cannot wait for a dry run: set dryrun=False")
    handle = f"{config.scheduler}://{_SESSION}/{name}"
    if force_restart:
        spec = await asyncio.to_thread(info, handle)
        if spec is not None and spec.state not in _ENDED:
            await asyncio.to_thread(kill_and_confirm, handle)
    else:
        spec = await server_ready(handle, check_interval)
        if spec is not None and spec.is_running:
            return spec
    handle = str(await asyncio.to_thread(create, config, name))
    ready = await server_ready(handle, check_interval)
    if ready is None or not ready.is_running:
        state = "is not known" if ready is None else f"is {ready.state}"
        raise RuntimeError(f"{handle} did not start: it {state}")
    return ready


def kill(server_handle: str) -> None:
    """Have the scheduler end the app. Does not wait."""
    torchx_runner().cancel(server_handle)


def kill_and_confirm(server_handle: str, timeout_after_kill: int = 300) -> None:
    """End the app, and wait until it has ended. Raises TimeoutError after this many seconds."""
    kill(server_handle)
    deadline = time.monotonic() + timeout_after_kill
    while True:
        spec = info(server_handle)
        if spec is None or spec.state in _ENDED:
            return
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{server_handle} is {spec.state} {timeout_after_kill} s after kill")
        threading.Event().wait(_PAUSE)
