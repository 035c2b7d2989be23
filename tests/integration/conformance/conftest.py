"""Fixtures of the conformance suite: black-box tests of the public interface.

Every test states what a user of the interface may rely on. The suite runs against any
implementation: this one, and the reference distribution (torchmonarch 0.7). The runs on the
reference show that a test states real behaviour and not a wish. A test that holds only for this
engine has the marker ``ours`` with the reason, and is skipped on the reference::

    pytest tests/integration/conformance                                   # this engine
    pytest --confcutdir=tests/integration/conformance tests/integration/conformance
                                                  # with the python of the reference's venv

Rules of the suite:

- It imports only public names, and the old private paths that existing programs use.
- It checks exception types and the short fragments that programs match on, never whole sentences.
- A mesh's processes are expensive on the reference. Tests in which no actor fails share the
  module's meshes (``pair``, ``grid``, ``single``) and spawn their own actors there. A test that
  makes an actor fail takes its processes from ``fresh``.
- A failure that reaches the root is collected by ``faults`` instead of killing the test run.
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

if ON_REFERENCE:  # the reference's procs do not get the caller's sys.path
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
    """The failures that reached the root since the test began; callable as the root's hook."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.seen: list[Any] = []

    def __call__(self, failure: Any) -> None:
        self._queue.put(failure)

    def next(self, timeout: float = WAIT) -> Any:
        """Wait for the next failure and return it; raise `queue.Empty` after `timeout` seconds."""
        failure = self._queue.get(timeout=timeout)
        self.seen.append(failure)
        return failure

    def drain(self) -> list[Any]:
        """Return the failures that arrived and that `next` has not returned, without waiting."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        self.seen.extend(found)
        return found


@pytest.fixture(autouse=True)
def faults() -> Faults:
    """Collect the failures that reach ``monarch.actor.unhandled_fault_hook``.

    A late failure of an earlier test goes to the collector that is installed when it arrives.
    A test that reads failures must therefore select its own.
    """
    import monarch.actor

    collector = Faults()
    # The collector stays installed after the test: a failure may still be in flight, and the
    # default hook would end the run.
    monarch.actor.unhandled_fault_hook = collector
    return collector


def _stop(procs: Any) -> None:
    with contextlib.suppress(RuntimeError):  # already stopped by the test
        procs.stop().get(timeout=WAIT)


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    """Yield two procs, ``{gpus: 2}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"gpus": 2})
    yield procs
    _stop(procs)


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    """Yield four procs, ``{rows: 2, cols: 2}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"rows": 2, "cols": 2})
    yield procs
    _stop(procs)


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """Yield one proc, ``{}``; no test may make an actor fail there."""
    from monarch.actor import this_host

    procs = this_host().spawn_procs()
    yield procs
    _stop(procs)


@pytest.fixture
def fresh() -> Iterator[Callable[..., Any]]:
    """Yield a function that spawns procs; stop them all after the test."""
    from monarch.actor import this_host

    with contextlib.ExitStack() as stack:

        def make(per_host: dict[str, int] | None = None, **options: Any) -> Any:
            procs = this_host().spawn_procs(per_host=per_host, **options)
            stack.callback(_stop, procs)
            return procs

        yield make


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a source text in a new interpreter: status and output."""

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
