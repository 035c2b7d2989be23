"""Every test module must leave the machine as it found it.

Measured around each module, once its meshes are stopped: processes, descriptors, threads and named
shared memory. What the runtime keeps for the life of a client is base line, not a leak: one host
agent, a launcher per launch environment, the reactor, pooled segments. Of processes we know these
by where they hang: the agent is our child and launchers are its children; procs hang below them.

Killed processes end when the kernel says so, hence a bounded wait for those that are on their way.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from monarch._engine.launch import own_folder
from tests.skipped import summary

GRACE = 60.0
"""Seconds a process or thread that was told to stop may take to be gone."""

LONG_LIVED_FDS = 16
"""Descriptors that the runtime may open in a module and keep: agent, launchers, reactor."""

RUN = "pymonarch-run-"  # directories of test runs

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, Any, Any]:
    """Right above the closing line: what was skipped, and what would have it run."""
    result = yield
    skipped = terminalreporter.stats.get("skipped", [])
    for line in summary(report.longrepr[2] for report in skipped):
        terminalreporter.write_line(line)
    return result


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


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes of this run report their faults, see `no_faults`.

    Not when this module is loaded: processes of meshes load it, too. The next run removes the
    directory of one that was killed.
    """
    own_folder.remove_stale(RUN, tempfile.gettempdir())
    folder, fd = own_folder.make(RUN, tempfile.gettempdir())
    config.add_cleanup(functools.partial(os.close, fd))
    config.add_cleanup(functools.partial(shutil.rmtree, folder))
    path = Path(folder, "faults")
    path.touch()
    os.environ["MONARCH_FAULT_FILE"] = str(path)  # of the processes that are started, too


MARKERS = {"error": "internal_errors", "failure": "failures"}


class FaultFile:
    """Errors of reactors and failures that reach the root, of all processes, in order."""

    def __init__(self) -> None:
        self._path = Path(os.environ["MONARCH_FAULT_FILE"])
        self._read = 0
        self._tests: list[tuple[float, set[str]]] = []  # when they began, and what they want

    def begin(self, wanted: set[str]) -> None:
        """A test begins that wants these kinds of records."""
        self._tests.append((time.time(), wanted))

    def _is_wanted(self, kind: str, when: float) -> bool:
        """Whether the test under way wants it, or the one during which it happened.

        A failure may be noticed after the test that caused it.
        """
        then = [wanted for began, wanted in self._tests if began <= when][-1:]
        return kind in self._tests[-1][1] or (bool(then) and kind in then[0])

    def unwanted(self) -> list[str]:
        """The new records that no test wants."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            records = file.readlines()
        self._read += sum(map(len, records))
        return [
            f"{kind} in process {pid}:\n{text}"
            for kind, pid, when, text in map(json.loads, records)
            if not self._is_wanted(kind, when)
        ]


@pytest.fixture(scope="session")
def fault_file() -> FaultFile:
    return FaultFile()


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest, fault_file: FaultFile) -> Iterator[None]:
    """Fail a test during which a reactor reported an internal error, or a failure reached the root.

    Unless it says that it wants them: by a marker (`internal_errors`, `failures`), or, of the
    latter, by asking for the fixture `faults`, which holds them.
    """
    wanted = {kind for kind, name in MARKERS.items() if request.node.get_closest_marker(name)}
    function = getattr(request.node, "function", None)  # (a doctest has none)
    if function is not None and "faults" in inspect.signature(function).parameters:
        wanted.add("failure")
    fault_file.begin(wanted)
    yield
    if found := fault_file.unwanted():
        pytest.fail("no test wants these:\n" + "\n".join(found), pytrace=False)


@pytest.fixture(scope="module", autouse=sys.platform == "linux")
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose tests leave something behind."""
    before = Resources.now()
    yield
    if found := leaks(before):
        pytest.fail(f"{request.node.nodeid} left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def end_of_client(fault_file: FaultFile) -> Iterator[None]:
    """End the client while pytest can still report, not in an exit handler."""
    yield
    if "monarch.actor" in sys.modules:
        from monarch.config import configure

        configure(report_unobserved_errors=False)  # the last line of a run is pytest's
        sys.modules["monarch.actor"].shutdown_context().get(timeout=30)
        assert fault_file.unwanted() == []
        if sys.platform == "linux":
            await_end(frozenset(children(os.getpid())), time.monotonic() + GRACE)
            if left := [f"{pid}: {command(pid)}" for pid in children(os.getpid())]:
                pytest.fail("left running after shutdown_context():\n  " + "\n  ".join(left))
