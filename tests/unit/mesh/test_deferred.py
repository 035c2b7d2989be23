"""Calls that wait for a future among their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.mesh.call.deferred import defer
from monarch._engine.mesh.results.future import VALUE, Future
from monarch._engine.runtime.io import environment as environments


def test_a_call_that_is_cancelled_while_it_is_sent_is_cancelled_at_the_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_thread(_name: str, run: Callable[[], None]) -> None:
        run()

    monkeypatch.setattr(environments.current, "start_thread", start_thread)
    argument, sent = Future._new(), Future._new()

    def adverb(value: int) -> Any:
        assert value == 5
        call.cancel()  # as another thread does meanwhile
        return sent

    call: Any = defer(None, adverb, (argument,), {})
    argument._resolve(VALUE, 5)
    assert call.cancelled()
    assert sent.cancelled()
