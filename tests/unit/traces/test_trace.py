"""A trace has each span of the tables once, on a lane where it nests, with its flows."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._traces import chrome_json, pftrace
from monarch._traces.recording import check_output, profile, read, write
from monarch._traces.trace import Trace, build, in_order

CALLER = "monarch_hyperactor::telemetry::endpoint"
CALLEE = "monarch_hyperactor::telemetry"
END = 1_000


class Rows:
    """Tables of a program: actors call each other, and report spans of their own."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {
            name: []
            for name in (
                "meshes actors spans span_events messages sent_messages message_status_events "
                "events metric_gauges"
            ).split()
        }
        self.number = 100

    def actor(self, name: str, proc: str) -> str:
        full = f"{name}<1>.{proc}<2>@ipc://@{proc}"
        display = "<root>" if name == "client" else f"<root>.<m.A {name}{{'gpus': 0/2}}>"
        row = {"id": hash(full) & (1 << 62) - 1, "mesh_id": hash(name) & (1 << 62) - 1}
        row.update(full_name=full, display_name=display, timestamp_us=0, rank=0)
        self.tables["actors"].append(row)
        return full

    def id_of(self, actor: str) -> tuple[int, int]:
        row = next(row for row in self.tables["actors"] if row["full_name"] == actor)
        return row["id"], row["mesh_id"]

    def span(
        self,
        actor: str,
        begin: int,
        end: int | None,
        parent: int | None = None,
        target: str = CALLEE,
        kind: str = "python_user_span",
        **fields: Any,
    ) -> int:
        self.number += 1
        process = f"{actor.partition('.')[2].partition('<')[0]}@node:7"
        content = {"actor_id": actor, **fields}
        self.tables["spans"].append(
            {
                "process_id": process,
                "id": self.number,
                "name": kind,
                "target": target,
                "level": "INFO",
                "fields_json": json.dumps(content),
                "timestamp_us": begin,
                "parent_id": parent,
                "thread_name": "",
                "file": None,
                "line": None,
            }
        )
        events = {"enter": begin} if end is None else {"enter": begin, "exit": end, "close": end}
        for event, when in events.items():
            row = {"process_id": process, "id": self.number, "timestamp_us": when}
            self.tables["span_events"].append({**row, "event_type": event})
        return self.number

    def call(
        self,
        caller: str,
        callees: list[tuple[str, int, int | None]],
        begin: int,
        end: int | None,
        port: int,
    ) -> tuple[int, list[int]]:
        """Add a call, with begin and end of the endpoint of each callee."""
        names = {"mesh": "m", "method": "f", "correlation_id": str(port)}
        sent = self.span(caller, begin, end, target=CALLER, kind="call", **names)
        to_mesh = self.id_of(callees[0][0])[1] if callees else 0
        sender = self.id_of(caller)[0]
        self.tables["sent_messages"].append(
            {"id": sent, "timestamp_us": begin, "sender_actor_id": sender, "actor_mesh_id": to_mesh}
        )
        messages = []
        for callee, start, stop in callees:
            number = self.span(callee, start, stop, name="f", correlation_id=str(port))
            messages.append(number)
            self.tables["messages"].append(
                {
                    "id": number,
                    "timestamp_us": begin + 1,
                    "from_actor_id": sender,
                    "to_actor_id": self.id_of(callee)[0],
                    "endpoint": "f",
                    "port_index": 1,
                }
            )
            for status, when in (("queued", begin + 1), ("active", start)):
                row = {"id": number, "timestamp_us": when, "message_id": number}
                self.tables["message_status_events"].append({**row, "status": status})
        return sent, messages


