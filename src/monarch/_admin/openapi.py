"""The description of the admin API: OpenAPI 3.1, and a text for tools. Pure."""

from __future__ import annotations

from typing import Any

from monarch._admin import models
from monarch._admin.schema import schema_of, schemas_of

__all__ = ["document", "json_schema", "skill"]

_ALL = [getattr(models, name) for name in models.__all__]
_ERRORS = {"400": "bad_request", "401": "unauthorized", "403": "forbidden", "404": "not_found"}
_REFERENCE = ("reference", "The reference of a node, percent-encoded.")
_PROC = ("proc_reference", "The reference of a process, percent-encoded.")
_ROUTES: tuple[tuple[str, str, str, Any, Any, tuple[str, str] | None], ...] = (
    ("/v1/root", "get", "The root: its children are the hosts.", "NodePayload", None, None),
    ("/v1/{reference}", "get", "A host, a process or an actor.", "NodePayload", None, _REFERENCE),
    ("/v1/tree", "get", "All nodes as text.", "text/plain", None, None),
    ("/v1/admin", "get", "Where this API is served.", "AdminInfo", None, None),
    ("/v1/schema", "get", "The JSON Schema of NodePayload.", "application/json", None, None),
    ("/v1/schema/admin", "get", "The JSON Schema of AdminInfo.", "application/json", None, None),
    ("/v1/schema/error", "get", "The JSON Schema of errors.", "application/json", None, None),
    ("/v1/openapi.json", "get", "This document.", "application/json", None, None),
    ("/v1/config/{proc_reference}", "get", "The settings of a process.", "ConfigDump", None, _PROC),
    ("/v1/pyspy/{proc_reference}", "get", "Its stacks, now.", "application/json", None, _PROC),
    ("/v1/pyspy_dump/{proc_reference}", "post", "Store its stacks.", "DumpId", None, _PROC),
    (
        "/v1/pyspy_profile_svg/{proc_reference}",
        "post",
        "Sample it, as a flame graph.",
        "image/svg+xml",
        "ProfileRequest",
        _PROC,
    ),
    ("/v1/query", "post", "Answer SQL.", "QueryResponse", "QueryRequest", None),
)


def document(url: str) -> dict[str, Any]:
    """Return the OpenAPI document of an API that is served at `url`."""
    paths: dict[str, Any] = {}
    for path, method, summary, answer, body, parameter in _ROUTES:
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": f"{method}_{path.strip('/').replace('/', '_').strip('{}')}".translate(
                {ord(sign): "_" for sign in "{}./"}
            ),
            "responses": {
                "200": {"description": "The answer.", "content": _content(answer)},
                **{
                    status: {"description": code, "content": _content("ErrorEnvelope")}
                    for status, code in _ERRORS.items()
                },
                "default": {"description": "Any error.", "content": _content("ErrorEnvelope")},
            },
        }
        if parameter is not None:
            name, text = parameter
            operation["parameters"] = [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "description": text,
                    "schema": {"type": "string"},
                }
            ]
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _content(body)}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Monarch Mesh Admin API", "version": "1.0.0"},
        "servers": [{"url": url or "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas_of(_ALL),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(answer: str) -> dict[str, Any]:
    if "/" in answer:
        kind = {} if answer == "application/json" else {"type": "string"}
        return {answer: {"schema": kind}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}


_IDS = {"node_payload": "NodePayload", "admin_info": "AdminInfo", "error": "ErrorEnvelope"}


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema ``node_payload``, ``admin_info`` or ``error``."""
    definitions = {model.__name__: schema_of(model, "#/$defs/") for model in _ALL}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://monarch.meta.com/schemas/v1/{name}",
        **definitions[_IDS[name]],
        "$defs": definitions,
    }


def skill(url: str, script: str, telemetry: bool, tls: bool) -> str:
    """Return the text for tools, which names what this server really does."""
    routes = "\n".join(
        f"| {method.upper()} `{path}` | {summary} |" for path, method, summary, *_ in _ROUTES
    )
    curl = 'curl --cacert "$HYPERACTOR_TLS_CA"' if tls else "curl"
    sql = (
        'POST `/v1/query` with `{"sql": "SELECT ..."}`; `SHOW TABLES` lists the tables.'
        if telemetry
        else "Telemetry is off in this job, so there is no SQL: start it with MONARCH_TELEMETRY=1."
    )
    return f"""# The admin API of {script}

A read-only view of a running job: hosts, processes and actors, what each executes, and since when.
Served at {url}. Each request needs the header `Authorization: Bearer TOKEN`.

    {curl} -H "Authorization: Bearer $TOKEN" {url}/v1/tree
    {curl} -H "Authorization: Bearer $TOKEN" {url}/v1/root

## Routes

| Route | Answer |
|---|---|
{routes}

References are opaque: take them from `children` and `parent`, and percent-encode them in a path.
Errors are `{{"error": {{"code", "message"}}}}`; decide by `code`.

## How to find what hangs

1. `/v1/tree`: an actor that works shows `<endpoint>: processing for <time>`.
2. `/v1/{{reference}}` of that actor: `doing` has its line, its stack, and the call it waits for.
3. A process with `answers: false` is stopped or held by native code; `trouble` says which.
4. `/v1/pyspy/{{proc_reference}}` shows all threads of a process.
5. A process with `is_poisoned: true` has a failed actor: look at `failure_info` in
   `stopped_children`.

## SQL

{sql}
"""
