"""The account of a process: its actors, what each executes, and for what it waits.

It is made on the reactor thread, without the cooperation of the actors: from the stack of an
actor's thread or of a suspended task. Waits are found on the stack,
too: a thread that waits has a frame of `Future._block`, a coroutine one of `Future._await`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, TypedDict

from monarch._diagnosis.ended import EndedAccount, ExitAccount, ended, exits
from monarch._diagnosis.kernel import runnable_threads
from monarch._spi import (
    FAILED,
    KEYS,
    NO_STACK,
    Future,
    Request,
    environment,
    find,
    hook,
    is_engine_frame,
    is_package_frame,
    route,
    settings,
    stack_of_task,
    stacks,
    usable_cores,
)

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import NotRequired

    from monarch._spi import Cell, Frame, FrameLink, Proc, Stack, Step

__all__ = ["Account", "Activity", "ActorAccount", "FailureAccount", "Wait", "account", "on_request"]

_BLOCK = vars(Future)["_block"].__code__
_AWAIT = vars(Future)["_await"].__code__
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_DEEPEST = 30  # lines of a stack
_FAILURES = 5  # the last ones


class Wait(TypedDict):
    """A wait for answers: of the call `call`, by the actors `on` (process uid and mesh uid)."""

    call: str
    on: list[tuple[int, int]]
    asked: int
    seconds: float | None
    limit: float | None


class Activity(TypedDict):
    """One thing that an actor, or the script, does: an endpoint, for so many seconds, and where.

    `place` is the innermost line outside the standard library, `stack` all lines of the program.
    `debugged`: a debugger has stopped it there.
    """

    endpoint: str
    seconds: float | None
    place: str
    stack: list[str]
    wait: Wait | None
    debugged: NotRequired[bool]


class ActorAccount(TypedDict):
    """An actor: its names, its state, its mailbox, and what it does.

    `labels` and `sizes` are the shape of its mesh; both are empty while it is constructed.
    """

    reference: str
    name: str
    mesh: str
    kind: str
    labels: list[str]
    sizes: list[int]
    rank: int
    uid: int
    display: str
    state: str
    system: bool
    queued: int
    queued_bytes: int
    doing: list[Activity]


class FailureAccount(TypedDict):
    """The failure of an actor of this process; `replaced`: another one has its place."""

    actor: str
    error: str
    when: float
    replaced: bool


class Account(TypedDict):
    """A process. `settings` has the value and the origin of each setting that was changed.

    `runnable`: how many of its threads compute, or want to; `cores`: how many they may use.
    """

    uid: int
    reference: str
    label: str
    settings: dict[str, tuple[Any, str]]
    ended: list[EndedAccount]
    exits: list[ExitAccount]
    pid: int
    machine: str
    client: bool
    actors: list[ActorAccount]
    script: Activity | None
    failures: list[FailureAccount]
    runnable: NotRequired[int]
    cores: NotRequired[int]


def on_request(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Answer the request for this process's account; on the reactor thread."""
    Request(proc, link, frame).answer(json.dumps(account(proc)).encode())


def account(proc: Proc) -> Account:
    """Return the account of this process. Does not block; from any thread."""
    looked = stacks(_BLOCK)
    cells = [*list(proc.cells.values()), *list(proc.ending)]
    graves = [(grave, False) for grave in list(proc.graves.values()) if grave.kind == FAILED]
    graves += [(grave, True) for _, grave in list(proc.replaced) if grave.kind == FAILED]
    graves += [
        (loss, mesh.links[rank].uid != process) for mesh, rank, process, loss in list(proc.losses)
    ]
    graves.sort(key=lambda item: item[0].verdict.when)
    return {
        "uid": proc.uid,
        "reference": hook("actor_address")(0, "client", proc.uid, proc.label).proc_id,
        "label": proc.label,
        "settings": _changed_settings(),
        "ended": ended(proc),
        "exits": exits(proc),
        "pid": os.getpid(),
        "machine": proc.hostname,
        "client": proc.client,
        "actors": [_actor(cell, looked.get(cell.thread_id, NO_STACK)) for cell in cells],
        "script": _script(looked) if proc.client else None,
        "failures": [
            {
                "actor": grave.actor,
                "error": grave.error,
                "when": grave.verdict.when,
                "replaced": replaced,
            }
            for grave, replaced in graves[-_FAILURES:]
        ],
        "runnable": runnable_threads(),
        "cores": usable_cores(),
    }


def _changed_settings() -> dict[str, tuple[Any, str]]:
    """Return the settings of this process that are not the default: value and origin."""
    return {
        name: (value if isinstance(value, bool | int | float) else str(value), origin)
        for name, value in settings.get_global().items()
        if value != KEYS[name].kind.show(KEYS[name].default)
        and (origin := settings.origin(name)) != "default"
    }


def _script(looked: dict[int, Stack]) -> Activity:
    stack = looked.get(threading.main_thread().ident or 0, NO_STACK)
    return _activity("", None, stack.steps[::-1], _wait_of_thread(stack))


