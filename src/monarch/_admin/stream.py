"""Live updates: Server-Sent Events with what has changed since the last ones.

A reader gets all actors and processes at first, and then the changes of twice a second, found by
comparing pictures. A reader that takes nothing for a while misses changes, and gets the event
`lost`; its queue is bounded. With no reader, nothing is compared, and the script is not asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from monarch._admin.answers import Fault
from monarch._admin.picture import Actor, Picture
from monarch._admin.source import Pictures, Unavailable
from monarch._admin.views import actor_row, process_row

__all__ = ["Stream", "changes"]

_PERIOD = 0.5
_HEARTBEAT = 10.0
_QUEUED = 64  # events that wait for a reader
_READERS = 32
_SAME = 0.2  # seconds by which two pictures may differ about the begin of a call


def changes(
    before: Picture | None, now: Picture, stuck: float = 10.0, actors: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that lead from one picture to the next; all from nothing. Pure."""
    found: list[tuple[str, dict[str, Any]]] = []
    when = int(now.when * 1e6)
    old_actors = {} if before is None else before.actors
    changed = [
        actor_row(actor, stuck)
        for reference, actor in now.actors.items()
        if reference not in old_actors
        or _key(actor_row(old_actors[reference], stuck)) != _key(actor_row(actor, stuck))
        or _began_anew(
            old_actors[reference], actor, 0.0 if before is None else before.when, now.when
        )
    ]
    removed = [reference for reference in old_actors if reference not in now.actors]
    if before is None or changed or removed:
        if actors:
            found.append(("actors", {"as_of_us": when, "changed": changed, "removed": removed}))
        else:
            found.append(("counts", {"as_of_us": when, "meshes": _counts(now, stuck)}))
    old_processes = {} if before is None else before.processes
    rows = [
        process_row(process)
        for uid, process in now.processes.items()
        if uid not in old_processes
        or _steady(process_row(old_processes[uid])) != _steady(process_row(process))
    ]
    lost = [str(uid) for uid in old_processes if uid not in now.processes]
    if before is None or rows or lost:
        found.append(("procs", {"as_of_us": when, "changed": rows, "removed": lost}))
    earlier = [] if before is None else _failed(before)
    known = {actor.reference for actor in earlier}
    added = [actor for actor in _failed(now) if actor.reference not in known]
    if added:
        news = [
            {
                "ref": actor.reference,
                "name": actor.short,
                "error": (actor.ended or {})["error"],
                "when_us": int((actor.ended or {})["when"] * 1e6),
            }
            for actor in added
        ]
        found.append(("failures", {"as_of_us": when, "added": news}))
    return found


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a change is about: not the age, which grows by itself."""
    return row["state"], row["endpoint"], row["queued"], row["place"]


def _began_anew(old: Actor, actor: Actor, before: float, now: float) -> bool:
    """Whether this is another call of the same endpoint: it began at another time."""
    if old.age is None or actor.age is None:
        return False
    return abs((now - actor.age) - (before - old.age)) > _SAME


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    coarse = row["rss"] >> 20
    return {**row, "rss": coarse, "cpu": int(row["cpu"]), "cpu_percent": None}


def _failed(found: Picture) -> list[Actor]:
    return [actor for process in found.processes.values() for actor in process.failed]


def _counts(found: Picture, stuck: float) -> list[dict[str, Any]]:
    meshes: dict[str, dict[str, int]] = {}
    for actor in found.actors.values():
        row = actor_row(actor, stuck)
        counts = meshes.setdefault(row["mesh"], {})
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    return [{"id": mesh, "counts": counts} for mesh, counts in meshes.items()]


class _Reader:
    def __init__(self, actors: bool) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue(_QUEUED)
        self.actors = actors
        self.lost = False

    def put(self, text: str) -> None:
        if self.queue.full():
            self.lost = True
            while not self.queue.empty():
                self.queue.get_nowait()
        self.queue.put_nowait(text)


class Stream:
    """The readers of the stream, and the task that compares pictures while there are any."""

    def __init__(self, pictures: Pictures, about: Any) -> None:
        self._pictures = pictures
        self._about = about
        self._readers: dict[_Reader, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._before: Picture | None = None
        self._stale = False

    def read(self, actors: bool) -> AsyncIterator[str]:
        """Return the texts for one reader. Raises Fault if there are too many."""
        if len(self._readers) >= _READERS:
            raise Fault("service_unavailable", f"there are {_READERS} streams already")
        return self._texts(_Reader(actors))

    async def _texts(self, reader: _Reader) -> AsyncIterator[str]:
        self._readers[reader] = None
        try:
            first: Picture | None
            try:
                first = await self._pictures.get()
            except Unavailable:
                first = self._before
            yield self._event("hello", {"about": self._about()})
            if first is not None:
                for kind, data in changes(None, first, actors=reader.actors):
                    yield self._event(kind, data)
            if self._task is None:
                self._before = first
            while True:
                if self._task is None:  # this is the first reader, or comparing has failed
                    self._task = asyncio.get_running_loop().create_task(self._compare())
                try:
                    text = await asyncio.wait_for(reader.queue.get(), _HEARTBEAT)
                except asyncio.TimeoutError:
                    text = ": \n\n"
                if reader.lost:
                    reader.lost = False
                    yield self._event("lost", {})
                yield text
        finally:
            self._readers.pop(reader, None)

    def _event(self, kind: str, data: dict[str, Any]) -> str:
        self._number += 1
        text = json.dumps(data, separators=(",", ":"), default=str)
        return f"id: {self._number}\nevent: {kind}\ndata: {text}\n\n"

    async def _compare(self) -> None:
        try:
            while self._readers:
                await asyncio.sleep(_PERIOD)  # noqa: TID251 - the observer is never simulated
                await self._step()
        finally:
            self._task = None

    async def _step(self) -> None:
        try:
            now = await self._pictures.get()
        except Unavailable:
            return
        since = self._pictures.stale_since
        if self._stale != self._pictures.is_stale():
            self._stale = not self._stale
            stale = {"since_us": int((since or 0.0) * 1e6)} if self._stale else {}
            self._send("stale" if self._stale else "fresh", stale, None)
        before, self._before = self._before, now
        if before is None or now.number != before.number:
            for actors in {reader.actors for reader in self._readers}:
                for kind, data in changes(before, now, actors=actors):
                    self._send(kind, data, actors)

    def _send(self, kind: str, data: dict[str, Any], actors: bool | None) -> None:
        text = self._event(kind, data)
        for reader in list(self._readers):
            if actors is None or reader.actors == actors:
                reader.put(text)
