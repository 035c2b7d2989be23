"""The succession: who drives a job, and what becomes of it between two drivers.

The *driver* of a job is the process of the script. Without a promise its job ends with it. With a
*grace period* the job goes on, *vacant*, and a successor may take it over; if none does within the
period, it is over.

    driven --left--> vacant --claim--> claimed --taken--> driven
                       |  <----left-------'
                       '--deadline--> over

* There is one driver at a time. Who claims a job that has one is refused.
* A claim counts when it is *taken*: then the successor is ready to be spoken to. One that ends
  before that has not prolonged the period.
* Each driver has a number, its *reign*, 0 for the first. What drivers number themselves they number
  from there, so that nothing that was meant for an earlier one reaches a later one.

What a driver wants its successor to find it leaves as *keepsakes*, which nobody here looks into. (A
list of what went wrong meanwhile is not among them: whoever saw an end remembers it, and the
successor asks about everything it takes over. So nothing has to be collected, bounded and merged.)

Time is an argument, in seconds.
"""

from __future__ import annotations

import math

__all__ = ["Succession"]

_DRIVEN, _VACANT, _CLAIMED, _OVER = range(4)


class Succession:
    """See the module.

    Args:
        grace: seconds that the job outlives a driver.
        reign: the number of the driver it has.

    >>> job = Succession(60.0)
    >>> job.keep(1, "how to find a mesh")
    >>> job.left(100.0), job.deadline
    (True, 160.0)
    >>> job.claim(), job.taken(), job.reign
    (True, None, 1)
    >>> job.claim()
    False
    """

    def __init__(self, grace: float, reign: int = 0) -> None:
        self.grace = grace
        self.reign = reign
        self.keepsakes: dict[int, str] = {}
        """By the uid of what they are about."""
        self._state = _DRIVEN
        self._until = math.inf

    @property
    def driven(self) -> bool:
        """Whether there is a driver that can be spoken to."""
        return self._state == _DRIVEN

    @property
    def deadline(self) -> float:
        """When the job is over, if nobody takes it; infinity while it is driven."""
        return self._until if self._state in (_VACANT, _CLAIMED) else math.inf

    def keep(self, uid: int, keepsake: str) -> None:
        """The driver leaves this for its successor, unless it takes it back (`drop`)."""
        self.keepsakes[uid] = keepsake

    def drop(self, uid: int) -> None:
        """There is nothing to be found there any more."""
        self.keepsakes.pop(uid, None)

    def left(self, now: float) -> bool:
        """The driver, or who had claimed to be one, is gone. Whether the job goes on."""
        if self._state == _DRIVEN:
            self._until = now + self.grace
        self._state = _VACANT if now < self._until else _OVER
        return self._state == _VACANT

    def claim(self) -> bool:
        """Somebody wants to be the driver. Whether it may."""
        if self._state != _VACANT:
            return False
        self._state = _CLAIMED
        self.reign += 1
        return True

    def taken(self) -> None:
        """Who claimed the job drives it now."""
        if self._state == _CLAIMED:
            self._state = _DRIVEN

    def tick(self, now: float) -> bool:
        """Whether the job is over."""
        if now >= self.deadline:
            self._state = _OVER
        return self._state == _OVER
