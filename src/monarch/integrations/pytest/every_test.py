"""The part of the plugin that is loaded if every test is to be checked."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def monarch_every_test(monarch_checked: Any) -> None:
    """Check a test that uses none of the plugin's fixtures as well."""
