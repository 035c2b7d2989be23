"""Checks for every test: no leaked resources, and no unexpected faults.

Processes, descriptors, threads and named shared memory are counted before and after each module,
once its meshes are stopped, by the means of the plugin (`monarch.integrations.pytest`).
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import functools
import gc
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from monarch._engine.launch import own_folder
from monarch.integrations.pytest.resources import (
    GRACE,
    Resources,
    await_exit,
    children,
    command,
    leaks,
)
from tests import warm
from tests.reruns import Reruns
from tests.skipped import summary

LIMIT = pytest.StashKey[Any]()

MEMORY = 12 << 30
"""Bytes that this process may take: beyond, a `MemoryError` says where it is; the kernel kills."""

RUN_BEFORE: dict[str, None] = {}
"""The files whose tests this process has run, in their order."""

KEPT = 1 << 30
"""Bytes by which this process may grow during the tests of a module."""

RUN = "pymonarch-run-"  # prefix of the directories of test runs

# The examples are the same in each run and have no deadline, so that a run does not fail by chance.
# Use --hypothesis-profile=explore for random examples.
hypothesis.settings.register_profile(
    "explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "steady", hypothesis.settings.get_profile("explore"), derandomize=True, database=None
)
hypothesis.settings.load_profile("steady")

# Any free port: another test run may use the default one.
os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"

# All workers of a run collect the same tests, also past midnight (see tests/docs/test_promises.py).
os.environ.setdefault("PROMISES_OF_DAY", time.strftime("%Y-%m-%d", time.gmtime()))

# A test run in the background (`nohup make test &`) ignores these signals. The programs that tests
# interrupt would inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use two workers more than there are cores (``-n auto``), since tests wait much."""
    return (os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.file_queue import FileQueue  # other Pythons have no pytest-xdist

    config.option.loadscopereorder = False  # `longest_first` has sorted
    return FileQueue(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.file_queue import longest_first

        longest_first(items)


def pytest_collection_finish() -> None:
    """Freeze the objects that exist before the first test, to speed up later collections."""
    gc.collect()
    gc.freeze()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Keep the limit of a test for its second try; pytest-timeout sets it for the first only."""
    item.stash[LIMIT] = settings


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Say with a failure which files this process has run: each worker has an order of its own."""
    report = yield
    file = item.nodeid.partition("::")[0]
    RUN_BEFORE[file] = None
    if report.failed:
        report.sections.append(("files that this process has run", "\n".join(RUN_BEFORE)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1 and LIMIT in item.stash:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[LIMIT])


class SecondTries:
    """Keeps the record of second tries (see ``--reruns``), and fails a run that has too many."""

    def __init__(self, config: pytest.Config) -> None:
        # The tests on another Python have a cache of their own, and so a record.
        cache = getattr(config, "cache", None)  # none with `-p no:cacheprovider`
        self._record = Reruns(config.rootpath, cache and cache.mkdir("reruns"))
        self._reports: list[pytest.TestReport] = []
        self._faults: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self._reports.append(report)
            self._record.add(report.nodeid, report.longreprtext, os.getloadavg()[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._faults = self._record.close()
        if self._faults and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, Any, Any]:
        result = yield
        for report in self._reports:
            terminalreporter.write_line(f"failed, and was tried again: {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)
        for fault in self._faults:
            terminalreporter.write_line(f"error: {fault}")
        return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, Any, Any]:
    """Print the skipped tests, and what they need, just before the last line of the run."""
    result = yield
    for report in terminalreporter.stats.get("passed", []):
        for line in (value for name, value in report.user_properties if name == "says"):
            terminalreporter.write_line(line)
    skipped = terminalreporter.stats.get("skipped", [])
    for line in summary(report.longrepr[2] for report in skipped):
        terminalreporter.write_line(line)
    return result


def pytest_unconfigure() -> None:
    """Keep pytest's closing line the last one: duckdb's binding prints at exit that it leaks.

    It means its own types, whose module outlives the interpreter while a daemon thread runs.
    """
    if "_duckdb" in sys.modules:
        atexit.register(_be_calm)  # not now: pytest restores its standard error after this hook


def _be_calm() -> None:
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def pytest_configure(config: pytest.Config) -> None:
    """Set the file to which the processes of this run report their faults, see `no_faults`.

    This is not done on import, since processes of meshes import this module, too. If a run is
    killed, the next run removes its directory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))
    own_folder.remove_stale(RUN, tempfile.gettempdir())
    folder, fd = own_folder.make(RUN, tempfile.gettempdir())
    config.add_cleanup(functools.partial(os.close, fd))
    config.add_cleanup(functools.partial(shutil.rmtree, folder))
    path = Path(folder, "faults")
    path.touch()
    os.environ["MONARCH_FAULT_FILE"] = str(path)  # processes that are started inherit it
    if config.getoption("reruns", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTries(config), "second tries")


MARKERS = {"error": "internal_errors", "failure": "failures"}


class FaultFile:
    """The file with errors of reactors and failures that reach the root, of all processes."""

    def __init__(self) -> None:
        self._path = Path(os.environ["MONARCH_FAULT_FILE"])
        self._read = 0
        self._tests: list[tuple[float, set[str]]] = []  # start time, and expected kinds of records

    def begin(self, wanted: set[str]) -> None:
        """Note the start of a test that expects these kinds of records."""
        self._tests.append((time.time(), wanted))

    def _is_wanted(self, kind: str, when: float) -> bool:
        """Whether the present test expects such a record, or the test during which it was made.

        A failure may be detected after the test that caused it.
        """
        then = [wanted for began, wanted in self._tests if began <= when][-1:]
        return kind in self._tests[-1][1] or (bool(then) and kind in then[0])

    def unwanted(self) -> list[str]:
        """Return the new records that no test expects."""
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

    A test can expect such records: by a marker (`internal_errors`, `failures`), or, for failures,
    by using the fixture `faults`, which collects them.
    """
    wanted = {kind for kind, name in MARKERS.items() if request.node.get_closest_marker(name)}
    function = getattr(request.node, "function", None)  # a doctest has no function
    if function is not None and "faults" in inspect.signature(function).parameters:
        wanted.add("failure")
    fault_file.begin(wanted)
    yield
    if found := fault_file.unwanted():
        pytest.fail("no test wants these:\n" + "\n".join(found), pytrace=False)


@pytest.fixture(scope="module", autouse=sys.platform == "linux")
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose tests leave resources behind."""
    before, memory = Resources.now(), resident()
    yield
    before = dataclasses.replace(before, processes=before.processes | warm.processes())
    found = leaks(before)
    if (grown := resident() - memory) > KEPT:
        faulthandler.dump_traceback(all_threads=True)
        found.append(f"{grown >> 20} MiB of memory; what the threads do is on standard error")
    if found:
        pytest.fail(f"{request.node.nodeid} left behind:\n  " + "\n  ".join(found), pytrace=False)


def resident() -> int:
    """Return the bytes of memory of this process that it shares with no other."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


@pytest.fixture(scope="session", autouse=True)
def end_of_client(fault_file: FaultFile) -> Iterator[None]:
    """End the client while pytest can still report errors, and not in an exit handler."""
    yield
    if "monarch.actor" in sys.modules:
        from monarch.config import configure

        configure(report_unobserved_errors=False)  # pytest's summary stays the last line
        sys.modules["monarch.actor"].shutdown_context().get(timeout=30)
        assert fault_file.unwanted() == []
        if sys.platform == "linux":
            await_exit({*children(os.getpid())} - warm.processes(), time.monotonic() + GRACE)
            if left := {*children(os.getpid())} - warm.processes():
                lines = [f"{pid}: {command(pid)}" for pid in left]
                pytest.fail("left running after shutdown_context():\n  " + "\n  ".join(lines))
