"""Which line of the program an actor executes, for a stop that takes long."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from monarch._engine.mesh.meshes import busy
from monarch._engine.runtime.io.stacks import NO_STACK, Stack, stacks

ACTOR: Any = SimpleNamespace(
    serving=None,
    identity=SimpleNamespace(short=lambda: ("trainers.Trainer", "trainer{'gpus': 1/2}")),
)


def test_an_actor_that_executes_nothing_of_the_program_is_not_named() -> None:
    assert busy._story(ACTOR, NO_STACK) == ""


def test_the_innermost_line_of_the_program_is_named() -> None:
    """Not the one of the standard library that it calls."""
    begun, end = threading.Event(), threading.Event()

    def train() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert begun.wait(60)
        stack: Stack = stacks()[thread.ident or 0]
        story = busy._story(ACTOR, stack)
    finally:
        end.set()
        thread.join()
    assert story.startswith("trainer{'gpus': 1/2}, busy in train() at test_busy.py:")
