"""Procs for the tests of recipes: two that all tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch.actor import this_host

WAIT = 60.0
"""Seconds after which a wait is a hang."""


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    procs = this_host().spawn_procs({"procs": 2})
    yield procs
    procs.stop().get(timeout=WAIT)
