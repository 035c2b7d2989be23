"""The sampler of a process: it looks at the stacks of all threads, again and again, while asked.

It is a thread that lives for the time of a profile. Each sample adds the stack of a thread to a
tree, with a weight in nanoseconds: the wall time since the last sample or, by default, the
processor time that the thread has used since. So a thread that waits for a lock, a socket or a
message adds nothing. The memory is bounded by the number of nodes of the tree; beyond it, a stack
is cut to its known part. The sampler takes at most a tenth of its time for samples, at the price of
the rate.

Two facts shape what is seen. The sampler needs the interpreter lock, which another thread gives up
after 5 ms at most, or when it begins to wait. So the end of a burst of work would be charged to the
wait that follows: a thread that is found in the engine is charged to the code that it was found in
before. Bursts below 5 ms are charged to the calls between them, which cannot be helped. And native
code that has released the lock is charged to the line that called it.

Rejected: `pthread_getcpuclockid`, which reads freed memory for a thread that has just ended. The
number of the clock follows from the thread's number, and a clock of no thread is an error. Signals
of a timer for processor time were rejected since Python's handlers run in the main thread only.
"""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple, TypedDict

from monarch._spi import Step, stacks, threads
from monarch._traces.stacks import ENGINE

__all__ = ["ENGINE", "Options", "ProcessProfile", "Sampler", "Tree"]

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_NODES = 50_000  # of the tree: about 10 MB
_DEEPEST = 256  # frames of a stack that are kept: the outermost
_SHARE = 10  # the sampler sleeps for so many times the time that a sample took
_IDLE = 20  # a thread that used less than this part of the time is taken to wait
_RENEW = 64  # samples between two looks at the names of the threads


class Options(NamedTuple):
    """How a process is sampled.

    Attributes:
        seconds: for how long.
        rate: samples in a second.
        wall: count the time that passes, and not the processor time.
        lines: tell the lines of a function apart.
        engine: show the frames of this library one by one.
    """

    seconds: float
    rate: int = 100
    wall: bool = False
    lines: bool = False
    engine: bool = False


class ProcessProfile(TypedDict):
    """The samples of a process: frames, and stacks as positions of frames with their weight.

    `stacks` has rows of nanoseconds, samples, and frames, the outermost first. `lost` is the
    processor time of threads that were waiting whenever they were looked at, in nanoseconds.
    """

    pid: int
    machine: str
    label: str
    samples: int
    seconds: float
    cut: int
    lost: int
    frames: list[tuple[str, str, int]]
    stacks: list[list[int]]


class Tree:
    """Stacks with their weights, as a tree of a bounded number of nodes. A node is a number."""

    def __init__(self, most: int = _NODES) -> None:
        self._most = most
        self._parents = [0]
        self._frames = [-1]
        self._weights = [0]
        self._counts = [0]
        self._children: dict[tuple[int, int], int] = {}
        self.cut = 0

    def node(self, stack: list[int]) -> int:
        """Return the node of a stack, the outermost frame first; or of the part there is room for.

        >>> tree = Tree(most=3)
        >>> tree.add(tree.node([7, 8, 9]), 5)
        >>> tree.stacks(), tree.cut
        ([[5, 1, 7, 8]], 1)
        """
        at = 0
        for frame in stack:
            child = self._children.get((at, frame))
            if child is None:
                if len(self._parents) == self._most:
                    self.cut += 1
                    break
                child = self._children[at, frame] = len(self._parents)
                self._parents.append(at)
                self._frames.append(frame)
                self._weights.append(0)
                self._counts.append(0)
            at = child
        return at

    def add(self, node: int, weight: int) -> None:
        """Count a sample of this weight."""
        self._weights[node] += weight
        self._counts[node] += 1

    def stacks(self) -> list[list[int]]:
        """Return all stacks that were counted: weight, samples, frames."""
        found: list[list[int]] = []
        for node, count in enumerate(self._counts):
            if not count or not node:
                continue
            stack: list[int] = []
            at = node
            while at:
                stack.append(self._frames[at])
                at = self._parents[at]
            found.append([self._weights[node], count, *stack[::-1]])
        return found


