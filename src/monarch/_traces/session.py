"""The parts of a CPU profile inside the job: of the script, and of each of its processes.

The command in a terminal reaches the script by its door. The script asks all processes, itself
included, to start their samplers; each decides whether it is meant. The answers to the second
question, at the end, are passed on to the command as they are, so that adding them up costs the
script nothing. A process answers on its reactor thread, so also while its actors are busy.

A sampler ends by itself, so a script or a command that is killed leaves none. Its result is kept
until the next profile begins, or for a minute. There is one profile at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from monarch._diagnosis.census import Member, take
from monarch._spi import (
    Proc,
    Refused,
    Request,
    Unreachable,
    ask,
    call_later,
    client_proc,
    start_thread,
)
from monarch._traces.sampler import Options, Sampler
from monarch._traces.torch_recording import TorchRecording, has_torch

__all__ = ["HEADER", "on_request", "serve"]

HEADER = struct.Struct("<I")
"""Before each message to the command, which is JSON: its size."""

_LONGEST = 3600.0  # seconds
_FASTEST = 1000  # samples a second
_CENSUS = 2.0  # seconds for the list of processes
_STARTING = 5.0  # seconds for processes that do not answer
_FETCHING = 30.0
_WAVE = 32  # results that are fetched at a time
_KEPT = 60.0  # seconds until a result that was not fetched is dropped

_RECORDING = 300.0  # seconds for torch to write a trace

_active: tuple[str, Sampler | TorchRecording] | None = None
_joined: deque[str] = deque(maxlen=16)  # the last profiles that this process took part in

# -- each process ----------------------------------------------------------------------------------


def on_request(proc: Proc, link: Any, frame: Any) -> None:
    """Start the sampler of this process, or end it and answer with its result."""
    request = Request(proc, link, frame)
    asked: dict[str, Any] = json.loads(request.body)
    number = str(asked["profile"])
    if asked["op"] == "start":
        request.answer(json.dumps(_start(proc, number, asked)).encode())
    elif _active is None or _active[0] != number:
        request.refuse(_why_dropped(number))
    else:
        sampler = _active[1]
        if asked["op"] == "fetch" and asked["early"]:
            sampler.stop()  # otherwise it ends by itself: torch may have begun late
        start_thread("monarch-profile", lambda: _answer(proc, request, sampler, asked))


def _answer(
    proc: Proc, request: Request, sampler: Sampler | TorchRecording, asked: dict[str, Any]
) -> None:
    """Answer with the result, with a part of the trace of torch, or with the error."""
    if asked["op"] == "fetch":
        answer: Any
        try:
            if isinstance(sampler, Sampler):
                answer = sampler.result(os.getpid(), proc.hostname, proc.label)
            else:
                answer = {**_place(proc), "size": sampler.size()}
        except (OSError, RuntimeError) as error:
            answer = {**_place(proc), "error": str(error)}
        request.answer(json.dumps(answer, separators=(",", ":")).encode())
        if isinstance(sampler, Sampler) or "error" in answer:
            _forget(sampler)
        return
    assert isinstance(sampler, TorchRecording)
    try:
        data = sampler.part(int(asked["offset"]))
    except OSError as error:
        request.refuse(str(error))
        _forget(sampler)
        return
    request.answer(data)
    if int(asked["offset"]) + len(data) >= sampler.size():
        _forget(sampler)


def _why_dropped(number: str) -> str:
    """Return why this process has no result of a profile that was started in its place."""
    if number not in _joined:
        return f"it was lost during the profile, and process {os.getpid()} has its place"
    if _active is not None:
        return "another profile was started meanwhile"
    return f"its result was dropped, since no command had asked for it {_KEPT:g} s after the end"


def _place(proc: Proc) -> dict[str, Any]:
    """Return which process this is, for the command."""
    _, _, rank = proc.label.rpartition("-")
    cells = [cell for cell in list(proc.cells.values()) if cell.identity.name in _meshes(proc)]
    return {
        "pid": os.getpid(),
        "machine": proc.hostname,
        "label": proc.label,
        "mesh": cells[0].identity.name if cells else "",
        "rank": cells[0].rank if cells else int(rank) if rank.isdigit() else 0,
    }


def _start(proc: Proc, number: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Start the sampler, if this process is meant. Return whether it is, and why not."""
    global _active
    if _active is not None and not _active[1].ended:
        return {"joined": False, "why": "a profile is under way", "meshes": []}
    options = Options(*asked["options"])
    places = {(cell.identity.name, cell.rank) for cell in list(proc.cells.values())}
    if not proc.client:
        label, _, rank = proc.label.rpartition("-")
        places.add((label, int(rank) if rank.isdigit() else 0))
    if not _is_meant(proc, places, asked["mesh"], asked["ranks"]):
        return {"joined": False, "why": "", "meshes": sorted(_meshes(proc))}
    if asked["kind"] != "torch":
        sampler: Sampler | TorchRecording = Sampler(
            options, lambda: _labels(proc), script=proc.client
        )
    elif has_torch():
        sampler = TorchRecording(options.seconds)
    else:
        return {"joined": False, "why": "", "meshes": [], "lacks": "torch"}
    _active = number, sampler
    _joined.append(number)
    start_thread("monarch-sampler", sampler.run)
    call_later(options.seconds + _KEPT, lambda: _forget(sampler))
    return {"joined": True, "why": "", "meshes": []}


