"""The nodes of the admin API: root, hosts, processes and actors of a picture. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from monarch._admin.models import (
    ActorProperties,
    Doing,
    Execution,
    FailureInfo,
    HostProperties,
    NodePayload,
    ProcProperties,
    Properties,
    RootProperties,
)
from monarch._admin.picture import Actor, Picture, Process

__all__ = ["Counts", "actor_status", "failure_of", "iso", "node", "tree"]

_SPACE = uuid.UUID("7a1d6f5e-6d0c-4c8b-9f65-0e6f2b8d3c11")
_SHOWN = 100  # nodes of a parent in the tree


class Counts(NamedTuple):
    """The counts that telemetry has of an actor."""

    messages: int
    time_us: int | None
    created_us: int | None
    last: str | None


def iso(seconds: float) -> str:
    """Return a time since 1970 as text in UTC.

    >>> iso(0.0015)
    '1970-01-01T00:00:00.001Z'
    """
    whole = int(seconds)
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{day}.{int((seconds - whole) * 1000):03d}Z"


def node(
    found: Picture,
    reference: str,
    started: tuple[float, str],
    retained: int,
    counts: Callable[[Actor], Counts | None] = lambda actor: None,
) -> NodePayload | None:
    """Return the node with this reference; None if there is none.

    Args:
        found: the picture.
        reference: ``root``, or a reference of another node.
        started: when the job was started, in seconds since 1970, and the user.
        retained: how many actors that have ended a process keeps.
        counts: what telemetry knows of an actor; None if it is off.
    """
    if reference == "root":
        return _root(found, started)
    if reference.startswith("host:"):
        return _host(found, reference.removeprefix("host:"))
    process = found.references.get(reference)
    if process is not None:
        return _proc(found, process, retained)
    actor = found.actors.get(reference)
    return None if actor is None else _actor(found, actor, counts(actor))


def _payload(
    found: Picture,
    identity: str,
    properties: Properties,
    children: Iterable[str],
    parent: str | None,
) -> NodePayload:
    return {
        "identity": identity,
        "properties": properties,
        "children": list(children),
        "parent": parent,
        "as_of": iso(found.when),
    }


def _root(found: Picture, started: tuple[float, str]) -> NodePayload:
    hosts = sorted({*found.hosts, *found.missing})
    properties: RootProperties = {
        "num_hosts": len(hosts),
        "started_at": iso(started[0]),
        "started_by": started[1],
        "system_children": [],
    }
    return _payload(found, "root", {"Root": properties}, map("host:{}".format, hosts), None)


def _host(found: Picture, name: str) -> NodePayload | None:
    processes = found.hosts.get(name, [])
    if not processes and name not in found.missing:
        return None
    properties: HostProperties = {
        "addr": name,
        "num_procs": len(processes),
        "system_children": [],
        "memory": {
            "process_rss_bytes": sum(one.rss for one in processes) if processes else None,
            "process_vm_size_bytes": None,
        },
        "machine": processes[0].machine if processes else "",
        "answers": name not in found.missing,
    }
    children = [one.reference for one in processes]
    return _payload(found, f"host:{name}", {"Host": properties}, children, "root")


def _proc(found: Picture, process: Process, retained: int) -> NodePayload:
    alive = [actor for actor in process.actors if actor.alive]
    ended = [actor for actor in process.actors if not actor.alive]
    properties: ProcProperties = {
        "proc_name": process.label or process.reference,
        "num_actors": len(alive),
        "system_children": [actor.reference for actor in process.actors if actor.system],
        "stopped_children": [actor.reference for actor in ended],
        "stopped_retention_cap": retained,
        "is_poisoned": bool(process.failed),
        "failed_actor_count": len(process.failed),
        "debug": {
            "memory": {"process_rss_bytes": process.rss, "process_vm_size_bytes": None},
            "actor_work_queue_depth_total": process.queued,
            "actor_work_queue_depth_max": max((one.queued for one in alive), default=0),
            "actor_work_queue_depth_high_water_mark": process.highest,
            "last_nonzero_queue_depth_age_ms": None
            if process.last_queued is None
            else int(1000 * (found.when - process.last_queued)),
        },
        "pid": process.pid,
        "host": process.host,
        "machine": process.machine,
        "state": process.kernel,
        "answers": process.answers,
        "trouble": process.trouble,
        "cpu_seconds": process.cpu,
    }
    children = [actor.reference for actor in process.actors]
    parent = f"host:{process.host}"
    return _payload(found, process.reference, {"Proc": properties}, children, parent)


def actor_status(actor: Actor) -> str:
    """Return the status of an actor as the admin API writes it."""
    if actor.ended is not None:
        return f"{actor.state}: {actor.ended['error']}"
    if actor.state in ("busy", "waiting", "silent") and actor.doing:
        age = actor.age
        spent = "" if age is None else f" for {_duration(age)}"
        return f"{actor.endpoint}: processing{spent}"
    return {
        "starting": "initializing",
        "stopping": "stopping",
        "silent": "unknown",
    }.get(actor.state, "idle")


def _duration(seconds: float) -> str:
    """Return seconds as text: in milliseconds below one.

    >>> _duration(0.0123), _duration(75.04)
    ('12ms', '75.0s')
    """
    return f"{seconds:.1f}s" if seconds >= 1 else f"{int(1000 * seconds)}ms"


def _actor(found: Picture, actor: Actor, counts: Counts | None) -> NodePayload:
    created = None if counts is None or counts.created_us is None else counts.created_us / 1e6
    properties: ActorProperties = {
        "actor_status": actor_status(actor),
        "actor_type": actor.kind,
        "instance_id": str(uuid.uuid5(_SPACE, actor.reference)),
        "messages_processed": None if counts is None else counts.messages,
        "created_at": None if created is None else iso(created),
        "last_message_handler": actor.endpoint or (None if counts is None else counts.last),
        "total_processing_time_us": None if counts is None else counts.time_us,
        "queue_depth": actor.queued,
        "is_system": actor.system,
        "flight_recorder": None,
        "inbound_ordering": None,
        "failure_info": failure_of(found, actor),
        "execution": None if not actor.alive else _execution(found, actor),
        "display_name": actor.display,
        "mesh_name": actor.label,
        "rank": actor.rank,
        "doing": [_doing(one) for one in actor.doing],
    }
    process = found.processes[actor.process]
    return _payload(found, actor.reference, {"Actor": properties}, (), process.reference)


def _doing(activity: Mapping[str, Any]) -> Doing:
    wait = activity["wait"]
    return {
        "endpoint": activity["endpoint"],
        "seconds": activity["seconds"],
        "place": activity["place"],
        "stack": activity["stack"],
        "waits_for": None if wait is None else wait["call"],
    }


def _execution(found: Picture, actor: Actor) -> Execution:
    by_name: dict[str, list[float]] = {}
    for one in actor.doing:
        by_name.setdefault(one["endpoint"], []).append(one["seconds"] or 0.0)
    return {
        "active_count": len(actor.doing),
        "active_handlers": [
            {
                "name": name,
                "active_count": len(ages),
                "oldest_since": iso(max(0.0, found.when - max(ages))),
            }
            for name, ages in by_name.items()
        ],
        "complete": found.processes[actor.process].answers,
        "truncated": False,
    }


def failure_of(found: Picture, actor: Actor) -> FailureInfo | None:
    """Return why an actor failed; None if it did not."""
    ended = actor.ended
    if ended is None or ended["kind"] != "failed":
        return None
    root = ended["root"]
    cause = next(
        (
            one.reference
            for one in found.actors.values()
            if one.ended is not None and one.ended["display"] == root
        ),
        root,
    )
    message = ended["error"] if not ended["propagated"] else ended["root_error"]
    trace = ended["trace"]
    return {
        "error_message": f"{message}\n{trace}" if trace else message,
        "root_cause_actor": cause,
        "root_cause_name": root,
        "occurred_at": iso(ended["when"]),
        "is_propagated": ended["propagated"],
    }


def tree(found: Picture, address: Callable[[str], str]) -> str:
    """Return the tree of hosts, processes and actors as text; `address` makes the URL of a node."""
    lines = [f"root  {address('root')}"]
    hosts = sorted({*found.hosts, *found.missing})
    for host, (bar, below) in _branches(hosts):
        dead = " (does not answer)" if host in found.missing else ""
        lines.append(f"{bar}{host}{dead}  {address(f'host:{host}')}")
        for process, (bar2, below2) in _branches(found.hosts.get(host, [])[:_SHOWN]):
            note = "" if process.answers else f" ({process.trouble})"
            poisoned = f" [poisoned: {len(process.failed)} failed]" if process.failed else ""
            name = process.label or f"process {process.pid}"
            where = address(process.reference)
            lines.append(f"{below}{bar2}{name}{note}{poisoned}  {where}")
            users = [actor for actor in process.actors if not actor.system]
            for actor, (bar3, _) in _branches(users[:_SHOWN]):
                status = actor_status(actor).partition("\n")[0]
                where = address(actor.reference)
                lines.append(f"{below}{below2}{bar3}{actor.short} [{status}]  {where}")
            if len(users) > _SHOWN:
                lines.append(f"{below}{below2}    and {len(users) - _SHOWN} further actors")
        further = len(found.hosts.get(host, [])) - _SHOWN
        if further > 0:
            lines.append(f"{below}    and {further} further processes")
    return "\n".join(lines) + "\n"


def _branches(items: Iterable[Any]) -> Iterable[tuple[Any, tuple[str, str]]]:
    listed = list(items)
    for number, item in enumerate(listed):
        last = number == len(listed) - 1
        yield item, (("└── ", "    ") if last else ("├── ", "│   "))
