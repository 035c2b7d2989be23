"""Undeliverable one-way messages are reported to the actor that sent them.

A broadcast, a `send` without a port and `Port.send` have no future that could fail. If the receiver
has exited, the sender's `_handle_undeliverable_message` is called, if its class has one. The sender
is not affected otherwise: a message that it does not handle is a dead letter
(`runtime.proc.dead_letters`).

* If the receiver has ended but its process still runs, that process refuses the message. The
  refusal goes to the sender's *return port*, whose number is in the message's meta.
* If the sender knows that the receiver's process has exited, `send` itself finds that out.
* A message in flight to a process that exits is lost without a report: it is not known whether it
  was handled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch._engine.base.failure import Failure, UndeliverableMessageEnvelope
from monarch._engine.mesh.call.context import Instance, context, enter
from monarch._engine.runtime.actor.cell import Cell
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.transport.frame_link import FrameLink

__all__ = ["ReturnPort", "give_back"]


class ReturnPort:
    """The sink of refusals of one actor's messages.

    Args:
        instance: the actor.
        cell: the actor's cell.
        handler: the actor's `_handle_undeliverable_message`, plain or async.
    """

    def __init__(self, instance: Instance, cell: Cell, handler: Callable[[Any], Any]) -> None:
        self._instance = instance
        self._cell = cell
        self._handler = handler
        self.number = cell.proc.open_port(self)
        cell.ports.add(self.number)
        cell.proc.returns = True

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self.take(Failure.from_bytes(body))

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        """Do nothing: messages in flight to a process that exits are not reported."""

    def take(self, failure: Failure) -> None:
        """Report a message that was not delivered because of `failure`; any thread may call this.

        The handler runs on the actor's thread, between its messages.
        """
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


def give_back(link: FrameLink, failure_of: Callable[[Verdict], Failure]) -> None:
    """Report a message that the current actor tried to send over a lost link.

    `failure_of` makes the failure to report from the verdict on the receiver's process.
    """
    back: ReturnPort | None = context().actor_instance._returns
    proc = client_proc()

    def tell(verdict: Verdict) -> None:
        failure = failure_of(verdict)
        if back is None:
            proc.dead_letters.add(failure)
        else:
            back.take(failure)

    proc.when_gone(link.uid, tell)
