"""The screen of the terminal interface, with keys, on an invented cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("textual", reason="needs textual  ->  pip install '.[dev]'")

from textual.pilot import Pilot

from monarch._tui.app import Tui, _TreeView
from monarch._tui.client import Lost
from monarch._tui.words import Words

from .test_tree import ACTOR, grid, hosts, job, node, process

PROC = {
    "proc_name": "trainers-0",
    "pid": 4,
    "machine": "vm",
    "state": "S",
    "answers": True,
    "trouble": "",
    "cpu_seconds": 1.0,
    "num_actors": 2,
    "failed_actor_count": 0,
    "is_poisoned": False,
    "debug": {
        "memory": {"process_rss_bytes": 5_000_000, "process_vm_size_bytes": None},
        "actor_work_queue_depth_total": 0,
        "actor_work_queue_depth_max": 0,
        "actor_work_queue_depth_high_water_mark": 1,
        "last_nonzero_queue_depth_age_ms": None,
    },
}
HOST = {
    "addr": "a",
    "machine": "vm",
    "num_procs": 1,
    "memory": {"process_rss_bytes": 1_000_000, "process_vm_size_bytes": None},
}


class Server:
    """A client of an invented job."""

    url = "http://127.0.0.1:1729"

    def __init__(self, procs: int = 2) -> None:
        self.problem: Exception | None = None
        self.answers: dict[str, Any] = {
            **job(),
            "/api/about": {"now_us": 150_000_000, "started_at_us": 0, "user": "ann"},
            "/api/processes?limit=10000": {
                "hosts": hosts("a"),
                "processes": [process(i) for i in range(procs)],
            },
            "/api/grid": grid(procs, {0: "busy"}),
            "/v1/host%3Aa": {**node("Host", HOST), "children": []},
            "/v1/config/p0": {"entries": [{"name": "host_timeout", "value": 3, "source": "Env"}]},
            "/v1/pyspy/p0": {"BinaryNotFound": {"searched": []}},
        }
        for i in range(procs):
            self.answers[f"/v1/p{i}"] = node("Proc", PROC)
            self.answers[f"/v1/t{i}"] = node("Actor", ACTOR)
            self.answers[f"/v1/agent{i}"] = node("Actor", {**ACTOR, "is_system": True})

    def get(self, path: str) -> Any:
        if self.problem is not None:
            raise self.problem
        return self.answers[path]


def text_of(app: Tui) -> str:
    """Return the text on the screen."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in lines[:height] if width)


def on_screen(
    test: Callable[[Tui, Pilot[None], Server], Any],
    size: tuple[int, int] = (120, 30),
    lang: str = "en",
    procs: int = 2,
) -> None:
    server = Server(procs)

    async def main() -> None:
        app = Tui(server, refresh=3600, words=Words(lang))  # type: ignore[arg-type]
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            await test(app, pilot, server)

    asyncio.run(main())


async def settled(app: Tui, pilot: Pilot[None]) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


def test_tree_details_and_keys() -> None:
    async def test(app: Tui, pilot: Pilot[None], server: Server) -> None:
        shown = text_of(app)
        assert (
            "mesh-admin • http://127.0.0.1:1729 • up: 2m 30s • @ann • sys:off • stopped:off"
            in shown
        )
        assert "▼ a  2 processes" in shown
        assert "address" in shown
        await pilot.press("j", "tab")
        await settled(app, pilot)
        shown = text_of(app)
        assert "▼ trainers-0  2 actors: 1 system, 1 user" in shown
        assert "t[0]  train() for 2.5s" in shown
        assert "queued, peak" in shown
        assert "agent" not in shown
        await pilot.press("s", "down")
        await settled(app, pilot)
        shown = text_of(app)
        assert "sys:on" in shown
        assert "agent[0]" in shown
        assert "waits for data.next()" in shown
        await pilot.press("c")
        await settled(app, pilot)
        assert "trainers" not in text_of(app)
        await pilot.press("q")

    on_screen(test)


def test_overlays() -> None:
    async def test(app: Tui, pilot: Pilot[None], server: Server) -> None:
        await pilot.press("p")  # nothing on a host
        assert len(app.screen_stack) == 1
        await pilot.press("j")
        for key, found in (
            ("p", "py-spy is not installed"),
            ("C", "host_timeout  3  Env"),
            ("question_mark", "POISONED"),
            ("d", "7 of 7 passed: healthy"),
        ):
            await pilot.press(key)
            await settled(app, pilot)
            assert found in text_of(app), key
            await pilot.press("r", "j", "k", "escape")
            await settled(app, pilot)
            assert len(app.screen_stack) == 1

    on_screen(test)


def test_the_server_is_lost_and_comes_back() -> None:
    async def test(app: Tui, pilot: Pilot[None], server: Server) -> None:
        server.problem = Lost("connection refused")
        app._look()
        await settled(app, pilot)
        shown = text_of(app)
        assert "lost the server" in shown
        assert "connection refused" in shown
        assert "▼ a" in shown
        server.problem = None
        app._look()
        await settled(app, pilot)
        assert "lost the server" not in text_of(app)

    on_screen(test)


@pytest.mark.parametrize("size", [(80, 24), (40, 10)])
def test_small_screens_and_many_actors(size: tuple[int, int]) -> None:
    async def test(app: Tui, pilot: Pilot[None], server: Server) -> None:
        await pilot.press("end")
        await settled(app, pilot)
        assert "trainers-4999" in text_of(app)
        await pilot.press("pageup")
        await settled(app, pilot)
        assert "trainers-4989" in text_of(app)
        await pilot.press("ctrl+l")
        await settled(app, pilot)
        view = app.query_one("#tree", _TreeView)
        assert view.scroll_offset.y >= 4980
        assert app.query_one("#details").display == (size[0] >= 60)

    on_screen(test, size=size, procs=5000)


def test_chinese_and_markup_is_text() -> None:
    async def test(app: Tui, pilot: Pilot[None], server: Server) -> None:
        assert "运行: 2m 30s" in text_of(app)
        odd = process(0, label="[bold]x[/bold]")
        server.answers["/api/processes?limit=10000"] = {"hosts": hosts("a"), "processes": [odd]}
        app._look()
        await settled(app, pilot)
        assert "[bold]x[/bold]" in text_of(app)

    on_screen(test, lang="zh")
