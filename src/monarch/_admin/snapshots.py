"""The tables of the topology for SQL: the nodes of a picture as rows. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._admin.models import FailureInfo
from monarch._admin.nodes import Counts, failure_of, node
from monarch._admin.picture import Actor, Picture

__all__ = ["snapshot"]

Rows = dict[str, list[tuple[Any, ...]]]


def snapshot(
    found: Picture,
    number: str,
    started: tuple[float, str],
    retained: int,
    counts: Callable[[Actor], Counts | None] = lambda actor: None,
) -> Rows:
    """Return the rows of each table of the topology; see `_store.tables.PLAIN` for the columns.

    Args:
        found: the picture.
        number: the id of the snapshot.
        started: see `nodes.node`.
        retained: see `nodes.node`.
        counts: see `nodes.node`.
    """
    when = _us(found.when)
    rows: Rows = {name: [] for name in ("actor_inbound_orderings", "ordering_sessions")}
    rows.update({name: [] for name in _TABLES})
    rows["snapshots"].append((number, when))
    left = ["root"]
    while left:
        payload = node(found, left.pop(), started, retained, counts)
        if payload is None:
            continue
        own = payload["identity"]
        [(kind, content)] = payload["properties"].items()
        facts: Any = content
        rows["nodes"].append((number, own, kind.lower(), when))
        hidden = {*facts.get("system_children", ())}
        ended = {*facts.get("stopped_children", ())}
        for place, child in enumerate(payload["children"]):
            flags = child in hidden, child in ended
            rows["children"].append((number, own, child, place, *flags))
        left += payload["children"]
        if kind == "Root":
            row = facts["num_hosts"], _us(started[0]), started[1]
            rows["root_nodes"].append((number, own, *row))
        elif kind == "Host":
            rows["host_nodes"].append((number, own, facts["addr"], facts["num_procs"]))
            if own.removeprefix("host:") in found.missing:
                text = f"host {own.removeprefix('host:')} does not answer"
                rows["resolution_errors"].append((number, own, "gateway_timeout", text))
        elif kind == "Proc":
            names = ("proc_name", "num_actors", "stopped_retention_cap", "is_poisoned")
            more = (*(facts[name] for name in names), facts["failed_actor_count"])
            rows["proc_nodes"].append((number, own, *more))
        else:
            actor = found.actors[own]
            _add_actor(rows, number, found, actor, facts, counts(actor))
    for process in found.processes.values():
        for actor in process.replaced:  # others have their places in the tree
            _add_failure(rows, number, actor, failure_of(found, actor))
    return rows


_TABLES = (
    *("snapshots", "nodes", "children", "root_nodes", "host_nodes", "proc_nodes", "actor_nodes"),
    *("actor_failures", "actor_executions", "active_handlers", "resolution_errors"),
)


def _add_actor(
    rows: Rows, number: str, found: Picture, actor: Actor, facts: Any, known: Counts | None
) -> None:
    own = actor.reference
    rows["actor_nodes"].append(
        (
            *(number, own, facts["actor_status"], facts["actor_type"], facts["instance_id"]),
            facts["messages_processed"],
            None if known is None else known.created_us,
            facts["last_message_handler"],
            facts["total_processing_time_us"],
            facts["queue_depth"],
            facts["is_system"],
        )
    )
    _add_failure(rows, number, actor, facts["failure_info"])
    execution = facts["execution"]
    if execution is None:
        return
    counted = tuple(execution[name] for name in ("active_count", "complete", "truncated"))
    rows["actor_executions"].append((number, own, *counted))
    oldest: dict[str, float] = {}
    for one in actor.doing:
        oldest[one["endpoint"]] = max(one["seconds"] or 0.0, oldest.get(one["endpoint"], 0.0))
    for handler in execution["active_handlers"]:
        name = handler["name"]
        since = _us(found.when - oldest[name])
        rows["active_handlers"].append((number, own, name, handler["active_count"], since))


def _add_failure(rows: Rows, number: str, actor: Actor, failure: FailureInfo | None) -> None:
    if failure is None or actor.ended is None:
        return
    told = failure["error_message"], failure["root_cause_actor"], failure["root_cause_name"]
    when = _us(actor.ended["when"])
    rows["actor_failures"].append((number, actor.reference, *told, when, failure["is_propagated"]))


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
