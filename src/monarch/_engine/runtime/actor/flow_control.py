"""Back-pressure: keeps a queue bounded by making the processes that fill it wait.

A queue is full above `limit` messages or `bytes_limit` bytes. Then each process that sends to it
gets a FLOW frame, once per link, and waits. When the queue is half empty, a second FLOW frame lets
all of them go on. Messages already in flight are bounded by the socket buffers. Bodies below 1 kB
are bounded by the number of messages, and their bytes are not counted.

Both kinds of frames leave in the order in which they were decided, under one lock. The lock is
re-entrant, since a finaliser can send at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch._engine.base.settings import settings
from monarch._engine.transport.frame_link import FrameLink

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["FlowControl"]

_COUNTED = 1024


class FlowControl:
    """The bound of one queue; see the module.

    Args:
        proc: sends the FLOW frames.
        dest: the mailbox or port that the queue belongs to.
        depth: returns how many messages wait.
    """

    __slots__ = (
        "_bytes_limit",
        "_closed",
        "_depth",
        "_dest",
        "_held",
        "_limit",
        "_lock",
        "_proc",
        "bytes",
    )

    def __init__(self, proc: Proc, dest: int, depth: Callable[[], int]) -> None:
        self._proc = proc
        self._dest = dest
        self._depth = depth
        self._limit: int = settings.mailbox_limit
        self._bytes_limit: int = settings.mailbox_bytes_limit
        self.bytes = 0
        self._closed = False
        self._held: dict[FrameLink, None] = {}  # links whose senders wait
        self._lock = threading.RLock()

    def put(self, link: FrameLink, size: int, depth: int) -> None:
        """Count a message of `size` bytes that came over `link`; `depth` messages wait now."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes += size
        if (depth > self._limit or self.bytes > self._bytes_limit) and link not in self._held:
            with self._lock:
                self._proc.flow(link, self._dest, full=True)
                self._held[link] = None
            # The queue was emptied meanwhile, so no later `take` would release.
            if self._has_room():
                self.release()

    def take(self, size: int) -> None:
        """Count a message of `size` bytes as taken."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes -= size
        if self._held and self._has_room():
            self.release()

    def put_back(self, size: int) -> None:
        """Count a taken message of `size` bytes as waiting again."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes += size

    def _has_room(self) -> bool:
        return self._closed or (
            self._depth() <= self._limit // 2 and self.bytes <= self._bytes_limit // 2
        )

    def close(self) -> None:
        """Close the queue: senders no longer wait for it."""
        self._closed = True
        self.release()

    def release(self) -> None:
        """Let all waiting senders go on."""
        with self._lock:
            while self._held:
                self._proc.flow(self._held.popitem()[0], self._dest, full=False)
