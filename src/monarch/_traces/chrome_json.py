"""A trace as Chrome's JSON, which https://ui.perfetto.dev and chrome://tracing open. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from monarch._traces.trace import Trace

__all__ = ["write"]


def write(trace: Trace, file: IO[bytes], further: Iterable[dict[str, Any]] = ()) -> None:
    """Write a trace; `further` are events of torch's profiler, already in this format."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    first = True
    for events in (_events(trace), iter(further)):
        for event in events:
            text = json.dumps(event, separators=(",", ":"), default=str)
            file.write((text if first else f",\n{text}").encode(errors="replace"))
            first = False
    file.write(b"\n]}\n")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for process in trace.processes:
        yield _about(process.number, 0, "process_name", {"name": process.name})
        yield _about(process.number, 0, "process_labels", {"labels": process.description})
        yield _about(process.number, 0, "process_sort_index", {"sort_index": process.number})
    processes = {lane.number: lane.process for lane in trace.lanes}
    for lane in trace.lanes:
        yield _about(lane.process, lane.number, "thread_name", {"name": lane.name})
        yield _about(lane.process, lane.number, "thread_sort_index", {"sort_index": lane.number})
    for each in trace.slices:
        place = {"pid": processes[each.lane], "tid": each.lane}
        yield {
            "ph": "X",
            "ts": each.begin,
            "dur": each.end - each.begin,
            "name": each.name,
            "cat": each.category,
            "args": each.notes,
            **place,
        }
        for flow in each.flows:
            yield {"ph": "t", "id": flow, "ts": each.begin, **_FLOW, **place}
    for instant in trace.instants:
        place = {"pid": processes[instant.lane], "tid": instant.lane}
        yield {
            "ph": "i",
            "s": "t",
            "ts": instant.time,
            "name": instant.name,
            "cat": instant.category,
            "args": instant.notes,
            **place,
        }
        for flow in instant.starts:
            yield {"ph": "s", "id": flow, "ts": instant.time, **_FLOW, **place}
        for flow in instant.ends:
            yield {"ph": "f", "bp": "e", "id": flow, "ts": instant.time, **_FLOW, **place}
    for counter in trace.counters:
        for time, value in counter.points:
            yield {
                "ph": "C",
                "pid": counter.process,
                "ts": time,
                "name": counter.name,
                "args": {counter.unit or "value": value},
            }


_FLOW = {"name": "message", "cat": "message"}


def _about(process: int, lane: int, name: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": lane, "name": name, "args": content}
