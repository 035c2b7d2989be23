"""The cause of a long stop: which actors still execute code of the program, and at which line.

An actor handles earlier messages before it stops, so an actor that is in an endpoint keeps its
process from exiting. The process that waits for the stop asks the other process. The reactor there
answers, without waiting for the actor. The reactor reads the line off the stack of the actor's
thread or, for a task that awaits, off the stack of the task.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from monarch._engine.base.errors import is_engine_frame
from monarch._engine.mesh.results.service import Request, Unreachable, ask
from monarch._engine.runtime.actor.cell import Cell
from monarch._engine.runtime.agent.client import when_ready
from monarch._engine.runtime.io.stacks import NO_STACK, Stack, Step, stack_of_task, stacks
from monarch._engine.runtime.proc.proc import Proc

__all__ = ["serve_busy", "who_is_busy"]

_SERVICE = "busy"
_PATIENCE = 1.0  # seconds for the answers
_MOST = 3  # processes that are asked, and actors that are named


def who_is_busy(uids: Sequence[int], mesh: int = 0) -> str:
    """Return a text that names actors on these processes that still execute code of the program.

    Empty if there are none. `mesh` is the uid of the actor mesh to report; 0: all. Only the first
    few processes are asked. Blocks for about a second at most.
    """
    body = mesh.to_bytes(8, "big")
    answers = [ask(uid, _SERVICE, body, _PATIENCE) for uid in uids[:_MOST]]
    found: list[str] = []
    for answer in answers:
        try:
            found += json.loads(answer.get())
        except (Unreachable, TimeoutError):  # it has exited, or its reactor does not run
            continue
    more = len(uids) - len(answers) + max(0, len(found) - _MOST)
    return ", ".join(found[:_MOST]) + (f" and {more} more" if found and more else "")


def _answer(request: Request) -> None:
    proc = request._proc
    mesh = int.from_bytes(request.body, "big")
    found = stacks()
    cells = [cell for cell in (*proc.cells.values(), *proc.ending) if mesh in (0, cell.uid)]
    told = [_story(cell, found.get(cell.thread_id, NO_STACK)) for cell in cells]
    request.answer(json.dumps([story for story in told if story]).encode())


def _story(cell: Cell, stack: Stack) -> str:
    """Return the actor and its line, as text; empty if it executes no code of the program."""
    place = _first_place(stack.steps)
    if not place and cell.serving is not None:
        place = _first_place(stack_of_task(cell.serving).steps[::-1])
    return f"{cell.identity.short()[1]}, busy in {place}" if place else ""


def _first_place(steps: list[Step]) -> str:
    """Return the innermost line of the program; `steps` have the innermost first."""
    return next((place for step in steps if (place := _place(step))), "")


def _place(step: Step) -> str:
    if is_engine_frame(step.file) or not _is_users(step.file):
        return ""
    return f"{step.name}() at {os.path.basename(step.file)}:{step.line}"


def _is_users(filename: str) -> bool:
    """Whether a file belongs to the program or its packages, and not to the standard library."""
    return not filename.startswith(("<frozen", _LIBRARY))


_LIBRARY = os.path.dirname(os.__file__) + os.sep


def serve_busy(proc: Proc) -> None:
    """Have a process answer what its actors execute."""
    proc.services[_SERVICE.encode()] = lambda link, frame: _answer(Request(proc, link, frame))


when_ready(serve_busy)
