"""The output of Slurm's commands, as values.

Formats differ between releases. Slurm 22 prints a job's state as a string and newer releases print
a list of flags. Allocated nodes are a list of objects, in one of two places, or a compressed text
such as ``n[0-2,5]``. An exit code is a wait status or an object. All of these are accepted.
Anything else raises ValueError, whose text says what was expected.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple, cast

__all__ = [
    "FIELDS",
    "SlurmState",
    "addresses_of_text",
    "expand",
    "state_of_json",
    "state_of_text",
    "submitted_id",
]

FIELDS = "%i|%T|%r|%D|%N"
"""The argument of ``squeue --format`` whose output `state_of_text` reads."""

_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
_WAITS = frozenset({
    "COMPLETING", "CONFIGURING", "PENDING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED",
    "REQUEUE_HOLD", "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED",
    "EXPEDITING", "LAUNCH_FAILED", "RECONFIG_FAIL", "UPDATE_DB", "POWERING_UP",
})  # fmt: skip
_AGAIN = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_MOST_NODES = 100_000
_LARGE = 0xFFFF_FFF0  # Slurm prints numbers from here on for "no value"


class SlurmState(NamedTuple):
    """A job as Slurm sees it."""

    flags: tuple[str, ...]
    reason: str = ""
    exit: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int | None = None
    """The number of allocated nodes, if Slurm reports it; of a waiting job: of requested nodes."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good, and Slurm will not start it again."""
        flags = set(self.flags)
        return bool(flags & _ENDED) and not flags & _AGAIN

    @property
    def released(self) -> bool:
        """Whether the job has ended, and holds no node."""
        return self.ended and "COMPLETING" not in self.flags

    @property
    def running(self) -> bool:
        """Whether the job's script runs, and its nodes are ready."""
        return "RUNNING" in self.flags and not set(self.flags) & (_WAITS | _ENDED)

    def __str__(self) -> str:
        text = "+".join(self.flags)
        more = [self.reason] if self.reason not in ("", "None") else []
        if self.ended and self.exit:
            more.append(self.exit)
        return f"{text} ({', '.join(more)})" if more else text


def submitted_id(text: str) -> int:
    """Return the number in the output of ``sbatch``. Raises ValueError.

    >>> submitted_id("Submitted batch job 12"), submitted_id("13;cluster")
    (12, 13)
    """
    for pattern in (r"^Submitted batch job (\d+)\b", r"^(\d+)(?:;\S+)?$"):
        if found := re.search(pattern, text, re.MULTILINE):
            return int(found[1])
    raise ValueError("there is no line `Submitted batch job NUMBER`")


def state_of_json(text: str, number: int) -> SlurmState | None:
    """Return the state of this job in the output of ``squeue --json``; None: it is not there."""
    try:
        jobs = json.loads(text)["jobs"]
        found = [job for job in jobs if _number(job["job_id"]) == number]
        if not found:
            return None
        return _state(found[0])
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"a part is missing or has another form ({error!r})") from error


def state_of_text(text: str, number: int) -> SlurmState | None:
    """Return the state of this job in the output of ``squeue`` with the format `FIELDS`."""
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) < 5 or words[0] != str(number):
            continue
        flags = _flags(words[1])
        # A reason may contain the separator.
        return SlurmState(
            flags,
            "|".join(words[2:-2]),
            nodes=tuple(expand(words[-1])),
            node_count=int(words[-2]) if re.fullmatch("[0-9]{1,9}", words[-2]) else None,
        )
    if text.strip() and "|" not in text:
        raise ValueError("there are no columns")
    return None


