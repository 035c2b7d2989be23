"""A trace in Perfetto's own format, by the package `perfetto`."""

from __future__ import annotations

import importlib
from typing import IO, Any

from monarch._traces.trace import Instant, Slice, Trace, in_order

__all__ = ["write"]

_SEQUENCE = 1
_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_LANES, _COUNTERS = 1 << 32, 1 << 40  # the first identities of tracks; those of processes are below


def write(trace: Trace, file: IO[bytes]) -> None:
    """Write a trace. Raises ModuleNotFoundError, with the remedy, without the package."""
    try:
        perfetto = importlib.import_module("perfetto.trace_builder.proto_builder")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"traces as .pftrace need the package perfetto ({error}): pip install "
            "'pymonarch[perfetto]', or choose a name that ends in .json",
            name=error.name,
        ) from None
    builder: Any = perfetto.StreamingTraceProtoBuilder(file)
    cleared = False

    def packet() -> Any:
        nonlocal cleared
        made = builder.create_packet()
        made.trusted_packet_sequence_id = _SEQUENCE
        if not cleared:
            made.sequence_flags = _CLEARED
            cleared = True
        return made

    for process in trace.processes:
        made = packet()
        track = made.track_descriptor
        track.uuid = process.number
        track.process.pid = process.number
        track.process.process_name = _plain(process.name)
        if process.description:
            track.description = _plain(process.description)
            track.process.process_labels.append(_plain(process.description))
        builder.write_packet(made)
    for lane in trace.lanes:
        made = packet()
        track = made.track_descriptor
        track.uuid, track.parent_uuid = _LANES + lane.number, lane.process
        track.thread.pid, track.thread.tid = lane.process, len(trace.processes) + lane.number
        track.thread.thread_name = _plain(lane.name)
        builder.write_packet(made)
    for counter in trace.counters:
        made = packet()
        track = made.track_descriptor
        track.uuid, track.parent_uuid = _COUNTERS + counter.number, counter.process
        track.name = _plain(counter.name)
        track.counter.unit_name = _plain(counter.unit)
        builder.write_packet(made)
    for time, kind, each in in_order(trace):
        made = packet()
        made.timestamp = time * 1000
        made.track_event.track_uuid = _LANES + each.lane
        if kind == "end":
            made.track_event.type = _END
        else:
            _describe(made.track_event, each)
        builder.write_packet(made)
    for counter in trace.counters:
        for time, value in counter.points:
            made = packet()
            made.timestamp = time * 1000
            made.track_event.type = _COUNTER
            made.track_event.track_uuid = _COUNTERS + counter.number
            made.track_event.double_counter_value = value
            builder.write_packet(made)


def _describe(event: Any, each: Slice | Instant) -> None:
    event.name = _plain(each.name)
    event.categories.append(each.category)
    if isinstance(each, Slice):
        event.type = _BEGIN
        event.flow_ids.extend(each.flows)
    else:
        event.type = _INSTANT
        event.flow_ids.extend(each.starts)
        event.terminating_flow_ids.extend(each.ends)
    for name, value in each.notes.items():
        note = event.debug_annotations.add()
        note.name = _plain(name)
        if isinstance(value, bool):
            note.bool_value = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
            if value < 0:
                note.int_value = value
            else:
                note.uint_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.string_value = _plain(str(value))


def _plain(text: str) -> str:
    """Return a text without halves of characters, which protobuf refuses."""
    return text.encode(errors="replace").decode()
