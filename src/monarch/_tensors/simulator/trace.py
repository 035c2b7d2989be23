"""Trace files of simulations, in the JSON format of Chrome, which https://ui.perfetto.dev opens.

The format: "Trace Event Format", Google, 2016. A device is a process of the trace, its streams and
its control thread are threads, the bytes that it holds are a counter. Times in the file are
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch._tensors.simulator.machine import Device, Machine, TraceEvent

__all__ = [
    "compress_workers_range",
    "dump_memory_trace",
    "dump_process_name",
    "dump_thread_event_trace",
    "file_path_with_iter",
    "trace_of",
    "write_trace",
]

CONTROLLER = "Controller"
_MEGA = 1_000_000


def file_path_with_iter(file_path: str, iter_count: int) -> str:
    """Return the path of the file of one iteration.

    >>> file_path_with_iter("/tmp/trace.json", 3)
    '/tmp/trace_3.json'
    """
    path = Path(file_path)
    return str(path.with_name(f"{path.stem}_{iter_count}{path.suffix}"))


def compress_workers_range(workers: Iterable[int]) -> str:
    """Return ranks as text.

    >>> compress_workers_range([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(workers):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def dump_process_name(trace: list[dict[str, Any]], *, pid: int, name: str) -> None:
    """Add the name of a process to a trace."""
    meta = {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "dur": 0}
    trace.append({**meta, "args": {"name": name}})


def dump_thread_event_trace(
    trace: list[dict[str, Any]], events: Sequence[TraceEvent], *, pid: int, tid: int, name: str
) -> float:
    """Add the events of a thread and its name to a trace; return when the last one ends, in µs."""
    meta = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "dur": 0}
    trace.append({**meta, "args": {"name": name}})
    last = 0.0
    for event in events:
        args: dict[str, Any] = {"command": event.command_id}
        if len(event.meta) > 1:
            args["meta"] = ", ".join(event.meta[1:])
        if event.traceback:
            args["traceback"] = [
                f"{file}:{line} in {where}" for file, line, where in event.traceback
            ]
        trace.append(
            {
                "ph": "X",
                "name": event.meta[0],
                "cat": event.kind,
                "pid": pid,
                "tid": tid,
                "ts": event.start / 1000,
                "dur": event.runtime / 1000,
                "args": args,
            }
        )
        last = max(last, event.end / 1000)
    return last


def dump_memory_trace(
    trace: list[dict[str, Any]], *, pid: int, memory: int, ts: float, name: str
) -> None:
    """Add to a trace how many bytes a device holds from `ts` on, in µs; shown in megabytes."""
    counter = {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "dur": 0}
    trace.append({**counter, "args": {"MB": memory / _MEGA}})


def trace_of(
    machine: Machine, *, streams: bool, controller: bool, group_workers: bool
) -> list[dict[str, Any]]:
    """Return the events of a trace.

    Args:
        machine: what was simulated.
        streams: whether to show the streams and the memory.
        controller: whether to show the control threads.
        group_workers: whether to show devices with the same history as one.
    """
    trace: list[dict[str, Any]] = []
    devices: list[tuple[int, str, Device]] = []
    for device in machine.devices:
        ranks = sorted(device.ranks)
        if group_workers:
            which = compress_workers_range(ranks)
            devices.append((ranks[0], f"Device {which}", device))
        else:
            devices += [(rank, f"Device {rank}", device) for rank in ranks]
    for pid, name, device in sorted(devices, key=lambda entry: entry[0]):
        dump_process_name(trace, pid=pid, name=name)
        if controller:
            dump_thread_event_trace(trace, device.launches, pid=pid, tid=0, name=CONTROLLER)
        if not streams:
            continue
        for stream, events in sorted(device.events.items()):
            label = machine.streams[stream]
            dump_thread_event_trace(trace, events, pid=pid, tid=stream + 1, name=label)
        for kind, line in sorted(device.timeline().items()):
            for time, count in line:
                counter = f"memory ({kind})"
                dump_memory_trace(trace, pid=pid, memory=count, ts=time / 1000, name=counter)
    return trace


def write_trace(path: str, events: list[dict[str, Any]]) -> None:
    """Write a trace to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
