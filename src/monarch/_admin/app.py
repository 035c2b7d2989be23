"""The app: the routes of the admin API, and those of the dashboard, behind the guard."""

from __future__ import annotations

import asyncio
import mimetypes
import os
import socket
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from monarch._admin import stacks, views
from monarch._admin.answers import Fault, error, json_body, reply
from monarch._admin.dashboard_api import DashboardApi
from monarch._admin.guard import Guard
from monarch._admin.nodes import Counts, node, tree
from monarch._admin.openapi import document, json_schema, skill
from monarch._admin.options import Options
from monarch._admin.picture import Picture, Process
from monarch._admin.source import Pictures, Source, Unavailable
from monarch._admin.sql import Sql
from monarch._admin.stream import Stream
from monarch._spi import KEYS
from monarch._store.query import Queries, QueryError
from monarch._telemetry.prometheus import Scrape

__all__ = ["make_app"]

_ORIGINS = {
    "default": "Default",
    "configure": "Runtime",
    "client": "ClientOverride",
    "environment": "Env",
}
_POSTS = ("query", "pyspy_dump/", "pyspy_profile_svg/")
_PROFILES = 2  # at a time


def make_app(source: Source, queries: Queries | None, options: Options) -> Starlette:
    """Return the app that serves the admin API, and the dashboard's.

    Args:
        source: gives diagnoses of the job.
        queries: answers SQL; None where telemetry is off.
        options: see there.
    """
    admin = _Admin(source, queries, options)
    app = Starlette(
        routes=admin.routes(),
        exception_handlers={
            HTTPException: _http_error,
            Fault: _fault,
            Unavailable: _unavailable,
            QueryError: _query_error,
            Exception: _internal,
        },
    )
    app.add_middleware(Guard, token=options.token, names=options.names)
    return app


async def _http_error(request: Request, raised: Exception) -> Response:
    status = getattr(raised, "status_code", 500)
    code, text = {
        404: ("not_found", f"there is no {request.url.path}"),
        405: ("method_not_allowed", f"{request.method} is not possible here"),
    }.get(status, ("bad_request", str(getattr(raised, "detail", raised))))
    return error(code, text, headers=dict(getattr(raised, "headers", None) or {}))


async def _fault(_request: Request, raised: Exception) -> Response:
    assert isinstance(raised, Fault)
    # The rest of a body that was not read would be taken for the next request.
    more = {"Connection": "close"} if raised.code in ("timeout", "too_large") else None
    return error(raised.code, raised.message, raised.details, more)


async def _unavailable(_request: Request, raised: Exception) -> Response:
    return error("service_unavailable", str(raised))


async def _query_error(_request: Request, raised: Exception) -> Response:
    return error("bad_request", str(raised))


async def _internal(_request: Request, raised: Exception) -> Response:
    return error("internal_error", f"an error of the server: {type(raised).__name__}")


