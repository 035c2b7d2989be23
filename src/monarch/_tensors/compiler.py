"""`torch.compile` while a mesh is active: a compiled function runs as it was written.

Torch's compiler reads the Python code that a function runs, and so would read this package, for
minutes and to no use: the script computes nothing. Torch asks a function of its own which compiler
to use in a call; where a mesh is active the answer is none. Functions that are compiled in the
processes, and in the script outside of a mesh, are compiled as ever.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from monarch._tensors.active import active

__all__ = ["define"]

_CHOICE = "_callback_from_stance"
_compile: Any = torch.compile


@functools.wraps(_compile)
def _compiled(*args: Any, **kwargs: Any) -> Any:
    made = _compile(*args, **kwargs)
    _stand_aside()  # the compiler is loaded now
    return made


def _stand_aside() -> None:
    """Let torch's compiler do nothing where a mesh is active, if it is loaded."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    choose = getattr(compiler, _CHOICE, None)
    if choose is None or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def chosen(callback: Any) -> Any:
        return choose(callback) if active().mesh is None else None

    setattr(compiler, _CHOICE, chosen)


def define() -> None:
    """Let ``torch.compile`` and what it has made ask for the active mesh."""
    torch.compile = _compiled
    _stand_aside()
