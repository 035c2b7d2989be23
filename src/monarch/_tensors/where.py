"""Where the program is: a stack that is cheap to take, and is formatted only for an error.

Torch's own function takes it: 20 frames in half a microsecond, in one object that the garbage
collector need not look at. A walk in Python takes four times as long, and leaves 20 tuples.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch._C._profiler import CapturedTraceback, gather_traceback, symbolize_tracebacks

from monarch import _spi
from monarch._tensors.core.aliases import Stack

__all__ = ["Tagged", "frames_of", "here", "is_in_operator", "lines_of", "program_level", "text_of"]

_OWN = os.path.dirname(__file__) + os.sep

here: Callable[[], Stack] = functools.partial(gather_traceback, True, False, False)
"""Return the stack, with code objects and the offsets of instructions."""


class Tagged(NamedTuple):
    """A stack, and the tags that the operation has: see `monarch.set_meta`."""

    stack: Stack
    tags: tuple[str, ...]


def lines_of(stack: Stack) -> list[tuple[str, int, str]]:
    """Return file, line and function of the frames of the program in `stack`, outermost first.

    The engine's own frames are left out, and those of torch that called it at the inner end.
    """
    if isinstance(stack, Tagged):
        stack = stack.stack
    if not stack:
        return []
    frames = []
    inner = True
    symbolized: Any = symbolize_tracebacks([cast("CapturedTraceback", stack)])[0]
    for frame in symbolized:
        file = frame["filename"]
        if (inner and _is_inner(file)) or _is_own(file):
            continue
        inner = False
        frames.append((file, frame["line"], frame["name"]))
    return frames[::-1]


def frames_of(stack: Stack) -> list[traceback.FrameSummary]:
    """Return what `lines_of` does, as `traceback` shows it."""
    return [traceback.FrameSummary(*line) for line in lines_of(stack)]


def text_of(stack: Stack) -> str:
    """Return the stack as text, as in a traceback."""
    return "".join(traceback.format_list(frames_of(stack)))


def program_level() -> int:
    """Return the ``stacklevel`` with which the caller's warning names the line of the program."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inner(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def is_in_operator() -> bool:
    """Whether the program is at an operator with two operands, as ``+`` or ``<``."""
    frame = sys._getframe(program_level() - 1)
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return name.startswith(("BINARY_", "COMPARE_", "INPLACE_")) and name != "BINARY_SUBSCR"


def _is_inner(file: str) -> bool:
    """Whether a frame is of this engine or of torch."""
    return _is_own(file) or f"{os.sep}torch{os.sep}" in file


def _is_own(file: str) -> bool:
    return file.startswith(_OWN) or _spi.is_engine_frame(file)
