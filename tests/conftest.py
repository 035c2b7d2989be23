"""Every test module must leave the machine as it found it.

Measured around each module, once its meshes are stopped: processes, descriptors, threads and named
shared memory. What the runtime keeps for the life of a client is base line, not a leak: one host
agent, a launcher per launch environment, the reactor, pooled segments. Of processes we know these
by where they hang: the agent is our child and launchers are its children; procs hang below them.

Killed processes end when the kernel says so, hence a bounded wait for those that are on their way.
"""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

GRACE = 60.0
"""Seconds a process or thread that was told to stop may take to be gone."""

LONG_LIVED_FDS = 16
"""Descriptors that the runtime may open in a module and keep: agent, launchers, reactor."""

RUNTIME_PROCESS = "monarch._engine"
RUNTIME_THREAD = "monarch-"

# No run fails for what another one passes: the examples are the same each time, and may take what
# they take. Others are tried with --hypothesis-profile=explore.
hypothesis.settings.register_profile(
    "explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "steady", hypothesis.settings.get_profile("explore"), derandomize=True, database=None
)
hypothesis.settings.load_profile("steady")

# Whatever port is free: the default may be another run's.
os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"

# A run that was started in the background (`nohup make test &`) ignores these signals, and would
# pass that on to the programs that tests interrupt.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the many collections below need not look."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Resources:
    processes: frozenset[int]
    descriptors: tuple[str, ...]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        return cls(
            processes=frozenset(descendants(os.getpid())),
            descriptors=tuple(descriptors()),
            threads=frozenset(
                thread
                for thread in threading.enumerate()
                if not thread.name.startswith(RUNTIME_THREAD)
            ),
            segments=frozenset(named_segments()),
        )


def children_of_all() -> dict[int, list[int]]:
    """Who is whose child on this machine, zombies included."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name, in parentheses, may itself hold spaces and parentheses.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.setdefault(parent, []).append(int(stat.parent.name))
    return found


def children(pid: int) -> list[int]:
    return children_of_all().get(pid, [])


def descendants(root: int) -> Iterator[int]:
    """The processes below `root` less the agent and its launchers."""
    below = children_of_all()
    level, depth = below.get(root, []), 1
    while level:
        yield from (pid for pid in level if not (depth <= 2 and is_runtime(pid)))
        level = [child for pid in level for child in below.get(pid, [])]
        depth += 1


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_runtime(pid: int) -> bool:
    return RUNTIME_PROCESS in command(pid)


def descriptors() -> Iterator[str]:
    """What is open, less the shared memory that is pooled for reuse."""
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue  # the listing's own
        if not target.startswith("/memfd:monarch"):
            yield target


def named_segments() -> Iterator[str]:
    """Shared memory that outlives its processes, made by this process or one below it."""
    ours = re.compile(rf"monarch|_{os.getpid()}_")
    shm = Path("/dev/shm")
    return (entry.name for entry in shm.iterdir() if ours.search(entry.name))


def await_end(pids: frozenset[int], deadline: float) -> None:
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)


def leaks(before: Resources) -> list[str]:
    """One line for each thing that is there and was not before."""
    deadline = time.monotonic() + GRACE
    await_end(Resources.now().processes - before.processes, deadline)
    threads = Resources.now().threads - before.threads
    while threads.intersection(threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)  # (one that is about to start cannot be joined)
    after = Resources.now()
    found = [f"process {pid}: {command(pid)}" for pid in after.processes - before.processes]
    found += [f"thread {thread}" for thread in after.threads - before.threads]
    found += [f"/dev/shm/{name}" for name in after.segments - before.segments]
    if len(after.descriptors) > len(before.descriptors) + LONG_LIVED_FDS:
        old = list(before.descriptors)
        new = [fd for fd in after.descriptors if fd not in old or old.remove(fd)]
        found.append(f"{len(new)} descriptors: {', '.join(sorted(new))}")
    return found


@pytest.fixture(scope="module", autouse=sys.platform == "linux")
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose tests leave something behind."""
    before = Resources.now()
    yield
    if found := leaks(before):
        pytest.fail(f"{request.node.nodeid} left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def end_of_client() -> Iterator[None]:
    """End the client while pytest can still report, not in an exit handler."""
    yield
    if "monarch.actor" in sys.modules:
        sys.modules["monarch.actor"].shutdown_context().get(timeout=30)
        if sys.platform == "linux":
            await_end(frozenset(children(os.getpid())), time.monotonic() + GRACE)
            if left := [f"{pid}: {command(pid)}" for pid in children(os.getpid())]:
                pytest.fail("left running after shutdown_context():\n  " + "\n  ".join(left))
