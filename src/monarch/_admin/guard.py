"""The guard before all routes: the token, the names in the request, its size, and the load.

The token is accepted in the header ``Authorization: Bearer``, as the first part of the path (so
that programs can add ``/v1/root`` to an address), or as ``?token=``, which gives a browser a cookie
and leads it to the address without the token. The check of ``Host`` keeps other names from
resolving to this server (DNS rebinding); that of ``Origin`` keeps other pages from using a cookie.
"""

from __future__ import annotations

import asyncio
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monarch._admin.answers import Fault, error

__all__ = ["Guard"]

_LARGEST = 1 << 20  # bytes of a body
_BODY_TIME = 10.0  # seconds for a body
_AT_ONCE = 64  # requests
_QUEUE_TIME = 10.0
_OPEN = ("/health", "/api/health")
_POLICY = (
    b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY),
)


class Guard:
    """See the module. `names` are the host names, in lower case, under which it may be reached."""

    def __init__(self, app: ASGIApp, token: str, names: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._names = names
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        guarded = _guarded(send)
        try:
            response = self._check(scope)
            if response is not None:
                await response(scope, receive, guarded)
                return
            body = _Body(receive)
            if scope["path"] == "/api/stream":  # counted by itself
                await self._app(scope, body.receive, guarded)
                return
            await self._wait_turn()
        except Fault as fault:
            more = {"WWW-Authenticate": "Bearer"} if fault.code == "unauthorized" else {}
            more["Connection"] = "close"
            response = error(fault.code, fault.message, fault.details, more)
            await response(scope, receive, guarded)
            return
        try:
            await self._app(scope, body.receive, guarded)
        finally:
            self._free.release()

    async def _wait_turn(self) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), _QUEUE_TIME)
        except asyncio.TimeoutError:
            raise Fault("service_unavailable", "too many requests at a time; try again") from None

    def _check(self, scope: Scope) -> Any:
        """Return an answer, or None if the request may go on. Raises Fault."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name_of(host) not in self._names:
            raise Fault("forbidden", "the header Host names another server")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise Fault("forbidden", "pages of other servers are not answered")
        foreign = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if foreign and origin is None and headers.get("sec-fetch-mode") != "navigate":
            raise Fault("forbidden", "pages of other servers are not answered")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > _LARGEST:
            raise Fault("too_large", f"a request has at most {_LARGEST} bytes")
        front, _, rest = scope["path"][1:].partition("/")
        if self._is_token(front):
            scope["path"], scope["raw_path"] = f"/{rest}", quote(f"/{rest}").encode()
            if rest.startswith(("v1", "api", "SKILL.md")):
                return None
            return self._welcome(scope, "/" + rest, scope["query_string"].decode("latin-1"))
        if scope["path"] in _OPEN:
            return None
        if self._is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), "")
        if given and self._is_token(given):
            left = urlencode([(name, value) for name, value in query if name != "token"])
            if scope["method"] == "GET":
                return self._welcome(scope, scope["path"], left)
            scope["query_string"] = left.encode()
            return None
        if self._is_token(self._cookie(headers.get("cookie", ""), scope)):
            return None
        raise Fault(
            "unauthorized",
            "the token is missing or wrong; send it as `Authorization: Bearer TOKEN` "
            "(monarch dashboard opens a page with it)",
        )

    def _welcome(self, scope: Scope, path: str, query: str) -> Any:
        """Return the answer that gives a cookie, and leads to an address without the token."""
        path = "/" + path.lstrip("/\\")  # never another host
        response = RedirectResponse(quote(path) + (f"?{query}" if query else ""), 303)
        response.set_cookie(
            _cookie_name(scope),
            self._token.decode(),
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
        )
        response.headers["Cache-Control"] = "no-store"
        return response

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)

    def _cookie(self, text: str, scope: Scope) -> str:
        try:
            found = SimpleCookie(text).get(_cookie_name(scope))
        except CookieError:
            return ""
        return "" if found is None else found.value


def _cookie_name(scope: Scope) -> str:
    """Return the name of the cookie: with the port, since ports share their cookies."""
    server = scope.get("server")
    return f"monarch-{server[1] if server else 0}"


def _name_of(host: str) -> str:
    """Return the name in a header Host.

    >>> _name_of("LOCALHOST:80"), _name_of("[::1]:80"), _name_of("[::1]")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _guarded(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            headers += [pair for pair in _HEADERS if pair[0] not in names]
            if b"cache-control" not in names:
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
        await send(message)

    return guarded


class _Body:
    """The body of a request: of bounded size, and within a time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = _LARGEST
        self._complete = False
        self._until: float | None = None

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # a disconnection
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + _BODY_TIME
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._until - now))
        except asyncio.TimeoutError:
            raise Fault("timeout", "the body did not come in time") from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._left < 0:
                raise Fault("too_large", f"a request has at most {_LARGEST} bytes")
        return message
