"""From the rows of telemetry to a trace: processes, lanes of actors, slices, flows. Pure.

The rows are those of the documented tables (docs/observability.md), so a trace can be made of any
store that has them. Each proc is a process of the trace, and each actor a lane in it. A lane holds
slices that nest: calls that run concurrently, as async endpoints do, are put on further lanes. A
call is a slice of its caller with two instants, `send` and `complete`; each callee's endpoint is a
slice of the callee; and a flow leads from the first instant by the callee to the second.
"""

from __future__ import annotations

import json
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

__all__ = ["Counter", "Instant", "Lane", "Process", "Slice", "Tables", "Trace", "build"]

Row: TypeAlias = Mapping[str, Any]
Tables: TypeAlias = Mapping[str, Sequence[Row]]
"""Rows by the name of their table."""

_LONGEST = 200  # characters of a log line as a name
_OWN_THREADS = ("", "MainThread")


class Process(NamedTuple):
    """A proc, with the process number that it has in the trace."""

    number: int
    name: str
    description: str


class Lane(NamedTuple):
    """A row of slices in a process: of an actor, or a further one of it."""

    number: int
    process: int
    name: str


@dataclass(eq=False)
class Slice:
    """A stretch of time on a lane, in microseconds; `flows` are passed on by it."""

    lane: int
    begin: int
    end: int
    name: str
    category: str
    notes: dict[str, Any]
    flows: list[int] = field(default_factory=list[int])


@dataclass(eq=False)
class Instant:
    """A moment on a lane. It starts flows, or ends them."""

    lane: int
    time: int
    name: str
    category: str
    notes: dict[str, Any]
    starts: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])


class Counter(NamedTuple):
    """A value over time, of a process."""

    number: int
    process: int
    name: str
    unit: str
    points: list[tuple[int, float]]


@dataclass
class Trace:
    """All of it. `skipped` counts the rows that have no place, by the reason."""

    processes: list[Process] = field(default_factory=list[Process])
    lanes: list[Lane] = field(default_factory=list[Lane])
    slices: list[Slice] = field(default_factory=list[Slice])
    instants: list[Instant] = field(default_factory=list[Instant])
    counters: list[Counter] = field(default_factory=list[Counter])
    skipped: Tally[str] = field(default_factory=Tally[str])
    actors: int = 0
    procs: int = 0

    def summary(self) -> str:
        """Return a line that says how much there is.

        >>> Trace().summary()
        'Wrote 0 spans from 0 actors on 0 procs.'
        """
        text = f"Wrote {len(self.slices)} spans from {self.actors} actors on {self.procs} procs."
        if self.skipped:
            why = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
            text += f" Skipped {sum(self.skipped.values())} rows: {why}"
        return text


@dataclass(eq=False)
class _Span:
    """A row of `spans` that has a place: an actor's, or a thread's of the script."""

    row: Row
    fields: dict[str, Any]
    actor: str
    group: tuple[str, str]
    begin: int
    end: int
    finished: bool
    is_call: bool
    is_message: bool = False
    slice: Slice | None = None


def build(tables: Tables, end_us: int) -> Trace:
    """Return the trace of these rows.

    Args:
        tables: rows of `meshes`, `actors`, `spans`, `span_events`, `messages`, `sent_messages`,
            `message_status_events`, `events` and `metric_gauges`; a missing table is empty.
        end_us: the time to which spans are drawn that have not ended.
    """
    return _Builder(tables, end_us).build()