def _activity(
    endpoint: str, seconds: float | None, steps: Sequence[Step], wait: Wait | None
) -> Activity:
    """Return an activity; `steps` are outermost first, and those of the engine are left out."""
    users = [step for step in steps if not is_package_frame(step.file)]
    while users and _is_library(users[0].file):
        del users[0]  # how the thread or the interpreter was started
    lines = [f"{step.name}() at {step.file}:{step.line}" for step in users]
    own = [line for line, step in zip(lines, users, strict=True) if not _is_library(step.file)]
    return {
        "endpoint": endpoint,
        "seconds": seconds,
        "place": own[-1] if own else "",
        "stack": lines[::-1][:_DEEPEST],
        "wait": wait,
    }


def _actor(cell: Cell, stack: Stack) -> ActorAccount:
    identity, proc = cell.identity, cell.proc
    kind, display = identity.short()
    extent = getattr(getattr(cell.behaviour, "instance", None), "rank", None)
    shape: dict[str, int] = {} if extent is None else dict(extent.extent)
    label = identity.label.rpartition("-")[0]
    return {
        "reference": str(hook("actor_address")(cell.uid, label, proc.uid, proc.label)),
        "name": identity.name,
        "mesh": identity.label,
        "kind": kind,
        "labels": [*shape],
        "sizes": [*shape.values()],
        "rank": cell.rank,
        "uid": cell.uid,
        "display": display,
        "state": cell.state,
        "system": kind.startswith("monarch."),
        "queued": cell.depth(),
        "queued_bytes": cell.flow_control.bytes,
        "doing": list(_doing(cell, stack)),
    }


def _doing(cell: Cell, stack: Stack) -> Iterator[Activity]:
    now = environment.current.now()
    current = cell.current
    name = route(current[1].meta)[0] if current is not None else ""
    stopped_at = find("stopped_at")
    stopped = None if stopped_at is None else stopped_at(stack.steps)
    if stopped is not None:
        found = _activity(name, now - cell.began, stopped[::-1], None)
        found["debugged"] = True
    else:
        wait = _wait_of_thread(stack)
        found = _activity(name, now - cell.began, stack.steps[::-1], wait)
    if cell.serving is not None and not found["stack"]:  # suspended, or it polls its loop
        awaits = stack_of_task(cell.serving, _AWAIT)
        found = _activity(name, now - cell.began, awaits.steps, _wait_of_task(awaits))
    if not name and found["stack"]:  # a constructor, or a hook of supervision
        found["endpoint"] = found["stack"][-1].partition("()")[0]
    if found["endpoint"]:
        yield found
    if cell.serving is not None:
        yield from _concurrent(cell.serving, now)


def _concurrent(serving: asyncio.Task[Any], now: float) -> Iterator[Activity]:
    """Yield the calls of concurrent endpoints of an actor."""
    for task in _tasks(serving.get_loop()):
        awaits = stack_of_task(task, _AWAIT)
        if awaits.steps and _handles_call(awaits.steps[0].code):
            handling = stack_of_task(task, awaits.steps[0].code).variables
            if handling:  # the task has not ended meanwhile
                name, began = handling[0]["handler"].name, handling[0]["began"]
                yield _activity(name, now - began, awaits.steps, _wait_of_task(awaits))


def _handles_call(code: CodeType) -> bool:
    """Whether this is the code of the tasks of concurrent endpoints."""
    return code.co_name == "_concurrent" and is_engine_frame(code.co_filename)


def _tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    import asyncio  # loaded already, since there is a loop

    try:
        return list(asyncio.all_tasks(loop))
    except RuntimeError:  # the set of tasks changed again and again, on the loop's thread
        return []


def _is_library(filename: str) -> bool:
    in_packages = f"{os.sep}site-packages{os.sep}" in filename
    return filename.startswith(("<frozen", _LIBRARY)) and not in_packages


def _wait_of_thread(stack: Stack) -> Wait | None:
    """Return the wait of a stack with the variables of `Future._block`."""
    if not stack.variables:
        return None
    local = stack.variables[0]
    since = local.get("since")
    seconds = None if since is None else environment.current.now() - since
    return _wait(local["self"], seconds, local["timeout"])


def _wait_of_task(stack: Stack) -> Wait | None:
    """Return the wait of a stack with the variables of `Future._await`."""
    return _wait(stack.variables[0]["self"], None, None) if stack.variables else None


def _wait(future: Any, seconds: float | None, limit: float | None) -> Wait:
    while (behind := getattr(future, "_behind", None)) is not None:
        future = behind  # a call that is not sent yet waits for its arguments
    if not hasattr(future, "_unanswered"):
        return {
            "call": "an operation of the runtime",
            "on": [],
            "asked": 0,
            "seconds": seconds,
            "limit": limit,
        }
    endpoint = future._endpoint
    _, links = future._needs()
    return {
        "call": future._call_name(),
        "on": [(link.uid, endpoint.mesh._uid) for link in links],
        "asked": future._asked(),
        "seconds": seconds,
        "limit": limit,
    }
