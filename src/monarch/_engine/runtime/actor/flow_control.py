"""The gauge of a queue: keeps it bounded by telling the processes that fill it to wait.

Above `limit` messages or `bytes_limit` bytes the process behind a link that delivers is told to
wait (a FLOW frame), once per link; when half is empty, all are told to go on. What is under way
meanwhile is bounded by socket buffers. Bodies below 1 kB are bounded by the number of messages and
not counted. "Wait" and "go on" leave in the order they were decided, under one lock, which may be
re-entered: a finaliser can send at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Gauge"]

_COUNTED = 1024


class Gauge:
    """See the module.

    Args:
        proc: sends the FLOW frames.
        dest: the mailbox or port the queue belongs to.
        depth: how many messages wait.
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
        self._held: dict[Any, None] = {}  # links whose senders wait
        self._lock = threading.RLock()

    def put(self, link: Any, size: int, depth: int) -> None:
        """A message of `size` bytes came over `link`; `depth` wait now."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes += size
        if (depth > self._limit or self.bytes > self._bytes_limit) and link not in self._held:
            with self._lock:
                self._proc.flow(link, self._dest, full=True)
                self._held[link] = None
            if self._has_room():  # emptied meanwhile: nobody else would say so
                self.release()

    def take(self, size: int) -> None:
        """A message of `size` bytes was taken."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes -= size
        if self._held and self._has_room():
            self.release()

    def put_back(self, size: int) -> None:
        """A message of `size` bytes that was taken waits again."""
        if size >= _COUNTED:
            with self._lock:
                self.bytes += size

    def _has_room(self) -> bool:
        return self._closed or (
            self._depth() <= self._limit // 2 and self.bytes <= self._bytes_limit // 2
        )

    def close(self) -> None:
        """The queue is over: nobody waits for it any more."""
        self._closed = True
        self.release()

    def release(self) -> None:
        """Tell everyone who waits to go on."""
        with self._lock:
            while self._held:
                self._proc.flow(self._held.popitem()[0], self._dest, full=False)
