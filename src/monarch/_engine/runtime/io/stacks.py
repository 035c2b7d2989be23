"""The stacks of threads and of suspended tasks, as finished lists.

All code of this package that looks at what another thread executes asks here: profiles, accounts,
the search for deadlocks, reports of stops and of blocked loops.

Invariants: no frame object leaves this module, and a stack is read while no other thread runs.

* CPython 3.11 makes a frame object when somebody asks for it (`sys._current_frames`, `f_back`,
  `f_locals`, `cr_frame`), and that allocation may run the garbage collector at once. A finalizer
  releases the interpreter lock, the other thread returns from the frame, and the new object points
  to memory that is used again: the process dies, or reads other objects in the place of frames. Up
  to 3.11.8 `sys._current_frames` can also block for good, since it allocates with a lock held.
* A frame object holds the variables of the frame. If the thread returns while another holds it,
  their finalizers run in the thread that looked.

Design: a stack is read by one call of a function in C (`deque`), which drives iterators in C. The
interpreter gives up its lock for another thread between the instructions of Python code only, and
there is none inside that call. Before 3.12, where the collector still runs inside allocations, the
same call sets the collector's threshold to 0 and restores it. So the program cannot turn the
collector on in between, its own settings are kept, and two threads that look do not disturb each
other. For 234 frames of 12 threads it takes 73 us on 3.11, as a loop in Python does.

Rejected: `gc.disable` and a loop in Python. Another thread may call `gc.enable` between two
instructions, and what it sets meanwhile is lost at the end. `faulthandler.dump_traceback` to a file
allocates nothing, but has neither code objects nor variables, 100 frames at most, and its text has
to be parsed. Reading from outside, as py-spy does, needs the right to trace processes.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import accumulate, chain, compress, islice, repeat, starmap, takewhile, tee
from operator import attrgetter, is_, is_not, itemgetter, methodcaller
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "NO_STACK",
    "Stack",
    "Step",
    "leave_out_callers",
    "stack_of_task",
    "stack_of_thread",
    "stacks",
    "threads",
]

_COLLECTS = sys.version_info < (3, 12)  # allocations run the collector
_T = TypeVar("_T")
_left_out: tuple[int, int] = (0, 0)  # a thread, and how many of its outermost frames are not shown


class Step(NamedTuple):
    """A frame, as it was: its code, the offset of its instruction, and its module's variables."""

    code: CodeType
    offset: int
    module: dict[str, Any]

    @property
    def line(self) -> int:
        """The line of the source."""
        for start, end, line in self.code.co_lines():
            if start <= self.offset < end and line is not None:
                return line
        return self.code.co_firstlineno

    @property
    def file(self) -> str:
        """The path of the source."""
        return self.code.co_filename

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.co_name


class Stack(NamedTuple):
    """A stack, the innermost frame first.

    `variables` are the local ones of the frames of the code that was asked for, in the same order.
    """

    steps: list[Step]
    variables: list[dict[str, Any]]


NO_STACK = Stack([], [])
"""The stack of a thread that runs no Python code, or has ended."""


def threads() -> list[int]:
    """Return the numbers of all threads that run Python code."""
    return _at_once(_numbers)


def leave_out_callers() -> None:
    """Leave the callers of the calling function out of all stacks of this thread from now on.

    How a process came to run actors on its main thread is no part of what the actors do.
    """
    global _left_out
    count, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        count, frame = count + 1, frame.f_back
    _left_out = get_ident(), count


def stacks(inside: CodeType | None = None, of: Collection[int] | None = None) -> dict[int, Stack]:
    """Return the stacks of threads by the threads' numbers; from any thread. Does not block.

    Args:
        inside: a code object; each stack has the variables of the frames that execute it.
        of: the numbers of the threads, in a collection of the standard library; by default all.
    """
    found = dict(_at_once(_of_threads, inside, of))
    thread, count = _left_out
    if count and thread in found:
        del found[thread].steps[-count:]
    return found


def stack_of_thread(thread: int | None, inside: CodeType | None = None) -> Stack:
    """Return the stack of the thread with this number; empty if there is none. See `stacks`."""
    return stacks(inside, (thread,)).get(thread, NO_STACK) if thread else NO_STACK


