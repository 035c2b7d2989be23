"""One-way messages that find nobody: they go back to the actor that sent them.

A broadcast, a `send` without a port and `Port.send` have no future that could fail. If the receiver
is gone, the sender's `_handle_undeliverable_message` is asked, if its class has one. Nothing else
happens to the sender: what is not handled is a dead letter (`runtime.dead_letters`).

* A process that lives, where the receiver lived, refuses the message. It says so at the sender's
  *return port*, whose number travels in the message's meta.
* That a process is gone, the send itself notices, once the sender has learned of it.
* What was on its way into a process that died is lost: nobody knows what became of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch._engine.base.failure import Failure, UndeliverableMessageEnvelope
from monarch._engine.mesh.context import Instance, context, enter
from monarch._engine.runtime.cell import Cell
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.ends import Verdict

__all__ = ["ReturnPort", "give_back"]


class ReturnPort:
    """Where the messages of one actor come back to.

    Args:
        instance: the actor.
        cell: its cell.
        handler: its `_handle_undeliverable_message`, plain or async.
    """

    def __init__(self, instance: Instance, cell: Cell, handler: Callable[[Any], Any]) -> None:
        self._instance = instance
        self._cell = cell
        self._handler = handler
        self.number = cell.proc.open_port(self)
        cell.ports.add(self.number)
        cell.proc.returns = True

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        self.take(Failure.from_bytes(body))

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        """What was on its way is lost."""

    def take(self, failure: Failure) -> None:
        """A message could not be delivered because of `failure`. Any thread."""
        ask = self._ask_async if self._cell.is_async else self._ask
        self._cell.interrupt(functools.partial(ask, failure))

    def _ask(self, failure: Failure) -> None:
        handled: Any = False
        try:
            handled = bool(self._handler(self._enveloped(failure)))
        except Exception as error:
            self._raised(error)
        if not handled:
            self._cell.proc.dead_letters.add(failure)

    async def _ask_async(self, failure: Failure) -> None:
        handled: Any = False
        try:
            handled = self._handler(self._enveloped(failure))
            if hasattr(handled, "__await__"):
                handled = await handled
            handled = bool(handled)
        except Exception as error:
            self._raised(error)
        if not handled:
            self._cell.proc.dead_letters.add(failure)

    def _raised(self, error: Exception) -> None:
        import logging

        text = f"_handle_undeliverable_message of {self._instance} raised"
        logging.getLogger("monarch").error(text, exc_info=error)

    def _enveloped(self, failure: Failure) -> UndeliverableMessageEnvelope:
        instance = self._instance
        enter(instance, instance.rank.rank, instance.rank.extent)
        return UndeliverableMessageEnvelope(str(instance), failure.actor, failure.report())


def give_back(link: Any, failure_of: Callable[[Verdict], Failure]) -> None:
    """A message of the current actor was refused by a link that is lost: tell it why."""
    back: ReturnPort | None = context().actor_instance._returns
    proc = client_proc()

    def tell(verdict: Verdict) -> None:
        failure = failure_of(verdict)
        if back is None:
            proc.dead_letters.add(failure)
        else:
            back.take(failure)

    proc.when_gone(link.uid, tell)
