"""Fixtures of all tests with real processes: long time limits, no failures of earlier tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

import monarch.actor
from monarch._engine.runtime.agent import client
from monarch.config import configured

SILENCE = "5s"


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A host that gets no CPU time for some seconds is not lost, except where that is tested."""
    with pytest.MonkeyPatch.context() as patch, configured(host_timeout=SILENCE):
        patch.setenv("MONARCH_HOST_TIMEOUT", SILENCE)  # for the processes that are started
        yield


@pytest.fixture(scope="module", autouse=True)
def own_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """New processes import torch and numpy if the test module has done so itself.

    Launchers import what the program has imported. A test run has imported all test modules, so
    each of its hosts would import torch, which takes seconds.
    """
    modules = [value for value in vars(request.module).values() if isinstance(value, ModuleType)]
    own = {module.__name__.partition(".")[0] for module in modules}
    preloads = client._preloads

    def of_this_module() -> list[str]:
        others = {"numpy", "torch"} - own
        return [name for name in preloads() if name.partition(".")[0] not in others]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_preloads", of_this_module)
        yield


@pytest.fixture(scope="session", autouse=True)
def late_failures() -> Iterator[None]:
    """A failure between two tests that check failures belongs to neither: ignore it."""
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    yield
    monarch.actor.unhandled_fault_hook = before


@pytest.fixture(autouse=True)
def earlier_failures(late_failures: None) -> None:
    """Wait until the failures of earlier tests have been delivered."""
    deadline = time.monotonic() + 60
    # (Not by `join`: one of the threads may be about to start.)
    while any(thread.name == "monarch-fault" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