def _is_meant(
    proc: Proc, places: set[tuple[str, int]], mesh: str | None, ranks: list[int] | None
) -> bool:
    if mesh is None and ranks is None:
        return True
    return not proc.client and any(
        (mesh is None or name == mesh) and (ranks is None or rank in ranks) for name, rank in places
    )


def _meshes(proc: Proc) -> set[str]:
    """Return the names that the program gave to the meshes of this process."""
    cells = list(proc.cells.values())
    own = {
        cell.identity.name for cell in cells if not cell.identity.short()[0].startswith("monarch.")
    }
    return own if proc.client else own | {proc.label.rpartition("-")[0]} - {"anon"}


def _forget(sampler: Sampler | TorchRecording) -> None:
    """Drop a result that was fetched, or never will be."""
    global _active
    if _active is not None and _active[1] is sampler:
        _active = None
        if isinstance(sampler, TorchRecording):
            start_thread("monarch-profile", sampler.close)


def _labels(proc: Proc) -> dict[int, str]:
    """Return the names of the actors of this process, by the thread that each runs on."""
    cells = [*list(proc.cells.values()), *list(proc.ending)]
    return {cell.thread_id: cell.identity.name for cell in cells if cell.thread_id}


# -- the script ------------------------------------------------------------------------------------


def serve(connection: socket.socket, asked: dict[str, Any]) -> None:
    """Take a profile for a command; blocks until it is over.

    The command ends it early by a line; if it closes the connection, the profile is dropped. It is
    sent one message when the samplers run, one for each process, and an empty one at the end.
    """
    _check(asked)
    number = f"{os.getpid()}-{time.monotonic_ns()}"
    start = json.dumps({**asked, "op": "start", "profile": number}).encode()
    members, missing = take(_CENSUS)
    known = {member.uid: member for member in members}
    uids = list(dict.fromkeys([client_proc().uid, *known]))
    joined: list[int] = []
    silent: list[str] = []
    refused: set[str] = set()
    meshes: set[str] = set()
    without: set[str] = set()
    for uid, found in _answers(uids, start, _STARTING):
        answer: Any = json.loads(found) if isinstance(found, bytes) else None
        if answer is None:
            if isinstance(found, TimeoutError):
                silent.append(_name(known.get(uid)))
        elif answer["joined"]:
            joined.append(uid)
        else:
            meshes.update(answer["meshes"])
            without.update([answer["lacks"]] if "lacks" in answer else [])
            refused.update([answer["why"]] if answer["why"] else [])
    _say(
        connection,
        {
            "joined": len(joined),
            "silent": silent,
            "missing": sorted(missing),
            "refused": sorted(refused),
            "meshes": sorted(meshes),
            "lacks": sorted(without),
        },
    )
    early, wanted = _wait(connection, float(asked["options"][0])) if joined else (True, True)
    fetch = json.dumps({"op": "fetch", "profile": number, "early": early}).encode()
    limit = _RECORDING if asked["kind"] == "torch" else _FETCHING
    for at in range(0, len(joined), _WAVE):
        for uid, found in _answers(joined[at : at + _WAVE], fetch, limit):
            if not wanted:
                continue
            if isinstance(found, bytes):
                connection.sendall(HEADER.pack(len(found)) + found)
                if asked["kind"] == "torch":
                    _pass_on(connection, uid, number, json.loads(found).get("size", 0))
            else:
                _say(connection, {"fault": f"{_name(known.get(uid))}: {found}"})
    if wanted:
        _say(connection, {})


def _pass_on(connection: socket.socket, uid: int, number: str, size: int) -> None:
    """Send the trace of a process to the command, in parts."""
    at = 0
    while at < size:
        body = json.dumps({"op": "part", "profile": number, "offset": at}).encode()
        data = ask(uid, "profile", body, timeout=_FETCHING).get(timeout=_FETCHING)
        connection.sendall(data)
        at += len(data)


def _check(asked: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless the request is one of the command."""
    options, mesh, ranks = Options(*asked["options"]), asked["mesh"], asked["ranks"]
    if asked["kind"] not in ("stacks", "torch"):
        raise ValueError(f"no profile of kind {asked['kind']}")
    if not (0 < options.seconds <= _LONGEST and 1 <= int(options.rate) <= _FASTEST):
        raise ValueError(f"a profile of {options.seconds} s, {options.rate} times a second")
    if not (mesh is None or isinstance(mesh, str)) or not (ranks is None or list(map(int, ranks))):
        raise TypeError("mesh is a name, and ranks are numbers")


def _answers(uids: list[int], body: bytes, limit: float) -> Iterator[tuple[int, bytes | Exception]]:
    """Ask processes; yield the answer of each, or the reason why there is none."""
    asked = [(uid, ask(uid, "profile", body, timeout=limit)) for uid in uids]
    until = time.monotonic() + limit
    for uid, answer in asked:
        try:
            yield uid, answer.get(timeout=max(0.0, until - time.monotonic()))
        except (TimeoutError, Unreachable, Refused) as error:
            yield uid, error


def _wait(connection: socket.socket, seconds: float) -> tuple[bool, bool]:
    """Wait for the end of the profile; return whether it is early, and the command still there."""
    if not select.select([connection], [], [], seconds)[0]:
        return False, True
    with contextlib.suppress(OSError):
        return True, bool(connection.recv(64))
    return True, False


def _name(member: Member | None) -> str:
    return "the script" if member is None else f"process {member.pid} on {member.machine}"


def _say(connection: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    connection.sendall(HEADER.pack(len(data)) + data)
