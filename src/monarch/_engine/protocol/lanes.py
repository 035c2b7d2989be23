"""Which message goes next when many wait for one connection.

Messages wait in **lanes**. Within a lane they leave in order, one after the other; between lanes
they leave in pieces, interleaved, so that a big transfer on one lane holds up the others by one
piece at a time. Who shares a lane is the driver's choice: what must stay in order shares one (a
sender and its receiver), what need not does not.

Lane 0 (`CONTROL`) is served before all others; it is for what the runtimes tell each other. The
rest share by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): a lane whose turn it is
may send a *quantum* of bytes, what it overdraws is taken off its next turn, so lanes get equal
shares of the bytes whatever the sizes of their messages. As in RFC 8290 (section 4.2) a lane that
was idle takes its first turn before those that have been busy all along: a call is not held up by
a hundred transfers, just by the piece that is leaving. It cannot abuse that: when it has had its
turn, or runs empty, it queues up behind the others, and only from there it may become idle again.

A lane that the receiver has paused keeps its messages. A lane counts the bytes of what it was
given and the receiver has not acknowledged; above `limit` it is full, until half of that is
acknowledged.

Nothing is copied: pieces are views of the buffers that were handed in.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from monarch._engine.wire.packet import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CONTROL", "OVERHEAD", "Lanes", "Message"]

CONTROL = 0
"""The lane that goes first."""

OVERHEAD = 128
"""What a message counts beyond its bytes, so that many tiny ones are bounded too."""


class Message:
    """Bytes in several buffers, on their way out piece by piece."""

    __slots__ = ("_buffers", "_index", "_offset", "lane", "left", "token", "total")

    def __init__(self, lane: int, buffers: Sequence[Buffer], token: object) -> None:
        self.lane = lane
        self.token = token
        self.total = self.left = sum(map(len, buffers))
        self._buffers = buffers
        self._index = 0  # the buffer that the next piece begins in,
        self._offset = 0  # and where in it

    def take(self, limit: int) -> Sequence[Buffer]:
        """The next piece, of `limit` bytes or the rest."""
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
        self.deficit = 0  # bytes it may still send in this turn
        self.listed = False  # among those that have, or had, a turn
        self.paused = False
        self.held = 0  # bytes that are not acknowledged
        self.full = False


class Lanes:
    """Messages in, pieces out, in the order the module describes.

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
        self._lanes: dict[int, _Lane] = {}  # those with messages, a full mark or a pause
        self._new: deque[_Lane] = deque()  # those that were idle
        self._old: deque[_Lane] = deque()

    def __iter__(self) -> Iterator[Message]:
        """What waits, also in part."""
        for lane in (self._control, *self._lanes.values()):
            yield from lane.queue

    def put(self, message: Message) -> bool:
        """Queue `message`; False when its lane is full now."""
        lane = self._lane(message.lane)
        lane.queue.append(message)
        lane.held += message.total + OVERHEAD
        if not lane.listed and not lane.paused:
            self._list(lane, self._new)
        if lane.held > self._limit:
            lane.full = True
        return not lane.full

    def take(self, *, control: bool = False) -> tuple[Message, Sequence[Buffer]] | None:
        """The next piece and its message, or None. With `control` of the control lane only."""
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
        """`size` bytes of `message` were acknowledged; True when its lane has room again."""
        lane = self._lane(message.lane)
        lane.held -= size
        has_room = lane.full and lane.held <= self._limit // 2
        if has_room:
            lane.full = False
        self._forget(lane)
        return has_room

    def pause(self, number: int) -> None:
        """Take nothing of this lane until `resume`."""
        self._lane(number).paused = True

    def resume(self, number: int) -> None:
        """The opposite of `pause`."""
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
        """The lane whose turn it is."""
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
                if ring is new:  # it queues up once, lest it were always new
                    old.append(lane)
                else:
                    lane.listed = False
                    self._forget(lane)
        return None
