"""The tables: those in which rows are kept, and those that queries see.

Rows are kept as they are recorded (`monarch._telemetry.kinds`): a message with its four times, a
span with begin and end. Documented tables with one row for each of these steps are views. A table
of rows consists of generations, so that the oldest rows can be dropped at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from monarch._telemetry.kinds import KINDS

__all__ = ["ARROW", "COLUMNS", "DOCUMENTED", "LASTING", "PLAIN", "VIEWS", "filled"]

_NULLABLE = {
    "parent_id": "U64",
    "parent_span": "U64",
    "file": "Utf8",
    "module_path": "Utf8",
    "line": "U32",
    "is_monotonic": "Boolean",
    "start_timestamp_us": "I64",
    "count": "U64",
}
_TYPES = {"Q": "U64", "q": "I64", "s": "Utf8"}

ARROW = {
    "U64": "UInt64",
    "U32": "UInt32",
    "I64": "Int64",
    "I32": "Int32",
    "F64": "Float64",
    "Utf8": "Utf8",
    "Boolean": "Boolean",
}
"""The types of columns as queries see them: those of Arrow."""


def _type(column: str, kind: str) -> str:
    if kind != "j":
        return _TYPES[kind]
    suffix = column.rpartition("_")[2].upper()
    return suffix if suffix in ("F64", "I64", "U64") else _NULLABLE[column]


COLUMNS: dict[str, list[tuple[str, str]]] = {
    kind: [
        *((name, _type(name, each)) for name, each in columns),
        *([("process", "Utf8")] if kind in ("actor", "spans") else []),
    ]
    for kind, columns in KINDS.items()
    if kind != "running"
}
"""The columns of each table of rows, with their types."""

LASTING = frozenset(("mesh", "actor", "state"))
"""The tables whose rows are kept as long as there is room: retention by time is for the others."""

_MESSAGES = "(SELECT * FROM {message} UNION ALL SELECT * FROM {running})"

VIEWS: dict[str, str] = {
    "meshes": """
        SELECT id, time AS timestamp_us, class, given_name, full_name, shape AS shape_json,
            NULLIF(parent, 0) AS parent_mesh_id, NULLIF(parent_view, '') AS parent_view_json
        FROM {mesh}""",
    "actors": """
        SELECT id, time AS timestamp_us, mesh AS mesh_id, rank, full_name,
            NULLIF(display_name, '') AS display_name
        FROM {actor}""",
    "actor_status_events": """
        SELECT id, time AS timestamp_us, actor AS actor_id, status AS new_status,
            NULLIF(reason, '') AS reason
        FROM {state}""",
    "sent_messages": """
        SELECT id, time AS timestamp_us, actor AS sender_actor_id, mesh AS actor_mesh_id,
            view AS view_json, shape AS shape_json
        FROM {send}""",
    # Only calls by actors are joined: other messages have the process's own instance as `sender`.
    # An actor takes all messages from one port.
    "messages": f"""
        SELECT m.id, m.queued AS timestamp_us,
            COALESCE(c.actor, b.actor, m.sender) AS from_actor_id,
            m.actor AS to_actor_id, m.endpoint, CAST(1 AS UBIGINT) AS port_index
        FROM {_MESSAGES} m
        LEFT JOIN (
            SELECT proc, port, MAX(actor) AS actor FROM {{send}}
            WHERE by_actor = 1 AND port <> 0 GROUP BY proc, port
        ) c ON c.proc = m.peer AND c.port = m.port
        LEFT JOIN (
            SELECT proc, mesh, endpoint, MAX(actor) AS actor FROM {{send}}
            WHERE by_actor = 1 AND port = 0 GROUP BY proc, mesh, endpoint
        ) b ON m.port = 0 AND b.proc = m.peer AND b.mesh = m.mesh AND b.endpoint = m.endpoint""",
    "message_status_events": f"""
        SELECT id * 4 AS id, queued AS timestamp_us, id AS message_id, 'queued' AS status
        FROM {_MESSAGES} a
        UNION ALL SELECT id * 4 + 1, begun, id, 'active' FROM {_MESSAGES} b
        UNION ALL SELECT id * 4 + 2, ended, id, CASE failed WHEN 0 THEN 'complete' ELSE 'failed' END
        FROM {{message}}""",
    "spans": f"""
        SELECT process AS process_id, id, name, target, level, fields_json,
            begin_us AS timestamp_us, parent_id, thread_name, file, line
        FROM {{spans}}
        UNION ALL SELECT a.process, m.id, 'python_user_span', 'monarch_hyperactor::telemetry',
            'INFO', '{{"actor_id":"' || a.full_name || '","name":"' || m.endpoint
                || '","correlation_id":' || m.port || '}}',
            m.begun, NULL, '', NULL, NULL
        FROM {_MESSAGES} m LEFT JOIN {{actor}} a ON a.id = m.actor
        UNION ALL SELECT a.process, s.id, CASE s.port WHEN 0 THEN 'broadcast' ELSE 'call' END,
            'monarch_hyperactor::telemetry::endpoint', 'INFO',
            '{{"actor_id":"' || COALESCE(a.full_name, '') || '","mesh":"'
                || COALESCE(e.given_name, '') || '","method":"' || s.endpoint
                || '","correlation_id":' || s.port || '}}',
            s.time, NULLIF(s.parent, 0), '', NULL, NULL
        FROM {{send}} s LEFT JOIN {{actor}} a ON a.id = s.actor LEFT JOIN {{mesh}} e
            ON e.id = s.mesh""",
    "span_events": """
        SELECT process AS process_id, id, begin_us AS timestamp_us, 'enter' AS event_type
        FROM {spans}
        UNION ALL SELECT process, id, end_us, 'exit' FROM {spans}
        UNION ALL SELECT process, id, end_us, 'close' FROM {spans}
        UNION ALL SELECT a.process, t.id, t.at, t.what
        FROM (
            SELECT id, actor, begun AS at, 'enter' AS what FROM {message}
            UNION ALL SELECT id, actor, ended, 'exit' FROM {message}
            UNION ALL SELECT id, actor, ended, 'close' FROM {message}
            UNION ALL SELECT id, actor, begun, 'enter' FROM {running}
            UNION ALL SELECT id, actor, time, 'enter' FROM {send}
            UNION ALL SELECT s.id, s.actor, MAX(m.ended), 'exit' FROM {send} s JOIN {message} m
                ON m.peer = s.proc AND m.port = s.port WHERE s.port <> 0 GROUP BY s.id, s.actor
        ) t JOIN {actor} a ON a.id = t.actor""",
    "events": """
        SELECT name, target, level, fields_json, timestamp_us, parent_span, thread_id, thread_name,
            module_path, file, line
        FROM {events}""",
    "metric_gauges": "SELECT * FROM {metric_gauges}",
    "metric_sums": "SELECT * FROM {metric_sums}",
    "metric_histograms": "SELECT * FROM {metric_histograms}",
}
"""The documented tables that are views, over the tables of rows."""


def filled(sql: str, names: Mapping[str, str]) -> str:
    """Return the SQL of a view with the names that a database has for the tables of rows."""
    for table, name in names.items():
        sql = sql.replace("{" + table + "}", name)
    return sql


_SNAPSHOT = ("snapshot_id", "Utf8")
_NODE = (_SNAPSHOT, ("node_id", "Utf8"))
PLAIN: dict[str, list[tuple[str, str]]] = {
    "snapshots": [_SNAPSHOT, ("snapshot_ts", "I64")],
    "nodes": [*_NODE, ("node_kind", "Utf8"), ("as_of", "I64")],
    "children": [
        _SNAPSHOT,
        ("parent_id", "Utf8"),
        ("child_id", "Utf8"),
        ("child_sort_key", "I64"),
        ("is_system", "Boolean"),
        ("is_stopped", "Boolean"),
    ],
    "root_nodes": [
        *_NODE,
        ("num_hosts", "I64"),
        ("started_at", "I64"),
        ("started_by", "Utf8"),
    ],
    "host_nodes": [*_NODE, ("addr", "Utf8"), ("host_num_procs", "I64")],
    "proc_nodes": [
        *_NODE,
        ("proc_name", "Utf8"),
        ("num_actors", "I64"),
        ("stopped_retention_cap", "I64"),
        ("is_poisoned", "Boolean"),
        ("failed_actor_count", "I64"),
    ],
    "actor_nodes": [
        *_NODE,
        ("actor_status", "Utf8"),
        ("actor_type", "Utf8"),
        ("instance_id", "Utf8"),
        ("messages_processed", "I64"),
        ("created_at", "I64"),
        ("last_message_handler", "Utf8"),
        ("total_processing_time_us", "I64"),
        ("queue_depth", "I64"),
        ("is_system", "Boolean"),
    ],
    "actor_failures": [
        *_NODE,
        ("failure_error_message", "Utf8"),
        ("failure_root_cause_actor", "Utf8"),
        ("failure_root_cause_name", "Utf8"),
        ("failure_occurred_at", "I64"),
        ("failure_is_propagated", "Boolean"),
    ],
    "actor_executions": [
        *_NODE,
        ("active_count", "I64"),
        ("complete", "Boolean"),
        ("truncated", "Boolean"),
    ],
    "active_handlers": [
        *_NODE,
        ("name", "Utf8"),
        ("active_count", "I64"),
        ("oldest_since", "I64"),
    ],
    "actor_inbound_orderings": [
        *_NODE,
        ("enabled", "Boolean"),
        ("snapshot_complete", "Boolean"),
        ("skipped_session_count", "I64"),
        ("known_session_count", "I64"),
        ("returned_buffered_session_count", "I64"),
        ("returned_buffered_message_count", "I64"),
        ("returned_max_buffered_count", "I64"),
    ],
    "ordering_sessions": [
        *_NODE,
        ("session_id", "Utf8"),
        ("sender", "Utf8"),
        ("last_released_seq", "I64"),
        ("expected_next_seq", "I64"),
        ("buffered_count", "I64"),
        ("oldest_buffered_seq", "I64"),
        ("newest_buffered_seq", "I64"),
    ],
    "resolution_errors": [*_NODE, ("error_code", "Utf8"), ("error_message", "Utf8")],
    "pyspy_dumps": [
        ("dump_id", "Utf8"),
        ("timestamp_us", "I64"),
        ("pid", "I32"),
        ("binary", "Utf8"),
        ("proc_ref", "Utf8"),
        ("capture_mode", "Utf8"),
        ("warnings_json", "Utf8"),
    ],
    "pyspy_stack_traces": [
        ("dump_id", "Utf8"),
        ("pid", "I32"),
        ("thread_id", "U64"),
        ("thread_name", "Utf8"),
        ("os_thread_id", "U64"),
        ("active", "Boolean"),
        ("owns_gil", "Boolean"),
    ],
    "pyspy_frames": [
        ("dump_id", "Utf8"),
        ("thread_id", "U64"),
        ("frame_depth", "I32"),
        ("name", "Utf8"),
        ("filename", "Utf8"),
        ("module", "Utf8"),
        ("short_filename", "Utf8"),
        ("line", "I32"),
        ("is_entry", "Boolean"),
    ],
    "pyspy_local_variables": [
        ("dump_id", "Utf8"),
        ("thread_id", "U64"),
        ("frame_depth", "I32"),
        ("name", "Utf8"),
        ("addr", "U64"),
        ("arg", "Boolean"),
        ("repr", "Utf8"),
    ],
}
"""The documented tables that are kept as they are: of snapshots, and of stacks."""

_OF_VIEWS = {
    "meshes": "id U64 timestamp_us I64 class Utf8 given_name Utf8 full_name Utf8 shape_json Utf8 "
    "parent_mesh_id U64 parent_view_json Utf8",
    "actors": "id U64 timestamp_us I64 mesh_id U64 rank U64 full_name Utf8 display_name Utf8",
    "actor_status_events": "id U64 timestamp_us I64 actor_id U64 new_status Utf8 reason Utf8",
    "sent_messages": "id U64 timestamp_us I64 sender_actor_id U64 actor_mesh_id U64 view_json Utf8 "
    "shape_json Utf8",
    "messages": "id U64 timestamp_us I64 from_actor_id U64 to_actor_id U64 endpoint Utf8 "
    "port_index U64",
    "message_status_events": "id U64 timestamp_us I64 message_id U64 status Utf8",
    "spans": "process_id Utf8 id U64 name Utf8 target Utf8 level Utf8 fields_json Utf8 "
    "timestamp_us I64 parent_id U64 thread_name Utf8 file Utf8 line U32",
    "span_events": "process_id Utf8 id U64 timestamp_us I64 event_type Utf8",
}


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


DOCUMENTED: dict[str, list[tuple[str, str]]] = {
    **{name: _pairs(text) for name, text in _OF_VIEWS.items()},
    "events": COLUMNS["events"],
    **{name: COLUMNS[name] for name in ("metric_gauges", "metric_sums", "metric_histograms")},
    **PLAIN,
}
"""All tables that queries see, with the names and types of their columns."""
