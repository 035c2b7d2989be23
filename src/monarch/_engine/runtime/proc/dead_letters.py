"""Dead letters: one-way messages that could not be delivered, and whose sender wants no error.

A sender that asked for no answer must not fail because the receiver is lost. So an undeliverable
message is counted, and logged once per receiver. The level is INFO if the receiver failed, which
its owner learns in any case. The level is DEBUG if the receiver was stopped, since messages often
cross a stop.
"""

from __future__ import annotations

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED

__all__ = ["DeadLetters"]

_REMEMBERED = 1000  # receivers


class DeadLetters:
    """Counts and logs the dead letters of a process. `count` is their number."""

    __slots__ = ("_told", "count")

    def __init__(self) -> None:
        self.count = 0
        self._told: dict[str, None] = {}

    def add(self, failure: Failure) -> None:
        """Count a message to `failure.actor` that could not be delivered. For any thread."""
        self.count += 1
        actor = failure.actor
        if actor in self._told:
            return
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told[actor] = None
        import logging  # most processes never need it

        level = logging.INFO if failure.kind == FAILED else logging.DEBUG
        logging.getLogger("monarch").log(
            level,
            "A message without a waiting caller could not be delivered to %s, and was dropped; "
            "further ones are only counted. %s",
            actor,
            failure.report(),
        )
