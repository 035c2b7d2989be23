"""Queries to the store, a few at a time, on threads; and those behind the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monarch._admin.answers import Fault
from monarch._store.query import Answer, Queries, QueryError

__all__ = ["Sql", "percentile"]

_AT_ONCE = 4
_WAIT = 10.0
_SAMPLE = 50_000  # messages of which latencies are made
_SERIES = 20
_SCAN = 20_000  # events among which log lines are searched


class Sql:
    """Answers queries; without a store, as if every table were empty."""

    def __init__(self, queries: Queries | None) -> None:
        self._queries = queries
        self._free = asyncio.Semaphore(_AT_ONCE)
        on_disk = getattr(queries, "engine", "") == "sqlite3"
        self._message = "rows_message" if on_disk else "memory.rows.message"

    @property
    def there(self) -> bool:
        """Whether there is a store."""
        return self._queries is not None

    async def answer(
        self, sql: str, *parameters: Any, limit: int = 10_000, timeout: float = _WAIT
    ) -> Answer:
        """Return the answer of a statement. Raises Fault, and QueryError for mistakes in it."""
        queries = self._queries
        if queries is None:
            raise Fault(
                "service_unavailable",
                "telemetry is off; start the script with MONARCH_TELEMETRY=1, or call "
                "job.enable_telemetry()",
            )
        try:
            await asyncio.wait_for(self._free.acquire(), _WAIT)
        except asyncio.TimeoutError:
            raise Fault("service_unavailable", "too many queries at a time; try again") from None
        try:
            return await asyncio.to_thread(queries.query, sql, timeout, limit, parameters)
        finally:
            self._free.release()

    async def rows(self, sql: str, *parameters: Any, limit: int = 10_000) -> list[dict[str, Any]]:
        """Return rows as dictionaries; none without a store. Raises Fault."""
        if self._queries is None:
            return []
        try:
            return (await self.answer(sql, *parameters, limit=limit)).dicts()
        except QueryError as error:
            raise Fault("proxy_error", str(error)) from None

    # -- messages ----------------------------------------------------------------------------------

    async def lifecycle(self) -> dict[str, int]:
        """Return how many messages there were, by what became of them."""
        found = await self.rows(
            f"SELECT COUNT(*) AS total, SUM(failed) AS failed FROM {self._message}"
        )
        running = await self._running()
        total = found[0]["total"] if found else 0
        failed = int(found[0]["failed"] or 0) if found else 0
        return {
            "queued": total + running,
            "active": running,
            "completed": total - failed,
            "failed": failed,
        }

    async def _running(self) -> int:
        table = self._message.replace("message", "running")
        found = await self.rows(f"SELECT COUNT(*) AS total FROM {table}")
        return int(found[0]["total"]) if found else 0

    async def by_endpoint(self) -> list[dict[str, Any]]:
        """Return the endpoints with their numbers of messages, the most first."""
        found = await self.rows(
            "SELECT endpoint, COUNT(*) AS total, SUM(1 - failed) AS completed "
            f"FROM {self._message} GROUP BY endpoint ORDER BY total DESC",
            limit=1000,
        )
        return [
            {
                "endpoint": row["endpoint"] or "(none)",
                "total": row["total"],
                "completed": int(row["completed"] or 0),
            }
            for row in found
        ]

    async def counts(self, actor: int) -> dict[str, Any] | None:
        """Return the messages of an actor: number, microseconds, the last endpoint, creation."""
        if not self.there:
            return None
        message = self._message
        found = await self.rows(
            f"SELECT COUNT(*) AS messages, SUM(ended - begun) AS time_us FROM {message} "
            "WHERE actor = ?",
            actor,
        )
        last = await self.rows(
            f"SELECT endpoint FROM {message} WHERE actor = ? ORDER BY ended DESC LIMIT 1", actor
        )
        created = await self.rows("SELECT timestamp_us FROM actors WHERE id = ?", actor)
        return {
            "messages": found[0]["messages"],
            "time_us": int(found[0]["time_us"] or 0),
            "last": last[0]["endpoint"] if last else None,
            "created_us": created[0]["timestamp_us"] if created else None,
        }

    async def activity(self, buckets: int = 44) -> dict[str, Any]:
        """Return the number of messages in equal parts of the time that is kept."""
        message = self._message
        found = await self.rows(
            f"SELECT MIN(queued) AS first, MAX(ended) AS last, COUNT(*) AS total FROM {message}"
        )
        if not found or not found[0]["total"]:
            return {"start_us": 0, "end_us": 0, "total": 0, "buckets": [0] * buckets}
        first, last, total = (int(found[0][name]) for name in ("first", "last", "total"))
        width = max(1, -(-(last - first + 1) // buckets))
        rows = await self.rows(
            f"SELECT CAST(FLOOR((queued - {first}) / {float(width)}) AS BIGINT) AS part, "
            f"COUNT(*) AS number FROM {message} GROUP BY 1"
        )
        parts = [0] * buckets
        for row in rows:
            parts[min(max(int(row["part"]), 0), buckets - 1)] += row["number"]
        return {"start_us": first, "end_us": last, "total": total, "buckets": parts}

    # -- endpoints ---------------------------------------------------------------------------------

    async def _sample(self, since: int, endpoint: str | None) -> list[dict[str, Any]]:
        where = "" if endpoint is None else "AND m.endpoint = ? "
        more = () if endpoint is None else (endpoint,)
        return await self.rows(
            "SELECT m.mesh, e.given_name AS name, m.endpoint, m.queued, m.begun, m.ended, m.failed "
            f"FROM {self._message} m LEFT JOIN meshes e ON e.id = m.mesh "
            f"WHERE m.ended >= ? {where}ORDER BY m.ended DESC LIMIT {_SAMPLE}",
            since,
            *more,
            limit=_SAMPLE,
        )

    async def endpoints(self, window: float) -> list[dict[str, Any]]:
        """Return rates and latencies of each endpoint during the last `window` seconds."""
        rows = await self._sample(int((_now() - window) * 1e6), None)
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault((row["name"] or "", row["endpoint"] or "(none)"), []).append(row)
        found: list[dict[str, Any]] = []
        sampled = len(rows) == _SAMPLE
        oldest = min((row["ended"] for row in rows), default=0)
        span = max(1e-3, _now() - oldest / 1e6) if sampled else window
        for (mesh, endpoint), group in groups.items():
            spent = sorted(row["ended"] - row["begun"] for row in group)
            queued = sorted(row["begun"] - row["queued"] for row in group)
            found.append(
                {
                    "mesh": mesh,
                    "endpoint": endpoint,
                    "count": len(group),
                    "rate": round(len(group) / span, 3),
                    "failed": sum(1 for row in group if row["failed"]),
                    "p50_us": percentile(spent, 50),
                    "p95_us": percentile(spent, 95),
                    "p99_us": percentile(spent, 99),
                    "max_us": spent[-1],
                    "queued_p50_us": percentile(queued, 50),
                    "queued_p99_us": percentile(queued, 99),
                    "sampled": sampled,
                }
            )
        return sorted(found, key=lambda row: row["count"], reverse=True)

    async def history(self, window: float, buckets: int, endpoint: str | None) -> dict[str, Any]:
        """Return rates and latencies of endpoints over time, of the busiest ones."""
        now = _now()
        start = int((now - window) * 1e6)
        width = max(1, int(window * 1e6 / buckets))
        series: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
        for row in await self._sample(start, endpoint):
            key = row["name"] or "", row["endpoint"] or "(none)"
            empty: list[list[dict[str, Any]]] = [[] for _ in range(buckets)]
            parts = series.setdefault(key, empty)
            place = min(max(int(row["ended"] - start) // width, 0), buckets - 1)
            parts[place].append(row)
        busiest = sorted(series.items(), key=lambda item: -sum(map(len, item[1])))[:_SERIES]
        found: list[dict[str, Any]] = []
        for (mesh, name), parts in busiest:
            spent = [sorted(row["ended"] - row["begun"] for row in part) for part in parts]
            found.append(
                {
                    "mesh": mesh,
                    "endpoint": name,
                    "count": [len(part) for part in parts],
                    "failed": [sum(1 for row in part if row["failed"]) for part in parts],
                    "p50_us": [percentile(part, 50) for part in spent],
                    "p99_us": [percentile(part, 99) for part in spent],
                }
            )
        return {"start_us": start, "bucket_us": width, "series": found}

    # -- logs --------------------------------------------------------------------------------------

    async def logs(
        self,
        levels: Iterable[str],
        wanted: dict[str, str],
        since: int | None,
        until: int | None,
        limit: int,
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Return the latest log records that fit, and the time before which there may be more."""
        conditions, values = ["1 = 1"], list[Any]()
        names = list(levels)
        if names:
            conditions.append(f"level IN ({', '.join('?' * len(names))})")
            values += names
        if since is not None:
            conditions.append("timestamp_us >= ?")
            values.append(since)
        if until is not None:
            conditions.append("timestamp_us < ?")
            values.append(until)
        text = wanted.get("text", "")
        if text:
            conditions.append(
                "(LOWER(fields_json) LIKE ? ESCAPE '!' OR LOWER(name) LIKE ? ESCAPE '!')"
            )
            inside = json.dumps(text.lower())[1:-1]
            values += [_like(inside), _like(text.lower())]
        rows = await self.rows(
            "SELECT name, target, level, fields_json, timestamp_us, thread_name, file, line "
            f"FROM events WHERE {' AND '.join(conditions)} "
            f"ORDER BY timestamp_us DESC LIMIT {_SCAN}",
            *values,
            limit=_SCAN,
        )
        found: list[dict[str, Any]] = []
        for row in rows:
            record = _record(row)
            if _fits(record, wanted):
                found.append(record)
                if len(found) > limit:
                    return found[:limit], found[limit - 1]["timestamp_us"]
        more = rows[-1]["timestamp_us"] if len(rows) == _SCAN else None
        return found, more