class _Thread:
    """A thread under observation: its name in the profile, its clock, and what is charged to it."""

    __slots__ = ("before", "clock", "ended", "label", "owed", "seen", "used")

    def __init__(self, label: str, native: int | None, new: bool) -> None:
        self.label = label
        self.clock = None if native is None else (~native << 3) | 6  # see clock_getcpuclockid(3)
        self.ended = False
        self.used = 0
        if not new:
            self.used = self.time()
        self.owed = 0
        self.before = 0  # the node of its last sample, if that was in the program
        self.seen: list[tuple[int, int]] = []

    def time(self) -> int:
        """Return the processor time so far, in nanoseconds; 0 if it is not known."""
        if self.clock is None:
            return 0
        try:
            return time.clock_gettime_ns(self.clock)
        except OSError:  # it has ended, and perhaps another one has its place
            self.ended = True
            return self.used

    def charge(self, elapsed: int) -> int:
        """Return the processor time to charge to the present stack; 0 while the thread waits."""
        used = self.time()
        fresh, self.used = max(0, used - self.used), used
        self.owed += fresh
        if fresh * _IDLE < elapsed:
            return 0
        owed, self.owed = self.owed, 0
        return owed

    def has_moved(self, steps: list[Step]) -> bool:
        """Whether the thread is at another place than when this was last asked."""
        seen, self.seen = self.seen, [(id(step.code), step.offset) for step in steps]
        return seen != self.seen


