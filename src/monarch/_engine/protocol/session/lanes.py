"""Lanes: decide which of many waiting messages goes next over one connection.

Messages wait in **lanes**. Within a lane they leave in order, one after the other. Between lanes
they leave in pieces, interleaved, so that a big transfer on one lane delays the others by one piece
at a time. The driver assigns lanes: messages that must stay in order (those of one sender to one
receiver) share a lane, independent messages use different ones.

Lane 0 (`CONTROL`) is served before all others; it carries the runtimes' own messages. The rest
share by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): a lane whose turn it is may
send a *quantum* of bytes, and the excess is subtracted from its next turn, so lanes get equal
shares of the bytes whatever the sizes of their messages. As in RFC 8290 (section 4.2), a lane that
was idle takes its first turn before the lanes that have been busy: a call does not wait for a
hundred transfers, only for the piece that is leaving. A lane cannot abuse that: after its turn, or
when it runs empty, it queues behind the others, and must reach the head of that queue before it can
count as idle again.

A lane that the receiver has paused keeps its messages. A lane counts the bytes that were queued and
not yet acknowledged by the receiver; above `limit` it is full, until half of that is acknowledged.

Pieces are views of the buffers that were passed in, so no data is copied.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from monarch._engine.wire.packet import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CONTROL", "OVERHEAD", "Lanes", "Message"]

CONTROL = 0
"""The lane that is sent first."""

OVERHEAD = 128
"""The bytes that a message counts beyond its size, so that small messages are limited as well."""


class Message:
    """Bytes in several buffers, sent piece by piece."""

    __slots__ = ("_buffers", "_index", "_offset", "lane", "left", "token", "total")

    def __init__(self, lane: int, buffers: Sequence[Buffer], token: object) -> None:
        self.lane = lane
        self.token = token
        self.total = self.left = sum(map(len, buffers))
        self._buffers = buffers
        self._index = 0  # the buffer in which the next piece begins
        self._offset = 0  # the position in that buffer

    def take(self, limit: int) -> Sequence[Buffer]:
        """Return the next piece, of `limit` bytes or the rest."""
        if self.left == self.total <= limit:
            self.left = 0
            return self._buffers
        piece: list[Buffer] = []
        room = min(limit, self.left)
        self.left -= room
        while room:
            view = memoryview(self._buffers[self._index])
            part = view[self._offset : self._offset + room]
            if part:
                piece.append(part)
            room -= len(part)
            self._offset += len(part)
            if self._offset == len(view):
                self._index += 1
                self._offset = 0
        return piece


class _Lane:
    __slots__ = ("deficit", "full", "held", "listed", "number", "paused", "queue")

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: deque[Message] = deque()
        self.deficit = 0  # bytes that the lane may still send in this turn
        self.listed = False  # whether the lane is in one of the two rings
        self.paused = False
        self.held = 0  # unacknowledged bytes
        self.full = False


class Lanes:
    """A scheduler: messages in, pieces out, in the order that the module describes.

    Args:
        quantum: bytes of a piece, and of a turn.
        limit: bytes above which a lane is full.

    >>> lanes = Lanes(quantum=4, limit=1000)
    >>> lanes.put(Message(1, [b"transfer"], None)), lanes.put(Message(2, [b"call"], None))
    (True, True)
    >>> [bytes(part) for _ in range(3) for part in lanes.take()[1]]
    [b'tran', b'call', b'sfer']
    """

    __slots__ = ("_control", "_lanes", "_limit", "_new", "_old", "_quantum")

    def __init__(self, quantum: int, limit: int) -> None:
        self._quantum = quantum
        self._limit = limit
        self._control = _Lane(CONTROL)
        self._lanes: dict[int, _Lane] = {}  # lanes in use, or paused
        self._new: deque[_Lane] = deque()  # lanes that were idle
        self._old: deque[_Lane] = deque()

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages that wait, in whole or in part."""
        for lane in (self._control, *self._lanes.values()):
            yield from lane.queue

    def put(self, message: Message) -> bool:
        """Queue `message`; return False when its lane is full now."""
        lane = self._lane(message.lane)
        lane.queue.append(message)
        lane.held += message.total + OVERHEAD
        if not lane.listed and not lane.paused:
            self._list(lane, self._new)
        if lane.held > self._limit:
            lane.full = True
        return not lane.full

    def take(self, *, control: bool = False) -> tuple[Message, Sequence[Buffer]] | None:
        """Return the next piece and its message, or None.

        With `control` only of the control lane.
        """
        queue = self._control.queue
        if queue:
            lane = self._control
        elif control or (turn := self._turn()) is None:
            return None
        else:
            lane = turn
            queue = lane.queue
        message = queue[0]
        before = message.left
        piece = message.take(self._quantum)
        lane.deficit -= before - message.left + OVERHEAD
        if not message.left:
            queue.popleft()
        return message, piece

    def acknowledge(self, message: Message, size: int) -> bool:
        """Record that `size` bytes of `message` were acknowledged.

        Return True when a lane that was full has room again.
        """
        lane = self._lane(message.lane)
        lane.held -= size
        has_room = lane.full and lane.held <= self._limit // 2
        if has_room:
            lane.full = False
        self._forget(lane)
        return has_room

    def pause(self, number: int) -> None:
        """Send nothing of this lane until `resume`."""
        self._lane(number).paused = True

    def resume(self, number: int) -> None:
        """Send messages of this lane again."""
        lane = self._lane(number)
        lane.paused = False
        if lane.queue and not lane.listed:
            self._list(lane, self._old)
        self._forget(lane)

    def _lane(self, number: int) -> _Lane:
        if number == CONTROL:
            return self._control
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(number)
        return lane

    def _list(self, lane: _Lane, ring: deque[_Lane]) -> None:
        if lane.number != CONTROL:
            lane.listed = True
            lane.deficit = self._quantum
            ring.append(lane)

    def _forget(self, lane: _Lane) -> None:
        if not (lane.held or lane.listed or lane.paused):
            self._lanes.pop(lane.number, None)

    def _turn(self) -> _Lane | None:
        """Return the lane whose turn it is, or None."""
        new, old = self._new, self._old
        while ring := new or old:
            lane = ring[0]
            if lane.deficit <= 0:
                lane.deficit += self._quantum
                old.append(ring.popleft())
            elif lane.queue and not lane.paused:
                return lane
            else:
                ring.popleft()
                if ring is new:  # it must queue once, or it could stay new forever
                    old.append(lane)
                else:
                    lane.listed = False
                    self._forget(lane)
        return None