TIMES = st.tuples(st.integers(0, END), st.integers(0, 300)).map(
    lambda pair: (pair[0], min(END, pair[0] + pair[1]))
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), TIMES, st.lists(st.tuples(st.integers(0, 2), TIMES))),
        max_size=12,
    ),
    st.lists(st.tuples(st.integers(0, 2), TIMES, st.booleans()), max_size=12),
)
def test_every_span_is_drawn_once_and_lanes_nest(calls: list[Any], spans: list[Any]) -> None:
    rows = Rows()
    actors = [rows.actor(name, proc) for name, proc in (("a", "p"), ("b", "p"), ("c", "q"))]
    for port, (caller, (begin, end), callees) in enumerate(calls, 1):
        rows.call(actors[caller], [(actors[at], *times) for at, times in callees], begin, end, port)
    for at, (begin, end), finished in spans:
        rows.span(actors[at], begin, end if finished else None, name="own")
    trace = build(rows.tables, END)

    assert len(rows.tables["spans"]) == len(trace.slices)
    assert {row["id"] for row in rows.tables["spans"]} == {s.notes["span_id"] for s in trace.slices}
    assert not trace.skipped
    for lane in trace.lanes:
        open_: list[Any] = []
        last = 0
        for time, kind, each in in_order(trace):
            if each.lane != lane.number:
                continue
            assert time >= last
            last = time
            if kind == "begin":
                assert not open_ or open_[-1].begin <= each.begin <= each.end <= open_[-1].end
                open_.append(each)
            elif kind == "end":
                assert open_.pop() is each
        assert not open_
    # Each message is one flow: from its call, by its endpoint, back to the call.
    starts = Counter(flow for instant in trace.instants for flow in instant.starts)
    passed = Counter(flow for each in trace.slices for flow in each.flows)
    ends = Counter(flow for instant in trace.instants for flow in instant.ends)
    assert starts == passed == ends
    assert len(starts) == len(rows.tables["messages"])
    assert set(starts.values()) <= {1}


def example() -> Rows:
    """A script calls two trainers, one of which fails to end; a span, a log and memory."""
    rows = Rows()
    script = rows.actor("client", "local")
    trainers = [rows.actor("trainers", "p"), rows.actor("trainers", "q")]
    _, (first, _) = rows.call(script, [(trainers[0], 20, 90), (trainers[1], 30, None)], 10, None, 5)
    rows.span(trainers[0], 40, 50, parent=first, name="load")
    rows.call(script, [(trainers[0], 110, 120)], 100, None, 0)
    log = {"target": "train", "thread_id": 1, "thread_name": "t", "module_path": None}
    log.update(level="WARNING", file="x.py", line=7)
    for parent, when in ((first, 45), (None, 46)):
        content = {"name": "loss is nan", "fields_json": "{}", "timestamp_us": when}
        rows.tables["events"].append({**log, **content, "parent_span": parent})
    for when in (5, 15):
        gauge = {"name": "process.memory.rss_bytes", "timestamp_us": when, "unit": "By"}
        gauge.update(attributes_json='{"pid": "7"}', resource_attributes_json="{}")
        gauge.update(value_f64=None, value_i64=None, value_u64=4096 * when)
        rows.tables["metric_gauges"].append(gauge)
    rows.tables["spans"].append(
        {**rows.tables["spans"][0], "id": 1, "process_id": "other@n:1", "fields_json": "{}"}
    )
    return rows


def test_names_annotations_logs_and_counters() -> None:
    trace = build(example().tables, END)
    assert trace.summary() == (
        "Wrote 6 spans from 3 actors on 3 procs. Skipped 1 rows: 1 missing actor_id"
    )
    lanes = {lane.number: lane.name for lane in trace.lanes}
    found = {(lanes[each.lane], each.name, each.begin, each.end) for each in trace.slices}
    assert found == {
        ("the script", "m.f.call()", 10, END),
        ("the script", "m.f.call()", 100, 100),
        ("trainers{'gpus': 0/2}", "f", 20, 90),
        ("trainers{'gpus': 0/2}", "load", 40, 50),
        ("trainers{'gpus': 0/2}", "f", 110, 120),
        ("trainers{'gpus': 0/2}", "f", 30, END),
    }
    call = trace.slices[[each.name for each in trace.slices].index("m.f.call()")]
    assert call.notes["unfinished"] is True
    assert (call.notes["mesh"], call.notes["method"]) == ("m", "f")
    assert call.notes["correlation_id"] == "5"
    endpoint = next(each for each in trace.slices if each.begin == 20)
    assert endpoint.notes["queued_us"] == 9
    logs = [each for each in trace.instants if each.category == "log"]
    assert [(lanes[each.lane], each.name) for each in logs] == [
        ("trainers{'gpus': 0/2}", "loss is nan"),
        ("logs", "loss is nan"),
    ]
    assert logs[0].notes["line"] == 7
    (counter,) = trace.counters
    assert counter.points == [(5, 20480.0), (15, 61440.0)]
    sends = [each for each in trace.instants if each.name == "send"]
    assert [len(each.starts) for each in sorted(sends, key=lambda each: each.time)] == [2, 1]