class _Admin:
    def __init__(self, source: Source, queries: Queries | None, options: Options) -> None:
        self._options = options
        self._pictures = Pictures(source)
        self._sql = Sql(queries)
        self._profiles = asyncio.Semaphore(_PROFILES)
        stream = Stream(self._pictures, self._about)
        self._scrape = None if queries is None else Scrape(queries)
        self._scraping = asyncio.Lock()
        self._dashboard = DashboardApi(self._pictures, self._sql, self._about, stream)

    def routes(self) -> list[Route]:
        get = {
            "/health": self._health,
            "/api/health": self._health,
            "/SKILL.md": self._skill,
            "/metrics": self._metrics,
            "/v1/root": self._node,
            "/v1/tree": self._tree,
            "/v1/admin": self._info,
            "/v1/openapi.json": self._openapi,
            "/v1/schema": self._schema,
            "/v1/schema/{name}": self._schema,
            "/v1/config/{proc:path}": self._config,
            "/v1/pyspy/{proc:path}": self._pyspy,
        }
        post = {
            "/v1/query": self._query,
            "/v1/pyspy_dump/{proc:path}": self._pyspy_dump,
            "/v1/pyspy_profile_svg/{proc:path}": self._profile,
            "/api/pyspy/capture": self._capture,
        }
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
            Route("/api/actors/{reference:path}/live", self._live, methods=["GET"]),
            *self._dashboard.routes(),
            Route("/v1/{reference:path}", self._node, methods=["GET"]),
            Route("/api/{rest:path}", self._nothing, methods=["GET"]),
            Route("/{path:path}", self._file, methods=["GET"]),
        ]

    async def _metrics(self, _request: Request) -> Response:
        """Answer with the metrics in the text format of Prometheus."""
        if self._scrape is None:
            raise Fault("not_found", "there are no metrics: the script records no telemetry")
        async with self._scraping:
            text = await asyncio.to_thread(self._scrape.text, time.time_ns() // 1000)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _about(self) -> dict[str, Any]:
        from monarch import __version__

        options = self._options
        return {
            "script": options.script,
            "pid": options.pid,
            "user": options.user,
            "started_at_us": int(options.started_at * 1e6),
            "now_us": time.time_ns() // 1000,
            "telemetry": self._sql.there,
            "version": __version__,
            "admin_url": options.url,
            "stale": self._pictures.is_stale(),
        }

    async def _health(self, _request: Request) -> Response:
        return reply({"status": "ok"})

    async def _nothing(self, request: Request) -> Response:
        raise Fault("not_found", f"there is no {request.url.path}")

    # -- nodes -------------------------------------------------------------------------------------

    async def _node(self, request: Request) -> Response:
        reference = request.path_params.get("reference", "root")
        if reference.startswith(_POSTS):
            raise Fault("method_not_allowed", "send it by POST")
        return reply(await self._payload(reference))

    async def _payload(self, reference: str) -> Any:
        found = await self._pictures.get()
        actor = found.actors.get(reference)
        counts = None
        if actor is not None:
            known = await self._sql.counts(int(views.sql_id(actor)))
            counts = None if known is None else Counts(**known)
        options = self._options
        started = options.started_at, options.user
        payload = node(found, reference, started, options.retained, lambda _: counts)
        if payload is None:
            raise Fault("not_found", f"there is no node {reference!r}")
        return payload

    async def _live(self, request: Request) -> Response:
        reference = request.path_params["reference"]
        payload = await self._payload(reference)
        actor = (await self._pictures.get()).actors.get(reference)
        return reply({"node": payload, "doing": [] if actor is None else actor.doing})

    async def _tree(self, _request: Request) -> Response:
        from urllib.parse import quote

        found = await self._pictures.get()
        url = self._options.url
        text = tree(found, lambda reference: f"{url}/v1/{quote(reference, safe='')}")
        return PlainTextResponse(text)

    async def _info(self, _request: Request) -> Response:
        found = await self._pictures.get()
        client = next((one for one in found.processes.values() if one.client), None)
        reference = "" if client is None else client.reference
        return reply(
            {
                "actor_id": "",
                "proc_id": reference,
                "host": socket.gethostname(),
                "url": self._options.url,
            }
        )

    async def _openapi(self, _request: Request) -> Response:
        return reply(document(self._options.url))

    async def _schema(self, request: Request) -> Response:
        name = request.path_params.get("name", "node")
        full = {"node": "node_payload", "admin": "admin_info", "error": "error"}.get(name)
        if full is None:
            raise Fault("not_found", f"there is no schema {name!r}; there are admin and error")
        return reply(json_schema(full))

    async def _skill(self, _request: Request) -> Response:
        options = self._options
        text = skill(options.url, options.script, self._sql.there, options.url.startswith("https"))
        return Response(text, media_type="text/markdown")

    # -- processes ---------------------------------------------------------------------------------

    async def _process(self, reference: Any) -> tuple[Picture, Process]:
        found = await self._pictures.get()
        process = found.references.get(reference) if isinstance(reference, str) else None
        if process is None:
            raise Fault("not_found", f"there is no process {reference!r}")
        return found, process

    async def _config(self, request: Request) -> Response:
        _, process = await self._process(request.path_params["proc"])
        changed = process.settings
        if changed is None:
            raise Fault("gateway_timeout", f"the process does not answer: {process.trouble}")
        entries: list[dict[str, Any]] = []
        for name, key in sorted(KEYS.items()):
            default = key.kind.show(key.default)
            default = default if isinstance(default, bool | int | float) else str(default)
            value, origin = changed.get(name, (default, "default"))
            entries.append(
                {
                    "name": name,
                    "value": value,
                    "default_value": default,
                    "source": _ORIGINS[origin],
                    "changed_from_default": value != default,
                    "env_var": key.variable,
                }
            )
        return reply({"entries": entries})

    async def _captured(self, reference: Any) -> dict[str, Any]:
        _, process = await self._process(reference)
        async with self._profiles:
            return await asyncio.to_thread(stacks.capture, process, self._options)

    async def _pyspy(self, request: Request) -> Response:
        return reply(await self._captured(request.path_params["proc"]))

    async def _capture(self, request: Request) -> Response:
        content = await json_body(request)
        reference = content.get("proc_ref")
        if not isinstance(reference, str):
            raise Fault("bad_request", "proc_ref is missing")
        return reply({"proc_ref": reference, "result": await self._captured(reference)})

    async def _pyspy_dump(self, request: Request) -> Response:
        keep = self._options.keep
        if keep is None:
            raise Fault("service_unavailable", "telemetry is off, so no stacks are stored")
        reference = request.path_params["proc"]
        result = await self._captured(reference)
        if "Ok" not in result:
            raise Fault("pyspy_failed", "no stacks", result)
        dump, tables = stacks.tables_of(result, reference)
        for table, columns in tables.items():
            await asyncio.to_thread(keep, table, columns, ("dump_id", dump))
        return reply({"dump_id": dump})

    async def _profile(self, request: Request) -> Response:
        content = await json_body(request)
        _, process = await self._process(request.path_params["proc"])
        if self._profiles.locked():
            raise Fault("service_unavailable", f"{_PROFILES} profiles are being made already")
        async with self._profiles:
            data = await asyncio.to_thread(stacks.flame_graph, process, self._options, content)
        return Response(data, media_type="image/svg+xml")

    async def _query(self, request: Request) -> Response:
        content = await json_body(request)
        sql = content.get("sql")
        if not isinstance(sql, str):
            raise Fault("bad_request", "missing 'sql' in request body")
        if not self._sql.there:
            raise Fault("not_found", "telemetry is off in this job, so there is no SQL")
        answer = await self._sql.answer(sql, limit=100_000)
        return reply(
            {
                "rows": answer.dicts(),
                "columns": answer.columns,
                "types": answer.types,
                "truncated": answer.truncated,
            }
        )

    # -- the dashboard's files ---------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        """Answer with a file of the dashboard; addresses of its pages (/d/...) with its shell."""
        folder = self._options.dashboard
        path = request.path_params["path"]
        if folder is None:
            raise Fault("not_found", f"there is no /{path}; the admin API is below /v1")
        if path in {"", "d"} or path.startswith("d/"):
            path = "index.html"
        found = _inside(folder, path)
        if found is None:
            raise Fault("not_found", f"there is no /{path}")
        kind = mimetypes.guess_type(found)[0] or "application/octet-stream"
        return FileResponse(found, media_type=kind, headers={"Cache-Control": "no-cache"})


def _inside(folder: str, path: str) -> str | None:
    """Return the path of a file in a folder, or below it; None if there is none."""
    found = os.path.realpath(os.path.join(folder, path))
    inside = os.path.realpath(folder) + os.sep
    return found if found.startswith(inside) and os.path.isfile(found) else None
