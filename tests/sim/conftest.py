"""Simulated programs start as every program does: with the default hook and the default timeout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import monarch.actor
from monarch.config import configured

DEFAULT = monarch.actor.unhandled_fault_hook  # read before any test has run


@pytest.fixture(autouse=True)
def default_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default hook: tests of real processes leave theirs, for late failures."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", DEFAULT)


@pytest.fixture(autouse=True)
def default_timeout() -> Iterator[None]:
    """Restore the default timeout: tests of real processes raise it for the rest of the run."""
    with configured(host_timeout="3s"):
        yield
