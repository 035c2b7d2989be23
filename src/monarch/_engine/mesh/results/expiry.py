"""The end of a call whose time limit has passed, unless a debugger had stopped the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._engine.base.features import find
from monarch._engine.mesh.results.future import PENDING
from monarch._engine.runtime.io import environment as environments

if TYPE_CHECKING:
    from monarch._engine.mesh.results.gather import Gather
    from monarch._engine.mesh.results.reply import Reply
    from monarch._engine.runtime.io.reactor import Reactor, Timer

__all__ = ["expire"]


def expire(reactor: Reactor, waiting: Reply[Any] | Gather[Any], limit: float, began: float) -> None:
    """End a call whose limit of `limit` seconds since `began` has passed; on the reactor.

    A limit that has time left, since the program was stopped meanwhile, is examined again then.
    """
    settle_limit = find("settle_limit")
    timers: list[Timer] = []

    def examine() -> None:
        if waiting._phase != PENDING:
            return
        if settle_limit is None:
            waiting._expire()
        else:
            settle_limit(limit, began, settle)

    def cancel() -> None:
        timers[-1].cancel()  # the one that is due next

    def settle(left: float) -> None:
        if waiting._phase != PENDING:
            return
        if not left:
            waiting._expire()
            return
        timers.append(reactor.call_at(environments.current.now() + left, examine))
        if len(timers) == 1:
            waiting._notify(cancel)
        else:
            del timers[0]

    examine()
