"""`Resources`: what this process has, and its descendants, to find what a test left behind.

The runtime keeps some resources as long as its client lives, which are no leak: one host agent, a
launcher for each launch environment, the reactor, pooled segments. The position in the process tree
identifies these processes: the agent is a child of this process, launchers are children of the
agent, and procs are below the launchers. Helpers that `multiprocessing` and torch keep are none
either.

A process that was killed takes some time to exit, so `leaks` waits, within a limit. Linux only:
elsewhere nothing is found.
"""

from __future__ import annotations

import gc
import os
import re
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GRACE", "Resources", "await_exit", "children", "command", "leaks"]

GRACE = 60.0
"""Seconds that a process or thread which was told to stop may take to end."""

_LONG_LIVED_FDS = 16  # descriptors that the runtime may open and keep: agent, launchers, reactor
_RUNTIME_PROCESS = "monarch._engine"
_RUNTIME_THREAD = "monarch-"
_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")


@dataclass(frozen=True)
class Resources:
    """The resources at one moment; see `now`."""

    processes: frozenset[int]
    descriptors: tuple[str, ...]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        """Return the resources of this moment, after a garbage collection."""
        gc.collect()
        return cls(
            processes=frozenset(_descendants(os.getpid())),
            descriptors=tuple(_descriptors()),
            threads=frozenset(
                thread
                for thread in threading.enumerate()
                if not thread.name.startswith(_RUNTIME_THREAD)
            ),
            segments=frozenset(_named_segments()),
        )


def leaks(before: Resources, *, in_process: bool = True) -> list[str]:
    """Return one line for each resource that exists now and did not exist `before`.

    Waits until new processes and threads end, at most `GRACE` seconds. `in_process` is whether
    threads and descriptors of this process are among them.
    """
    deadline = time.monotonic() + GRACE
    await_exit(Resources.now().processes - before.processes, deadline)
    if in_process:
        threads = Resources.now().threads - before.threads
        while threads.intersection(threading.enumerate()) and time.monotonic() < deadline:
            threading.Event().wait(0.001)  # no `join`: it fails for a thread not yet started
    after = Resources.now()
    found = [f"process {pid}: {command(pid)}" for pid in after.processes - before.processes]
    found += [f"shared memory {name}" for name in after.segments - before.segments]
    if in_process:
        found += [f"thread {thread}" for thread in after.threads - before.threads]
        if len(after.descriptors) > len(before.descriptors) + _LONG_LIVED_FDS:
            new = [*(Counter(after.descriptors) - Counter(before.descriptors)).elements()]
            found.append(f"{len(new)} descriptors: {', '.join(sorted(new))}")
    return found


def await_exit(pids: Iterable[int], deadline: float) -> None:
    """Wait until these processes have exited, at most until `deadline` (`time.monotonic`)."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)


def children(pid: int) -> list[int]:
    """Return the children of a process, zombies included."""
    return _children_of_all().get(pid, [])


def command(pid: int) -> str:
    """Return the command line of a process; empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _children_of_all() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        try:
            # The command name is in parentheses, and may contain spaces and parentheses itself.
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.setdefault(parent, []).append(int(pid))
    return found


def _descendants(root: int) -> Iterator[int]:
    """Yield the processes below `root`, except those that are kept."""
    below = _children_of_all()
    level, depth = below.get(root, []), 1
    while level:
        yield from (pid for pid in level if not _is_kept(pid, depth))
        level = [child for pid in level for child in below.get(pid, [])]
        depth += 1


def _is_kept(pid: int, depth: int) -> bool:
    line = command(pid)
    return (depth <= 2 and _RUNTIME_PROCESS in line) or any(name in line for name in _KEPT)


def _descriptors() -> Iterator[str]:
    """Yield the open descriptors, except those of shared memory that is pooled for reuse."""
    folder = Path("/proc/self/fd")
    for fd in folder.iterdir() if sys.platform == "linux" else ():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if not target.startswith("/memfd:monarch"):
            yield target


def _named_segments() -> Iterator[str]:
    """Yield the named shared memory of this process and its descendants, which outlives them."""
    ours = re.compile(rf"monarch|_{os.getpid()}_")
    folder = "/dev/shm"  # noqa: S108 - it is looked at only
    return filter(ours.search, os.listdir(folder) if os.path.isdir(folder) else ())
