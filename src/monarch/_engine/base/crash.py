"""What Python wrote about itself when a signal killed it, made into a traceback for people.

The text is that of `faulthandler`: every thread with its frames, the innermost first, no lines of
source. The thread that matters is the one that crashed, and of its frames those of the program: as
in all tracebacks here, what lies before them, how the runtime came to call the program, is left
out. A crash that no frame of the program was part of (a native thread of a library, a signal from
outside) is told with what the program was doing meanwhile, in other threads.

The text comes from a process that was no longer in order. Whatever in it is not understood is
passed over.
"""

from __future__ import annotations

import re

__all__ = ["crash_trace", "is_runtime_frame"]

_REASON = "Fatal Python error: "
_THREAD = re.compile(r"(Current thread|Thread|Stack)\b(?!').*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_RUNTIME = re.compile(
    r"/monarch/_engine/|^monarch\._src\."
    r"|/python3[^/]*/(threading|asyncio/\w+|concurrent/futures/\w+)\.py$"
    r"|^<frozen runpy>$|/python3[^/]*/runpy\.py$"
)
_HEAD, _END = 6, 18  # frames shown of a deep stack: how it begins, how it ends
_OTHERS = 3  # threads shown instead of the one that crashed
_CRASHED = "Traceback of where the process crashed (most recent call last):"
_ELSEWHERE = "Traceback of a thread that did not crash (most recent call last):"

_Stack = list[tuple[str, str]]  # file, and the frame's line in a traceback


def crash_trace(dump: str) -> str:
    """The traceback in a `faulthandler` dump, and why it was written; empty if there is none.

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
    # (A second one is of a crash while the first was told.)
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
    """The stack that crashed, and those of other threads; outermost frame first."""
    crashed: _Stack = []
    others: list[_Stack] = []
    stack: _Stack = []
    for line in lines:
        if thread := _THREAD.match(line):
            stack = crashed if thread[1] != "Thread" else []
            if stack is not crashed:
                others.append(stack)
        elif frame := _FRAME.match(line):
            file, number, name = frame.groups()
            stack.insert(0, (file, f'  File "{file}", line {number}, in {name}'))
    return crashed, others


def _of_program(stack: _Stack) -> _Stack:
    # What our processes were started with, `python -c`, is no file of ours, but it is ours.
    first = 1 if len(stack) > 1 and "/monarch/_engine/" in stack[1][0] else 0
    while first < len(stack) and is_runtime_frame(stack[first][0]):
        first += 1
    return stack[first:]


def is_runtime_frame(filename: str) -> bool:
    """Whether code in this file is what runs programs: the runtime, threads, event loops."""
    return _RUNTIME.search(filename) is not None


def _folded(stack: _Stack) -> list[str]:
    lines = [line for _, line in stack]
    left_out = len(lines) - _HEAD - _END
    if left_out > 1:
        lines[_HEAD:-_END] = [f"  ... {left_out} frames ..."]
    return lines
