"""The guard before all routes: how many requests it lets through at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch._admin import guard as guards
from monarch._admin.guard import Guard

SCOPE = {
    "type": "http",
    "scheme": "http",
    "method": "GET",
    "path": "/health",
    "headers": [(b"host", b"localhost")],
}


def test_a_request_beyond_64_waits_for_its_turn_or_is_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "_QUEUE_TIME", 0.01)

    async def main() -> None:
        inside = 0
        go_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal inside
            inside += 1
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200})

        guard = Guard(app, "token", frozenset({"localhost"}))

        async def ask() -> int:
            told: list[Any] = []

            async def send(message: Any) -> None:
                told.append(message)

            await guard(dict(SCOPE), lambda: None, send)  # type: ignore[arg-type,return-value]
            status: int = told[0]["status"]
            return status

        asked = [asyncio.ensure_future(ask()) for _ in range(65)]
        answered, waiting = await asyncio.wait(
            asked, timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        assert [request.result() for request in answered] == [503]
        assert inside == 64
        go_on.set()
        assert set(await asyncio.gather(*waiting)) == {200}
        assert await ask() == 200

    asyncio.run(main())
