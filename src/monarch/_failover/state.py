"""Failover: which process drives a job, and the state of the job between two drivers.

The *driver* of a job is the process of the script. Without a grace period the job ends when its
driver exits. With a *grace period* the job continues, *vacant*, and a successor may take it over;
if none does within the period, the job is over.

========  ==========  ==========  ==========  ==========
          driven      vacant      claimed     over
========  ==========  ==========  ==========  ==========
left      vacant      -           vacant      -
claim     refused     claimed     refused     refused
taken     -           -           driven      -
deadline  -           over        over        -
========  ==========  ==========  ==========  ==========

* There is at most one driver at a time. A claim to a job that has a driver is refused.
* A claim counts when it is *taken*: then the successor is ready to be contacted. A successor that
  exits before that does not prolong the period.
* Each driver has an epoch number, its *reign*, 0 for the first. Drivers number their own objects
  starting from it, so that a message for an earlier driver never reaches a later one.

A driver leaves data for its successor as *saved handles*, which are opaque here. A list of failures
in between is not among them: every host that saw an exit remembers it, and the successor asks about
everything that it takes over. So there is nothing to collect, bound and merge.

Time is an argument, in seconds.
"""

from __future__ import annotations

import math

__all__ = ["Failover"]

_DRIVEN, _VACANT, _CLAIMED, _OVER = range(4)


class Failover:
    """The state of one job. See the module.

    Args:
        grace: seconds that the job outlives a driver.
        reign: the epoch number of the present driver.

    >>> job = Failover(60.0)
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
        self.saved_handles: dict[int, str] = {}
        """The texts that the job keeps, by the uid of the object that each describes."""
        self._state = _DRIVEN
        self._until = math.inf

    @property
    def driven(self) -> bool:
        """Whether there is a driver that can be contacted."""
        return self._state == _DRIVEN

    @property
    def deadline(self) -> float:
        """The time at which the job is over unless it is taken; infinity while it is driven."""
        return self._until if self._state in (_VACANT, _CLAIMED) else math.inf

    def keep(self, uid: int, keepsake: str) -> None:
        """Store a saved handle of the driver for its successor, until `drop`."""
        self.saved_handles[uid] = keepsake

    def drop(self, uid: int) -> None:
        """Remove the saved handle about `uid`, if there is one."""
        self.saved_handles.pop(uid, None)

    def left(self, now: float) -> bool:
        """Report that the driver, or a claimant, has exited. Return whether the job continues."""
        if self._state == _DRIVEN:
            self._until = now + self.grace
        self._state = _VACANT if now < self._until else _OVER
        return self._state == _VACANT

    def claim(self) -> bool:
        """Claim the job for a new driver. Return whether it may."""
        if self._state != _VACANT:
            return False
        self._state = _CLAIMED
        self.reign += 1
        return True

    def taken(self) -> None:
        """Report that the process that claimed the job drives it now."""
        if self._state == _CLAIMED:
            self._state = _DRIVEN

    def tick(self, now: float) -> bool:
        """Return whether the job is over at `now`."""
        if now >= self.deadline:
            self._state = _OVER
        return self._state == _OVER
