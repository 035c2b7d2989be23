"""Restart decisions: when to restart a failed child, which others with it, and when to give up.

This is the decision core of a supervisor in the sense of Erlang/OTP. The theory is in Joe
Armstrong's thesis (*Making reliable distributed systems in the presence of software errors*, 2003,
chapters 4 to 6) and in OTP's public documentation of supervisors. A failed process is not repaired
but replaced by a fresh one, and what depends on its state is replaced along with it. A fault that
recurs faster than a stated *intensity* is beyond this supervisor: it terminates its children and
fails itself, and its own supervisor decides with a wider view.

A **child** is one rank of one mesh that the supervisor owns, ``(mesh, rank)``. That pair is also
its place in the order of children: meshes in the order in which they were spawned, ranks in
numerical order. The strategies, when a child fails:

=============  ==============================================================================
one_for_one    only that child is replaced
one_for_all    the others are terminated, then all are started
rest_for_one   those after it in the order are terminated, then they and it are started
=============  ==============================================================================

Each child is in one of four states. An *ending* one is being terminated, and one that is *down* is
started when it is due. Every input is a line of this table; it has the next state, unless that is
the same:

=============  ======================  ======================  ======================  ==========
               alive                   ending                  down                    vacant
=============  ======================  ======================  ======================  ==========
failed         down                    down                    -                       -
another fails  ending, by strategy     -                       -                       -
stopped        forgotten               down                    forgotten               forgotten
due            -                       -                       alive                   -
started        runs from now on        too late                -                       -
no place       vacant                  -                       -                       -
place          -                       -                       -                       down
=============  ======================  ======================  ======================  ==========

Children are vacant whose host was lost, while no other host can take its place. A
*vacant* child does not exist, and its mesh goes on without it, as long as at least `min_size`
children of the mesh are left. With fewer the supervisor gives up. When there is a place, the child
is due at once; with the strategies that replace several children, the others are terminated as if
it had failed, since a group that grows has to be formed anew. That is no fault.

Invariants:

- A vacant child is ignored by all rules until it is placed, or stopped.
- A child is started only after its predecessor is confirmed to have exited. With the strategies
  that replace several children, none is started before all terminated ones have exited: the new
  ones must not meet the old ones, which is why they are replaced together.
- Terminations are listed in reverse start order, starts in start order.
- A failure of a child that is being terminated is not a new fault: when one rank dies in a
  collective the others fail because of it, and that is one fault. Ranks that fail in one event
  (their process died) are one fault as well.
- At most ``max_restarts`` faults within any ``within`` seconds are answered with a restart. After
  one more, all children are terminated, in reverse order; when the last has exited, `GiveUp` is
  emitted, once, and no effect follows it. OTP counts in the same way: a fault is in the window as
  long as it is not older than the window, and a child that fails while it starts counts like any
  other.
- A child restarts at once after its first failure, then after ``backoff`` seconds, then twice that,
  up to ``max_backoff``. The delay is reset for a child that ran for ``max_backoff`` seconds, since
  its restarts are then as rare as the longest delay would make them, or for ``within`` seconds. OTP
  has no back-off; it relies on the intensity alone, which is either too tight for a rank that waits
  for a resource to become available, or permits a busy loop of restarts. A child that is replaced
  because of another child is not delayed.

Two deliberate differences from OTP. A child that was stopped deliberately never restarts; OTP would
restart it with the next group. And the children of one list may be terminated or started
concurrently, with requests in the order of the list: the ranks of a mesh are peers, and a mesh of
thousands cannot be processed one by one.

The driver reports the exit of each incarnation once (incarnations of a child are not distinguished
here), calls `tick` when `deadline` is reached, and performs the effects in their order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["Child", "Effect", "GiveUp", "Restarts", "Start", "Strategy", "Terminate"]

Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]

Child: TypeAlias = tuple[int, int]
"""The index of the mesh among the supervisor's meshes, and the rank in it."""


class Terminate(NamedTuple):
    """Effect: terminate these children, requested in this order, and report the exit of each."""

    children: tuple[Child, ...]


class Start(NamedTuple):
    """Effect: start new incarnations of these, requested in this order, and report each start."""

    children: tuple[Child, ...]


class GiveUp(NamedTuple):
    """Effect: fail the supervisor; no child is left.

    `cause` is the child whose failure exceeded the intensity.
    """

    cause: Child


Effect: TypeAlias = Terminate | Start | GiveUp


