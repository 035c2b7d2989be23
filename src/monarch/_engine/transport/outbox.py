"""`Outbox`: bytes that wait for a socket which takes them in parts.

A socket that does not block takes the first of the bytes that it is given. The rest stays here, and
the next write resumes at the byte after. Buffers are neither copied nor joined. The owner decides
when to write, how much may wait, and what an error means.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Outbox"]

_MOST_BUFFERS = 512  # per call of the socket; the kernel takes at most 1024


class _Socket(Protocol):
    def sendmsg(self, buffers: list[memoryview], /) -> int: ...


class Outbox(list[memoryview]):
    """The buffers that were not sent yet, in order; add to them as to any list."""

    __slots__ = ()

    def write(self, sock: _Socket) -> int:
        """Give the first buffers to `sock`; return how many bytes it took.

        If `sock` raises, BlockingIOError above all, no byte has been removed.
        """
        left = sent = sock.sendmsg(self[:_MOST_BUFFERS])
        done = 0
        for buffer in self:
            if left < len(buffer):
                self[done] = buffer[left:]
                break
            left -= len(buffer)
            done += 1
        del self[:done]
        return sent
