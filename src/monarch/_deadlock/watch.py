"""The watch: finds long waits of a process's actors, and drives `search` with them.

The watch reads from an actor's stack what the actor waits for, whenever `runtime.proc.wait_watch`
has a check. The same wait in two successive checks is a long one.

* A thread that blocks has a frame of `Future._block`, whose variables name the wait.
* The task that serves an async actor is suspended at `Future._await`. It is checked on its own
  loop (`awaits`), where it cannot change meanwhile.

Only waits that block the actor itself are detected; other threads and tasks of the actor are
ignored. All further steps happen on the reactor, which can tell whether a wait still stands. To
break a deadlock, the wait of the victim is ended, and its future is not settled: other threads may
wait for the future, and its answer may arrive.

A wait with a time limit ends by itself and is ignored. Not detected are waits for an answer behind
something else: a thread or task that the endpoint started and now waits for (`asyncio.gather`
starts tasks), a channel, the body of a `returns_future`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from monarch._deadlock.awaits import Awaits
from monarch._deadlock.long_wait import LongWait, place_of
from monarch._deadlock.search import Break, Chase, Deadlocks, Effect, Probe
from monarch._spi import (
    NO_STACK,
    PROBE,
    DeadlockError,
    Future,
    environment,
    is_engine_frame,
    stacks,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from monarch._deadlock.long_wait import Answer
    from monarch._spi import Cell, Frame, FrameLink, LoopGate, Parker, Proc, Stack

__all__ = ["Watch"]

_BLOCK = vars(Future)["_block"].__code__
"""Code that blocks its thread until ``self`` is resolved: at a ``parker``, with a ``timeout``."""

_PROOF = 1  # flag of a PROBE that has returned to its origin


class _Parked(LongWait):
    """A thread that waits."""

    def __init__(self, cell: Cell, answer: Answer, place: str, parker: Parker) -> None:
        super().__init__(cell, answer, place)
        self._parker = parker

    @property
    def standing(self) -> bool:
        answer = self._answer()
        return answer is not None and answer._is_awaited(self._parker) and super().standing

    def fail(self, error: DeadlockError) -> None:
        answer = self._answer()
        if answer is not None:
            answer._refuse(self._parker, error)


class Watch:
    """See the module; one per proc."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._numbers = itertools.count(1)
        self._seen: dict[int, Parker] = {}  # found at the last check, by actor
        self._told: dict[int, Parker] = {}  # reported to the reactor
        self._loops: deque[Callable[[], None]] = deque()  # further checks, of event loops
        self._deadlocks = Deadlocks(proc.uid)
        self._due: float | None = None  # when the next tick is

    def follow(self, cell: Cell, gate: LoopGate, task: asyncio.Task[None]) -> None:
        """Look for long waits of an async actor, whose mailbox `task` serves."""
        Awaits(cell, gate, task, self._look_at, self._begin)

    def _look_at(self, look: Callable[[], None]) -> None:
        """Call `look()` at the next check, once; from any thread."""
        self._loops.append(look)
        wait_watch = self._proc.wait_watch
        if wait_watch.resting:
            wait_watch.rouse()

    def _begin(self, wait: LongWait) -> None:
        """Begin to search for a deadlock of a long wait; from any thread."""
        wait.number = next(self._numbers)
        self._proc.reactor.call_soon(self._examine, wait)

    # -- on the clock's thread -------------------------------------------------------------------

    def look(self) -> bool:
        """Look for long waits; return whether some wait may become long."""
        seen: dict[int, Parker] = {}
        told: dict[int, Parker] = {}
        unsure = False
        found = stacks(_BLOCK)
        for cell in list(self._proc.cells.values()):
            stack = found.get(cell.thread_id, NO_STACK)
            if not stack.variables:
                continue
            local = stack.variables[0]  # of the innermost
            answer: Any = local["self"]
            parker: Parker | None = local.get("parker")
            if local["timeout"] is not None or not hasattr(answer, "_unanswered"):
                continue
            if parker is None:
                unsure = True  # about to wait: it may have read `resting` before this check
            elif parker is self._told.get(cell.uid):
                told[cell.uid] = parker
            elif parker is self._seen.get(cell.uid):
                told[cell.uid] = parker
                self._begin(_Parked(cell, answer, _user_place(stack), parker))
            else:
                seen[cell.uid] = parker
        del found
        self._seen, self._told = seen, told
        for _ in range(len(self._loops)):
            self._loops.popleft()()
        return bool(seen) or unsure

    # -- on the reactor --------------------------------------------------------------------------

    def on_probe(self, link: FrameLink, frame: Frame) -> None:
        """Handle a PROBE frame, received or sent to this very process (from any thread)."""
        probe = Probe.from_bytes(frame.body)
        # Deferred: within one process, a cycle would nest as deep on the stack as it is long.
        if frame.flags & _PROOF:
            self._proc.reactor.call_soon(self._proven, link, frame, probe)
        else:
            self._proc.reactor.call_soon(self._chased, link, frame, probe)

    def _examine(self, wait: LongWait) -> None:
        if wait.standing:
            self._do(self._deadlocks.begin(environment.current.now(), wait))

    def _chased(self, link: FrameLink, frame: Frame, probe: Probe) -> None:
        now = environment.current.now()
        self._do(self._deadlocks.chased(now, link, frame.dest, frame.port, probe))

    def _proven(self, link: FrameLink, frame: Frame, probe: Probe) -> None:
        self._do(self._deadlocks.proven(link, frame.dest, probe))

    def _tick(self) -> None:
        self._due = None
        self._do(self._deadlocks.tick(environment.current.now()))

    def _do(self, effects: list[Effect]) -> None:
        say = self._proc.say
        for effect in effects:
            if isinstance(effect, Chase):
                body = effect.probe.to_bytes()
                for call in effect.calls:
                    over: Any = call.link  # a FrameLink: `begin` or `chased` took it
                    say(over, PROBE, call.actor, call.port, 0, body)
            elif isinstance(effect, Break):
                wait: Any = effect.wait  # `begin` received it from here
                wait.fail(DeadlockError(effect.cycle))
            else:
                back: Any = effect.link  # a FrameLink: `chased` took it
                say(back, PROBE, effect.actor, 0, 0, effect.probe.to_bytes(), _PROOF)
        due = self._deadlocks.deadline
        if due is not None and (self._due is None or due < self._due):
            self._due = due  # an earlier timer may be left, which costs one useless tick
            tick = functools.partial(self._proc.reactor.call_soon, self._tick)
            self._proc.clock.call_later(due - environment.current.now(), tick)


def _user_place(stack: Stack) -> str:
    """Return the innermost line of the user's program that has called `Future._block`."""
    steps = itertools.dropwhile(lambda step: step.code is not _BLOCK, stack.steps)
    above = [*itertools.dropwhile(lambda step: is_engine_frame(step.file), steps)]
    step = above[0] if above else next(step for step in stack.steps if step.code is _BLOCK)
    return place_of(step.code, step.line)
