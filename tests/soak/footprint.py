"""Resources of a client and its runtime, which must return to a base line after the work is done.

The figures are the descriptors, threads and resident memory of the client, its host agent and the
launchers, read from /proc, and the sizes of the client's tables. The base line is taken after a
warm-up, since pools are filled on first use and kept. Memory gets a tolerance, as allocators keep
freed memory; the other figures must return to the base line exactly, or below it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

from monarch._engine.runtime.agent.client import client_proc

__all__ = ["MEMORY", "Footprint", "excess", "footprint"]

MEMORY = 16 << 10
"""KiB of memory that a process may keep."""

PATIENCE = 60.0
"""Seconds after which what is still there is a leak: what was told to end takes a moment."""

REMEMBERED = ("graves", "successors", "verdicts")
"""Tables that keep the last ends, a bounded number, for those who ask late."""

Footprint = dict[str, int]


def footprint() -> Footprint:
    """Return the present figures, by name."""
    gc.collect()
    figures = {"files in /dev/shm": sum("monarch" in name for name in os.listdir("/dev/shm"))}
    for name, pid in _processes().items():
        proc = Path(f"/proc/{pid}")
        figures[f"descriptors of {name}"] = len(_descriptors(proc / "fd"))
        figures[f"threads of {name}"] = len(os.listdir(proc / "task"))
        figures[f"KiB of {name}"] = _resident(proc)
    figures["segments in use"] = client_proc().segments.statistics[0]
    for name, table in vars(client_proc()).items():
        if isinstance(table, dict | list | set) and name not in REMEMBERED:
            figures[f"client_proc().{name}"] = len(table)
    return figures


def excess(before: Footprint) -> list[str]:
    """Return a sentence for each figure that stays above `before`, after a limited wait."""
    deadline = time.monotonic() + PATIENCE
    while (found := _above(before, footprint())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _above(before: Footprint, now: Footprint) -> list[str]:
    return [
        f"{name}: {before.get(name, 0)} before, {now[name]} now"
        for name in now
        if now[name] > before.get(name, 0) + (MEMORY if name.startswith("KiB") else 0)
    ]


def _processes() -> dict[str, int]:
    """Return the pids of the client, its agent, and the launchers below the agent, by name."""
    found = {"the client": os.getpid()}
    for agent in _children(os.getpid()):
        if b"monarch._engine" in Path(f"/proc/{agent}/cmdline").read_bytes():
            found["the agent"] = agent
            launchers = enumerate(_children(agent))
            found |= {f"launcher {number}": launcher for number, launcher in launchers}
    return found


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def _descriptors(folder: Path) -> list[str]:
    """Return the open descriptors, except those of pooled shared memory, whose size is bounded."""
    found: list[str] = []
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(entry))
    return [target for target in found if not target.startswith("/memfd:monarch")]


def _resident(proc: Path) -> int:
    for line in (proc / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise LookupError(f"{proc}/status does not say VmRSS")
