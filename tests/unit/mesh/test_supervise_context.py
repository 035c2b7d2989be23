"""The context in which a supervisor runs."""

from __future__ import annotations

import contextvars
from typing import Any

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.mesh.call.context import Instance, context, enter
from monarch._engine.shapes import Extent
from monarch._engine.shapes.point import point_of


def test_a_supervisor_runs_in_the_context_of_its_actor_and_of_no_message() -> None:
    """The last message may have come by a slice, in which the actor has another rank."""
    unused: Any = None
    mine = point_of(3, Extent(["gpus"], [4]))
    instance = Instance(mine, unused, "owner", "Owner", None, None)
    seen: list[Any] = []

    def supervise(_failure: Any) -> bool:
        seen.append((context().actor_instance, context().message_rank))
        return True

    def judge() -> Any:
        enter(instance, 0, Extent([], []))
        return instance._judge()

    instance._supervisor = supervise
    instance._unheard.append(Failure("<root>.<W w>", Verdict(FAILED, "it failed")))
    assert contextvars.copy_context().run(judge) is None
    assert seen == [(instance, mine)]
