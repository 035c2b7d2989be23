"""The watch: finds long waits of a process's actors, and drives `protocol.deadlock` with them.

A wait pays for the test of one flag (`Watch.resting`): its beginning and end are not recorded. The
watch reads from an actor's stack what the actor waits for, every `LONG` seconds while any actor
waits. The same wait in two successive checks is a long one.

* A thread that blocks has a frame of `BLOCKING`, whose variables name the wait.
* The task that serves an async actor is suspended at a generator of `AWAITING`. It is checked on
  its own loop (`loop_watch`), where it cannot change meanwhile.

Only waits that block the actor itself are detected; other threads and tasks of the actor are
ignored. All further steps happen on the reactor, which can tell whether a wait still stands. To
break a deadlock, the wait of the victim is ended, and its future is not settled: other threads may
wait for the future, and its answer may arrive.

A wait with a time limit ends by itself and is ignored. Not detected are waits for an answer behind
something else: a thread or task that the endpoint started and now waits for (`asyncio.gather`
starts tasks), a channel, the body of a `returns_future`.

`protocol.deadlock` is imported at the first long wait, since most clients never have one.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import DeadlockError, is_engine_frame
from monarch._engine.runtime.io import environment as environments
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import PROBE, Frame

if TYPE_CHECKING:
    from monarch._engine.protocol.deadlock import Call, Deadlocks, Effect, Probe
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.io.environment import Parker
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["AWAITING", "BLOCKING", "LONG", "Answer", "LongWait", "Watch", "place_of"]

LONG = 0.15
"""Seconds between two checks."""

BLOCKING: set[CodeType] = set()
"""Code that blocks its thread until ``self`` is resolved: at a ``parker``, with a ``timeout``."""

AWAITING: set[CodeType] = set()
"""Code of generators that await ``self``, until it has ``arrived``."""

_PROOF = 1  # flag of a PROBE that has returned to its origin


class Answer(Protocol):
    """The awaited object: a future of the mesh layer that calls resolve."""

    def _is_awaited(self, parker: Parker) -> bool:
        """Whether a thread waits for it at `parker`."""
        ...

    def _is_pending(self) -> bool:
        """Whether it is unresolved."""
        ...

    def _call_name(self) -> str:
        """Return the name of the call in errors."""
        ...

    def _unanswered(self) -> list[Call]:
        """Return the calls to actors that must all be answered before it is resolved."""
        ...

    def _refuse(self, parker: Parker, error: BaseException) -> None:
        """End the wait at `parker`, if it goes on, and no other, with `error`."""


class LongWait:
    """A wait that blocks an actor; implements `protocol.deadlock.Wait`."""

    def __init__(self, cell: Cell, answer: Answer, place: str) -> None:
        self.actor = cell.uid
        self.number = cell.proc.watch.next_number()
        self.story = (cell.identity.display, answer._call_name(), place)
        self._cell = cell
        self._answer = weakref.ref(answer)  # weak, since the waiting code keeps it

    @property
    def standing(self) -> bool:
        answer = self._answer()
        return answer is not None and answer._is_pending() and self._cell.grave is None

    def unanswered(self) -> list[Call]:
        answer = self._answer()
        return [] if answer is None else answer._unanswered()

    def owes(self, link: object, port: int) -> bool:
        return (link, port) not in self._cell.aside

    def fail(self, error: DeadlockError) -> None:
        """End the wait, and no other, with `error`; on the reactor."""
        raise NotImplementedError


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
    """See the module; one per proc. `resting`: no check is due, so a new wait must call `rouse`."""

    def __init__(self, proc: Proc) -> None:
        self.clock = environments.current.clock()
        self.resting = True
        self._proc = proc
        self._numbers = itertools.count(1)
        self._looking = False  # a check is scheduled; for the clock's thread
        self._seen: dict[int, Parker] = {}  # found at the last check, by actor
        self._told: dict[int, Parker] = {}  # reported to the reactor
        self._loops: deque[Callable[[], None]] = deque()  # further checks, of event loops
        self._loaded: Deadlocks | None = None
        self._due: float | None = None  # when the next tick is

    def next_number(self) -> int:
        """Return a number for a wait, from any thread."""
        return next(self._numbers)

    def rouse(self) -> None:
        """Schedule a check, since a wait begins; from any thread."""
        self.resting = False
        self.clock.call_later(0.0, self._arm)

    def look_at(self, look: Callable[[], None]) -> None:
        """Call `look()` at the next check, once; from any thread."""
        self._loops.append(look)
        if self.resting:
            self.rouse()

    def begin(self, wait: LongWait) -> None:
        """Report a long wait of an actor; from any thread."""
        self._proc.reactor.call_soon(self._begin, wait)

    # -- on the clock's thread -------------------------------------------------------------------

    def _arm(self) -> None:
        if not self._looking:
            self._looking = True
            self.clock.call_later(LONG, self._look)

    def _look(self) -> None:
        self._looking = False
        self.resting = True  # set first: a wait that begins during the check rouses the watch
        seen: dict[int, Parker] = {}
        told: dict[int, Parker] = {}
        unsure = False
        frames = sys._current_frames()
        for cell in list(self._proc.cells.values()):
            frame = frames.get(cell.thread_id)
            inner = _blocking(frame)
            if inner is None:
                continue
            local: dict[str, Any] = inner.f_locals
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
                self.begin(_Parked(cell, answer, _user_place(inner), parker))
            else:
                seen[cell.uid] = parker
        del frames
        self._seen, self._told = seen, told
        self._proc.agent_watch.look()
        for _ in range(len(self._loops)):
            self._loops.popleft()()
        if seen or unsure:
            self.resting = False
            self._arm()

    # -- on the reactor --------------------------------------------------------------------------

    def on_probe(self, link: FrameLink, frame: Frame) -> None:
        """Handle a PROBE frame, received or sent to this very process (from any thread)."""
        from monarch._engine.protocol.deadlock import Probe

        probe = Probe.from_bytes(frame.body)
        # Deferred: within one process, a cycle would nest as deep on the stack as it is long.
        if frame.flags & _PROOF:
            self._proc.reactor.call_soon(self._proven, link, frame, probe)
        else:
            self._proc.reactor.call_soon(self._chased, link, frame, probe)

    @property
    def _deadlocks(self) -> Deadlocks:
        if self._loaded is None:
            from monarch._engine.protocol.deadlock import Deadlocks

            self._loaded = Deadlocks(self._proc.uid)
        return self._loaded

    def _begin(self, wait: LongWait) -> None:
        if wait.standing:
            self._do(self._deadlocks.begin(environments.current.now(), wait))

    def _chased(self, link: FrameLink, frame: Frame, probe: Probe) -> None:
        now = environments.current.now()
        self._do(self._deadlocks.chased(now, link, frame.dest, frame.port, probe))

    def _proven(self, link: FrameLink, frame: Frame, probe: Probe) -> None:
        self._do(self._deadlocks.proven(link, frame.dest, probe))

    def _tick(self) -> None:
        self._due = None
        self._do(self._deadlocks.tick(environments.current.now()))

    def _do(self, effects: list[Effect]) -> None:
        from monarch._engine.protocol.deadlock import Break, Chase

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
            self.clock.call_later(due - environments.current.now(), tick)


def place_of(frame: FrameType) -> str:
    """Return the place of a frame in the program."""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"


def _blocking(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that blocks, or None."""
    while frame is not None and frame.f_code not in BLOCKING:
        frame = frame.f_back
    return frame


def _user_place(frame: FrameType) -> str:
    """Return the innermost line of the user's program on the stack."""
    above: FrameType | None = frame
    while above is not None and is_engine_frame(above.f_code.co_filename):
        above = above.f_back
    return place_of(above or frame)
