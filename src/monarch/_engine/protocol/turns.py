"""Turns: one order out of two streams, each of which keeps its own; and what may be needed again.

Two procs of different hosts that talk often have two ways to each other: the tunnel, which the
agents carry and which everything can take, and a direct connection, which is faster and may break.
A sender is on one of them at a time. When it changes it says so, by a TURN, as the last frame on
the way it leaves. The receiver takes frames from one way until it finds a TURN, then from the
other; what has come too early on that one waits (`Turns`). So both may be as slow as they like, and
steady traffic pays nothing. It is the sender who decides, for each direction on its own.

A direct connection that breaks ends in the middle of what was sent on it. Therefore a sender keeps
what was not confirmed (`Unconfirmed`). After a break each side tells the other, through the tunnel,
up to which byte it has received whole frames, and gets the rest the same way, wrapped: it belongs
to the stream of the connection still, whose last frame is then a TURN.

Nothing waits for ever: a TURN that was sent comes, as both streams are reliable (a connection that
breaks by its rest), or the tunnel is lost, and with it everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from monarch._engine.base.errors import ProtocolError
from monarch._engine.wire.frame import DIRECT, RELEASE, TURN, Frame

__all__ = ["CONNECTION", "TUNNEL", "Turns", "Unconfirmed"]

_OUT_OF_TURN = (DIRECT, RELEASE)

TUNNEL = 0
CONNECTION = 1


class Turns:
    """The frames of both ways, in the order of their sending.

    >>> def frame(kind, dest=0):
    ...     return Frame(kind, 0, dest, 0, 0, 0, b"", b"")
    >>> turns = Turns()
    >>> turns.came(CONNECTION, [frame(1, 22)])
    []
    >>> [ready.dest for ready in turns.came(TUNNEL, [frame(1, 11), frame(TURN)])]
    [11, 0, 22]
    """

    __slots__ = ("_waiting", "early", "way")

    def __init__(self) -> None:
        self.way = TUNNEL
        """From where the next frame is taken."""
        self.early = [0, 0]
        """Bytes that wait, by the way they came: a reader may want to stop."""
        self._waiting: tuple[deque[Frame], deque[Frame]] = (deque(), deque())

    def came(self, way: int, frames: Iterable[Frame]) -> list[Frame]:
        """These have come by `way`; those whose turn it is, TURNs included.

        Frames about the connection itself (DIRECT), and those of the agent at this end of the
        tunnel (RELEASE), have no turn: they are there at once.
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
        """Whether the tunnel alone is left, and nothing waits."""
        return self.way == TUNNEL and not any(self._waiting)


class Unconfirmed:
    """What was sent on a connection, as far as the other side may not have it.

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
        self._first = 0  # the position of the first byte that is kept
        self.end = 0
        """The position after the last byte."""

    def add(self, data: bytes) -> None:
        """This is sent, or would be if the connection were whole."""
        self._sent.append(data)
        self.end += len(data)

    def confirmed(self, position: int) -> None:
        """The other side has all that is before `position`.

        Raises ProtocolError if that cannot be.
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
        """What follows `position`. Raises ProtocolError if that cannot be."""
        self.confirmed(position)
        return b"".join(self._sent)[position - self._first :]
