"""A message that arrives before its actor waits for it; one that arrives just after does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.runtime.proc.early import EarlyMessages
from monarch._engine.wire.frame import CALL, Frame

ACTOR = 7


def test_an_actor_that_was_spawned_meanwhile_has_the_message_at_once() -> None:
    """The reactor looks for the actor before it holds the message for it."""
    got: list[Any] = []
    cell = SimpleNamespace(uid=ACTOR, put=lambda *message: got.append(message))
    early = EarlyMessages(SimpleNamespace(cells={ACTOR: cell}))  # type: ignore[arg-type]
    link: Any = object()
    call = Frame(CALL, 0, ACTOR, 0, 0, 0, b"", b"")
    assert early.keep(link, call)
    assert got == [(link, call)]
