"""Links without a socket: to this process itself, and to a process that has exited.

Also the gate, where senders wait while a receiver at the other end of a link is full.
"""

from __future__ import annotations

from monarch._engine.runtime.io import environment as environments

__all__ = ["Gate", "LocalLink", "LostLink"]


class Gate:
    """Blocks senders while a receiver's mailbox is full."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = environments.current.event()

    def wait(self, timeout: float) -> bool:
        return self._event.wait(timeout)

    def open(self) -> None:
        self._event.set()


class LocalLink:
    """The link of a process to itself: frames go straight to the mailbox or port."""

    lost = None
    queued = 0
    born = None

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.paused: dict[int, Gate] = {}


class LostLink:
    """The link to a process that is known to have exited; refuses every frame."""

    queued = 0
    queue_limit = 0
    born = None

    def __init__(self, uid: int, reason: str) -> None:
        self.uid = uid
        self.lost = reason
        self.paused: dict[int, Gate] = {}

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        return False
