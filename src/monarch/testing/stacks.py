"""The places where strands wait, in words, for reports of deadlocks."""

from __future__ import annotations

import linecache
import os
import traceback
from typing import TYPE_CHECKING, Any

from monarch._spi import Future, is_package_frame, stack_of_task, stack_of_thread

if TYPE_CHECKING:
    from monarch._spi import Stack
    from monarch.testing.scheduler import Strand

__all__ = ["describe_strand", "describe_tasks", "describe_thread"]

_BLOCK = vars(Future)["_block"].__code__
_STANDARD = os.path.dirname(os.__file__)


def describe_strand(strand: Strand) -> list[str]:
    """Return lines that describe what a strand waits for, and where; none if it is idle."""
    lines: list[str] = []
    carrier = strand.carrier
    if carrier is not None:
        stack = stack_of_thread(carrier.thread.ident, _BLOCK)
        lines.append(f"  {strand.name} waits{_awaited(stack)}")
        lines += [f"    {line}" for line in _user_lines(stack)]
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
        where: str | None = None
        for step in stack_of_task(task).steps:
            if _is_users(step.file):
                where = f"{step.file}:{step.line} in {getattr(step.code, 'co_qualname', step.name)}"
        if where is not None:
            lines.append(where)
    return lines


def describe_thread(ident: int | None) -> str:
    """Return the stack of an OS thread as text."""
    steps = stack_of_thread(ident).steps[::-1]
    lines = [(step.file, step.line, step.name, None) for step in steps]
    return "".join(traceback.format_list(lines)) or "(it has ended)"


def _awaited(stack: Stack) -> str:
    """Return what a thread in `Future.get` waits for; empty if it is not there."""
    if not stack.variables:
        return ""
    future = stack.variables[0]["self"]
    endpoint = getattr(future, "_endpoint", None)
    if endpoint is not None:
        return f" for {endpoint.name}"
    return f" for {type(future).__name__.strip('_').lower()}"


def _user_lines(stack: Stack) -> list[str]:
    return [
        f"{step.file}:{step.line} in {step.name}: {linecache.getline(step.file, step.line).strip()}"
        for step in reversed(stack.steps)
        if _is_users(step.file)
    ]


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith("<doctest") or filename == "<stdin>"
    inside_standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not is_package_frame(filename) and not inside_standard
