"""The proc of a test, without a reactor that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch._engine.runtime.proc.proc import Proc


@pytest.fixture
def proc() -> Iterator[Proc]:
    made = Proc(1, "test", lambda proc, link, frame: None, lambda proc, frame: None, client=False)
    yield made
    made.reactor.close()
