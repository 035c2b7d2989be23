"""The one crossing between engine threads and asyncio loops.

A loop that waits for the engine (an `await` on a future, an async actor's mailbox) has one
`LoopGate`. Other threads `post` callbacks to it; the first post after the loop went idle writes an
eventfd, the others ride along, and the loop runs them all in one go. That is two to three times
cheaper than `loop.call_soon_threadsafe`, which writes to its pipe for every call.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["LoopGate", "gate_of"]


class LoopGate:
    """Runs callbacks of other threads on one asyncio loop. Make it with `gate_of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ready: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._signalled = False
        if hasattr(os, "eventfd"):
            self._read_fd = self._write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
        loop.add_reader(self._read_fd, self._drain)

    def post(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Run `callback(argument)` on the loop. Any thread; order of posts is kept."""
        self._ready.append((callback, argument))
        if not self._signalled:
            self._signalled = True
            os.write(self._write_fd, b"\1\0\0\0\0\0\0\0")

    def close(self) -> None:
        if self._read_fd >= 0:
            self._signalled = True  # later posts must not write to a number that is reused
            os.close(self._read_fd)
            if self._write_fd != self._read_fd:
                os.close(self._write_fd)
            self._read_fd = -1

    def _drain(self) -> None:
        os.read(self._read_fd, 8)
        self._signalled = False
        ready = self._ready
        while ready:
            callback, argument = ready.popleft()
            try:
                callback(argument)
            except Exception as error:  # what waits behind it may be all that wakes somebody
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a callback of the runtime raised", "exception": error}
                )


_gates: weakref.WeakKeyDictionary[Any, LoopGate] = weakref.WeakKeyDictionary()


def gate_of(loop: asyncio.AbstractEventLoop) -> LoopGate:
    """The gate of `loop`, made on first use; call it on the loop's thread."""
    gate = _gates.get(loop)
    if gate is None:
        gate = _gates[loop] = LoopGate(loop)
        # The loop does not tell when it closes; its collection does.
        weakref.finalize(loop, gate.close).atexit = False
    return gate
