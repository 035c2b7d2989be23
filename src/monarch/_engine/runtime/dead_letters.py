"""Dead letters: one-way messages that reached nobody and that nobody wanted back.

A sender that asked for no answer is not to fail because there is nobody to answer. So what cannot
be delivered is counted, and logged once per receiver for those who look: at level INFO if the
receiver failed, of which its owner is told anyway, and DEBUG if it was stopped, since messages that
cross a stop are nothing unusual.
"""

from __future__ import annotations

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED

__all__ = ["DeadLetters"]

_REMEMBERED = 1000  # receivers


class DeadLetters:
    """See the module. `count` is how many there were."""

    __slots__ = ("_told", "count")

    def __init__(self) -> None:
        self.count = 0
        self._told: dict[str, None] = {}

    def add(self, failure: Failure) -> None:
        """A message to `failure.actor` could not be delivered. Any thread."""
        self.count += 1
        actor = failure.actor
        if actor in self._told:
            return
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told[actor] = None
        import logging  # most processes never come here

        level = logging.INFO if failure.kind == FAILED else logging.DEBUG
        logging.getLogger("monarch").log(
            level,
            "A message without a waiting caller could not be delivered to %s, and was dropped; "
            "further ones are only counted. %s",
            actor,
            failure.report(),
        )