class _Builder:
    def __init__(self, tables: Tables, end_us: int) -> None:
        self._tables = tables
        self._end = end_us
        self._trace = Trace()
        self._processes: dict[str, Process] = {}
        self._actors: dict[str, Row] = {str(row["full_name"]): row for row in self._rows("actors")}
        self._lanes: dict[tuple[str, str], list[Lane]] = {}
        self._descriptions: dict[str, str] = {}
        self._spans: list[_Span] = []
        self._by_id: dict[int, _Span] = {}

    def _rows(self, table: str) -> Sequence[Row]:
        return self._tables.get(table, ())

    def build(self) -> Trace:
        self._read_spans()
        messages = {row["id"]: row for row in self._rows("messages")}
        for number in messages:
            if number in self._by_id:
                self._by_id[number].is_message = True
        self._place()
        self._draw_waits()
        self._draw_flows(messages)
        self._draw_events()
        self._draw_counters()
        trace = self._trace
        trace.actors = len({span.actor for span in self._spans})
        trace.procs = len({_proc_of(span.actor) for span in self._spans})
        trace.processes = list(self._processes.values())
        return trace

    # -- spans -------------------------------------------------------------------------------------

    def _read_spans(self) -> None:
        ends: dict[tuple[str, int], int] = {}
        for row in self._rows("span_events"):
            if row["event_type"] in ("exit", "close"):
                key = row["process_id"], row["id"]
                ends[key] = max(ends.get(key, 0), row["timestamp_us"])
        rows = [(row, _object(row["fields_json"])) for row in self._rows("spans")]
        scripts: dict[str, str] = {}  # the script's own instance, by process
        for row, fields in rows:
            actor = str(fields.get("actor_id") or "")
            if actor:
                self._descriptions.setdefault(_proc_of(actor), str(row["process_id"]))
                if actor.startswith("client<"):
                    scripts[row["process_id"]] = actor
        for row, fields in rows:
            actor = str(fields.get("actor_id") or scripts.get(row["process_id"], ""))
            if not actor:
                self._trace.skipped["missing actor_id"] += 1
                continue
            end = ends.get((row["process_id"], row["id"]))
            begin = int(row["timestamp_us"])
            thread = str(row.get("thread_name") or "")
            is_call = str(row["target"]).endswith("::endpoint")
            if end is None and is_call and _port(fields) == "0":
                end = begin  # it awaits no answer
            own = thread in _OWN_THREADS or not actor.startswith("client<")
            span = _Span(
                row,
                fields,
                actor,
                (actor, "" if own else thread),
                begin,
                max(begin, self._end if end is None else end),
                end is not None,
                is_call,
            )
            self._spans.append(span)
            self._by_id[row["id"]] = span

    def _place(self) -> None:
        """Give each span a slice, on a lane where it nests."""
        groups: dict[tuple[str, str], list[_Span]] = {}
        for span in self._spans:
            groups.setdefault(span.group, []).append(span)
        for group, spans in sorted(groups.items()):
            open_: list[list[_Span]] = []
            # A parent comes before what it contains, also if both take the same time.
            spans.sort(key=lambda span: (span.begin, -span.end, span.is_call, span.row["id"]))
            for span in spans:
                for stack in open_:
                    while stack and stack[-1].end <= span.begin:
                        stack.pop()
                at = self._lane_for(span, open_)
                open_[at].append(span)
                span.slice = self._slice(span, self._lane(group, at))
                self._trace.slices.append(span.slice)

    def _lane_for(self, span: _Span, open_: list[list[_Span]]) -> int:
        parent = self._by_id.get(span.row["parent_id"] or 0)
        free = len(open_)
        for at, stack in enumerate(open_):
            if not stack:
                free = min(free, at)
            elif span.is_message or stack[-1].end < span.end:
                continue
            elif parent is None or parent in stack:
                return at
        if free == len(open_):
            open_.append([])
        return free

    def _slice(self, span: _Span, lane: Lane) -> Slice:
        row, fields = span.row, span.fields
        if span.is_call:
            name = f"{fields.get('mesh', '')}.{fields.get('method', '')}.{row['name']}()"
        else:
            name = str(fields.get("name") or row["name"])
        notes = {"process_id": row["process_id"], "span_id": row["id"], "target": row["target"]}
        if row["parent_id"]:
            notes["parent_id"] = row["parent_id"]
        notes.update(fields)
        notes["actor_id"] = span.actor
        if row.get("file"):
            notes["file"] = f"{row['file']}:{row.get('line') or 0}"
        if not span.finished:
            notes["unfinished"] = True
        category = "call" if span.is_call else "endpoint" if span.is_message else "span"
        return Slice(lane.number, span.begin, span.end, name, category, notes)

    # -- processes and lanes -----------------------------------------------------------------------

    def _process(self, proc: str) -> Process:
        process = self._processes.get(proc)
        if process is None:
            about = self._descriptions.get(proc, "")
            process = Process(len(self._processes) + 1, proc, about.replace("@", " @ ", 1))
            self._processes[proc] = process
        return process

    def _lane(self, group: tuple[str, str], at: int = 0) -> Lane:
        lanes = self._lanes.setdefault(group, [])
        while len(lanes) <= at:
            actor, thread = group
            name = thread or self._name(actor)
            more = f" ({len(lanes) + 1})" if lanes else ""
            process = self._process(_proc_of(actor)).number
            lane = Lane(len(self._trace.lanes) + 1, process, name + more)
            lanes.append(lane)
            self._trace.lanes.append(lane)
        return lanes[at]

    def _name(self, actor: str) -> str:
        """Return the name of an actor for people."""
        row = self._actors.get(actor)
        display = str(row["display_name"] or "") if row is not None else ""
        if actor.startswith("client<"):
            return "the script"
        last = display.rpartition(".<")[2].removesuffix(">")
        return last.partition(" ")[2] or actor.partition(".")[0].partition("<")[0] or actor

    # -- messages ----------------------------------------------------------------------------------

    def _draw_waits(self) -> None:
        """Note how long each message waited in its mailbox, and whether its endpoint failed."""
        times: dict[int, dict[str, int]] = {}
        for row in self._rows("message_status_events"):
            times.setdefault(row["message_id"], {})[row["status"]] = row["timestamp_us"]
        for number, found in times.items():
            span = self._by_id.get(number)
            if span is None or span.slice is None:
                continue
            if "queued" in found and "active" in found:
                span.slice.notes["queued_us"] = found["active"] - found["queued"]
            if "failed" in found:
                span.slice.notes["failed"] = True

    def _draw_flows(self, messages: Mapping[int, Row]) -> None:
        calls = _Calls(self._actors, self._rows("sent_messages"))
        for span in self._spans:
            if span.is_call and span.slice is not None:
                calls.add(span)
        replies: dict[int, list[int]] = {}
        started: dict[int, list[int]] = {}
        for flow, message in enumerate(messages.values(), 1):
            callee = self._by_id.get(message["id"])
            if callee is None or callee.slice is None:
                continue
            call = calls.find(message, _port(callee.fields))
            if call is None:
                continue
            callee.slice.flows.append(flow)
            started.setdefault(id(call), []).append(flow)
            if callee.finished and call.finished and _port(call.fields) != "0":
                replies.setdefault(id(call), []).append(flow)
        for span in self._spans:
            if not span.is_call or span.slice is None:
                continue
            lane, flows = span.slice.lane, started.get(id(span), [])
            send = Instant(lane, span.begin, "send", "call", {}, starts=flows)
            self._trace.instants.append(send)
            if span.finished and _port(span.fields) != "0":
                done = Instant(
                    lane, span.end, "complete", "call", {}, ends=replies.get(id(span), [])
                )
                self._trace.instants.append(done)

    # -- logs and gauges ---------------------------------------------------------------------------

    def _draw_events(self) -> None:
        for row in self._rows("events"):
            fields = _object(row["fields_json"])
            inside = self._by_id.get(row["parent_span"] or 0)
            actor = str(fields.get("actor_id") or "")
            if inside is not None and inside.slice is not None:
                lane = inside.slice.lane
            elif actor:
                lane = self._lane((actor, "")).number
            else:
                lane = self._lane(("", "logs")).number
            text = str(fields.get("message") or row["name"])
            notes = {
                key: row[key]
                for key in ("level", "target", "thread_name", "module_path", "file", "line")
                if row.get(key)
            }
            notes.update(fields)
            name = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
            self._trace.instants.append(Instant(lane, row["timestamp_us"], name, "log", notes))

    def _draw_counters(self) -> None:
        procs = {about.rpartition(":")[2]: proc for proc, about in self._descriptions.items()}
        counters: dict[tuple[int, str], Counter] = {}
        for row in sorted(self._rows("metric_gauges"), key=lambda row: int(row["timestamp_us"])):
            attributes = _object(row["attributes_json"])
            about = {**_object(row["resource_attributes_json"]), **attributes}
            pid = str(about.get("pid") or about.get("process.pid") or "")
            proc = procs.get(pid, f"process {pid}" if pid else "metrics")
            others = {key: value for key, value in attributes.items() if key not in _PLACES}
            suffix = " " + ", ".join(f"{k}={others[k]}" for k in sorted(others)) if others else ""
            name = f"{row['name']}{suffix}"
            process = self._process(proc).number
            counter = counters.get((process, name))
            if counter is None:
                number = len(counters) + 1
                counter = Counter(number, process, name, str(row["unit"] or ""), [])
                counters[process, name] = counter
                self._trace.counters.append(counter)
            values = (row.get(key) for key in ("value_f64", "value_i64", "value_u64"))
            value = next((value for value in values if value is not None), None)
            if value is not None:
                counter.points.append((int(row["timestamp_us"]), float(value)))


