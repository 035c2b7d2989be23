"""The statistics of a process: levels of its mailboxes, links, shared memory, and of the system.

All are read from what the engine keeps anyway, so that no message pays for them. They are levels at
one moment, each with its unit; the table in docs/observability.md lists them.
"""

from __future__ import annotations

import os
import threading

from monarch._engine.runtime.agent.client import current_proc

__all__ = ["UNITS", "statistics"]

UNITS = {
    "monarch.actors": "{actor}",
    "monarch.mailbox.messages": "{message}",
    "monarch.mailbox.bytes": "By",
    "monarch.mailbox.deepest": "{message}",
    "monarch.links": "{link}",
    "monarch.link.queued": "By",
    "monarch.link.queued_most": "By",
    "monarch.ports": "{port}",
    "monarch.segments.used": "{segment}",
    "monarch.segments.used_bytes": "By",
    "monarch.segments.free_bytes": "By",
    "process.memory.rss_bytes": "By",
    "process.memory.vm_bytes": "By",
    "process.cpu.time": "s",
    "process.threads": "{thread}",
    "process.open_files": "{file}",
}
"""The unit of each statistic, as OpenTelemetry writes units."""

_PAGE = os.sysconf("SC_PAGESIZE")


def statistics() -> dict[str, float]:
    """Return the statistics of this process by name, units in `UNITS`. Does not block.

    From any thread. A process that has no part of the runtime, and a system that does not know a
    value, leave it out. Actors that start or end meanwhile may or may not be counted.
    """
    return {**_engine(), **_system()}


def _engine() -> dict[str, float]:
    proc = current_proc()
    if proc is None:
        return {}
    cells = [cell for cell in list(proc.cells.values()) if hasattr(cell, "depth")]
    depths = [cell.depth() for cell in cells]
    queued = [getattr(link, "queued", 0) for link in list(proc.links.values())]
    used = list(proc.segments._used.values())
    return {
        "monarch.actors": len(cells),
        "monarch.mailbox.messages": sum(depths),
        "monarch.mailbox.bytes": sum(cell.flow_control.bytes for cell in cells),
        "monarch.mailbox.deepest": max(depths, default=0),
        "monarch.links": len(queued),
        "monarch.link.queued": sum(queued),
        "monarch.link.queued_most": max(queued, default=0),
        "monarch.ports": len(proc.ports),
        "monarch.segments.used": len(used),
        "monarch.segments.used_bytes": sum(segment.size for segment in used),
        "monarch.segments.free_bytes": proc.segments._free_bytes,
    }


def _system() -> dict[str, float]:
    times = os.times()
    found: dict[str, float] = {
        "process.cpu.time": times.user + times.system,
        "process.threads": threading.active_count(),
    }
    try:
        with open("/proc/self/statm") as file:
            size, resident = file.read().split()[:2]
        found["process.memory.vm_bytes"] = int(size) * _PAGE
        found["process.memory.rss_bytes"] = int(resident) * _PAGE
        found["process.open_files"] = len(os.listdir("/proc/self/fd"))
    except OSError:  # a system without this file system
        return found
    return found
