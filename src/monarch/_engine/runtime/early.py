"""Messages that came before their actor.

Messages between two processes keep their order, but a mesh may be known to a third one: its owner
spawns it and hands on a reference, and whoever gets that calls at once. The owner's SPAWN and that
call come to the actor's process on two links, of which the second may be the faster one: the first
may have to be made, or cross a slower network.

So what is for an actor that is neither here nor among the dead waits for it (but for a STOP, which
comes from the owner). How long is bounded, since an actor may have been forgotten, or its owner may
have died with the SPAWN in its hands.
A process that replaced another does not wait: actors of its predecessor are not among its own dead,
and callers are to be told at once.

Rejected: to let references leave their owner only when each rank has acknowledged its SPAWN. Then
meshes could not be spawned, passed on and called in one burst.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch._engine.wire.frame import CALL, Frame

if TYPE_CHECKING:
    from monarch._engine.runtime.cell import Cell
    from monarch._engine.runtime.proc import Proc

__all__ = ["EarlyMessages"]

_PATIENCE = 10.0  # seconds
_LIMIT = 10_000  # messages that wait


class EarlyMessages:
    """See the module. Messages come from the reactor thread and from local senders."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Any, list[tuple[Any, Frame]]]] = {}  # timer, messages
        self._count = 0

    def keep(self, link: Any, frame: Frame) -> bool:
        """Whether a message for an actor that is not here was kept for it."""
        proc, uid = self._proc, frame.dest
        with self._lock:
            cell = proc.cells.get(uid)
            if cell is not None:  # it came just now
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

    def admit(self, cell: Cell) -> None:
        """Make an actor reachable, with what came before it in its mailbox."""
        with self._lock:
            timer, messages = self._take(cell.uid)
            if timer is not None:
                timer.cancel()
            for link, frame in messages:
                self._deliver(cell, link, frame)
            self._proc.cells[cell.uid] = cell

    def _deliver(self, cell: Cell, link: Any, frame: Frame) -> None:
        if frame.kind == CALL:
            cell.put(link, frame)
        else:  # a QUERY: whether it is there
            self._proc.post(link, frame.port, frame.rank, None)

    def _take(self, uid: int) -> tuple[Any, list[tuple[Any, Frame]]]:
        timer, messages = self._waiting.pop(uid, (None, []))
        self._count -= len(messages)
        return timer, messages

    def _expire(self, uid: int) -> None:
        with self._lock:
            _, messages = self._take(uid)
        for link, frame in messages:
            self._proc.refuse(link, frame)
