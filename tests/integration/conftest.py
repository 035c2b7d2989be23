"""What all tests with real processes share: time, and no failures of tests that are over."""

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
    """A host that gets no time for some seconds is not lost, except where that is tested."""
    with pytest.MonkeyPatch.context() as patch, configured(host_timeout=SILENCE):
        patch.setenv("MONARCH_HOST_TIMEOUT", SILENCE)  # of the processes that are started
        yield


@pytest.fixture(scope="session", autouse=True)
def late_failures() -> Iterator[None]:
    """Between two tests that look at failures one is nobody's, and does not end the run."""
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    yield
    monarch.actor.unhandled_fault_hook = before


@pytest.fixture(autouse=True)
def earlier_failures(late_failures: None) -> None:
    """Those of earlier tests have reached whoever looked at them then."""
    deadline = time.monotonic() + 60
    # (Not by `join`: one that is about to start is among them.)
    while any(thread.name == "monarch-fault" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
