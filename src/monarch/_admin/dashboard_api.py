"""The dashboard's API: ``/api/*``. Counts of messages and logs by SQL, all else of the picture."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from monarch._admin import views
from monarch._admin.answers import Fault, json_body, reply
from monarch._admin.picture import Actor, Picture
from monarch._admin.source import Pictures
from monarch._admin.sql import Sql
from monarch._admin.stream import Stream
from monarch._store.query import QueryError

__all__ = ["DashboardApi"]

_PAGE, _LARGEST_PAGE = 1000, 10_000
_STUCK = 10.0
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_WEIGHTS = {
    "idle": 100,
    "busy": 80,
    "waiting": 80,
    "stuck": 80,
    "client": 50,
    "silent": 50,
    "starting": 30,
    "stopping": 30,
    "stopped": 20,
    "failed": 0,
}
_SHOWN = {"busy": "processing", "waiting": "processing", "starting": "initializing"}
_ACTORS = """
    SELECT a.id, a.timestamp_us, a.mesh_id, a.rank, a.full_name, a.display_name,
        m.class AS mesh_class, m.given_name AS mesh_name
    FROM actors a LEFT JOIN meshes m ON m.id = a.mesh_id"""
_ID_COLUMNS = re.compile(r"(^|_)id$")
_Handler = Callable[[Request], Awaitable[Response]]


class DashboardApi:
    """See the module. `about` gives the facts of the observer."""

    def __init__(
        self, pictures: Pictures, sql: Sql, about: Callable[[], dict[str, Any]], stream: Stream
    ) -> None:
        self._pictures = pictures
        self._sql = sql
        self._about = about
        self._stream = stream

    def routes(self) -> list[Route]:
        """Return the routes."""
        get: dict[str, _Handler] = {
            "about": self._get_about,
            "summary": self._summary,
            "message-stats": self._message_stats,
            "message-activity": self._message_activity,
            "dag": self._dag,
            "meshes": self._meshes,
            "meshes/{id}": self._mesh,
            "meshes/{id}/children": self._mesh_children,
            "actors": self._actors,
            "actors/{id:path}/status_events": self._status_events,
            "actors/{id:path}/messages": self._actor_messages,
            "actors/{id:path}": self._actor,
            "messages": self._messages,
            "message_status_events": self._message_status_events,
            "sent_messages": self._sent_messages,
            "grid": self._grid,
            "waits": self._waits,
            "failures": self._failures,
            "endpoints": self._endpoints,
            "endpoints/history": self._history,
            "processes": self._processes,
            "logs": self._logs,
            "stream": self._events,
        }
        routes = [Route(f"/api/{path}", handler, methods=["GET"]) for path, handler in get.items()]
        return [*routes, Route("/api/query", self._query, methods=["POST"])]

    async def _get_about(self, _request: Request) -> Response:
        return reply(self._about())

    # -- of the picture ----------------------------------------------------------------------------

    async def _grid(self, request: Request) -> Response:
        found = await self._pictures.get()
        query = request.query_params
        references = query.get("refs", "true") != "false"
        stuck = _number(request, "stuck", _STUCK)
        return reply(views.grid(found, stuck, query.get("mesh"), references))

    async def _waits(self, _request: Request) -> Response:
        return reply(views.waits(await self._pictures.get()))

    async def _failures(self, _request: Request) -> Response:
        return reply(views.failures(await self._pictures.get()))

    async def _processes(self, _request: Request) -> Response:
        return reply(views.processes(await self._pictures.get()))

    async def _events(self, request: Request) -> Response:
        texts = self._stream.read(request.query_params.get("actors", "true") != "false")
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(texts, 200, headers, media_type="text/event-stream")

    async def _dag(self, request: Request) -> Response:
        found = await self._pictures.get()
        hide = request.query_params.get("hide_system", "true") != "false"
        nodes: list[dict[str, Any]] = []
        edges: list[dict[str, Any]] = []

        def add(tier: str, entity: str, parent: str | None, **more: Any) -> str:
            identity = f"{tier}-{entity}"
            nodes.append({"id": identity, "entity_id": entity, "tier": tier, **more})
            if parent is not None:
                edges.append(_edge(parent, identity, "hierarchy"))
            return identity

        by_id: dict[str, str] = {}
        for host in sorted({*found.hosts, *found.missing}):
            status = "failed" if host in found.missing else "idle"
            above = add("host", f"host:{host}", None, label=host, subtitle="host", status=status)
            for process in found.hosts.get(host, []):
                proc = add(
                    "proc",
                    process.reference,
                    above,
                    label=process.label or f"process {process.pid}",
                    subtitle=f"pid {process.pid}",
                    status="idle" if process.answers else "unknown",
                    mesh_name=process.label,
                )
                if process.client:
                    by_id[_client_id(process.uid)] = proc
                for actor in process.actors:
                    if hide and actor.system:
                        continue
                    by_id[views.sql_id(actor)] = add(
                        "actor",
                        actor.reference,
                        proc,
                        label=actor.short,
                        subtitle=actor.kind.rpartition(".")[2],
                        status=_SHOWN.get(actor.state, actor.state),
                        mesh_name=actor.name,
                        telemetry_actor_id=views.sql_id(actor),
                    )
        for sender, receiver in await self._pairs():
            if sender in by_id and receiver in by_id:
                edges.append(_edge(by_id[sender], by_id[receiver], "message"))
        return reply(
            {
                "nodes": nodes,
                "edges": edges,
                "snapshot_pending": False,
                "snapshot_partial": not all(one.answers for one in found.processes.values()),
                "resolution_error_count": sum(not one.answers for one in found.processes.values()),
            }
        )

    async def _pairs(self) -> list[tuple[str, str]]:
        rows = await self._sql.rows(
            "SELECT DISTINCT sender_actor_id AS sender, a.id AS receiver FROM sent_messages s "
            "JOIN actors a ON a.mesh_id = s.actor_mesh_id LIMIT 2000"
        )
        return [(str(row["sender"]), str(row["receiver"])) for row in rows]

    async def _summary(self, _request: Request) -> Response:
        found = await self._pictures.get()
        lifecycle = await self._sql.lifecycle()
        endpoints = await self._sql.by_endpoint()
        activity = await self._sql.activity()
        users = [actor for actor in found.actors.values() if not actor.system]
        by_status: dict[str, int] = {}
        for actor in users:
            status = _SHOWN.get(actor.state, actor.state)
            by_status[status] = by_status.get(status, 0) + 1
        ended = [_end(actor) for actor in users if not actor.alive]
        failed = [row for row, actor in ended if actor.state == "failed"]
        done = lifecycle["completed"] + lifecycle["failed"]
        rows = await self._sql.rows("SELECT COUNT(*) AS number FROM actor_status_events")
        onset = min((row["timestamp_us"] for row in failed), default=None)
        meshes = await self._mesh_rows(found)
        classes = [row["class"] for row in meshes]
        score = sum(_WEIGHTS[actor.state] for actor in users) // len(users) if users else 100
        rate = lifecycle["completed"] / done if done else 1.0
        return reply(
            {
                "mesh_counts": {"total": len(meshes)},
                "hierarchy_counts": {
                    "host_meshes": classes.count("Host"),
                    "proc_meshes": classes.count("Proc"),
                    "actor_meshes": sum(name not in ("Host", "Proc") for name in classes),
                },
                "actor_counts": {
                    "total": len(users),
                    "by_status": by_status,
                    "system": len(found.actors) - len(users),
                },
                "message_counts": {
                    "total": lifecycle["queued"],
                    "by_status": {
                        "complete": lifecycle["completed"],
                        "failed": lifecycle["failed"],
                        "active": lifecycle["active"],
                    },
                    "by_endpoint": {row["endpoint"]: row["total"] for row in endpoints},
                    "delivery_rate": int(1000 * rate) / 1000,
                },
                "errors": {
                    "failed_actors": failed,
                    "stopped_actors": [row for row, actor in ended if actor.state == "stopped"],
                    "failed_messages": lifecycle["failed"],
                },
                "timeline": {
                    "start_us": activity["start_us"],
                    "end_us": activity["end_us"],
                    "failure_onset_us": onset,
                    "total_status_events": rows[0]["number"] if rows else 0,
                    "total_message_events": lifecycle["queued"],
                },
                "health_score": score,
                "telemetry": self._sql.there,
            }
        )

    # -- by SQL ------------------------------------------------------------------------------------

    async def _message_stats(self, _request: Request) -> Response:
        names = await self._sql.rows(
            "SELECT DISTINCT f.full_name AS sender, t.full_name AS receiver FROM sent_messages s "
            "JOIN actors f ON f.id = s.sender_actor_id "
            "JOIN actors t ON t.mesh_id = s.actor_mesh_id LIMIT 2000"
        )
        return reply(
            {
                "lifecycle": await self._sql.lifecycle(),
                "endpoints": await self._sql.by_endpoint(),
                "pairs": [[row["sender"], row["receiver"]] for row in names],
                "telemetry": self._sql.there,
            }
        )

    async def _message_activity(self, _request: Request) -> Response:
        return reply(await self._sql.activity())

    async def _mesh_rows(self, found: Picture) -> list[dict[str, Any]]:
        """Return the rows of `meshes`; without telemetry, those of the meshes that there are."""
        if self._sql.there:
            rows = await self._sql.rows("SELECT * FROM meshes ORDER BY timestamp_us, id")
            return [_texts(row) for row in rows]
        shapes: dict[str, Actor] = {}
        for actor in found.actors.values():
            if actor.alive or views.mesh_id(actor) not in shapes:
                shapes[views.mesh_id(actor)] = actor
        return [_mesh_row(identity, actor, found) for identity, actor in shapes.items()]

    async def _meshes(self, request: Request) -> Response:
        query = request.query_params
        rows = await self._mesh_rows(await self._pictures.get())
        class_, parent = query.get("class"), query.get("parent_mesh_id")
        excluded = query.get("exclude_classes", "").split(",")
        kept = [
            row
            for row in rows
            if (class_ is None or row["class"] == class_)
            and (parent is None or row["parent_mesh_id"] == parent)
            and row["class"] not in excluded
        ]
        return _page(request, kept)

    async def _mesh(self, request: Request) -> Response:
        identity = request.path_params["id"]
        for row in await self._mesh_rows(await self._pictures.get()):
            if row["id"] == identity:
                return reply(row)
        raise Fault("not_found", "mesh not found")

    async def _mesh_children(self, request: Request) -> Response:
        query = request.query_params
        identity = request.path_params["id"]
        excluded = query.get("exclude_classes", "").split(",")
        class_ = query.get("mesh_class")
        rows = [
            row
            for row in await self._mesh_rows(await self._pictures.get())
            if row["parent_mesh_id"] == identity
            and row["class"] not in excluded
            and class_ in (None, row["class"])
        ]
        return _page(request, rows)

    async def _actor_rows(self, found: Picture) -> list[dict[str, Any]]:
        live = {views.sql_id(actor): actor for actor in found.actors.values()}
        if not self._sql.there:
            return [_actor_row(identity, actor, found) for identity, actor in live.items()]
        states = {
            str(row["actor_id"]): row
            for row in await self._sql.rows(
                "SELECT s.actor_id, s.new_status, s.timestamp_us FROM actor_status_events s JOIN "
                "(SELECT actor_id, MAX(id) AS id FROM actor_status_events GROUP BY actor_id) l "
                "ON l.id = s.id"
            )
        }
        found_rows = await self._sql.rows(f"{_ACTORS} ORDER BY a.timestamp_us, a.id")
        rows = [_texts(row) for row in found_rows]
        for row in rows:
            state = states.get(row["id"], {})
            actor = live.get(row["id"])
            row["latest_status"] = state.get("new_status", "").lower() or None
            if actor is not None and actor.alive:
                row["latest_status"] = _SHOWN.get(actor.state, actor.state)
                row["system"] = actor.system
            row["status_timestamp_us"] = state.get("timestamp_us")
        return rows

    async def _actors(self, request: Request) -> Response:
        mesh = request.query_params.get("mesh_id")
        rows = await self._actor_rows(await self._pictures.get())
        return _page(request, [row for row in rows if mesh in (None, row["mesh_id"])])

    async def _actor(self, request: Request) -> Response:
        identity = request.path_params["id"]
        for row in await self._actor_rows(await self._pictures.get()):
            if identity in (row["id"], row["full_name"]):
                return reply(row)
        raise Fault("not_found", "actor not found")

    async def _status_events(self, request: Request) -> Response:
        rows = await self._sql.rows(
            "SELECT * FROM (SELECT * FROM actor_status_events WHERE actor_id = ? "
            "ORDER BY timestamp_us DESC, id DESC LIMIT 200) l ORDER BY timestamp_us, id",
            _id_of(request.path_params["id"]),
        )
        return reply([_texts(row) for row in rows])

    async def _actor_messages(self, request: Request) -> Response:
        identity = _id_of(request.path_params["id"])
        rows = await self._sql.rows(
            "SELECT * FROM (SELECT * FROM messages WHERE to_actor_id = ? OR from_actor_id = ? "
            "ORDER BY timestamp_us DESC LIMIT 200) l ORDER BY timestamp_us",
            identity,
            identity,
        )
        if rows:
            ids = ", ".join(str(int(row["id"])) for row in rows)
            states = await self._sql.rows(
                "SELECT message_id, status FROM message_status_events "
                f"WHERE message_id IN ({ids}) ORDER BY id"
            )
            latest = {row["message_id"]: row["status"] for row in states}
            for row in rows:
                row["latest_status"] = latest.get(row["id"])
        return reply([_texts(row) for row in rows])

    async def _table(self, request: Request, table: str, *columns: str) -> Response:
        conditions, values = ["1 = 1"], list[Any]()
        for column in columns:
            value = request.query_params.get(column)
            if value is not None:
                conditions.append(f"{column} = ?")
                values.append(_id_of(value))
        limit, start = _limits(request)
        rows = await self._sql.rows(
            f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} ORDER BY timestamp_us, id "
            f"LIMIT {limit + 1} OFFSET {start}",
            *values,
            limit=limit + 1,
        )
        headers = {"X-Next-Cursor": str(start + limit)} if len(rows) > limit else None
        return reply([_texts(row) for row in rows[:limit]], headers=headers)

    async def _messages(self, request: Request) -> Response:
        return await self._table(request, "messages", "from_actor_id", "to_actor_id")

    async def _message_status_events(self, request: Request) -> Response:
        return await self._table(request, "message_status_events", "message_id")

    async def _sent_messages(self, request: Request) -> Response:
        return await self._table(request, "sent_messages", "sender_actor_id")

    async def _endpoints(self, request: Request) -> Response:
        window = _number(request, "window", 60.0)
        found = await self._sql.endpoints(window) if self._sql.there else []
        running: dict[tuple[str, str], int] = {}
        for actor in (await self._pictures.get()).actors.values():
            if not actor.system:
                for one in actor.doing:
                    key = actor.name, one["endpoint"]
                    running[key] = running.get(key, 0) + 1
        for row in found:
            row["running"] = running.get((row["mesh"], row["endpoint"]), 0)
        content = {"telemetry": self._sql.there, "window": window, "endpoints": found}
        return reply(content)

    async def _history(self, request: Request) -> Response:
        window = _number(request, "window", 600.0)
        buckets = int(min(_number(request, "buckets", 60.0), 500.0))
        if not self._sql.there:
            now = time.time_ns() // 1000 - int(window * 1e6)
            return reply({"start_us": now, "bucket_us": 0, "series": []})
        endpoint = request.query_params.get("endpoint")
        return reply(await self._sql.history(window, max(1, buckets), endpoint))

    async def _logs(self, request: Request) -> Response:
        query = request.query_params
        limit, _ = _limits(request, 200, numeric=False)
        level = query.get("level", "").upper()
        if level and level not in _LEVELS:
            raise Fault("bad_request", f"level is one of {', '.join(_LEVELS)}")
        levels = _LEVELS[_LEVELS.index(level) :] if level else ()
        names = [*levels, *(("WARN",) if "WARNING" in levels else ())]
        wanted = {name: query.get(name, "") for name in ("actor", "rank", "text")}
        since, until = (_microseconds(query.get(name)) for name in ("since_us", "until_us"))
        cursor = _microseconds(query.get("cursor"))
        if cursor is not None:
            until = cursor if until is None else min(cursor, until)
        records: list[dict[str, Any]] = []
        more: int | None = None
        if self._sql.there:
            records, more = await self._sql.logs(names, wanted, since, until, limit)
        following = None if more is None else str(more)
        content = {"telemetry": self._sql.there, "records": records, "next": following}
        return reply(content)

    async def _query(self, request: Request) -> Response:
        content = await json_body(request)
        sql = content.get("sql")
        if not isinstance(sql, str):
            return reply({"error": "missing 'sql' in request body"}, 400)
        try:
            limit = min(int(content.get("limit") or 100_000), 100_000)
            timeout = min(float(content.get("timeout") or 10.0), 60.0)
            answer = await self._sql.answer(sql, limit=limit, timeout=timeout)
        except (QueryError, ValueError, TypeError) as error:
            return reply({"error": str(error)}, 400)
        rows: list[Any] = [list(row) for row in answer.rows]
        if request.query_params.get("ids") == "strings":
            rows = [
                [str(one) if type(one) is int and abs(one) > 1 << 53 else one for one in row]
                for row in rows
            ]
        shaped = request.query_params.get("shape") == "values"
        shown = rows if shaped else [dict(zip(answer.columns, row, strict=True)) for row in rows]
        return reply(
            {
                "values" if shaped else "rows": shown,
                "columns": answer.columns,
                "types": answer.types,
                "truncated": answer.truncated,
            }
        )


def _edge(source: str, target: str, kind: str) -> dict[str, str]:
    identity = f"{kind}-{source}-{target}"
    return {"id": identity, "source_id": source, "target_id": target, "type": kind}


def _client_id(uid: int) -> str:
    from monarch._telemetry.recorder import actor_number

    return str(actor_number(uid, 0))


def _end(actor: Actor) -> tuple[dict[str, Any], Actor]:
    ended = actor.ended or {}
    return {
        "actor_id": views.sql_id(actor),
        "full_name": actor.reference,
        "mesh_id": views.mesh_id(actor),
        "reason": ended["trace"] or ended["error"],
        "timestamp_us": int(ended["when"] * 1e6),
    }, actor


def _mesh_row(identity: str, actor: Actor, found: Picture) -> dict[str, Any]:
    shape = {"inner": {"labels": actor.labels, "sizes": actor.sizes}}
    return {
        "id": identity,
        "timestamp_us": int(found.when * 1e6),
        "class": f"Python<{actor.kind.rpartition('.')[2]}>",
        "given_name": actor.name,
        "full_name": actor.label,
        "shape_json": json.dumps(shape, separators=(",", ":")),
        "parent_mesh_id": None,
        "parent_view_json": None,
    }


def _actor_row(identity: str, actor: Actor, found: Picture) -> dict[str, Any]:
    return {
        "id": identity,
        "timestamp_us": None,
        "mesh_id": views.mesh_id(actor),
        "rank": actor.rank,
        "full_name": actor.reference,
        "display_name": actor.display,
        "mesh_class": f"Python<{actor.kind.rpartition('.')[2]}>",
        "mesh_name": actor.name,
        "latest_status": _SHOWN.get(actor.state, actor.state),
        "status_timestamp_us": int(found.when * 1e6),
        "system": actor.system,
    }


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose ids are texts, since browsers round large numbers."""
    return {
        name: str(value) if value is not None and _ID_COLUMNS.search(name) else value
        for name, value in row.items()
    }


def _id_of(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 64:
        raise Fault("bad_request", f"{text!r} is no id")
    return int(text)


def _microseconds(text: str | None) -> int | None:
    return None if text is None or text == "" else _id_of(text)


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise Fault("bad_request", f"{name} has to be a number above 0")
    return value


def _limits(request: Request, default: int = _PAGE, *, numeric: bool = True) -> tuple[int, int]:
    limit = min(int(_number(request, "limit", float(default))), _LARGEST_PAGE)
    cursor = request.query_params.get("cursor")
    return max(1, limit), 0 if cursor is None or not numeric else _id_of(cursor)


def _page(request: Request, rows: list[dict[str, Any]]) -> Response:
    limit, start = _limits(request)
    headers = {"X-Next-Cursor": str(start + limit)} if len(rows) > start + limit else None
    return reply(rows[start : start + limit], headers=headers)