def test_the_file_of_perfetto_has_what_the_trace_has() -> None:
    perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace, file = build(example().tables, END), io.BytesIO()
    pftrace.write(trace, file)
    packets = perfetto.Trace.FromString(file.getvalue()).packet
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor")
    }
    assert {t.process.process_name for t in tracks.values() if t.HasField("process")} == {
        process.name for process in trace.processes
    }
    threads = {uuid: t.thread for uuid, t in tracks.items() if t.HasField("thread")}
    assert {t.thread_name for t in threads.values()} == {lane.name for lane in trace.lanes}
    pids = {t.process.pid for t in tracks.values() if t.HasField("process")}
    assert {t.pid for t in threads.values()} <= pids
    events = [(p.timestamp, p.track_event) for p in packets if p.HasField("track_event")]
    assert all(event.track_uuid in tracks for _, event in events)
    kinds = Counter(event.type for _, event in events)
    assert kinds[1] == kinds[2] == len(trace.slices)
    assert kinds[3] == len(trace.instants)
    assert kinds[4] == 2
    flows = Counter(flow for _, event in events for flow in event.flow_ids)
    assert set(flows.values()) == {2}  # the call, and the endpoint
    ended = {flow for _, event in events for flow in event.terminating_flow_ids}
    assert ended <= set(flows)
    begins = {event.name: event for _, event in events if event.type == 1}
    notes = {note.name: note for note in begins["load"].debug_annotations}
    assert notes["actor_id"].string_value.startswith("trainers<1>.p<2>")
    assert notes["span_id"].uint_value
    assert packets[0].sequence_flags == 1


def test_chromes_json_has_what_the_trace_has() -> None:
    trace, file = build(example().tables, END), io.BytesIO()
    chrome_json.write(trace, file, [{"ph": "X", "name": "aten::mm"}])
    events = json.loads(file.getvalue())["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == len(trace.slices) + 1
    assert kinds["i"] == len(trace.instants)
    assert kinds["C"] == 2
    assert kinds["s"] == kinds["t"] == 3
    assert kinds["f"] == 0  # a trainer has not answered, and the other call awaits no answer
    slices = {
        (e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and "ts" in e
    }
    assert len(slices) == len(trace.slices)


class Client:
    """Answers from tables, in pages."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def query(self, sql: str, timeout: float | None = None) -> dict[str, Any]:
        table = sql.partition(" FROM ")[2].partition(" ")[0]
        offset = int(sql.rpartition(" OFFSET ")[2])
        size = int(sql.rpartition(" LIMIT ")[2].partition(" ")[0])
        return {"rows": self.rows.tables[table][offset : offset + size]}


def test_all_pages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._traces.recording._PAGE", 2)
    trace, notes = read(Client(example()), 0, END)
    assert len(trace.slices) == 6
    assert notes == []
    monkeypatch.setattr("monarch._traces.recording._MOST", 4)
    _, notes = read(Client(example()), 0, END)
    assert notes[0].startswith("The table spans has more than 4 rows")


def test_a_file_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    for name in ("a.json", "a.pftrace"):
        path = str(tmp_path / name)
        write(Trace(), path, overwrite=False)
        with pytest.raises(FileExistsError, match="output already exists"):
            write(Trace(), path, overwrite=False)
        with pytest.raises(FileExistsError, match="output already exists"):
            check_output(path, overwrite=False)
        write(Trace(), path, overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "a.pftrace"]
    with pytest.raises(ValueError, match=r"ends in \.pftrace or \.json"):
        check_output(str(tmp_path / "a.txt"), overwrite=False)
    with pytest.raises(FileNotFoundError):
        check_output(str(tmp_path / "no" / "a.json"), overwrite=False)


def test_without_the_package_json_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pymonarch\[perfetto\]"):
        check_output(str(tmp_path / "a.pftrace"), overwrite=False)
    check_output(str(tmp_path / "a.json"), overwrite=False)


def test_a_profile_is_for_one_block() -> None:
    ready: list[profile] = []
    profiled = profile("http://localhost:1", on_trace_ready=ready.append)
    with pytest.raises(RuntimeError, match="has not ended"):
        profiled.export_perfetto_trace()
    profiled.__enter__()
    with pytest.raises(RuntimeError, match="has not ended"):
        profiled.export_perfetto_trace()
    profiled.__exit__(KeyError, KeyError(), None)
    assert ready == [profiled]
    with pytest.raises(RuntimeError, match="cannot be used again"), profiled:
        pass
