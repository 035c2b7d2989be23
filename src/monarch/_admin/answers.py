"""Answers in JSON, and the one form of all errors: ``{"error": {"code", "message"}}``."""

from __future__ import annotations

import json
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["CODES", "Fault", "error", "json_body", "reply"]

CODES = {
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "too_large": 413,
    "unprocessable": 422,
    "internal_error": 500,
    "pyspy_failed": 500,
    "profile_failed": 500,
    "proxy_error": 500,
    "service_unavailable": 503,
    "gateway_timeout": 504,
}
"""The status of each code of an error."""


class Fault(Exception):
    """An answer that is an error."""

    def __init__(self, code: str, message: str, details: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, details


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    data = json.dumps(content, separators=(",", ":"), default=str).encode()
    return Response(data, status, headers, media_type="application/json")


def error(
    code: str, message: str, details: Any = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the answer of an error."""
    content: dict[str, Any] = {"code": code, "message": message}
    if details is not None:
        content["details"] = details
    return reply({"error": content}, CODES[code], headers)


async def json_body(request: Request) -> dict[str, Any]:
    """Return the object in the body of a request. Raises Fault for anything else."""
    data = await request.body()
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Fault("bad_request", "the body has to be JSON") from None
    if type(content) is not dict:
        raise Fault("unprocessable", "the body has to be an object of JSON")
    return cast("dict[str, Any]", content)
