"""The scheduler of a simulation: virtual time, and the choice of what runs next.

Every event of a simulation is a *step*: a call that was scheduled for a moment of virtual time
(`at`, `soon`). Steps run one after the other, in the order of their moments, and time jumps from
one moment to the next. The seed adds a small random delay to each moment. So another seed gives
another interleaving, and the same seed gives the same one.

User code may wait in the middle of a step (`Future.get`, `time.sleep`). Therefore it runs in a
*strand*: an actor, the script's main function, or whatever else would be a thread. A strand that
waits keeps its OS thread, the *carrier*, and passes the baton to another carrier, which continues
to take steps. Exactly one carrier has the baton, and all others wait for it. A strand that does not
wait needs no thread: carriers take the steps of any number of strands, and ten thousand idle actors
are ten thousand small objects.

    carrier 1   step, step, step of actor A ........ waits          continues, step ...
    carrier 2                                  step, step, "resume A"

A heartbeat, or another step that repeats as long as its process exists, is a background step
(`aside`): the simulation does not count it as something left to do. If the main strand waits and
only background steps happen for 30 virtual seconds, or no step is left, that is a deadlock; its
report has what every strand waits for. A step that blocks outside the simulation (a socket, a lock
of `threading`) would hang it: a watchdog in real time reports this.

Rejected: greenlets (a compiled dependency); a thread for each strand, with two switches a step
(fifty times slower).
"""

from __future__ import annotations

import contextvars
import heapq
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from monarch._engine.runtime.agent import client as clients
from monarch._engine.runtime.io.stacks import stack_of_thread
from monarch.testing.errors import StepBlockedError, StuckError, TimeLimitError
from monarch.testing.stacks import describe_strand, describe_thread

__all__ = ["Entry", "Place", "Scheduler", "Strand", "Unwound", "Vanished", "Wait"]

Entry = list[Any]
"""A scheduled step: time, order, place, function, arguments, False for a background step."""

_UNEVENTFUL = 30.0
"""How many seconds background steps may continue alone before the simulation is stuck."""

_SETTLED = 5.0
"""The same after the end of the script."""

JITTER = 20e-6
"""The longest random delay of a step that is ready, in seconds."""


class Unwound(BaseException):
    """Thrown into strands that still wait when the simulation ends."""


class Vanished(BaseException):
    """The process whose reactor is running has exited within its own step."""


class Place:
    """The process or host at which steps happen. It can be paused, slow or dead."""

    def __init__(self, name: str, proc: Any = None) -> None:
        self.name = name
        self.proc = proc
        self.dead = False
        self.pauses = 0  # how many pauses are in force
        self.lag = 0.0  # seconds added to each of its steps
        self.held: list[Any] = []  # steps held back during a pause
        self.awaited = 0  # scheduled steps that are not background steps
        self.machine: Any = None  # of a host: its worker, see `worker`
        self.ends: dict[Any, None] = {}  # stream ends that are read here


class Strand:
    """A flow of control that may wait, such as a thread or an actor."""

    __slots__ = ("carrier", "context", "doom", "name", "place", "task_stacks", "thrown", "wait")

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.place = place
        self.context = contextvars.Context()
        self.carrier: _Carrier | None = None  # set while it waits
        self.wait: Wait | None = None
        self.thrown: BaseException | None = None  # raised where it waits
        self.doom: Callable[[], None] | None = None  # a fault for its next send or wait
        self.task_stacks: Callable[[], list[str]] | None = None  # for strands that are event loops


