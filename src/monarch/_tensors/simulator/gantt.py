"""A picture of a simulation in text: a row for each stream, a column for each span of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._tensors.simulator.trace import compress_workers_range

if TYPE_CHECKING:
    from monarch._tensors.simulator.machine import Machine, TraceEvent

__all__ = ["gantt"]

_MARKS = {"compute": "#", "communication": "~", "wait": "."}


def gantt(machine: Machine, width: int = 72) -> str:
    """Return the picture: `#` is computation, `~` communication, `.` a wait, a blank is idle.

    A column shows what took most of its time. Devices with the same history share their rows.
    """
    end = max(
        (
            event.end
            for device in machine.devices
            for row in device.events.values()
            for event in row
        ),
        default=0,
    )
    rows: list[tuple[str, str]] = []
    for device in sorted(machine.devices, key=lambda device: min(device.ranks)):
        which = compress_workers_range(device.ranks)
        for stream, events in sorted(device.events.items()):
            rows.append((f"{which} {machine.streams[stream]}", _row(events, end, width)))
    margin = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name:<{margin}} |{row}|" for name, row in rows]
    scale = f"{end / 1e6:.3f} ms"
    lines.append(f"{'':<{margin}}  0{scale:>{width - 1}}")
    return "\n".join(lines)


def _row(events: list[TraceEvent], end: int, width: int) -> str:
    """Return the columns of one stream."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    span = max(end, 1) / width
    for event in events:
        first = int(event.start / span)
        last = min(int(event.end / span), width - 1)
        for column in range(first, last + 1):
            begin, stop = column * span, (column + 1) * span
            inside = min(event.end, stop) - max(event.start, begin)
            mark = _MARKS[event.kind]
            shares[column][mark] = shares[column].get(mark, 0) + inside
    row = ""
    for share in shares:
        idle = span - sum(share.values())
        mark = max(share, key=lambda kind: share[kind], default=" ")
        row += mark if share and share[mark] >= idle else " "
    return row
