"""The one crossing between engine threads and asyncio loops.

A loop that waits for the engine (an `await` on a future, an async actor's mailbox) has one
`LoopGate`. Other threads `post` callbacks to it. The first post to an idle loop writes to an
eventfd, later ones only append to a queue, and the loop runs the whole queue at once. That is two
to three times cheaper than `loop.call_soon_threadsafe`, which writes to its pipe for every call.

asyncio calls the reader of a ready descriptor in one turn of a loop, and resumes the task that the
reader wakes in the next. The loops of actors (`new_loop`) save the first of the two turns: their
selector runs the posts itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import selectors
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch._engine.base.errors import format_all
from monarch._engine.runtime.io.fault_file import note_error

__all__ = ["LoopGate", "gate_of", "new_loop"]

Wait = Callable[[float | None], bool | None]


class LoopGate:
    """Runs callbacks of other threads on one asyncio loop. Make it with `gate_of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Called at the next wait for a future on this loop, while set.
        self.on_wait: Callable[[asyncio.Future[None]], None] | None = None
        self._ready: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._signalled = False
        self._read_fd, self._write_fd = _event()
        loop.add_reader(self._read_fd, self.drain)

    def post(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Run `callback(argument)` on the loop, in the order of posts. Call it from any thread."""
        self._ready.append((callback, argument))
        if not self._signalled:
            self._signalled = True
            os.write(self._write_fd, b"\1\0\0\0\0\0\0\0")

    @property
    def fileno(self) -> int:
        """The descriptor that the loop waits for."""
        return self._read_fd

    def close(self) -> None:
        if self._read_fd >= 0:
            self._signalled = True  # later posts must not write to a reused descriptor
            os.close(self._read_fd)
            if self._write_fd != self._read_fd:
                os.close(self._write_fd)
            self._read_fd = -1

    def separate(self) -> None:
        """Replace the descriptors in a forked child, which must not take the parent's events."""
        if self._read_fd >= 0:
            read_fd, write_fd = _event()
            os.dup2(read_fd, self._read_fd, inheritable=False)
            os.close(read_fd)
            if write_fd != read_fd:
                os.dup2(write_fd, self._write_fd, inheritable=False)
                os.close(write_fd)
            self._ready.clear()
            self._signalled = False

    def drain(self) -> None:
        """Run what was posted; on the loop, when `fileno` is readable."""
        try:
            os.read(self._read_fd, 8)
        except BlockingIOError:  # a forked child and its parent may wait on one selector
            return
        self.run()

    def hold(self) -> None:
        """Write to no descriptor for posts until `run`, which the caller calls on the loop."""
        self._signalled = True

    def run(self) -> None:
        """Run what was posted; on the loop."""
        self._signalled = False
        ready = self._ready
        while ready:
            callback, argument = ready.popleft()
            try:
                callback(argument)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # a later callback may be the only one to wake a thread
                note_error(format_all(error))
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a callback of the runtime raised", "exception": error}
                )


def _event() -> tuple[int, int]:
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


class _GateSelector(selectors.DefaultSelector):
    """A selector that runs posts before the turn of the loop begins, if there is nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = -1
        self._run: Callable[[], None] | None = None
        self._wait: Wait | None = None

    def attend(self, fd: int, run: Callable[[], None]) -> None:
        """Call `run` when `fd` alone is ready, and report nothing then."""
        self._fd = fd
        self._run = run

    def wait_by(self, wait: Wait) -> None:
        """Call `wait(timeout)` while the loop is idle.

        It returns early when this selector is ready. It returns None if it did not wait, and True
        if it has run posts.
        """
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._wait is not None and (timeout is None or timeout > 0):
            came = self._wait(timeout)
            if came:
                return []
            if came is not None:
                timeout = 0
        ready = super().select(timeout)
        # Not beside other descriptors: callbacks of the program could close these.
        if len(ready) == 1 and ready[0][0].fd == self._fd and self._run is not None:
            self._run()
            ready.clear()
        return ready


def new_loop(
    waits: Callable[[int, LoopGate, Callable[[], None]], Wait] | None = None,
) -> asyncio.AbstractEventLoop:
    """Return a new event loop with a gate. If the program sets a policy, that makes the loop.

    `waits(descriptor of the selector, gate, run)` returns the function by which the idle loop
    waits; `run` runs the posts of the gate.
    """
    policy = getattr(asyncio.events, "_event_loop_policy", None)  # None: no code has asked for it
    if policy is not None and type(policy).__module__ != "asyncio.unix_events":
        return asyncio.new_event_loop()
    selector = _GateSelector()
    loop = asyncio.SelectorEventLoop(selector)
    gate = gate_of(loop)
    run_in_context = contextvars.copy_context().run  # as asyncio does for readers
    selector.attend(gate.fileno, lambda: run_in_context(gate.drain))
    if waits is not None:
        run = functools.partial(run_in_context, gate.run)
        selector.wait_by(waits(selector.fileno(), gate, run))
    return loop


_gates: weakref.WeakKeyDictionary[Any, LoopGate] = weakref.WeakKeyDictionary()


def gate_of(loop: asyncio.AbstractEventLoop) -> LoopGate:
    """Return the gate of `loop`, made on first use; call it on the loop's thread."""
    gate = _gates.get(loop)
    if gate is None:
        gate = _gates[loop] = LoopGate(loop)
        # A loop has no callback for its closing, but its collection has one.
        weakref.finalize(loop, gate.close).atexit = False
    return gate


def _separate_all() -> None:
    for gate in list(_gates.values()):
        gate.separate()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_separate_all)
