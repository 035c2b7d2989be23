"""The last line of a soak command, and its exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["count", "end"]


def count(default: int) -> int:
    """Return the command's only argument, a number."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def end(what: str, seconds: float, faults: list[str]) -> NoReturn:
    """Print the work done, the time taken and the faults; exit with 1 if there are any."""
    verdict = "FAILED: " + "; ".join(faults) if faults else "ok"
    print(f"{what}: {seconds:.1f} s, {verdict}")
    sys.exit(bool(faults))
