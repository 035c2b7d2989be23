"""Protocols for links: of any link between two processes, and of a link over a stream.

A process sends to `FrameLink`s: over a socket (`Link`), in memory (the simulator's), to itself
(`LocalLink`), or to a process that has exited (`LostLink`). Handlers of frames get the link on
which a frame came. Only code that reads or closes links needs a `StreamLink`.

Protocols exist for type checkers alone. No class of links derives from them, so that a call on a
link costs no more than without them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from monarch._engine.transport.loan import Loan
from monarch._engine.wire.frame import Frame, FrameReader

__all__ = ["FrameLink", "Stream", "StreamLink", "Waiting"]


class Stream(Protocol):
    """The stream that a link reads and writes: a socket, or the simulator's stream."""

    def shutdown(self, how: int, /) -> None:
        """End one direction of the stream, or both, as `socket.shutdown` does."""
        ...


class Waiting(Protocol):
    """A gate where senders wait while a receiver is full."""

    def wait(self, timeout: float) -> bool:
        """Wait until the gate opens; return False after `timeout` seconds."""
        ...

    def open(self) -> None:
        """Release all who wait, now and later."""
        ...


class FrameLink(Protocol):
    """A link as its senders, and the handlers of its frames, see it."""

    peer: str
    """The name of the other side in errors."""
    uid: int
    """The process at the other end."""
    born: tuple[int, bool] | None
    """The process that the link was made for, and whether by this side; None without a stream."""
    lost: str | None
    """The reason why the link is lost, once it is."""
    queued: int
    """The number of bytes that wait for the socket."""
    queue_limit: int
    """The number of queued bytes above which senders wait."""
    paused: dict[int, Waiting]
    """Receivers behind the link that asked senders to wait."""
    casts: int
    """The last cast of this process that the peer also gets."""
    used: bool
    """Whether something was sent since the last mark."""
    direct: Any
    """The direct connection beside the link, if there is one; for `runtime.direct.link`."""
    released: deque[int]
    """Shared segments of the peer that are no longer used here."""

    def __hash__(self) -> int:
        """Links are keys: of the segments that a peer holds, of what is owed over them."""
        ...

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """Send whole frames without waiting; return False if the link is lost."""
        ...

    def wait_room(self, timeout: float) -> bool:
        """Wait until the queue is below its limit, or the link is lost.

        Return False if the peer has taken nothing for `timeout` seconds.
        """
        ...

    def mark(self, number: int) -> None:
        """Mark the place of a cast in the order of what is sent."""
        ...

    def turn_back(self) -> None:
        """Return to the tunnel, if frames go over a direct connection."""
        ...

    def take_fds(self, count: int) -> list[int]:
        """Return the next descriptors that came with frames; the caller owns them.

        Raises ProtocolError if there are fewer.
        """
        ...

    def take_fds_if_any(self, count: int) -> list[int] | None:
        """Return what `take_fds` does, or None if this process could not open all of them."""
        ...


class StreamLink(FrameLink, Protocol):
    """A link over a stream, as the process sees it that reads it and closes it."""

    fileno: int
    """The key for the reactor; negative after the link was unregistered."""
    owner: Any
    """The object that the holder of the link keeps with it."""
    reader: FrameReader
    loan: Loan | None
    """What a thread needs to read the link in place of the reactor; None if it never asked."""

    @property
    def sock(self) -> Stream:
        """The stream; the link owns it."""
        ...

    def receive(self, scratch: memoryview) -> list[Frame]:
        """Read once; return complete frames. Sets `lost` at end-of-file.

        Raises ProtocolError for anything but frames.
        """
        ...

    def await_casts(self) -> None:
        """Prepare for casts, before anything is sent."""
        ...

    def lose(self, reason: str) -> None:
        """Give the link up: `send` returns False from now on."""
        ...

    def close(self, reason: str) -> None:
        """Give the link up, and close its end of the stream."""
        ...
