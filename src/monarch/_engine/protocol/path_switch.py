"""PathSwitch: in-order delivery over two streams, and replay of what a broken connection lost.

Two procs of different hosts that communicate often have two paths: the tunnel, which the agents
carry and which can carry everything, and a direct connection, which is faster and may break. A
sender uses one of them at a time. To change, it sends a TURN as the last frame on the path that it
leaves. The receiver takes frames from one path until it finds a TURN, then from the other; frames
that arrive too early on that one wait (`PathSwitch`). So either path may be arbitrarily slow, and
steady traffic pays nothing. The sender decides, separately for each direction.

A direct connection that breaks ends in the middle of what was sent on it. Therefore a sender keeps
what was not confirmed (`Unconfirmed`). After a break each side reports to the other, through the
tunnel, up to which byte it has received whole frames. The other side sends the rest the same way,
wrapped: it still belongs to the stream of the connection, whose last frame is then a TURN.

Every wait ends: a TURN that was sent arrives, as both streams are reliable (a broken connection
with the help of its rest), or the tunnel is lost, and with it everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from monarch._engine.base.errors import ProtocolError
from monarch._engine.wire.frame import DIRECT, RELEASE, TURN, Frame

__all__ = ["CONNECTION", "TUNNEL", "PathSwitch", "Unconfirmed"]

_OUT_OF_TURN = (DIRECT, RELEASE)

TUNNEL = 0
CONNECTION = 1


class PathSwitch:
    """The frames of both paths, put in the order of sending.

    >>> def frame(kind, dest=0):
    ...     return Frame(kind, 0, dest, 0, 0, 0, b"", b"")
    >>> turns = PathSwitch()
    >>> turns.came(CONNECTION, [frame(1, 22)])
    []
    >>> [ready.dest for ready in turns.came(TUNNEL, [frame(1, 11), frame(TURN)])]
    [11, 0, 22]
    """

    __slots__ = ("_waiting", "early", "way")

    def __init__(self) -> None:
        self.way = TUNNEL
        """The way from which the next frame is taken."""
        self.early = [0, 0]
        """The bytes that wait for their turn, by way; a reader can limit them by not reading."""
        self._waiting: tuple[deque[Frame], deque[Frame]] = (deque(), deque())

    def came(self, way: int, frames: Iterable[Frame]) -> list[Frame]:
        """Accept frames that arrived by `way`; return those whose turn it is, TURNs included.

        Frames about the connection itself (DIRECT), and those of the agent at this end of the
        tunnel (RELEASE), are exempt from the order: they are returned at once.
        """
        ready: list[Frame] = []
        for frame in frames:
            if frame.kind in _OUT_OF_TURN:
                ready.append(frame)
            elif way != self.way:
                self._waiting[way].append(frame)
                self.early[way] += len(frame.body)
            else:
                ready.append(frame)
                if frame.kind == TURN:
                    self._turn(ready)
        return ready

    def _turn(self, ready: list[Frame]) -> None:
        while True:
            self.way = 1 - self.way
            waiting = self._waiting[self.way]
            while waiting:
                ready.append(frame := waiting.popleft())
                self.early[self.way] -= len(frame.body)
                if frame.kind == TURN:
                    break
            else:
                return

    @property
    def idle(self) -> bool:
        """Whether only the tunnel is in use, and no frame waits."""
        return self.way == TUNNEL and not any(self._waiting)


class Unconfirmed:
    """The data sent on a connection that the other side has not confirmed.

    >>> sent = Unconfirmed()
    >>> for data in (b"one", b"two", b"three"):
    ...     sent.add(data)
    >>> sent.confirmed(4)
    >>> sent.rest(4)
    b'wothree'
    """

    __slots__ = ("_first", "_sent", "end")

    def __init__(self) -> None:
        self._sent: deque[bytes] = deque()
        self._first = 0  # position of the first byte that is kept
        self.end = 0
        """The position after the last byte that was sent."""

    def add(self, data: bytes) -> None:
        """Record data that is sent, or would be sent if the connection were intact."""
        self._sent.append(data)
        self.end += len(data)

    def confirmed(self, position: int) -> None:
        """Drop everything before `position`, which the other side has.

        Raises ProtocolError if the position is out of range.
        """
        if not self._first <= position <= self.end:
            raise ProtocolError(
                f"byte {position} of a direct connection is confirmed, "
                f"of {self._first} to {self.end}"
            )
        sent = self._sent
        while sent and self._first + len(sent[0]) <= position:
            self._first += len(sent.popleft())

    def rest(self, position: int) -> bytes:
        """Return everything after `position`.

        Raises ProtocolError if the position is out of range.
        """
        self.confirmed(position)
        return b"".join(self._sent)[position - self._first :]