class Sampler:
    """A profile of this process, which begins at once and ends by itself.

    Args:
        options: what is asked for.
        labels: returns the names of actors by the thread that they run on.
        script: whether the main thread is that of the user's script.
    """

    def __init__(
        self, options: Options, labels: Callable[[], dict[int, str]], script: bool = False
    ) -> None:
        self._options = options
        self._labels = labels
        self._script = script
        self._tree = Tree()
        self._frames: list[tuple[str, str, int]] = []
        self._known: dict[tuple[int, int], tuple[int, int]] = {}  # numbers and kinds
        self._kinds: dict[int, int] = {}
        self._codes: list[CodeType] = []  # kept alive, since they are known by their addresses
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._roots: dict[str, int] = {}
        self._engine = self._frame((ENGINE, "", 0))
        self._threads: dict[int, _Thread] = {}
        self._names: dict[int, tuple[str, int | None]] = {}
        self._samples = 0
        self._lost = 0
        self._took = 0.0
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it no longer samples."""
        return self._ended.is_set()

    def stop(self) -> None:
        """End it now."""
        self._stopped.set()

    def run(self) -> None:
        """Sample until the time is over; the body of the sampler's thread."""
        began = time.monotonic()
        try:
            self._sample_until(began + self._options.seconds)
        except Exception as error:  # `result` raises it, for the command
            self._error = error
        finally:
            self._took = time.monotonic() - began
            self._ended.set()

    def _sample_until(self, end: float) -> None:
        interval = 1.0 / self._options.rate
        last, due = time.monotonic_ns(), time.monotonic()
        self._sample(0)  # the clocks begin here
        self._samples = 0
        while True:
            due = max(due + interval, time.monotonic())
            stopped = self._stopped.wait(max(0.0, min(due, end) - time.monotonic()))
            busy = time.thread_time()
            now = time.monotonic_ns()
            self._sample(now - last)
            last = now
            if stopped or time.monotonic() >= end:
                break
            due = max(due, time.monotonic() + (time.thread_time() - busy) * _SHARE - interval)

    def result(self, pid: int, machine: str, label: str) -> ProcessProfile:
        """Return what was sampled; call it when the sampler has ended. Waits for that.

        Raises RuntimeError if it ended with an error.
        """
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(
                f"the sampling ended with an error after {self._took:.1f} s: {_place(self._error)}"
            )
        lost = self._lost + sum(thread.owed for thread in self._threads.values())
        return {
            "pid": pid,
            "machine": machine,
            "label": label,
            "samples": self._samples,
            "seconds": self._took,
            "cut": self._tree.cut,
            "lost": lost,
            "frames": self._frames,
            "stacks": self._tree.stacks(),
        }

    def _sample(self, elapsed: int) -> None:
        own = threading.get_ident()
        found = threads()
        if self._samples % _RENEW == 0:
            self._names = self._names_of_threads()
        self._samples += 1
        due: dict[int, tuple[_Thread, int]] = {}
        for ident in found:
            if ident != own:
                thread = self._thread(ident, new=bool(elapsed))
                weight = self._weight(thread, elapsed)
                if weight:
                    due[ident] = thread, weight
                else:
                    thread.before = 0
                if thread.ended:
                    self._lost += self._threads.pop(ident).owed
                    self._names.pop(ident, None)
        for ident in self._threads.keys() - set(found):
            self._lost += self._threads.pop(ident).owed
        looked = stacks(of=due) if due else {}
        for ident, (thread, weight) in due.items():
            if ident in looked:
                self._count(thread, looked[ident].steps, weight)
            else:  # it has ended meanwhile
                self._lost += weight

    def _thread(self, ident: int, new: bool) -> _Thread:
        thread = self._threads.get(ident)
        if thread is None:
            if ident not in self._names:
                self._names = self._names_of_threads()
            label, native = self._names.get(ident, ("", None))
            thread = self._threads[ident] = _Thread(label, native, new)
        elif ident in self._names:
            thread.label = self._names[ident][0]
        return thread

    def _weight(self, thread: _Thread, elapsed: int) -> int:
        """Return what to charge to the present stack of a thread, in nanoseconds."""
        if self._options.wall or thread.clock is None or not elapsed:
            return elapsed
        return thread.charge(elapsed)

    def _count(self, thread: _Thread, steps: list[Step], weight: int) -> None:
        wall = self._options.wall
        # A thread that `threading` does not know has no clock: it works if it has moved on.
        if not wall and thread.clock is None and not thread.has_moved(steps):
            thread.before = 0
            return
        root = self._roots.get(thread.label)
        if root is None:
            root = self._roots[thread.label] = self._frame((thread.label or "a thread", "", 0))
        if root == self._engine and not self._options.engine:
            if wall:
                return  # the threads of this library wait most of the time
            stack: list[int] = []
            in_program = False
        else:
            stack, in_program = self._stack(steps)
        if in_program or wall or not thread.before:
            node = self._tree.node([root, *stack])
            thread.before = node if in_program else 0
        else:
            node, thread.before = thread.before, 0
        self._tree.add(node, weight)

    def _names_of_threads(self) -> dict[int, tuple[str, int | None]]:
        actors = self._labels()
        main = threading.main_thread().ident
        names: dict[int, tuple[str, int | None]] = {}
        for thread in threading.enumerate():
            if thread.ident is None:
                continue
            label = actors.get(thread.ident)
            if label is None and thread.ident == main:
                label = "the script" if self._script else ENGINE
            if label is None:
                label = ENGINE if thread.name.startswith("monarch-") else _plain(thread.name)
            names[thread.ident] = label, thread.native_id
        return names

    # -- stacks ------------------------------------------------------------------------------------

    def _stack(self, steps: list[Step]) -> tuple[list[int], bool]:
        """Return the frames to show, the outermost first, and whether one is of the program."""
        lines, known = self._options.lines, self._known.get
        walked = [
            known((id(step[0]), step[1] if lines else 0)) or self._learn(step)
            for step in reversed(steps)
        ]
        in_program = any(kind == _PROGRAM for _, kind in walked)
        if self._options.engine:
            return [number for number, _ in walked[:_DEEPEST]], in_program
        first = 0
        if in_program:  # how the thread came to the program is left out
            while walked[first][1] != _PROGRAM:
                first += 1
        elif any(kind == _ENGINE for _, kind in walked):
            return [self._engine], False
        shown: list[int] = []
        for number, kind in walked[first:]:
            if kind != _ENGINE:
                shown.append(number)
            elif not shown or shown[-1] != self._engine:
                shown.append(self._engine)
        return shown[:_DEEPEST], in_program

    def _learn(self, step: Step) -> tuple[int, int]:
        """Return the number and the kind of a frame that was not met before."""
        code, lines = step.code, self._options.lines
        if id(code) not in self._kinds:
            self._kinds[id(code)] = _kind(step.file)
            self._codes.append(code)
        name = getattr(code, "co_qualname", code.co_name)
        number = self._frame((name, step.file, step.line if lines else code.co_firstlineno))
        learnt = number, self._kinds[id(code)]
        self._known[id(code), step.offset if lines else 0] = learnt
        return learnt

    def _frame(self, frame: tuple[str, str, int]) -> int:
        number = self._numbers.setdefault(frame, len(self._frames))
        if number == len(self._frames):
            self._frames.append(frame)
        return number


_PROGRAM, _STANDARD, _ENGINE = range(3)


def _kind(file: str) -> int:
    if file.startswith(_OURS):
        return _ENGINE
    if file.startswith(("<frozen", _LIBRARY)) and _PACKAGES not in file:
        return _STANDARD
    return _PROGRAM


def _place(error: BaseException) -> str:
    """Return an error with the line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = os.path.basename(place.filename)
    return f"{type(error).__name__}: {error} (at {file}:{place.lineno}, in {place.name})"


def _plain(name: str) -> str:
    """Return the name of a thread without numbers, so that equal threads share a frame.

    >>> _plain("ThreadPoolExecutor-0_12")
    'ThreadPoolExecutor-N_N'
    """
    return re.sub(r"\d+", "N", name)