def addresses_of_text(text: str) -> dict[str, str]:
    """Return the address of each node in the output of ``scontrol show node --oneliner``.

    >>> addresses_of_text("NodeName=n0 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=host")
    {'n0': '10.0.0.1'}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        name = re.match(r"NodeName=(\S+)", line)
        address = re.search(r"\sNodeAddr=(\S+)", line)
        if name and address:
            found[name[1]] = address[1]
    return found


def expand(hosts: str) -> list[str]:
    """Return the names in Slurm's short form of a list of nodes. Raises ValueError.

    >>> expand("n[08-10,12],login,gpu[1-2]-[0-1]")
    ['n08', 'n09', 'n10', 'n12', 'login', 'gpu1-0', 'gpu1-1', 'gpu2-0', 'gpu2-1']
    """
    if hosts.strip() in ("", "(null)", "None assigned"):
        return []
    names: list[str] = []
    # Commas inside brackets belong to an item.
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\],]", hosts.strip()):
        if item == ",":
            continue
        parts: list[list[str]] = []
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            parts.append([plain] if plain else list(_ranges(ranges, hosts)))
        if not parts or item in "[]":
            raise ValueError(f"{hosts!r} is no list of nodes")
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > _MOST_NODES:
            raise ValueError(f"{hosts[:80]!r} has more than {_MOST_NODES:,} nodes")
        names += ("".join(parts) for parts in itertools.product(*parts))
    return names


def _ranges(text: str, hosts: str) -> list[str]:
    names: list[str] = []
    for one in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", one)
        if found is None:
            raise ValueError(f"{hosts!r} is no list of nodes: {one!r}")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NODES:
            raise ValueError(f"{hosts!r} is no list of nodes: {one!r}")
        names += (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return names


def _flags(state: object) -> tuple[str, ...]:
    """Return the words of a job's state, which is a string or a list. Raises ValueError."""
    words = re.split(r"[+,\s]+", state) if isinstance(state, str) else state
    if not isinstance(words, list) or not words:
        raise ValueError(f"{state!r} is no state of a job")
    flags = tuple(str(word).upper() for word in cast("list[object]", words) if word)
    if not any(flag in _ENDED or flag in _WAITS or flag == "RUNNING" for flag in flags):
        raise ValueError(f"{state!r} is no state of a job that is known here")
    return flags


def _state(job: dict[str, Any]) -> SlurmState:
    resources: Any = job.get("job_resources") or {}
    count = _number(resources.get("allocated_hosts", job.get("node_count")))
    return SlurmState(
        _flags(job["job_state"]),
        str(job.get("state_reason") or ""),
        _exit(job.get("exit_code")),
        tuple(_nodes(job, resources)),
        count,
    )


def _nodes(job: dict[str, Any], resources: dict[str, Any]) -> list[str]:
    nodes: Any = resources.get("nodes")
    allocated: Any = None
    if isinstance(nodes, dict):
        allocated = cast("dict[str, Any]", nodes).get("allocation")
    if allocated is None:
        allocated = resources.get("allocated_nodes")
    if isinstance(allocated, dict):  # by number
        numbered = cast("dict[str, Any]", allocated)
        allocated = [numbered[key] for key in sorted(numbered, key=_by_number)]
    if allocated:
        return [str(node.get("name") or node["nodename"]) for node in allocated]
    return expand(str(job.get("nodes") or ""))


def _by_number(key: object) -> tuple[int, str]:
    text = str(key)
    return (int(text) if text.isdecimal() else 0), text


def _number(value: Any) -> int | None:
    """Return a number that is written plainly, or as an object with the key ``number``."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        value = fields.get("number") if fields.get("set", True) else None
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        value = int(value)
    return value if isinstance(value, int) and value < _LARGE else None


def _exit(value: Any) -> str:
    """Return how the job's script ended, in words; an empty string if it is not known."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        signal: Any = fields.get("signal") or {}
        number = _number(signal.get("signal_id", signal.get("id")))
        status = _number(fields.get("return_code"))
    else:
        code = _number(value)
        number, status = (None, None) if code is None else (code & 127, code >> 8)
    if number:
        return f"signal {number}"
    return "" if status is None else f"exit code {status}"
