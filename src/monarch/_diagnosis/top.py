"""The table of ``monarch top``: what each actor does, what needs attention first. Pure.

The input are the data of `Diagnosis.to_dict`, of two moments: the processor time that a process has
used between them makes its share of a core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Row", "rows", "summary", "table"]

_MUCH = 0.5  # of a core: the share of a process whose only actor computes
_ORDER = ("silent", "stopped", "debugged", "busy", "waiting", "idle")


class Row(NamedTuple):
    """An actor, or a process that says nothing about its actors.

    `share` is the processor time of its process, in cores, and None at first; `memory` is in bytes.
    """

    state: str
    seconds: float | None
    actor: str
    doing: str
    queued: int
    pid: int
    machine: str
    share: float | None
    memory: int


def rows(
    data: Mapping[str, Any], before: Mapping[str, Any] | None = None, elapsed: float = 0.0
) -> list[Row]:
    """Return the rows, in the order in which they need attention.

    Args:
        data: a diagnosis.
        before: an earlier one.
        elapsed: the seconds between them.
    """
    used = {member["uid"]: member["cpu"] for member in before["processes"]} if before else {}
    accounts = {account["uid"]: account for account in data["accounts"]}
    found: list[Row] = []
    for member in data["processes"]:
        share = None
        if elapsed > 0 and member["uid"] in used:
            share = max(0.0, member["cpu"] - used[member["uid"]]) / elapsed
        place = member["pid"], member["machine"], share, member["rss"]
        account = accounts.get(member["uid"])
        if account is None:
            state = "stopped" if member["state"] in ("T", "t") else "silent"
            doing = f"state {member['state']}" if member["state"] else ""
            found.append(Row(state, None, "(does not answer)", doing, 0, *place))
            continue
        if account["script"] is not None:
            found.append(_row("the script", 0, [account["script"]], place))
        actors = [actor for actor in account["actors"] if not actor["system"]]
        computes = len(actors) == 1 and share is not None and share >= _MUCH
        found += [
            _row(actor["display"], actor["queued"], actor["doing"], place, computes)
            for actor in actors
        ]
    return sorted(found, key=lambda row: (_ORDER.index(row.state), -(row.seconds or 0.0)))


def _row(
    name: str,
    queued: int,
    doing: Sequence[Mapping[str, Any]],
    place: Any,
    computes: bool = False,
) -> Row:
    """Return the row of an actor, with the longest of what it does.

    It is busy between two messages as well: if more of them wait, or if it computes most of the
    time.
    """
    if not doing:
        is_busy = queued or computes
        text = "between two messages" if is_busy else ""
        return Row("busy" if is_busy else "idle", None, name, text, queued, *place)
    longest = max(doing, key=lambda activity: activity["seconds"] or 0.0)
    wait = longest["wait"]
    seconds = longest["seconds"]
    if longest.get("debugged", False):
        state, text = "debugged", longest["place"]
    elif wait is not None:
        state, text = "waiting", f"for {wait['call']}"
        seconds = wait["seconds"] if wait["seconds"] is not None else seconds
    else:
        state, text = "busy", longest["place"]
    endpoint = f"{longest['endpoint']}() " if longest["endpoint"] else ""
    if wait is None and text.startswith(endpoint):
        endpoint = ""
    more = f" and {len(doing) - 1} more" if len(doing) > 1 else ""
    return Row(state, seconds, name, f"{endpoint}{text}{more}", queued, *place)


def summary(found: Sequence[Row], data: Mapping[str, Any]) -> str:
    """Return the line above the table."""
    states = [row.state for row in found]
    counts = [f"{states.count(state)} {state}" for state in _ORDER if state in states]
    hosts = len({member["host"] for member in data["processes"]})
    lost = data["missing_hosts"]
    missing = f"; no answer from {', '.join(lost)}" if lost else ""
    of_hosts = f"{hosts} host{'s' if hosts != 1 else ''}"
    return (
        f"script {data['pid']}: {len(data['processes'])} processes on {of_hosts}: "
        f"{', '.join(counts)}{missing}"
    )


_COLUMNS = ("STATE", "SINCE", "QUEUE", "CPU", "MEMORY", "PID", "HOST", "ACTOR", "DOES")
_LEFT = 6  # the first column that is aligned to the left, but that of the states
_NAMES = 40  # characters of a host or an actor that are shown


def table(found: Sequence[Row], width: int, height: int) -> list[str]:
    """Return the lines of a table, at most `height` of at most `width` characters."""
    shown = list(found)
    if len(shown) + 1 > height:
        shown = shown[: max(0, height - 2)]
    cells = [_COLUMNS, *(tuple(_cells(row)) for row in shown)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines: list[str] = []
    for line in cells:
        parts = [
            cell.ljust(size) if column == 0 or column >= _LEFT else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip()[:width])
    if len(shown) < len(found):
        lines.append(f"and {len(found) - len(shown)} more"[:width])
    return lines[:height]


def _cells(row: Row) -> Iterator[str]:
    yield row.state
    yield "" if row.seconds is None else _time(row.seconds)
    yield str(row.queued) if row.queued else ""
    yield "" if row.share is None else f"{100 * row.share:.0f}%"
    yield f"{row.memory / 1e6:,.0f} MB" if row.memory else ""
    yield str(row.pid)
    yield row.machine[:_NAMES]
    yield row.actor[:_NAMES]
    yield row.doing


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