def _now() -> float:
    return time.time_ns() / 1e9


def _like(text: str) -> str:
    for sign in "!%_":
        text = text.replace(sign, f"!{sign}")
    return f"%{text}%"


def _record(row: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        fields = json.loads(row["fields_json"] or "{}")
    rank: Any = fields.get("rank")
    return {
        "timestamp_us": row["timestamp_us"],
        "level": row["level"],
        "message": fields.pop("message", row["name"]),
        "logger": row["target"],
        "actor": fields.get("actor") or fields.get("actor_id") or "",
        "rank": int(rank) if str(rank).isdigit() else None,
        "step": fields.get("step"),
        "file": row["file"],
        "line": row["line"],
        "thread": row["thread_name"],
        "fields": fields,
    }


def _fits(record: dict[str, Any], wanted: dict[str, str]) -> bool:
    actor, rank = wanted.get("actor", ""), wanted.get("rank", "")
    text = wanted.get("text", "").lower()
    return (
        actor in str(record["actor"])
        and (not rank or str(record["rank"]) == rank)
        and (not text or text in json.dumps(record, default=str, ensure_ascii=False).lower())
    )


def percentile(ordered: Sequence[int], percent: float) -> int | None:
    """Return the nearest-rank percentile of sorted numbers; None if there are none.

    >>> percentile([1, 2, 3, 4], 50), percentile([], 99), percentile([5], 1)
    (2, None, 5)
    """
    if not ordered:
        return None
    place = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(place) - 1)]
