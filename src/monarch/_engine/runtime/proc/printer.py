"""The printer of a process: what prints the output that agents stream to this process.

A process gets one with the first lines that arrive, from the package that also captures them on
their host. Processes that get no lines have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Printer"]


class Printer(Protocol):
    """Prints on a thread of its own. All methods but `hide` and `close` return at once."""

    def take(self, message: dict[str, Any]) -> None:
        """Print the lines of an agent's message."""
        ...

    def call(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once everything taken before is printed."""
        ...

    def flush(self, callback: Callable[[], object]) -> None:
        """As `call`; first print what waits for similar lines, too."""
        ...

    def hide(self, timeout: float) -> None:
        """Draw nothing from now on, and erase what was drawn; blocks for at most `timeout`."""
        ...

    def close(self, timeout: float) -> None:
        """Print everything and end; blocks for at most `timeout` seconds."""
        ...