_PLACES = ("pid", "proc_id", "process.pid")


class _Calls:
    """Finds the call that a message belongs to: by its port, or one without answers by its time."""

    def __init__(self, actors: Mapping[str, Row], sent: Iterable[Row]) -> None:
        self._ids = {name: row["id"] for name, row in actors.items()}
        self._sent = {row["id"]: row for row in sent}
        self._meshes = {row["id"]: row["mesh_id"] for row in actors.values()}
        self._by_port: dict[tuple[int, str], _Span] = {}
        self._one_way: dict[tuple[int, int, str], list[_Span]] = {}

    def add(self, span: _Span) -> None:
        sender = self._ids.get(span.actor)
        port = _port(span.fields)
        if sender is None:
            return
        if port != "0":
            self._by_port[sender, port] = span
        elif span.row["id"] in self._sent:
            mesh = self._sent[span.row["id"]]["actor_mesh_id"]
            key = sender, mesh, str(span.fields.get("method"))
            self._one_way.setdefault(key, []).append(span)

    def find(self, message: Row, port: str) -> _Span | None:
        sender = message["from_actor_id"]
        if port != "0":
            return self._by_port.get((sender, port))
        mesh = self._meshes.get(message["to_actor_id"])
        if mesh is None:
            return None
        sent = self._one_way.get((sender, mesh, str(message["endpoint"])), [])
        before = [span for span in sent if span.begin <= message["timestamp_us"]]
        return max(before, key=lambda span: span.begin, default=None)