class Wait:
    """One wait of one strand; has the interface of a `Parker`."""

    __slots__ = ("_scheduler", "released", "strand")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.released = False
        self.strand: Strand | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait until the release; return False if it does not come in `timeout` virtual seconds."""
        if not self.released and blocking:
            self._scheduler.wait(self, None if timeout < 0 else timeout)
        return self.released

    def release(self) -> None:
        """Let the strand continue, soon."""
        if not self.released:
            self.released = True
            if self.strand is not None:
                self._scheduler.resume(self)


class _Carrier:
    """An OS thread, and the lock on which it waits for the baton."""

    __slots__ = ("lock", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.lock = threading.Lock()
        self.lock.acquire()


class Scheduler:
    """The scheduler of one simulation, see the module.

    Args:
        seed: of all random delays.
        time_limit: virtual seconds after which the simulation fails.
        patience: real seconds that one step may take.
    """

    def __init__(self, seed: object, time_limit: float, patience: float) -> None:
        self.now = 0.0
        self.steps = 0
        self.random = random.Random(f"{seed}/order")  # noqa: S311 - must be repeatable
        self.strand: Strand | None = None  # the one that runs; None: a reactor or the world
        self.place: Place | None = None  # the place of the step that runs; None: the world
        self.strands: dict[Strand, None] = {}  # all that have not ended
        self.checks: list[Callable[[], object]] = []  # called between steps
        self.failure: BaseException | None = None
        self.books: Callable[[Any, bytes], None] | None = None  # called for each frame sent
        self.on_send: Callable[[Any, bytes], None] | None = None  # for faults at requests
        self.on_run: Callable[[Any, Any], None] | None = None
        self.interrupted = False  # whether an unhandled fault interrupted the script
        self.closing = False
        self.threads = {threading.get_ident()}  # OS threads that belong to the simulation
        self._heap: list[Entry] = []
        self._booked = 0
        self._awaited = 0  # entries that are not background steps
        self._eventful = 0.0  # moment of the last step that was not a background step
        self._uneventful = _UNEVENTFUL
        self._time_limit = time_limit
        self._patience = patience
        self._main: Strand | None = None
        self._quiet: Wait | None = None
        self._idle: list[_Carrier] = []
        self._workers: list[_Carrier] = []
        self._carrier: _Carrier | None = None
        self._over = threading.Event()

    # -- scheduling ------------------------------------------------------------------------------

    def at(
        self, when: float, place: Place | None, function: Callable[..., None], *args: Any
    ) -> Entry:
        """Call `function(*args)` at the moment `when`, unless `place` is dead by then."""
        self._booked += 1
        self._awaited += 1
        if place is not None:
            place.awaited += 1
        entry = [when, self._booked, place, function, args, 1]
        heapq.heappush(self._heap, entry)
        return entry

    def aside(
        self, when: float, place: Place | None, function: Callable[..., None], *args: Any
    ) -> Entry:
        """Schedule a background step; to wait for such steps alone is a deadlock.

        For work that repeats as long as a process exists, such as heartbeats.
        """
        self._booked += 1
        entry = [when, self._booked, place, function, args, 0]
        heapq.heappush(self._heap, entry)
        return entry

    def soon(self, place: Place, function: Callable[..., None], *args: Any) -> Entry:
        """Call `function(*args)` at `place` after a random delay, and after the lag of `place`."""
        self._booked += 1
        self._awaited += 1
        place.awaited += 1
        when = self.now + self.random.random() * JITTER + place.lag
        entry = [when, self._booked, place, function, args, 1]
        heapq.heappush(self._heap, entry)
        return entry

    def cancel(self, entry: Entry) -> None:
        """Cancel a step; time does not advance to its moment."""
        entry[3] = None
        if entry[5]:
            self._await_no_more(entry)

    def _await_no_more(self, entry: Entry) -> None:
        entry[5] = 0
        place = entry[2]
        if place is None:
            self._awaited -= 1
        elif not place.dead:
            self._awaited -= 1
            place.awaited -= 1

    def end(self, place: Place) -> None:
        """Drop all steps of `place`, and let no further one happen."""
        place.dead = True
        place.held.clear()
        self._awaited -= place.awaited
        place.awaited = 0

    def pause(self, place: Place) -> None:
        """Hold back all steps of `place` until `unpause`."""
        place.pauses += 1

    def unpause(self, place: Place) -> None:
        """Let the steps that were held back happen now, in their order."""
        place.pauses -= 1
        if not place.pauses:
            held, place.held = place.held, []
            for entry in held:  # the entries themselves, since they may still be cancelled
                entry[0] = max(entry[0], self.now)
                entry[5] = 1
                self._awaited += 1
                place.awaited += 1
                heapq.heappush(self._heap, entry)

    # -- strands ---------------------------------------------------------------------------------

    def wait(self, wait: Wait, timeout: float | None) -> None:
        """Let others run until `wait` is released or `timeout` (virtual seconds) has passed."""
        strand = self.strand
        if strand is None:
            raise RuntimeError("this would block a reactor, please report it")
        if self.closing:
            raise Unwound
        if strand.doom is not None:
            self.strike(strand)
        wait.strand = strand
        strand.wait = wait
        alarm = None
        if timeout is not None:
            alarm = self.at(self.now + timeout, strand.place, _resume, strand, wait)
        carrier = strand.carrier = self._carrier
        assert carrier is not None
        self.strand = None
        self._give_baton()
        self._await_baton(carrier, strand)
        if alarm is not None:
            self.cancel(alarm)
        strand.wait = strand.carrier = wait.strand = None
        if self._is_over_for(strand):
            raise Unwound
        self.strand = strand
        self.place = strand.place
        clients._current = strand.place.proc
        thrown, strand.thrown = strand.thrown, None
        if thrown is not None:
            raise thrown

    def _is_over_for(self, strand: Strand) -> bool:
        return self.closing or (self.failure is not None and strand is self._main)

    def _give_baton(self) -> None:
        """Let another carrier take steps; the caller then waits for the baton."""
        if self._idle:
            self._carrier = self._idle.pop()
            self._carrier.lock.release()
        else:
            thread = threading.Thread(target=self._work, name="monarch-simulated", daemon=True)
            self._carrier = _Carrier(thread)
            self._workers.append(self._carrier)
            thread.start()

    def _await_baton(self, carrier: _Carrier, strand: Strand) -> None:
        if strand is not self._main:
            carrier.lock.acquire()
            return
        try:
            carrier.lock.acquire()
        except BaseException as error:  # the user's Ctrl-C, or a time limit of a test
            # Another carrier is in a step: let the step end, and let no further step begin.
            self.fail(error)
            carrier.lock.acquire(timeout=1.0)
            self._carrier = carrier

    def resume(self, wait: Wait) -> None:
        """Let the strand of `wait` continue, soon."""
        strand = wait.strand
        assert strand is not None
        self.soon(strand.place, _resume, strand, wait)

    def sleep(self, seconds: float) -> None:
        """Suspend the current strand for `seconds` of virtual time."""
        self.wait(Wait(self), max(0.0, seconds))

    def vanish(self) -> None:
        """Stop the current strand, or reactor, whose process has exited; does not return."""
        if self.strand is None:
            raise Vanished
        self.wait(Wait(self), None)

    def strike(self, strand: Strand) -> None:
        """Let the fault happen that was planned for `strand`, which is running."""
        doom, strand.doom = strand.doom, None
        if doom is not None:
            doom()
            self.yield_if_paused()

    def yield_if_paused(self) -> None:
        """Suspend the current strand if its process was paused within its own step."""
        if self.strand is not None and self.strand.place.pauses:
            self.sleep(0)

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt where the main strand waits."""
        main = self._main
        if main is not None and main.wait is not None and self._quiet is None:
            self.interrupted = True
            main.thrown = KeyboardInterrupt()
            self.resume(main.wait)

    # -- the loop --------------------------------------------------------------------------------

    def run(self, place: Place, main: Callable[[], Any]) -> Any:
        """Run `main` as the main strand, on the calling thread; return its result.

        Raises what `main` raises, or the failure of the simulation.
        """
        self._main = strand = Strand("main", place)
        strand.context = contextvars.copy_context()
        self.strands[strand] = None
        self._carrier = _Carrier(threading.current_thread())
        self.threads.add(threading.get_ident())
        self.strand = strand
        self.place = place
        clients._current = place.proc
        watchdog = threading.Thread(target=self._watch, name="monarch-watchdog", daemon=True)
        watchdog.start()
        try:
            value = strand.context.run(main)
        except BaseException as error:
            failure = self.failure
            if failure is None or error is failure:
                raise
            raise failure from None
        finally:
            self._over.set()
            watchdog.join()
        if self.failure is not None:
            raise self.failure
        return value

    def settle(self, patience: float) -> None:
        """Wait, on the main strand, until no step is left, for at most `patience` seconds."""
        self._quiet = quiet = Wait(self)
        self._uneventful = _SETTLED
        self.aside(self.now + patience, None, quiet.release)
        self.wait(quiet, None)

    def fail(self, error: BaseException) -> None:
        """End the simulation: the main strand raises the first `error`."""
        if self.failure is None:
            self.failure = error

    def close(self) -> None:
        """End the strands that still wait, and their threads."""
        self.closing = True
        for carrier in self._workers:
            carrier.lock.release()
            carrier.thread.join(1.0)
        self._heap.clear()

    def _work(self) -> None:
        self.threads.add(threading.get_ident())
        carrier = self._carrier
        assert carrier is not None
        while True:
            self._take_steps(carrier)
            if self.closing:
                return
            carrier.lock.acquire()

    def _take_steps(self, carrier: _Carrier) -> None:
        """Take steps until the baton passes to a strand that waited."""
        heap = self._heap
        pop = heapq.heappop
        while not self.closing:
            try:
                for check in self.checks:
                    check()
            except BaseException as error:
                self.fail(error)
            if self.failure is not None:
                self._hand_to(self._main, carrier)
                return
            if not self._awaited and (not heap or heap[0][0] > self._eventful + self._uneventful):
                if self._quiet is None:
                    self.fail(StuckError(self._describe("nothing is left to happen")))
                self._hand_to(self._main, carrier)
                return
            entry = pop(heap)
            when, _, place, function, args, awaited = entry
            if function is None:
                continue
            if awaited:
                self._await_no_more(entry)
                self._eventful = when
            self.place = place
            if place is None:
                clients._current = None
            elif place.dead:
                continue
            elif place.pauses:
                place.held.append(entry)
                continue
            else:
                clients._current = place.proc
            resuming = function is _resume
            if resuming and args[0].wait is not args[1]:
                continue  # the strand has resumed for another reason
            if when > self._time_limit:
                text = f"it is not over after {self._time_limit:g} virtual seconds"
                self.fail(TimeLimitError(self._describe(text)))
                continue
            self.now = max(self.now, when)
            self.steps += 1
            if resuming:
                self._hand_to(args[0], carrier)
                return
            try:
                function(*args)
            except Vanished:
                pass
            except Unwound:
                return
            except BaseException as error:
                self.fail(error)

    def _hand_to(self, strand: Strand | None, carrier: _Carrier) -> None:
        assert strand is not None
        assert strand.carrier is not None
        self._idle.append(carrier)
        self._carrier = strand.carrier
        strand.carrier.lock.release()

    # -- diagnosis -------------------------------------------------------------------------------

    def _describe(self, what: str) -> str:
        lines = [f"at {self.now:.6f} s {what}, and these wait:"]
        for strand in self.strands:
            if not strand.place.dead:
                lines += describe_strand(strand)
        return "\n".join(lines)

    def _watch(self) -> None:
        """Find a step that does not end; runs on a thread in real time."""
        seen = -1
        while not self._over.wait(self._patience):
            carrier = self._carrier
            if self.steps != seen or carrier is None:
                seen = self.steps
                continue
            if _is_debugged(carrier.thread.ident or 0):
                continue  # virtual time stands still for as long as a person looks
            text = (
                f"a step at {self.now:.6f} s has blocked outside the simulation for more than "
                f"{self._patience:g} s; it is at:\n{describe_thread(carrier.thread.ident)}"
            )
            self.fail(StepBlockedError(text))
            print(f"monarch.testing: {text}", file=sys.stderr)  # noqa: T201 - may never be caught
            if threading.main_thread().ident in self.threads:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return


def _is_debugged(thread: int) -> bool:
    """Whether a debugger has stopped a thread; pdb and others are built on the module `bdb`."""
    return any(step.module.get("__name__") == "bdb" for step in stack_of_thread(thread).steps)


def _resume(strand: Strand, wait: Wait) -> None:  # noqa: ARG001
    """Mark an entry as "let this strand continue"; the loop recognizes it and never calls it."""
    raise AssertionError