class Restarts:
    """The restart decisions of one supervisor. See the module.

    Args:
        strategy: which children a failure affects.
        max_restarts: faults within `within` seconds that are answered with a restart.
        within: the window; seconds.
        backoff: delay of a child's second restart, doubled for each further one; seconds.
        max_backoff: the longest delay; seconds. The delay is reset for a child that ran for so
            long, or for `within` seconds.
        min_size: the least number of children with which a mesh goes on; None: all.

    >>> core = Restarts("one_for_one", max_restarts=1, within=5, backoff=0.1, max_backoff=1)
    >>> core.add_children(0, range(2))
    []
    >>> core.child_failed((0, 1), now=10.0)
    [Start(children=((0, 1),))]
    >>> core.child_failed((0, 0), now=11.0)
    [Terminate(children=((0, 1),))]
    >>> core.child_stopped((0, 1), now=11.5)
    [GiveUp(cause=(0, 0))]
    """

    __slots__ = (
        "_alive",
        "_backoff",
        "_cause",
        "_delay",
        "_down",
        "_ending",
        "_faults",
        "_given_up",
        "_max_backoff",
        "_max_restarts",
        "_min_size",
        "_strategy",
        "_vacant",
        "_within",
    )

    def __init__(
        self,
        strategy: Strategy,
        *,
        max_restarts: int,
        within: float,
        backoff: float,
        max_backoff: float,
        min_size: int | None = None,
    ) -> None:
        if strategy not in ("one_for_one", "one_for_all", "rest_for_one"):
            raise ValueError(
                f"unknown restart strategy {strategy!r}: expected one_for_one, one_for_all or "
                "rest_for_one"
            )
        if max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {max_restarts}")
        if not within > 0:
            raise ValueError(f"within must be a positive number of seconds, got {within}")
        if not 0 <= backoff <= max_backoff:
            raise ValueError(
                f"expected 0 <= backoff <= max_backoff, got backoff={backoff} and "
                f"max_backoff={max_backoff}"
            )
        if min_size is not None and min_size < 1:
            raise ValueError(f"min_size must be at least 1, got {min_size}")
        self._strategy = strategy
        self._min_size = min_size
        self._max_restarts = max_restarts
        self._within = within
        self._backoff = backoff
        self._max_backoff = max_backoff
        # The three states of a child. `_alive` has the time since when it runs (None: it is
        # starting), `_down` the time at which its restart is due.
        self._alive: dict[Child, float | None] = {}
        self._ending: set[Child] = set()
        self._down: dict[Child, float] = {}
        self._vacant: set[Child] = set()
        self._delay: dict[Child, float] = {}  # of the next restart of a child that has failed
        self._faults: deque[float] = deque()  # times of the faults within the window
        self._cause: Child | None = None  # the child whose failure exceeded the intensity
        self._given_up = False

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` has something to do, or None."""
        if not self._down or self._ending:
            return None
        return (min if self._strategy == "one_for_one" else max)(self._down.values())

    @property
    def giving_up(self) -> bool:
        """Whether the intensity was exceeded; no child is started after that."""
        return self._cause is not None

    @property
    def settled(self) -> bool:
        """Whether every child that has a place runs: none is ending, down or starting."""
        return not self._ending and not self._down and None not in self._alive.values()

    def is_alive(self, child: Child) -> bool:
        """Whether the child is starting or runs, according to the reports."""
        return child in self._alive

    def runs(self, child: Child) -> bool:
        """Whether the child has been started, or was there from the beginning, and has not ended.

        A child that the owner has started counts from then on, see `add_children`.
        """
        return self._alive.get(child) is not None

    def is_vacant(self, child: Child) -> bool:
        """Whether the child waits for a place."""
        return child in self._vacant

    def has_children(self, mesh: int) -> bool:
        """Whether any rank of `mesh` is alive, ending, due to restart or vacant."""
        places: tuple[Iterable[Child], ...] = (self._alive, self._ending, self._down, self._vacant)
        return any(child[0] == mesh for place in places for child in place)

    def add_children(self, mesh: int, ranks: Iterable[int]) -> list[Effect]:
        """Supervise children that the owner has started, or is starting."""
        new = [(mesh, rank) for rank in ranks]
        if self._cause is None:
            self._alive.update(dict.fromkeys(new))
            return []
        self._ending.update(new)
        return [Terminate(tuple(sorted(new, reverse=True)))]

    def remove(self, mesh: int, now: float) -> list[Effect]:
        """Forget the children of `mesh`, which their owner stops; do not await their exits."""
        for place in (self._alive, self._down, self._delay):
            for child in [child for child in place if child[0] == mesh]:
                del place[child]
        self._ending = {child for child in self._ending if child[0] != mesh}
        self._vacant = {child for child in self._vacant if child[0] != mesh}
        return self._proceed(now)

    def child_started(self, child: Child, now: float) -> None:
        """Report that the child's new incarnation runs."""
        if child in self._alive:
            self._alive[child] = now

    def child_stopped(self, child: Child, now: float) -> list[Effect]:
        """Report that the child exited deliberately: it was terminated, or stopped by its owner."""
        if child in self._ending:
            self._gone(child, now)
        else:
            self._alive.pop(child, None)
            self._down.pop(child, None)
            self._delay.pop(child, None)
            self._vacant.discard(child)
        return self._proceed(now)

    def children_vacant(self, children: Collection[Child], now: float) -> list[Effect]:
        """Report that these children, which were to be started, have no host to run on."""
        vacant = sorted(child for child in children if child in self._alive)
        for child in vacant:
            del self._alive[child]
            self._vacant.add(child)
        left = [child for place in (self._alive, self._ending, self._down) for child in place]
        for child in vacant:
            size = sum(other[0] == child[0] for other in left)
            if self._cause is None and (self._min_size is None or size < self._min_size):
                self._cause = child
                self._down.clear()
                return [*self._terminate(self._concerned(child), now), *self._proceed(now)]
        return self._proceed(now)

    def children_placed(self, children: Collection[Child], now: float) -> list[Effect]:
        """Report that there is a host for these vacant children; they are due at once."""
        placed = sorted(self._vacant.intersection(children))
        if not placed or self._cause is not None:
            return []
        self._vacant.difference_update(placed)
        self._down.update(dict.fromkeys(placed, now))
        return [*self._terminate(self._concerned(placed[0]), now), *self._proceed(now)]

    def child_failed(self, child: Child, now: float) -> list[Effect]:
        """Report that the child failed, while it started or while it ran."""
        return self.children_failed((child,), now)

    def children_failed(self, children: Collection[Child], now: float) -> list[Effect]:
        """Report that these children failed in one event, which counts as one fault."""
        failed = sorted(child for child in children if child in self._alive)
        for child in self._ending.intersection(children):
            self._gone(child, now)
        if not failed:
            return self._proceed(now)
        for child in failed:
            self._leave(child, now)
            delay = self._delay.get(child, 0.0)
            self._down[child] = now + delay
            self._delay[child] = min(2 * delay or self._backoff, self._max_backoff)
        faults = self._faults
        faults.append(now)
        while now - faults[0] > self._within:
            faults.popleft()
        if len(faults) > self._max_restarts:
            self._cause = failed[0]
            self._down.clear()
        return [*self._terminate(self._concerned(failed[0]), now), *self._proceed(now)]

    def tick(self, now: float) -> list[Effect]:
        """Start the children that are due."""
        return self._proceed(now)

    def _concerned(self, failed: Child) -> list[Child]:
        """Return the living children to terminate because of `failed`, the last one first."""
        if self._cause is not None or self._strategy == "one_for_all":
            return sorted(self._alive, reverse=True)
        if self._strategy == "rest_for_one":
            return sorted((child for child in self._alive if child > failed), reverse=True)
        return []

    def _terminate(self, children: list[Child], now: float) -> list[Effect]:
        for child in children:
            self._leave(child, now)
        self._ending.update(children)
        return [Terminate(tuple(children))] if children else []

    def _leave(self, child: Child, now: float) -> None:
        """Remove the child from the living; reset its delay if it ran for long enough."""
        since = self._alive.pop(child)
        if since is not None and now - since >= min(self._within, self._max_backoff):
            self._delay.pop(child, None)

    def _gone(self, child: Child, now: float) -> None:
        """Record that a child that was terminated has exited."""
        self._ending.remove(child)
        if self._cause is None:
            self._down[child] = now

    def _proceed(self, now: float) -> list[Effect]:
        if self._cause is not None:
            if self._ending or self._given_up:
                return []
            self._given_up = True
            return [GiveUp(self._cause)]
        due = self.deadline
        if due is None or now < due:
            return []
        ready = sorted(child for child, due in self._down.items() if due <= now)
        for child in ready:
            del self._down[child]
            self._alive[child] = None
        return [Start(tuple(ready))]
