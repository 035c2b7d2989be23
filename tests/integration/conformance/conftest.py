"""Fixtures of the conformance suite: black-box tests of the public interface.

Every test here states what a user of the interface may rely on, so the suite runs against any
implementation of it: ours, and the reference distribution (torchmonarch 0.7), which is how we know
that a test states real behaviour and not our wish.  What only holds here carries the marker
``ours`` with the reason, and is skipped when the reference is what is installed::

    pytest tests/integration/conformance                                   # ours
    pytest --confcutdir=tests/integration/conformance tests/integration/conformance
                                                  # with the python of the reference's venv

Rules of the suite.  It imports nothing but public names and the old private paths that programs in
the field use.  It checks exception types and the short fragments that programs match on, never
whole sentences.  The processes of a mesh are expensive on the reference, so tests that do no harm
share the module's meshes (``pair``, ``grid``, ``single``) and spawn their own actors there; a test
that makes an actor fail takes its processes from ``fresh``.  A failure that reaches the root
arrives at ``faults`` instead of killing the test run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import queue
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).resolve().parent
WAIT = 60.0
"""Seconds after which a wait is a hang."""

ON_REFERENCE = importlib.util.find_spec("monarch._engine") is None

if ON_REFERENCE:  # its procs do not get the caller's sys.path
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ours(reason): holds for this engine only; skipped on the reference"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        ours = item.get_closest_marker("ours")
        if ours is not None:
            if not ours.args:
                raise pytest.UsageError(f"{item.nodeid}: the marker ours needs a reason")
            if ON_REFERENCE:
                item.add_marker(pytest.mark.skip(reason=f"ours: {ours.args[0]}"))


class Faults:
    """Failures that reached the root since the test began."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.seen: list[Any] = []

    def __call__(self, failure: Any) -> None:
        self._queue.put(failure)

    def next(self, timeout: float = WAIT) -> Any:
        """Return the next failure, waiting for it."""
        failure = self._queue.get(timeout=timeout)
        self.seen.append(failure)
        return failure

    def drain(self) -> list[Any]:
        """Return the failures that arrived and were not looked at."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        self.seen.extend(found)
        return found


@pytest.fixture(autouse=True)
def faults() -> Faults:
    """Collects what reaches ``monarch.actor.unhandled_fault_hook``.

    A late failure of an earlier test goes to the collector that is installed when it arrives;
    a test that reads failures therefore looks for its own.
    """
    import monarch.actor

    collector = Faults()
    # It stays when the test is over: a failure may still be under way, and the default hook would
    # end the run.
    monarch.actor.unhandled_fault_hook = collector
    return collector


def _stop(procs: Any) -> None:
    with contextlib.suppress(RuntimeError):  # stopped by the test
        procs.stop().get(timeout=WAIT)


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    """Two procs, ``{gpus: 2}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"gpus": 2})
    yield procs
    _stop(procs)


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    """Four procs, ``{rows: 2, cols: 2}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"rows": 2, "cols": 2})
    yield procs
    _stop(procs)


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """One proc, ``{}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs()
    yield procs
    _stop(procs)


@pytest.fixture
def fresh() -> Iterator[Callable[..., Any]]:
    """Makes procs for one test and stops them after it."""
    from monarch.actor import this_host

    with contextlib.ExitStack() as stack:

        def make(per_host: dict[str, int] | None = None, **options: Any) -> Any:
            procs = this_host().spawn_procs(per_host=per_host, **options)
            stack.callback(_stop, procs)
            return procs

        yield make


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a source text as a program of its own and returns what it printed."""

    def run(
        source: str,
        *,
        check: bool = True,
        env: dict[str, str] | None = None,
        timeout: float = WAIT,
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "prog.py"
        path.write_text(textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, str(path)],
            check=False,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
