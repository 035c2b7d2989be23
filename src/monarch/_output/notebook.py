"""Notebooks and other IPython shells: output is flushed after every cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["current_shell", "flush_after_cells"]

_shells: list[Any] = []  # the shells that flush


def current_shell() -> Any:
    """Return the IPython shell or Jupyter kernel that runs in this process, or None."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def flush_after_cells(shell: Any, flush: Callable[[], None]) -> None:
    """Call `flush()` after every cell of a shell from now on. A second call has no effect."""

    def after_cell(_result: object) -> None:
        flush()

    if shell not in _shells:
        _shells.append(shell)
        shell.events.register("post_run_cell", after_cell)
