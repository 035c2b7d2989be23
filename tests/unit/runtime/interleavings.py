"""Every order in which threads can run: an explorer of schedules for code as it is.

Threads run one at a time. Before each line of the code under test a thread stops, and the schedule
says which one goes on (`Run`). A schedule is the list of *switches*: at which step a thread that
could go on has to stand back for which other. All schedules with at most so many switches are run
(`explore`); most errors of this kind need one or two. The kernel's part (epoll sets, eventfds,
sockets) is modelled by objects that are level-triggered and wake every thread that waits for them,
which allows for more than the kernel does.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Descriptor", "EpollSet", "Lock", "Run", "Stuck", "explore"]

_MOST_STEPS = 5000
_MOST_ALONE = 100  # steps of one thread while others can go on: the processor is shared
Switch = tuple[int, int]  # at this step, this thread


class Stuck(AssertionError):
    """No thread can go on, and not all are at their end; or they never come to it."""


class _Strand:
    def __init__(self, run: Run, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.may_go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.over = False
        self.line = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, args=(run, body), daemon=True)

    def _main(self, run: Run, body: Callable[[], None]) -> None:
        self.may_go.acquire()
        sys.settrace(run.trace)
        try:
            if not run.stopped:
                body()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.over = True
            run.turned.release()


class _Stopped(BaseException):
    """The run is over; unwinds a strand."""


class Run:
    """One schedule. `traced`: the files whose lines are steps."""

    def __init__(self, traced: set[str], switches: tuple[Switch, ...]) -> None:
        self.strands: list[_Strand] = []
        self.turned = threading.Semaphore(0)
        self.stopped = False
        self.steps = 0
        self.current: _Strand | None = None
        self.choices: list[tuple[int, ...]] = []  # at each step: which others could go on
        self.hooks: dict[int, Callable[[], None]] = {}  # at a step of the first strand's own
        self.takes_hooks: Callable[[], bool] = lambda: True
        self.own = 0  # steps of the first strand
        self._traced = traced
        self._switches = dict(switches)

    def add(self, name: str, body: Callable[[], None]) -> None:
        self.strands.append(_Strand(self, name, body))

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._traced:
            return None
        if event == "line" and self.current is not None:
            self.current.line = frame.f_lineno
            self.stop_here()
            if self.current is self.strands[0]:
                self.own += 1
                if self.hooks and min(self.hooks) <= self.own and self.takes_hooks():
                    self.hooks.pop(min(self.hooks))()
        return self.trace

    def stop_here(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, until `ready` and the schedule allow this thread to go on."""
        strand = self.current
        assert strand is not None
        if self.stopped:
            raise _Stopped
        strand.ready = ready
        self.turned.release()
        strand.may_go.acquire()
        if self.stopped:
            raise _Stopped

    def go(self) -> None:
        """Run all strands to their end. Raises `Stuck`."""
        for strand in self.strands:
            strand.thread.start()
        at = alone = 0
        try:
            while any(not strand.over for strand in self.strands):
                able = [n for n, s in enumerate(self.strands) if not s.over and s.ready()]
                if not able or self.steps > _MOST_STEPS:
                    raise Stuck(self._state())
                wish = self._switches.get(self.steps)
                if wish in able:
                    at = wish
                elif at not in able or alone > _MOST_ALONE:
                    at = next((n for n in able if n > at), able[0])
                alone = 0 if self.current is not self.strands[at] else alone + 1
                self.choices.append(tuple(n for n in able if n != at))
                self.steps += 1
                self.current = self.strands[at]
                self.current.may_go.release()
                self.turned.acquire()
        finally:
            self.stopped = True
            for strand in self.strands:
                while not strand.over:
                    self.current = strand
                    strand.may_go.release()
                    self.turned.acquire()
                strand.thread.join()
        for strand in self.strands:
            if strand.error is not None:
                raise strand.error

    def _state(self) -> str:
        left = [f"{x.name} (line {x.line})" for x in self.strands if not x.over]
        return f"after {self.steps} steps these have not ended: {', '.join(left)}"


def explore(make: Callable[[tuple[Switch, ...]], Run], most: int, every: int = 1) -> int:
    """Run all schedules with at most `most` switches; of those with `most`, each `every`th.

    Return how many.
    """
    count = skipped = 0
    waiting: deque[tuple[Switch, ...]] = deque([()])
    while waiting:
        switches = waiting.popleft()
        run = make(switches)
        try:
            run.go()
        except BaseException as error:
            error.args = (f"{error} (schedule {switches})",)
            raise
        count += 1
        if len(switches) < most:
            first = switches[-1][0] + 1 if switches else 0
            for step in range(first, len(run.choices)):
                for other in run.choices[step]:
                    skipped += 1
                    if len(switches) + 1 < most or skipped % every == 0:
                        waiting.append((*switches, (step, other)))
    return count


class Lock:
    """A re-entrant lock of a schedule."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owner: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        run = self._run
        strand = run.current
        run.stop_here(lambda: self._owner in (None, strand))
        self._owner = strand
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


class Descriptor:
    """Something that is readable, or not."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    @property
    def readable(self) -> bool:
        return self.count > 0


class EpollSet(Descriptor):
    """A set of descriptors, and one itself."""

    def __init__(self, number: int, run: Run, table: dict[int, Any]) -> None:
        super().__init__(number)
        self._run = run
        self._table = table
        self._members: dict[int, int] = {}

    def fileno(self) -> int:
        return self.number

    def register(self, fd: int, mask: int = 1) -> None:
        self._members[fd] = mask

    modify = register

    def unregister(self, fd: int) -> None:
        del self._members[fd]

    def _ready(self) -> Iterator[tuple[int, int]]:
        for fd, mask in list(self._members.items()):
            if mask and self._table[fd].readable:
                yield fd, 1

    @property
    def readable(self) -> bool:
        return any(True for _ in self._ready())

    def poll(self, timeout: float = -1, most: int = -1) -> list[tuple[int, int]]:
        if timeout:
            self._run.stop_here(lambda: self.readable)
        return list(self._ready())
