"""The dashboard's views of a picture: the grid of ranks, waits, failures, processes. Pure."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from typing import Any

from monarch._admin.picture import STATES, Actor, Picture, Process
from monarch._diagnosis.causes import Place, Search, compact
from monarch._diagnosis.diagnosis import Diagnosis
from monarch._telemetry.recorder import actor_number

__all__ = [
    "actor_row",
    "failures",
    "frames_of",
    "grid",
    "mesh_id",
    "process_row",
    "processes",
    "sql_id",
    "waits",
]

_MASK = (1 << 63) - 1
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+), in (.+)')
_LIBRARIES = ("site-packages", "/lib/python", "<frozen", "/monarch/_engine/")


def mesh_id(actor: Actor) -> str:
    """Return the id that the mesh of an actor has in SQL."""
    return str(actor.mesh & _MASK)


def sql_id(actor: Actor) -> str:
    """Return the id that an actor has in SQL."""
    return str(actor_number(actor.process, actor.mesh))


def grid(
    found: Picture, stuck: float, mesh: str | None = None, references: bool = True
) -> dict[str, Any]:
    """Return all actor meshes with the states of their ranks."""
    meshes: dict[str, list[Actor]] = {}
    for process in found.processes.values():
        for actor in process.actors:
            identity = mesh_id(actor)
            if mesh is None or mesh == identity:
                meshes.setdefault(identity, []).append(actor)
    return {
        "as_of_us": int(found.when * 1e6),
        "states": list(STATES),
        "meshes": [
            _mesh(identity, actors, stuck, references)
            for identity, actors in sorted(meshes.items(), key=lambda item: item[1][0].name)
        ],
    }


def _mesh(identity: str, actors: list[Actor], stuck: float, references: bool) -> dict[str, Any]:
    shaped = next((actor for actor in actors if actor.sizes), actors[0])
    endpoints, procs, places = _Table([""]), _Table([]), _Table([""])
    counts: dict[str, int] = {}
    ranks: list[list[Any]] = []
    for actor in sorted(actors, key=lambda one: one.rank):
        state = actor.state_beyond(stuck)
        counts[state] = counts.get(state, 0) + 1
        row = [
            actor.rank,
            STATES.index(state),
            endpoints.place(actor.endpoint),
            None if actor.age is None else round(actor.age, 3),
            actor.queued,
            procs.place(str(actor.process)),
            places.place(actor.place),
        ]
        ranks.append([*row, actor.reference] if references else row)
    return {
        "id": identity,
        "name": shaped.name,
        "class": shaped.kind.rpartition(".")[2],
        "system": shaped.system,
        "labels": shaped.labels,
        "sizes": shaped.sizes,
        "counts": counts,
        "endpoints": endpoints.values,
        "procs": procs.values,
        "places": places.values,
        "ranks": ranks,
    }


class _Table:
    """Texts that are written once, and referred to by place."""

    def __init__(self, values: list[str]) -> None:
        self.values = values
        self._places = {value: place for place, value in enumerate(values)}

    def place(self, value: str) -> int:
        found = self._places.setdefault(value, len(self._places))
        if found == len(self.values):
            self.values.append(value)
        return found


# -- waits -----------------------------------------------------------------------------------------


def waits(found: Picture) -> dict[str, Any]:
    """Return the actors that wait, those for which they wait, and the causes."""
    nodes: dict[str, dict[str, Any]] = {}
    edges: list[dict[str, Any]] = []
    for process in found.processes.values():
        if process.script is not None:
            nodes["script"] = _script_node(process)
            edges += _edges(found, "script", [process.script], nodes)
        for actor in process.actors:
            if not actor.doing or not actor.alive:
                continue
            nodes.setdefault(actor.reference, _node(found, actor))
            edges += _edges(found, actor.reference, actor.doing, nodes)
    diagnosis = Diagnosis.from_dict(found.diagnosis)
    return {
        "as_of_us": int(found.when * 1e6),
        "nodes": list(nodes.values()),
        "edges": edges,
        "causes": list(_causes(found)),
        "text": str(diagnosis),
    }


def _edges(
    found: Picture, start: str, doing: list[dict[str, Any]], nodes: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for wait in [one["wait"] for one in doing if one["wait"] is not None]:
        for uid, mesh in wait["on"]:
            actor = found.at.get((uid, mesh))
            if actor is None:
                continue
            nodes.setdefault(actor.reference, _node(found, actor))
            yield {
                "from": start,
                "to": actor.reference,
                "call": wait["call"],
                "seconds": wait["seconds"],
                "limit": wait["limit"],
                "asked": wait["asked"],
            }


def _script_node(process: Process) -> dict[str, Any]:
    script = process.script or {}
    waiting = script.get("wait")
    return {
        "id": "script",
        "label": "the script",
        "kind": "script",
        "mesh": "",
        "rank": 0,
        "state": "busy" if waiting is None else "waiting",
        "endpoint": "",
        "age": None if waiting is None else waiting["seconds"],
        "place": script.get("place", ""),
        "stack": script.get("stack", []),
        "proc": str(process.uid),
        "pid": process.pid,
        "host": process.host,
    }


def _node(found: Picture, actor: Actor) -> dict[str, Any]:
    process = found.processes[actor.process]
    return {
        "id": actor.reference,
        "label": actor.short,
        "kind": "actor" if process.answers else "silent",
        "mesh": actor.name,
        "rank": actor.rank,
        "state": actor.state,
        "endpoint": actor.endpoint,
        "age": actor.age,
        "place": actor.place,
        "stack": actor.doing[0]["stack"] if actor.doing else [],
        "proc": str(process.uid),
        "pid": process.pid,
        "host": process.host,
    }


def _causes(found: Picture) -> Iterator[dict[str, Any]]:
    silent = [uid for uid, process in found.processes.items() if not process.answers]
    search = Search(found.diagnosis["accounts"], silent)

    def reference(place: Place) -> str:
        if place.mesh == 0:
            return "script"
        actor = found.at.get((place.process, place.mesh))
        return f"{place.process}.{place.mesh}" if actor is None else actor.reference

    for cause in search.causes(*search.scripts, *search.actors):
        actor = found.at.get((cause.place.process, cause.place.mesh))
        name = "an actor" if actor is None else actor.short
        activity = cause.activity
        text = {
            "busy": f"{name} is in {activity['endpoint']}() "
            f"since {activity['seconds'] or 0.0:.1f} s"
            if activity is not None
            else "",
            "silent": f"the process of {name} does not answer",
            "queued": f"{name} has not taken its messages yet",
            "idle": f"{name} is idle: its answer is owed by other code",
            "unknown": f"{name} has ended",
            "circle": "these wait for each other",
        }[cause.kind]
        yield {
            "kind": cause.kind,
            "node": reference(cause.place),
            "through": [reference(place) for place in cause.through],
            "text": text,
        }


# -- failures --------------------------------------------------------------------------------------


def failures(found: Picture) -> dict[str, Any]:
    """Return the failures of actors and processes, grouped by cause, the latest group first."""
    groups: dict[tuple[str, str], list[Actor]] = {}
    for process in found.processes.values():
        for actor in (*process.replaced, *process.failed):
            ended = actor.ended or {}
            groups.setdefault((actor.name, _headline(ended)), []).append(actor)
    rows = [_group(error, actors) for (_, error), actors in groups.items()]
    known = {
        (actor.ended or {}).get("process")
        for process in found.processes.values()
        for actor in process.replaced
    }
    rows += [_exit(each) for each in _unique(found.exits) if each["process"] not in known]
    return {
        "as_of_us": int(found.when * 1e6),
        "groups": sorted(rows, key=lambda row: row["last_us"], reverse=True),
        "lost_hosts": found.missing,
        "silent": [
            {
                "proc": str(process.uid),
                "pid": process.pid,
                "host": process.host,
                "state": process.kernel,
                "text": process.trouble,
            }
            for process in found.processes.values()
            if not process.answers
        ],
    }


def _unique(exits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({each["process"]: each for each in exits}.values())


def _headline(ended: dict[str, Any]) -> str:
    """Return the line that names the error: the last one of the traceback, if there is one."""
    trace: str = ended["trace"].strip()
    return trace.splitlines()[-1] if trace else str(ended["error"]).partition("\n")[0]


def _group(error: str, actors: list[Actor]) -> dict[str, Any]:
    ends = [actor.ended or {} for actor in actors]
    trace = ends[0]["trace"]
    return {
        "error": error,
        "count": len(actors),
        "ranks": compact(actor.rank for actor in actors),
        "mesh": actors[0].name,
        "endpoint": None,
        "cause": ends[0]["cause"],
        "first_us": int(min(end["when"] for end in ends) * 1e6),
        "last_us": int(max(end["when"] for end in ends) * 1e6),
        "propagated": all(end["propagated"] for end in ends),
        "actors": [
            {
                "ref": actor.reference,
                "name": actor.short,
                "when_us": int(end["when"] * 1e6),
                "proc": str(actor.process),
            }
            for actor, end in zip(actors, ends, strict=True)
        ],
        "frames": frames_of(trace),
        "traceback": trace or ends[0]["error"],
    }


def _exit(exit_: dict[str, Any]) -> dict[str, Any]:
    when = int(exit_["when"] * 1e6)
    return {
        "error": exit_["error"].partition("\n")[0],
        "count": 1,
        "ranks": "",
        "mesh": f"process {exit_['pid']} on {exit_['host']}",
        "endpoint": None,
        "cause": exit_["cause"],
        "first_us": when,
        "last_us": when,
        "propagated": False,
        "actors": [],
        "frames": frames_of(exit_["trace"]),
        "traceback": exit_["trace"] or exit_["error"],
    }


def frames_of(trace: str) -> list[dict[str, Any]]:
    """Return the frames of a traceback: those of the program first, innermost first.

    >>> text = '''File "/usr/lib/python3/x.py", line 1, in y
    ... File "/a/t.py", line 3, in step
    ...     raise E'''
    >>> [(frame["function"], frame["user"], frame["code"]) for frame in frames_of(text)]
    [('step', True, 'raise E'), ('y', False, '')]
    """
    lines = trace.splitlines()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None:
            continue
        file, at, function = match.groups()
        following = lines[number + 1] if number + 1 < len(lines) else ""
        code = "" if _FRAME.match(following) else following.strip()
        found.append(
            {
                "file": file,
                "line": int(at),
                "function": function,
                "code": code or linecache.getline(file, int(at)).strip(),
                "user": not any(part in file for part in _LIBRARIES),
            }
        )
    found.reverse()
    return sorted(found, key=lambda frame: not frame["user"])


# -- processes and actors --------------------------------------------------------------------------


def processes(found: Picture) -> dict[str, Any]:
    """Return memory and processor time of hosts and processes."""
    rows = [process_row(process) for process in found.processes.values()]
    hosts: list[dict[str, Any]] = []
    for host in sorted({*found.hosts, *found.missing}):
        own = found.hosts.get(host, [])
        percents = [one.cpu_percent for one in own if one.cpu_percent is not None]
        hosts.append(
            {
                "host": host,
                "machine": own[0].machine if own else "",
                "processes": len(own),
                "rss": sum(one.rss for one in own),
                "cpu": round(sum(one.cpu for one in own), 2),
                "cpu_percent": round(sum(percents), 1) if percents else None,
                "answers": host not in found.missing,
            }
        )
    return {"as_of_us": int(found.when * 1e6), "hosts": hosts, "processes": rows}


def process_row(process: Process) -> dict[str, Any]:
    """Return a process as the dashboard shows it."""
    percent = process.cpu_percent
    return {
        "proc": str(process.uid),
        "ref": process.reference,
        "label": process.label,
        "pid": process.pid,
        "host": process.host,
        "machine": process.machine,
        "state": process.kernel,
        "answers": process.answers,
        "trouble": process.trouble,
        "rss": process.rss,
        "cpu": process.cpu,
        "cpu_percent": None if percent is None else round(percent, 1),
        "actors": sum(actor.alive for actor in process.actors),
        "queued": process.queued,
        "failed": len(process.failed),
        "client": process.client,
    }


def actor_row(actor: Actor, stuck: float) -> dict[str, Any]:
    """Return an actor as the stream reports it."""
    return {
        "ref": actor.reference,
        "mesh": mesh_id(actor),
        "name": actor.name,
        "rank": actor.rank,
        "state": actor.state_beyond(stuck),
        "endpoint": actor.endpoint,
        "age": None if actor.age is None else round(actor.age, 3),
        "queued": actor.queued,
        "place": actor.place,
    }
