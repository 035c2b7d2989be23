"""Links without a socket: to this process itself, and to a process that has exited.

Also the gate, where senders wait while a receiver at the other end of a link is full.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.verdict import Verdict
from monarch._engine.runtime.io import environment as environments
from monarch._engine.transport.frame_link import Waiting
from monarch._engine.transport.loan import Loan

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


class _Streamless:
    """The common parts of links without a stream, which carry no casts and no descriptors."""

    born: tuple[int, bool] | None = None
    queued: int = 0
    queue_limit: int = 0
    casts: int = 0
    used: bool = False
    direct: object = None
    loan: Loan | None = None

    def __init__(self, uid: int, peer: str, lost: str | None) -> None:
        self.uid = uid
        self.peer = peer
        self.lost = lost
        self.paused: dict[int, Waiting] = {}
        self.released: deque[int] = deque()

    def wait_room(self, timeout: float) -> bool:
        """Return True at once: no bytes wait."""
        return True

    def mark(self, number: int) -> None:
        """Do nothing: the order of messages here does not depend on casts."""

    def turn_back(self) -> None:
        """Do nothing: there is one way only."""

    def take_fds(self, count: int) -> NoReturn:
        """Raise ProtocolError: no descriptors arrive here."""
        raise ProtocolError(f"protocol error from {self.peer}: a frame names descriptors")

    take_fds_if_any = take_fds


class LocalLink(_Streamless):
    """The link of a process to itself: `Proc.send` puts frames straight in the mailbox or port."""

    def __init__(self, uid: int) -> None:
        super().__init__(uid, "this process", None)

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """Raise RuntimeError: there are no bytes between a process and itself.

        In a forked child, which is another process, return False: the link was the parent's.
        """
        if self.lost is not None:
            return False
        raise RuntimeError("a process sends to itself by Proc.send and Proc.say, not by its link")


class LostLink(_Streamless):
    """The link to a process that is known to have exited; refuses every frame."""

    def __init__(self, uid: int, verdict: Verdict) -> None:
        super().__init__(uid, f"proc {uid:x}", verdict.error)
        self.verdict = verdict

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """Return False: the link is lost."""
        return False
