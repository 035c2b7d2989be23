"""Simulated programs start with the hook for unhandled faults that every program starts with."""

from __future__ import annotations

import pytest

import monarch.actor

DEFAULT = monarch.actor.unhandled_fault_hook  # read before any test has run


@pytest.fixture(autouse=True)
def default_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of real processes leave theirs in place, for failures that come late."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", DEFAULT)
