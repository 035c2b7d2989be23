"""Crash reports: makes a traceback for people from what Python wrote when a signal killed it.

The input is the text of `faulthandler`: every thread with its frames, the innermost first, without
source lines. Of the thread that crashed, the frames of the program are shown. As in all tracebacks
here, the frames before them, by which the runtime called the program, are omitted. If no frame of
the program was part of the crash (a native thread of a library, a signal from outside), the report
shows the program's frames in other threads instead.

The text comes from a process that was already corrupted. Lines that are not understood are skipped.
"""

from __future__ import annotations

import re

__all__ = ["crash_trace", "is_runtime_frame"]

_REASON = "Fatal Python error: "
# Compiled at first use: all agents load this module, and few processes crash.
_THREAD = r"(Current thread|Thread|Stack)\b(?!').*\(most recent call first\):$"
_FRAME = r'  File "(.*)", line (\d+|\?\?\?) in (.*)$'
_RUNTIME = (
    r"/monarch/_engine/|^monarch\._src\."
    r"|/python3[^/]*/(threading|asyncio/\w+|concurrent/futures/\w+)\.py$"
    r"|^<frozen runpy>$|/python3[^/]*/runpy\.py$"
)
_HEAD, _END = 6, 18  # frames shown of a deep stack: first, last
_OTHERS = 3  # threads shown instead of the one that crashed
_CRASHED = "Traceback of where the process crashed (most recent call last):"
_ELSEWHERE = "Traceback of a thread that did not crash (most recent call last):"

_Stack = list[tuple[str, str]]  # file, and the frame's line in a traceback


def crash_trace(dump: str) -> str:
    """Return the traceback in a `faulthandler` dump, and its reason; empty if there is none.

    >>> print(crash_trace('''Fatal Python error: Segmentation fault
    ...
    ... Current thread 0x00007f54603646c0 (most recent call first):
    ...   File "/home/me/prog.py", line 15 in step
    ...   File "/home/me/prog.py", line 20 in train
    ...   File "/usr/lib/python3.12/threading.py", line 1012 in run
    ... '''))
    Traceback of where the process crashed (most recent call last):
      File "/home/me/prog.py", line 20, in train
      File "/home/me/prog.py", line 15, in step
    Segmentation fault
    """
    _, _, text = dump.partition(_REASON)
    reason, _, text = text.partition("\n")
    # A second report means that writing the first one crashed.
    crashed, others = _stacks(text.partition(_REASON)[0].splitlines())
    lines: list[str] = []
    if shown := _of_program(crashed):
        lines = [_CRASHED, *_folded(shown)]
    elif elsewhere := [shown for other in others if (shown := _of_program(other))]:
        for stack in elsewhere[:_OTHERS]:
            lines += [_ELSEWHERE, *_folded(stack)]
    elif crashed:
        lines = [_CRASHED, *_folded(crashed)]
    return "\n".join([*lines, reason]) if lines else ""


def _stacks(lines: list[str]) -> tuple[_Stack, list[_Stack]]:
    """Return the stack that crashed, and those of other threads; outermost frame first."""
    crashed: _Stack = []
    others: list[_Stack] = []
    stack: _Stack = []
    for line in lines:
        if thread := re.match(_THREAD, line):
            stack = crashed if thread[1] != "Thread" else []
            if stack is not crashed:
                others.append(stack)
        elif frame := re.match(_FRAME, line):
            file, number, name = frame.groups()
            stack.insert(0, (file, f'  File "{file}", line {number}, in {name}'))
    return crashed, others


def _of_program(stack: _Stack) -> _Stack:
    # The first frame is the `python -c` that started the process: not an engine file, but part of
    # it.
    first = 1 if len(stack) > 1 and "/monarch/_engine/" in stack[1][0] else 0
    while first < len(stack) and is_runtime_frame(stack[first][0]):
        first += 1
    return stack[first:]


def is_runtime_frame(filename: str) -> bool:
    """Whether this file belongs to what runs programs: the runtime, threads, event loops."""
    return re.search(_RUNTIME, filename) is not None


def _folded(stack: _Stack) -> list[str]:
    lines = [line for _, line in stack]
    left_out = len(lines) - _HEAD - _END
    if left_out > 1:
        lines[_HEAD:-_END] = [f"  ... {left_out} frames ..."]
    return lines
