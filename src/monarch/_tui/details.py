"""A node of the admin API as lines for a person: pairs of a name and a value, and panes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monarch._tui.tree import duration
from monarch._tui.words import Words, columns

__all__ = ["GLOSSARY", "Details", "details", "glossary", "settings_lines", "stack_lines"]


class Details(NamedTuple):
    """The title of a node, its pairs, and its panes: a title and lines each."""

    title: str
    pairs: list[tuple[str, str]]
    panes: list[tuple[str, list[str]]]


GLOSSARY = {
    "host": (
        ("address", "the name that the job has for the host"),
        ("machine", "the name that the machine has for itself"),
        ("memory", "what its processes have in memory, shared pages counted in each"),
        ("as of", "when these values were looked at"),
    ),
    "proc": (
        ("actors", "actors that run; those that have ended are counted apart"),
        ("queued", "messages that wait for an actor"),
        ("queued, most", "of one actor"),
        ("queued, peak", "the most that was seen since the admin API looks"),
        (
            "state",
            "of the kernel: R runs, S sleeps, D waits for a device, T is stopped, Z has exited",
        ),
        ("trouble", "why the process does not answer, and what helps"),
        ("POISONED", "an actor has failed, and the process runs on"),
    ),
    "actor": (
        ("status", "the endpoint that is executed, and for how long; or how the actor has ended"),
        ("queued", "messages that wait for it"),
        ("Execution", "each endpoint that runs: its line, its stack, and what it waits for"),
        ("messages", "how many it has handled; needs telemetry"),
        ("propagated", "the actor has failed because of another: see root cause"),
    ),
}
"""What the fields of a node mean, by the kind of the node; behind the key ``?``."""


def details(node: Mapping[str, Any], words: Words) -> Details:
    """Return what to show of a payload of ``/v1/{reference}``."""
    (kind, found), *_ = node["properties"].items()
    if kind == "Host":
        return _host(node, found, words)
    if kind == "Proc":
        return _proc(node, found, words)
    if kind == "Actor":
        return _actor(found, words)
    pairs = [(name, str(value)) for name, value in found.items()]
    return Details(str(node["identity"]), pairs, [])


def _host(node: Mapping[str, Any], host: Mapping[str, Any], words: Words) -> Details:
    pairs = [
        (words("address"), str(host["addr"])),
        (words("machine"), host["machine"] or words("unknown")),
        (words("processes"), str(host["num_procs"])),
        *_memory(host["memory"], words),
        (words("as of"), str(node["as_of"])),
    ]
    return Details(f"{words('host')} {host['addr']}", pairs, [])


def _proc(node: Mapping[str, Any], proc: Mapping[str, Any], words: Words) -> Details:
    debug = proc["debug"]
    pairs = [
        (words("name"), str(proc["proc_name"])),
        (words("pid"), str(proc["pid"])),
        (words("machine"), str(proc["machine"])),
        (words("state"), str(proc["state"])),
        (words("CPU"), f"{proc['cpu_seconds']:.1f} s"),
        (words("actors"), str(proc["num_actors"])),
        *_memory(debug["memory"], words),
        (words("queued"), str(debug["actor_work_queue_depth_total"])),
        (words("queued, most"), str(debug["actor_work_queue_depth_max"])),
        (words("queued, peak"), str(debug["actor_work_queue_depth_high_water_mark"])),
    ]
    last = debug["last_nonzero_queue_depth_age_ms"]
    if last is not None:
        pairs.append((words("last busy"), f"{duration(last / 1000)} ago"))
    if proc["failed_actor_count"]:
        pairs.append((words("failed actors"), str(proc["failed_actor_count"])))
    pairs.append((words("as of"), str(node["as_of"])))
    if proc["trouble"]:
        pairs.insert(0, (words("trouble"), str(proc["trouble"])))
    tag = f" [POISONED: {proc['failed_actor_count']} failed]" if proc["is_poisoned"] else ""
    return Details(f"{words('proc')} {proc['proc_name']}{tag}", pairs, [])


def _actor(actor: Mapping[str, Any], words: Words) -> Details:
    status = str(actor["actor_status"])
    pairs = [
        (words("status"), status.partition("\n")[0]),
        (words("type"), str(actor["actor_type"])),
        (words("queued"), str(actor["queue_depth"])),
        (words("instance"), str(actor["instance_id"])),
    ]
    if actor["messages_processed"] is not None:
        pairs.append((words("messages"), f"{actor['messages_processed']:,}"))
    if actor["total_processing_time_us"] is not None:
        spent = duration(actor["total_processing_time_us"] / 1e6)
        pairs.append((words("processing time"), spent))
    for name, key in (("created", "created_at"), ("last handler", "last_message_handler")):
        if actor[key]:
            pairs.append((words(name), str(actor[key])))
    panes: list[tuple[str, list[str]]] = []
    if actor["doing"]:
        panes.append((words("Execution"), _execution(actor["doing"], words)))
    failure = actor["failure_info"]
    if failure is not None:
        yes = words("yes") if failure["is_propagated"] else words("no")
        lines = [
            f"{words('failed at')}: {failure['occurred_at']}",
            f"{words('root cause')}: {failure['root_cause_name'] or failure['root_cause_actor']}",
            f"{words('propagated')}: {yes}",
            "",
            *str(failure["error_message"]).splitlines(),
        ]
        panes.append((words("Failure"), lines))
    return Details(f"{actor['display_name']} [{_tag(actor)}]", pairs, panes)


def _tag(actor: Mapping[str, Any]) -> str:
    if actor["failure_info"] is not None:
        return "failed"
    if str(actor["actor_status"]).startswith("stopped"):
        return "stopped"
    return "system" if actor["is_system"] else "user"


def _execution(doing: Sequence[Mapping[str, Any]], words: Words) -> list[str]:
    lines: list[str] = []
    for one in doing:
        spent = "" if one["seconds"] is None else f" for {duration(one['seconds'])}"
        lines.append(f"{one['endpoint']}(){spent}")
        if one["waits_for"]:
            lines.append(f"  {words('waits for')} {one['waits_for']}")
        lines += [f"  {frame}" for frame in one["stack"] or [one["place"]]]
    return lines


def _memory(memory: Mapping[str, Any], words: Words) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, key in (
        ("memory", "process_rss_bytes"),
        ("virtual memory", "process_vm_size_bytes"),
    ):
        if memory[key] is not None:
            pairs.append((words(name), f"{memory[key] / 1e6:,.0f} MB"))
    return pairs


def glossary(kind: str, words: Words) -> list[str]:
    """Return the lines of the help for the fields of a kind of node."""
    pairs = ((words(name), text) for name, text in GLOSSARY.get(kind, ()))
    return [name + text for name, text in columns(pairs)]


def settings_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings of a process as a table: name, value, where the value comes from."""
    rows = [(str(e["name"]), str(e["value"]), str(e["source"])) for e in entries]
    names = max((len(row[0]) for row in rows), default=0)
    values = min(40, max((len(row[1]) for row in rows), default=0))
    return [f"{name:<{names}}  {value:<{values}}  {source}" for name, value, source in rows]


def stack_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the stacks of a process, as py-spy has seen them; or why there are none."""
    if "Ok" in result:
        found = result["Ok"]
        lines = [f"process {found['pid']}, {found['capture_mode']}", *found["warnings"]]
        for trace in found["stack_traces"]:
            marks = [m for m, on in (("active", trace["active"]), ("GIL", trace["owns_gil"])) if on]
            name = trace["thread_name"] or trace["thread_id"]
            lines += ["", f"thread {name}{' (' + ', '.join(marks) + ')' if marks else ''}"]
            lines += [f"  {f['name']} at {f['filename']}:{f['line']}" for f in trace["frames"]]
        return lines
    if "BinaryNotFound" in result:
        return ["py-spy is not installed: pip install 'pymonarch[native]'"]
    failed = result["Failed"]
    return [f"py-spy failed with exit code {failed['exit_code']}", *failed["stderr"].splitlines()]
