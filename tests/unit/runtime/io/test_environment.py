"""The threads of actors, as debuggers list them and as the end of an interpreter finds them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.io.environment import Environment


@pytest.mark.parametrize(
    ("is_async", "name"), [(False, "monarch-actor-driver"), (True, "monarch-actor-event-loop")]
)
def test_the_thread_of_an_actor_has_a_name_and_keeps_no_interpreter(
    is_async: bool, name: str
) -> None:
    cell: Any = SimpleNamespace(is_async=is_async)
    began, ran = threading.Event(), list[tuple[str, bool, bool]]()

    def run(served: Any) -> None:
        thread = threading.current_thread()
        ran.append((thread.name, thread.daemon, served.thread_id == thread.ident))
        began.set()

    Environment().start_actor(cell, run)
    assert began.wait(60)
    assert ran == [(name, True, True)]
