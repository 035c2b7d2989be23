"""Simulated programs start with the default hook for unhandled faults, as every program does."""

from __future__ import annotations

import pytest

import monarch.actor

DEFAULT = monarch.actor.unhandled_fault_hook  # read before any test has run


@pytest.fixture(autouse=True)
def default_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default hook: tests of real processes leave theirs, for late failures."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", DEFAULT)
