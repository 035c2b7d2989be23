"""`Op` and `Transfer`: the bytes to move, and the one outcome of moving them.

Each transfer ends once, with success or with its first failure; slices that remain are not begun.
The code that carries out a transfer checks the time between slices, so that no byte of local memory
is touched after the end. The timer itself ends only a transfer that has not begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.rdma.errors import RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory

if TYPE_CHECKING:
    from monarch.rdma.routes import Unavailable
    from monarch.rdma.submission import Submission

__all__ = ["ADD", "READ", "SWAP", "WRITE", "Op", "Transfer"]

READ = 1  # remote to local
WRITE = 2  # local to remote
ADD = 3  # local = remote; remote += first operand (64 bits, unsigned)
SWAP = 4  # local = remote; if that is the first operand, remote = the second


class Op:
    """One operation: `nbytes` of a registration from `offset` on, and as many of `local`."""

    __slots__ = ("handle", "kind", "local", "nbytes", "offset", "operands")

    def __init__(
        self,
        kind: int,
        handle: Handle,
        offset: int,
        local: Memory,
        nbytes: int,
        operands: tuple[int, int] = (0, 0),
    ) -> None:
        self.kind = kind
        self.handle = handle
        self.offset = offset
        self.local = local
        self.nbytes = nbytes
        self.operands = operands


class Transfer:
    """All operations of one submit on one route. Routes carry transfers out: see `routes`."""

    __slots__ = ("_abort", "_begun", "_lock", "_submission", "deadline", "ended", "ops")

    def __init__(self, submission: Submission, ops: list[Op]) -> None:
        self._submission = submission
        self._abort: Callable[[], None] | None = None
        self._begun = False
        self._lock = threading.Lock()
        self.deadline = submission.deadline  # of time.monotonic()
        self.ended = False
        self.ops = ops

    def begin(self, abort: Callable[[], None] | None = None) -> bool:
        """Note that the route begins to move bytes; return False if the transfer has ended.

        After True only the route ends the transfer. When the time is over, `abort()` is called on
        the reactor thread; a route without `abort` checks `late` itself.
        """
        with self._lock:
            if self.ended:
                return False
            self._begun = True
            self._abort = abort
        return True

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def done(self) -> None:
        """End the transfer with success: all bytes have arrived."""
        self._end(None)

    def fail(self, error: RdmaError) -> None:
        """End the transfer with `error`."""
        self._end(error)

    def fail_late(self) -> None:
        """End the transfer because its time is over."""
        self._end(self._submission.late())

    def reroute(self, reason: Unavailable) -> None:
        """Hand the transfer back, so that the next kind of route carries it out.

        The caller has found that its own kind does not reach the memory. No byte may be moving.
        """
        with self._lock:
            self._begun = False
            self._abort = None
        self._submission.reroute(self, reason)

    def expire(self) -> None:
        """End the transfer if it has not begun, else abort it; on the reactor thread."""
        with self._lock:
            begun, abort = self._begun, self._abort
            if not begun:
                first, self.ended = not self.ended, True
            else:
                first = False
        if first:
            self._submission.ended(self, self._submission.late())
        elif abort is not None:
            abort()

    def _end(self, error: RdmaError | None) -> None:
        with self._lock:
            if self.ended:
                return
            self.ended = True
        self._submission.ended(self, error)