def stack_of_task(task: asyncio.Task[Any], inside: CodeType | None = None) -> Stack:
    """Return the stack of a task that awaits, the outermost frame first; from any thread."""
    awaited: list[Any] = []
    step: Any = task.get_coro()
    while step is not None:
        awaited.append(step)
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return _at_once(_of_coroutines, awaited, inside)[0]


def _at_once(build: Callable[..., Iterator[_T]], *arguments: Any) -> list[_T]:
    """Return what an iterator of C functions yields, read while no other thread runs.

    The iterator is not held by a variable, so the frames that it holds are dropped in the call.
    """
    if not _COLLECTS:
        return list(build(*arguments))
    thresholds = gc.get_threshold()
    found: list[_T] = []
    try:
        deque(
            starmap(
                gc.set_threshold,
                map(
                    itemgetter(0),
                    zip(  # in this order, once
                        islice(iter(gc.get_threshold, None), 1),
                        iter(partial(gc.set_threshold, 0), True),
                        _map(found.extend, (build(*arguments),)),
                        strict=False,
                    ),
                ),
            ),
            0,
        )
    except BaseException:  # no memory, or an audit hook that refuses
        gc.set_threshold(*thresholds)
        raise
    return found


# The functions below make iterators of functions in C alone: an instruction of Python would let
# another thread run. A walk is an iterable of frames.

_keys = methodcaller("keys")
_values = methodcaller("values")
_step = attrgetter("f_code", "f_lasti", "f_globals")
_code = attrgetter("f_code")
_locals = attrgetter("f_locals")
# Without types, since they are not known for functions such as `map`.
_map: Any = map
_tuple: Any = tuple
_accumulate: Any = accumulate
_as_step = partial(_tuple.__new__, Step)
_as_stack = partial(_tuple.__new__, Stack)


def _numbers() -> Iterator[int]:
    return chain.from_iterable(_map(_keys, islice(iter(sys._current_frames, None), 1)))


def _of_threads(inside: CodeType | None, of: Collection[int] | None) -> Iterator[tuple[int, Stack]]:
    wanted: Any = partial(is_not, None) if of is None else of.__contains__
    first, second, third = tee(islice(iter(sys._current_frames, None), 1), 3)
    numbers: Iterator[int] = filter(wanted, chain.from_iterable(_map(_keys, first)))
    chosen = map(wanted, chain.from_iterable(_map(_keys, second)))
    innermost: Iterator[Any] = compress(chain.from_iterable(_map(_values, third)), chosen)
    # frame, frame.f_back, frame.f_back.f_back, ... until it is None
    steps = _map(chain, zip(innermost, strict=True), repeat(repeat("f_back")))
    walks = _map(takewhile, repeat(bool), _map(_accumulate, steps, repeat(getattr)))
    return zip(numbers, _of_walks(walks, inside), strict=True)


def _of_coroutines(awaited: list[Any], inside: CodeType | None) -> Iterator[Stack]:
    kinds = [step.__class__ for step in awaited]
    names = ["cr_frame" if hasattr(kind, "cr_frame") else "gi_frame" for kind in kinds]
    walk = filter(None, _map(getattr, awaited, names, repeat(None)))
    return _of_walks(iter([walk]), inside)


def _of_walks(walks: Iterator[Any], inside: CodeType | None) -> Iterator[Stack]:
    if inside is None:
        steps = _each(_step, walks)
        variables: Iterator[list[dict[str, Any]]] = _map(list, repeat(()))
    else:
        first, second, third = tee(_map(list, walks), 3)
        steps = _each(_step, first)
        wanted = _each(partial(is_, inside), _each(_code, second))
        held = _each(_locals, _map(compress, third, wanted))
        variables = _map(list, _each(dict, held))  # copies: in 3.13 they are views of the frame
    lists: Iterator[list[Step]] = _map(list, _each(_as_step, steps))
    # Not strict: `variables` may be endless.
    found: Iterator[Stack] = _map(_as_stack, zip(lists, variables, strict=False))
    return found


def _each(function: Callable[..., Any], iterables: Iterator[Any]) -> Iterator[Any]:
    """Apply a function to the items of each iterable."""
    applied: Iterator[Any] = _map(map, repeat(function), iterables)
    return applied