def _proc_of(actor: str) -> str:
    """Return the proc in the reference of an actor.

    >>> _proc_of("trainer<4ER>.worker<21>@ipc://@b1")
    'worker<21>@ipc://@b1'
    """
    return actor.partition(".")[2] or "others"


def _port(fields: Mapping[str, Any]) -> str:
    """Return the port that receives the answers to a call; "0" if there are none."""
    return str(fields.get("correlation_id") or "0")


def _object(text: str | None) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if it is something else."""
    try:
        found: Any = json.loads(text or "{}")
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def in_order(trace: Trace) -> Iterator[tuple[int, str, Slice | Instant]]:
    """Yield begins and ends of slices and the instants, lane by lane, in an order that nests.

    At equal times, a slice ends before the next one begins, and the instants of a call are inside
    of it.
    """
    slices: dict[int, list[Slice]] = {}
    for each in trace.slices:
        slices.setdefault(each.lane, []).append(each)
    instants: dict[int, list[Instant]] = {}
    for instant in trace.instants:
        instants.setdefault(instant.lane, []).append(instant)
    for lane in trace.lanes:
        # Ends are added to the list of a lane when the next slice does not fit inside.
        found: list[tuple[int, str, Slice | Instant]] = []
        open_: list[Slice] = []
        for each in slices.get(lane.number, []):
            while open_ and open_[-1].end <= each.begin:
                ended = open_.pop()
                found.append((ended.end, "end", ended))
            found.append((each.begin, "begin", each))
            open_.append(each)
        found += [(ended.end, "end", ended) for ended in open_[::-1]]
        yield from _merged(found, sorted(instants.get(lane.number, []), key=lambda i: i.time))


def _merged(
    slices: list[tuple[int, str, Slice | Instant]], instants: list[Instant]
) -> Iterator[tuple[int, str, Slice | Instant]]:
    """Yield instants at the time of a begin after it, and those at the time of an end before it."""
    at = 0
    for time, kind, each in slices:
        while at < len(instants) and (
            instants[at].time < time or (instants[at].time == time and kind == "end")
        ):
            yield instants[at].time, "instant", instants[at]
            at += 1
        yield time, kind, each
    for instant in instants[at:]:
        yield instant.time, "instant", instant
