"""Traces of torch's profiler beside each other, and beside a trace of messages. Pure.

Each file has times of its own, numbers of processes that another machine may have as well, and
numbers of arrows. They are moved to microseconds since 1970, and renumbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["merged"]

_FIRST = 1_000_000  # the number of the first process


def merged(traces: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of some traces, by their names.

    >>> one = {"baseTimeNanoseconds": 5000, "traceEvents": [{"ph": "X", "ts": 1, "pid": 7}]}
    >>> list(merged({"rank 0": one, "rank 1": one}))[1]
    {'ph': 'X', 'ts': 6.0, 'pid': 1000001}
    """
    numbers: dict[tuple[str, Any], int] = {}
    for name, trace in traces.items():
        base = int(trace.get("baseTimeNanoseconds") or 0) / 1000
        for event in trace["traceEvents"]:
            moved = dict(event)
            if "ts" in moved:
                moved["ts"] = moved["ts"] + base
            if "pid" in moved:
                key = name, moved["pid"]
                moved["pid"] = numbers.setdefault(key, _FIRST + len(numbers))
            if "id" in moved:
                moved["id"] = f"{name} {moved['id']}"
            if moved.get("name") == "process_name" and moved.get("ph") == "M":
                moved["args"] = {"name": f"{name}: {moved['args'].get('name', '')}"}
            yield moved
