"""The reactor: one thread that moves bytes and fires timers, and never runs user code.

It waits on descriptors with epoll (`select.poll` where there is no epoll). After each wait it calls
the callback of every ready descriptor, then the functions that other threads passed to `call_soon`,
then the timers that are due. Callbacks must not block. Waking the reactor costs one eventfd write,
which is skipped while the reactor does not wait.

Most timers are deadlines of calls and are cancelled long before they are due. So a new timer wakes
the reactor only if it is due before all others. Cancelled timers are swept out of the heap whenever
it has doubled, so the heap never has many more entries than pending timers.

The thread is a daemon: it ends with the interpreter, after the `atexit` handlers. A forked child
has no reactor: `Proc` closes the descriptors that the child inherited.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch._engine.base.failure import PLEASE_REPORT
from monarch._engine.runtime.io.fault_file import note_error
from monarch._engine.runtime.io.real_threads import require_real_threads

__all__ = ["READ", "WRITE", "Reactor", "Timer", "report_error"]

READ = select.POLLIN
WRITE = select.POLLOUT
_SCRATCH = 256 << 10
_NEVER = float("inf")
_LONGEST = 1e6  # seconds of one wait; the kernel takes no more than 2**31 milliseconds
_FEW = 64  # so many entries are never swept


class Timer:
    """A pending `call_later` or `call_at`; `cancel` is idempotent and may come from any thread."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """See the module. `run` it in the current thread, or `start` a thread for it."""

    def __init__(self) -> None:
        require_real_threads()
        self._poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._scale = 1 if hasattr(select, "epoll") else 1000
        # Whether a change during a wait takes effect; not with `poll`.
        self._sees_changes = hasattr(select, "epoll")
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._new: deque[Timer] = deque()  # timers that are set, but not yet in the heap
        self._wakes = _NEVER  # when the present wait, if any, ends without an event
        self._crowded = _FEW  # entries at which cancelled timers are swept out
        self._order = itertools.count()
        self._waiting = False  # or about to wait: entries queued before it is set are seen
        self._woken = False
        self._running = True
        self.ident = 0
        # Mapped instead of allocated: in an idle proc, pages that no read has filled cost no
        # memory.
        self.scratch = memoryview(mmap.mmap(-1, _SCRATCH))
        if hasattr(os, "eventfd"):
            self._wake_in = self._wake_out = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._wake_in, self._wake_out = os.pipe()
            os.set_blocking(self._wake_in, False)
        self.register(self._wake_in, self._on_wake)

    def start(self, name: str) -> None:
        """Run in a daemon thread; return once the thread has its identity."""
        thread = threading.Thread(target=self.run, name=name, daemon=True)
        thread.start()
        self.ident = thread.ident or 0

    # -- for any thread --------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback(*args)` on the reactor thread. Takes no lock: safe in finalisers."""
        self._soon.append((callback, args))
        if self._waiting and not self._woken:
            self._woken = True
            os.write(self._wake_out, b"\1\0\0\0\0\0\0\0")

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Run `callback()` on the reactor thread after `delay` seconds, unless cancelled."""
        return self.call_at(time.monotonic() + delay, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run `callback()` at the moment `when` of the monotonic clock, as `call_later`."""
        timer = Timer(when, callback)
        self._new.append(timer)
        # The timer is appended before `_wakes` is read: `_timeout` sets `_wakes` before it looks
        # for new timers, so one of the two sees the other.
        if timer.when < self._wakes or len(self._new) > _FEW:
            self.call_soon(self._admit)
        return timer

    def register(self, fd: int, callback: Callable[[int], None]) -> None:
        """Call `callback(event mask)` on the reactor thread whenever `fd` is readable."""
        self._callbacks[fd] = callback
        self._poll.register(fd, READ)
        if not self._sees_changes:
            self._show_change()

    def watch_writes(self, fd: int, on: bool) -> None:
        """Also call back when `fd` takes bytes. Ignored when `fd` is no longer registered."""
        self.watch(fd, reads=True, writes=on)

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        """Set the events of `fd` that call back; hang-ups and errors always do."""
        try:
            self._poll.modify(fd, (READ if reads else 0) | (WRITE if writes else 0))
        except OSError:
            if fd in self._callbacks:
                raise
        if not self._sees_changes:
            self._show_change()

    def _show_change(self) -> None:
        if threading.get_ident() != self.ident:
            self.call_soon(lambda: None)

    def unregister(self, fd: int) -> None:
        """Forget `fd`; call it before closing the descriptor."""
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def stop(self) -> None:
        """Leave `run` after the current round."""
        self._running = False
        self.call_soon(lambda: None)

    def close(self) -> None:
        """Release descriptors; only after `run` has returned, or in a forked child."""
        if hasattr(self._poll, "close"):
            self._poll.close()
        self._woken = True  # a finaliser's later `call_soon` must not write to a reused descriptor
        os.close(self._wake_in)
        if self._wake_out != self._wake_in:
            os.close(self._wake_out)

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`; may be run again, by another thread."""
        self._running = True
        self.ident = threading.get_ident()
        poll = self._poll.poll
        callbacks = self._callbacks
        soon = self._soon
        while self._running:
            self._waiting = True
            ready = poll(self._timeout())
            self._waiting = False
            for fd, mask in ready:
                callback = callbacks.get(fd)
                if callback is not None:
                    try:
                        callback(mask)
                    except Exception:  # the last boundary: one bad link must not stop the others
                        report_error()
            while soon:
                function, args = soon.popleft()
                try:
                    function(*args)
                except Exception:
                    report_error()
            if self._timers:
                self._fire()

    def _timeout(self) -> float:
        if self._new:
            self._admit()
        timers = self._timers
        self._wakes = wakes = self._next() if timers else _NEVER
        if self._soon or self._new:
            return 0
        if not timers:
            return -1
        return min(max(0.0, wakes - time.monotonic()), _LONGEST) * self._scale

    def _next(self) -> float:
        """Return when the first timer is due that was not cancelled."""
        timers = self._timers
        # A cancelled timer would cause a useless wake-up.
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        return timers[0][0] if timers else _NEVER

    def _on_wake(self, _mask: int) -> None:
        # The flag is cleared before the queue is read, so a later append writes again.
        os.read(self._wake_in, 8)
        self._woken = False

    def _admit(self) -> None:
        timers = self._timers
        while self._new:
            timer = self._new.popleft()
            if timer.callback is not None:
                heapq.heappush(timers, (timer.when, next(self._order), timer))
        if len(timers) > self._crowded:
            timers[:] = [entry for entry in timers if entry[2].callback is not None]
            heapq.heapify(timers)
            self._crowded = max(_FEW, 2 * len(timers))

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            callback = timer.callback
            if callback is not None:
                try:
                    callback()
                except Exception:
                    report_error()


def report_error() -> None:
    import traceback  # loaded late: only failures need it

    text = traceback.format_exc()
    note_error(text)
    print(
        f"monarch: internal error in the reactor of process {os.getpid()}:\n{text}{PLEASE_REPORT}",
        file=sys.stderr,
        flush=True,
    )
