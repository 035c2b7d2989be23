"""Messages that arrive before their actor does.

Messages between two processes keep their order, but a third process may know a mesh, too: the owner
spawns the mesh and passes a reference on, and the receiver of the reference calls at once. The
owner's SPAWN and that call reach the actor's process by two links. The second link may be faster,
since the first may have to be made, or crosses a slower network.

So a message waits for an actor that neither lives here nor is known to have ended. (A STOP does
not wait, since only the owner sends it.) The wait is bounded: an actor may have been forgotten, or
its owner may have failed before it sent the SPAWN. A process that replaced another does not wait.
The ends of its predecessor's actors are not recorded in it, and callers need an answer at once.

Rejected: references leave their owner only when each rank has acknowledged its SPAWN. Then meshes
could not be spawned, passed on and called in one burst.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import CALL, Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["EarlyMessages"]

_PATIENCE = 10.0  # seconds
_LIMIT = 10_000  # messages that wait


class Receiver(Protocol):
    """An actor as this module needs it: `runtime.actor.cell.Cell`."""

    @property
    def uid(self) -> int:
        """The id at which the actor is reached."""
        ...

    @property
    def put(self) -> Callable[[Any, Frame], None]:
        """Put a message that came by a link into the mailbox."""
        ...


class EarlyMessages:
    """Holds messages until their actor is spawned. Called by the reactor and local senders."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Any, list[tuple[FrameLink, Frame]]]] = {}  # by actor
        self._count = 0

    def keep(self, link: FrameLink, frame: Frame) -> bool:
        """Whether a message is held here for its actor, or delivered to it."""
        proc, uid = self._proc, frame.dest
        with self._lock:
            cell = proc.cells.get(uid)
            if cell is not None:  # it was spawned just now
                self._deliver(cell, link, frame)
                return True
            if uid in proc.graves or self._count >= _LIMIT or proc.spec.get("former"):
                return False
            if uid not in self._waiting:
                timer = proc.reactor.call_later(_PATIENCE, lambda: self._expire(uid))
                self._waiting[uid] = timer, []
            self._waiting[uid][1].append((link, frame))
            self._count += 1
            return True

    def admit(self, cell: Receiver) -> None:
        """Make an actor reachable, after the messages held for it are in its mailbox."""
        with self._lock:
            timer, messages = self._take(cell.uid)
            if timer is not None:
                timer.cancel()
            for link, frame in messages:
                self._deliver(cell, link, frame)
            self._proc.cells[cell.uid] = cell

    def _deliver(self, cell: Receiver, link: FrameLink, frame: Frame) -> None:
        if frame.kind == CALL:
            cell.put(link, frame)
        else:  # a QUERY asks whether the actor exists
            self._proc.post(link, frame.port, frame.rank, None)

    def _take(self, uid: int) -> tuple[Any, list[tuple[FrameLink, Frame]]]:
        timer, messages = self._waiting.pop(uid, (None, []))
        self._count -= len(messages)
        return timer, messages

    def _expire(self, uid: int) -> None:
        with self._lock:
            _, messages = self._take(uid)
        for link, frame in messages:
            self._proc.refuse(link, frame)
