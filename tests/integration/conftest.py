"""What all tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.config import configured

SILENCE = "10s"


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A host that gets no time for some seconds is not lost, except where that is tested."""
    with pytest.MonkeyPatch.context() as patch, configured(host_timeout=SILENCE):
        patch.setenv("MONARCH_HOST_TIMEOUT", SILENCE)  # of the processes that are started
        yield
