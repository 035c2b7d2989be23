"""The door of a script on a host of the job of this directory.

A process on each host looks for scripts there and knocks at their doors, as `monarch debug` does on
its own machine: as the user of the host, and over the connections that the job has. So no port is
open for it, and who may debug is who may run code on the hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Generator
from typing import Any

from monarch import _spi
from monarch.actor import Actor, endpoint
from monarch.cli.jobs import _ready
from monarch.cli.script_door import Door, ScriptDoor, stopped_ones
from monarch.cli.status import saved
from monarch.cli.why import command_of
from monarch.job.carrier import Ends, carry, drop

__all__ = ["far_door"]

_PURPOSE = "script-door"
_LONGEST = 4096  # bytes of a request, and of its answer


@contextlib.contextmanager
def far_door(pid: int | None) -> Generator[Door]:
    """Yield the door of script `pid` on a host of the job, or of the only one there.

    Raises RuntimeError if that is not clear, and FileNotFoundError if no job runs.
    """
    context, job = saved(None)
    meshes = list(_ready(job)._hosts.values())
    procs = [mesh.spawn_procs(name="debug") for mesh in meshes]
    try:
        found: dict[tuple[str, int], tuple[Any, str]] = {}  # two hosts may be one machine
        for each in procs:
            knockers = each.spawn("knocker", _Knocker).flatten("rank")
            for rank, scripts in enumerate(knockers.scripts.call(pid, os.getpid()).get().values()):
                for machine, number, command in scripts:
                    found[machine, number] = knockers.slice(rank=rank), command
        if not found:
            which = "no script" if pid is None else f"no script with pid {pid}"
            raise RuntimeError(f"{which} runs on the hosts of the job of context {context!r}")
        if len(found) > 1:
            rows = "\n".join(
                f"  monarch debug --job {number}    {command}, on {machine}"
                for (machine, number), (_, command) in found.items()
            )
            raise RuntimeError(f"several scripts run on the hosts of the job; name one:\n{rows}")
        (((_, number), (knocker, _)),) = found.items()
        yield _FarDoor(knocker, number)
    finally:
        for each in procs:
            each.stop().get()


class _Knocker(Actor):
    """Knocks at the doors of scripts of its host."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def accept(stream: socket.socket, _caller: _spi.Caller) -> None:
            loop.call_soon_threadsafe(self._begin, stream)

        _spi.serve_streams(_PURPOSE, accept)

    @endpoint
    async def scripts(self, pid: int | None, asking: int) -> list[tuple[str, int, str]]:
        """Return machine, process number and command of scripts of this host: `pid`, or any.

        Those with a rank at a breakpoint, if there are any; not the process that is `asking`.
        """
        from monarch._diagnosis.door import running_scripts

        pids = [each for each in running_scripts() if each != asking and pid in (None, each)]
        pids = await asyncio.to_thread(stopped_ones, pids)
        return [(socket.gethostname(), each, command_of(each)) for each in pids]

    @endpoint
    async def uid(self) -> int:
        return _spi.own_uid()

    @endpoint
    async def diagnosis(self, pid: int) -> dict[str, Any]:
        return await asyncio.to_thread(ScriptDoor(pid).diagnosis)

    @endpoint
    async def check(self, pid: int, uids: list[int]) -> list[dict[str, Any]]:
        return await asyncio.to_thread(ScriptDoor(pid).check, uids)

    def _begin(self, stream: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: socket.socket) -> None:
        """Carry one connection to a door."""
        ends = await _ends(stream)
        asked = json.loads(await ends[0].readline())
        door = ScriptDoor(asked["pid"])
        try:
            if asked["for"] == "console":
                sock = await asyncio.to_thread(door.console)
            else:
                sock = await asyncio.to_thread(door.editor, asked["uid"])
        except (OSError, RuntimeError) as error:
            ends[1].write(json.dumps({"error": str(error)}).encode() + b"\n")
            await ends[1].drain()
            drop(ends)
            return
        ends[1].write(b"{}\n")
        await carry(await _ends(sock), ends)

    async def __cleanup__(self, exc: Exception | None) -> None:
        _spi.serve_streams(_PURPOSE, None)
        for task in self._tasks:
            task.cancel()


class _FarDoor:
    """The door of a script that a knocker can reach; implements `Door`."""

    def __init__(self, knocker: Any, pid: int) -> None:
        self._knocker = knocker
        self._pid = pid

    def console(self) -> socket.socket:
        return self._stream({"for": "console"})

    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = self._knocker.diagnosis.call_one(self._pid).get()
        return found

    def check(self, uids: list[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._knocker.check.call_one(self._pid, uids).get()
        return found

    def editor(self, uid: int) -> socket.socket:
        return self._stream({"for": "editor", "uid": uid})

    def lifeline(self) -> int | None:
        return None

    def _stream(self, request: dict[str, Any]) -> socket.socket:
        stream = _spi.open_stream(self._knocker.uid.call_one().get(), _PURPOSE)
        stream.setblocking(True)
        stream.sendall(json.dumps({"pid": self._pid, **request}).encode() + b"\n")
        answer = bytearray()
        while not answer.endswith(b"\n"):  # one by one: the content of the stream follows
            byte = stream.recv(1)
            if not byte or len(answer) > _LONGEST:
                stream.close()
                raise RuntimeError("the host has closed the connection")
            answer += byte
        error = json.loads(answer).get("error")
        if error:
            stream.close()
            raise RuntimeError(error)
        near, far = socket.socketpair()

        async def copy() -> None:
            await carry(await _ends(far), await _ends(stream))

        threading.Thread(target=asyncio.run, args=(copy(),), daemon=True).start()
        return near


async def _ends(sock: socket.socket) -> Ends:
    return await asyncio.open_unix_connection(sock=sock)
