"""Fixtures of all tests with real processes: long time limits, no failures of earlier tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import monarch.actor
from monarch.config import configured

SILENCE = "5s"


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A host that gets no CPU time for some seconds is not lost, except where that is tested."""
    with pytest.MonkeyPatch.context() as patch, configured(host_timeout=SILENCE):
        patch.setenv("MONARCH_HOST_TIMEOUT", SILENCE)  # for the processes that are started
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
