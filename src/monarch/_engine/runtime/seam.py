"""Ways and seams: what an agent holds for casts of a session with another host, and its tunnels.

All that concerns one session is in its `Way`, and goes with it: a host that is attached again, or
restarted, begins anew under the same name. What goes when is decided by the `CastRelay`; a seam,
the end of a tunnel where casts join, moves the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from monarch._engine.protocol.splice import Line, Splice

if TYPE_CHECKING:
    from monarch._engine.runtime.cast_relay import CastRelay
    from monarch._engine.wire.packet import Buffer

__all__ = [
    "BACK",
    "CASTS",
    "Cast",
    "Expected",
    "HostPeer",
    "Joining",
    "Seam",
    "Share",
    "Way",
    "ranked",
]

CASTS = 0xF000
"""The first lane of a host link that is not a tunnel's: there, a caller's casts share one."""

BACK = 0xFFFF
"""The lane of what goes back."""

_RANK_AT = struct.calcsize("<IBBHQQ")  # in a frame's header


class HostPeer(Protocol):
    """One side of a session with another host, for casts."""

    @property
    def sessions(self) -> tuple[int, int]:
        """Its numbers: ours, and theirs, which is 0 until we have met."""
        ...

    def cast(self, lane: int, buffers: Sequence[Buffer]) -> bool:
        """Send a message to the other relay; False when the lane is full now."""
        ...

    def hold(self, lane: int, *, on: bool) -> None:
        """Ask the other side to keep the messages of a lane, or to send them again."""
        ...


class Way:
    """A session with another host."""

    __slots__ = (
        "accepted",
        "blocked",
        "coming",
        "gone",
        "host",
        "key",
        "last",
        "lines",
        "opened",
        "overs",
        "peer",
        "seams",
        "tunnels",
    )

    def __init__(self, host: str, peer: HostPeer) -> None:
        self.host = host
        self.peer = peer
        self.key = (host, peer.sessions[0])  # what the core calls the host
        self.opened = 0  # tunnels by us, ever
        self.accepted = 0  # and by the host
        self.seams: dict[tuple[bool, int], Seam] = {}  # those that are: whether ours, number
        self.coming: dict[int, list[Joining]] = {}  # what waits for tunnels, by their number
        self.last: dict[int, int] = {}  # by caller here: its last cast to there
        self.overs: list[list[Any]] = []  # to be told
        # By caller there:
        self.lines: dict[int, Line[tuple[Cast, Share]]] = {}
        self.blocked: dict[int, dict[Seam, None]] = {}  # tunnels that wait for a cast, in order
        self.tunnels: dict[int, int] = {}  # how many there are
        self.gone: set[int] = set()  # whether it is

    def forget(self, caller: int) -> None:
        """Once a caller there is gone, and its last tunnel closed, there is nothing to know."""
        if caller in self.gone and not self.tunnels.get(caller):
            self.gone.discard(caller)
            self.lines.pop(caller, None)
            self.blocked.pop(caller, None)
            self.tunnels.pop(caller, None)


class Seam:
    """The end of a tunnel: subclasses move the bytes.

    Args:
        relay: of this agent.
        way: where the tunnel leads.
        near: the proc at this end.
        far: the proc on the other host.
        ours: whether this agent opened it.
    """

    def __init__(self, relay: CastRelay, way: Way, near: int, far: int, *, ours: bool) -> None:
        self.relay = relay
        self.way = way
        self.near = near
        self.far = far
        self.ours = ours
        self.number = 0
        self.splice: Splice[Any] | None = None
        self.held = False  # the lane, for a cast
        self.expected: dict[tuple[int, int], Expected] = {}  # by port and rank

    def write(self, data: Any) -> None:
        """What the tunnel brought goes to the proc."""
        raise NotImplementedError

    def write_cast(self, cast: Cast, rank: int) -> bool:
        """The proc gets a cast; False if more waits for it than should."""
        raise NotImplementedError

    def hold(self, *, on: bool) -> None:
        """Let the other end of the tunnel send nothing for now, or go on."""
        raise NotImplementedError


class Expected:
    """An answer that a proc owes."""

    __slots__ = ("body", "cast", "index")

    def __init__(self, cast: Cast, index: int) -> None:
        self.cast = cast
        self.index = index
        self.body: bytes | None = None  # once it was gathered


class Cast:
    """A cast at this host."""

    __slots__ = (
        "__weakref__",
        "content",
        "expected",
        "frame",
        "frame_here",
        "gathers",
        "ident",
        "key",
        "over",
        "port",
        "ranks",
        "segment",
        "shares",
        "source",
    )

    def __init__(self, ident: tuple[str, int, int], frame: bytes, content: Any) -> None:
        self.ident = ident  # host and uid of the caller, its number
        self.frame = frame  # what the procs get, but for its rank,
        self.content = content  # and the content of its segment, if it has one
        self.segment: Any = None  # of this host, with that content,
        self.frame_here: bytes | None = None  # and the frame that goes with it
        self.gathers = False
        self.port = 0
        self.shares: dict[Any, str] = {}  # by host, as JSON
        self.key: Any = None  # what the core calls this host
        self.source: int | tuple[Way, int] = 0  # the caller, or where it came from
        self.ranks: list[int] = []  # at the root: in the order of the core's
        self.expected: list[tuple[Seam, tuple[int, int]]] = []
        self.over = False

    @property
    def lane(self) -> int:
        return CASTS + self.ident[1] % (BACK - CASTS)


class Joining(NamedTuple):
    """A cast on its way into a tunnel: its place in the core's order, its rank, see `Splice`."""

    cast: Cast
    place: int
    rank: int
    tied: bool


class Share:
    """What this host has to do with a cast."""

    __slots__ = ("first", "previous", "ranks", "tied", "tunnels")

    def __init__(self, text: str, first: int) -> None:
        self.previous, tied, self.tunnels, self.ranks = json.loads(text)
        self.tied = frozenset(tied)
        self.first = first  # in the core's order


def ranked(frame: bytes, rank: int) -> bytes:
    """The frame of a cast, for one rank."""
    at = _RANK_AT
    return frame[:at] + rank.to_bytes(4, "little") + frame[at + 4 :]
