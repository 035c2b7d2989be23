"""The places where strands wait, in words, for reports of deadlocks."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch._spi import is_package_frame

if TYPE_CHECKING:
    from monarch.testing.scheduler import Strand

__all__ = ["describe_strand", "describe_tasks", "stack_of"]

_STANDARD = os.path.dirname(os.__file__)


def describe_strand(strand: Strand) -> list[str]:
    """Return lines that describe what a strand waits for, and where; none if it is idle."""
    lines: list[str] = []
    carrier = strand.carrier
    if carrier is not None:
        frame = sys._current_frames().get(carrier.thread.ident or 0)
        lines.append(f"  {strand.name} waits{_awaited(frame)}")
        lines += [f"    {line}" for line in _user_lines(frame)]
    if strand.task_stacks is not None:
        tasks = strand.task_stacks()
        if tasks:
            lines.append(f"  {strand.name} has tasks:")
            lines += [f"    {line}" for line in tasks]
    return lines


def describe_tasks(tasks: list[Any]) -> list[str]:
    """Return lines that describe where asyncio tasks are suspended in user code."""
    lines: list[str] = []
    for task in tasks:
        coroutine: Any = task.get_coro()
        where: str | None = None
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
            if frame is None:
                break
            if _is_users(frame.f_code.co_filename):
                code = frame.f_code
                where = (
                    f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                    if hasattr(code, "co_qualname")
                    else f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                )
            coroutine = getattr(coroutine, "cr_await", None) or getattr(
                coroutine, "gi_yieldfrom", None
            )
        if where is not None:
            lines.append(where)
    return lines


def stack_of(ident: int) -> str:
    """Return the stack of an OS thread as text."""
    frame = sys._current_frames().get(ident)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"


def _awaited(frame: FrameType | None) -> str:
    """Return what a thread in `Future.get` waits for; empty if it is not there."""
    while frame is not None:
        if frame.f_code.co_name == "_block":
            future = frame.f_locals.get("self")
            endpoint = getattr(future, "_endpoint", None)
            if endpoint is not None:
                return f" for {endpoint.name}"
            return f" for {type(future).__name__.strip('_').lower()}"
        frame = frame.f_back
    return ""


def _user_lines(frame: FrameType | None) -> list[str]:
    if frame is None:
        return []
    return [
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"
        for entry in traceback.extract_stack(frame)
        if _is_users(entry.filename)
    ]


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith("<doctest") or filename == "<stdin>"
    inside_standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not is_package_frame(filename) and not inside_standard
