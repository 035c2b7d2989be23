"""The sessions of the debugger: ranks that reached a breakpoint, as the client sees them.

A session lasts from the first breakpoint of an endpoint call to the end of that call. It connects
two sides. The *rank* is blocked inside its pdb and requests one line at a time (`read`), each time
with the new output of pdb. The *debugger* queues lines (`send`), reads output, and waits for
changes (`news`). Neither side waits for the other's connection: a debugger may connect late,
disconnect, or be replaced while the rank stays stopped. Lines that are queued for a busy rank are
delivered in order.

Several sessions can have one name and rank, because slices of a mesh number their ranks anew, and
because concurrent endpoints overlap. The first has number 1 and is shown as its rank, others as
``0.2``, ``0.3``; a number is free again when its session ends. A command that gives name and rank
means the oldest session that has stopped. (Requests of ranks name a session by a key.)

All code of this file runs on the event loop of the controller.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from monarch._debug.commands import selects
from monarch._debug.grid import grid
from monarch._debug.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from monarch._debug.commands import Ranks

__all__ = ["DebugSession", "DebugSessionInfo", "DebugSessions"]

_KEPT = 1 << 20
"""The number of characters of output that are kept while no debugger reads them."""

ENDED = "the actor was stopped while it was at a breakpoint"
"""Why no line can follow."""


@dataclass(frozen=True)
class DebugSessionInfo:
    """Where a rank has stopped."""

    actor_name: str
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    lineno: int | None
    number: int = 1
    """Which session of this name and rank."""

    @property
    def place(self) -> str:
        """The rank, with the number of the session unless it is the first: ``3`` or ``3.2``."""
        return f"{self.rank}" if self.number == 1 else f"{self.rank}.{self.number}"


class DebugSession:
    """One endpoint call that reached a breakpoint."""

    def __init__(self, info: DebugSessionInfo, peer: int, pauses: Pauses) -> None:
        self.info = info
        self.peer = peer  # the process of the rank
        self._pauses = pauses
        self.placed = info.function is not None  # whether `info` has the position of a stop
        self.ended = False
        self.released = False  # the rank was asked to continue; pdb has not taken that up yet
        self.attached = False  # a debugger shows output as it arrives
        self.seen = ""  # output since the last line that pdb took, already shown
        self._output = ""  # output since the last line that pdb took, not yet shown
        self._lines: deque[str] = deque()
        self._reading = False
        self._line_came = asyncio.Event()
        self._news = asyncio.Event()
        if self.placed:
            pauses.begin(self)

    def __str__(self) -> str:
        info = self.info
        return f"{info.actor_name} {info.place} ({info.hostname})"

    # The rank's side.

    def write(self, output: str) -> None:
        """Add output of pdb."""
        self._output += output
        if len(self._output) > _KEPT:
            self._output = "<earlier output is dropped>\n" + self._output[-_KEPT // 2 :]
        self._news.set()

    async def read(self, output: str, function: str | None, lineno: int | None) -> str | None:
        """Wait for the next line for pdb. None asks pdb to clear its breakpoints and continue.

        Raises `LookupError` if the session ends meanwhile: no line can follow.
        """
        self.info = replace(self.info, function=function, lineno=lineno)
        self.placed = self._reading = True
        if not self.ended:
            self._pauses.begin(self)
        self.write(output)
        try:
            while not self._lines and not self.released and not self.ended:
                self._line_came.clear()
                await self._line_came.wait()
        finally:
            self._reading = False
            self._pauses.end(self)
        if self.ended:
            raise LookupError(ENDED)
        if self.released:
            self.released = False
            return None
        if not self.attached:
            self._output = ""  # a debugger that attaches later sees output of the last line only
        self.seen = ""
        return self._lines.popleft()

    def end(self, output: str) -> None:
        """Mark the session as ended: its call has returned, or its process has exited."""
        self.ended = True
        self._pauses.end(self)
        self.write(output)
        self._line_came.set()

    # The debugger's side.

    @property
    def stopped(self) -> bool:
        """Whether pdb waits for a line, and none is queued."""
        return self._reading and not self._lines and not self.released

    def send(self, line: str) -> None:
        """Queue a line for pdb."""
        self._lines.append(line)
        self._line_came.set()

    def release(self) -> None:
        """Let the rank clear its breakpoints and continue, now or when it stops next."""
        self._lines.clear()
        self.released = True
        self._line_came.set()

    def take_output(self) -> str:
        """Return the output of pdb since the last call."""
        output, self._output = self._output, ""
        self.seen += output
        return output

    async def settled(self) -> None:
        """Wait until pdb has taken all lines and stopped again, or the session has ended."""
        while not self.stopped and not self.ended:
            await self.news()

    def news(self) -> asyncio.Future[Literal[True]]:
        """Return a future that is done at the next change: output, a stop, or the end."""
        self._news.clear()
        return asyncio.ensure_future(self._news.wait())


class DebugSessions:
    """All sessions, oldest first. The time in which any of them is stopped is one of `pauses`."""

    def __init__(self, pauses: Pauses | None = None) -> None:
        self._pauses = Pauses() if pauses is None else pauses
        self.editors: dict[int, list[str]] = {}
        """The actors of processes to which an editor is attached, by process."""
        self._sessions: dict[int, DebugSession] = {}
        self._keys = itertools.count(1)
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[DebugSession]:
        return iter(list(self._sessions.values()))

    def start(self, info: DebugSessionInfo, peer: int = 0) -> int:
        """Open a session of a rank in process `peer`; return the key for the other methods."""
        same = (info.actor_name, info.rank)
        taken = {s.info.number for s in self if (s.info.actor_name, s.info.rank) == same}
        number = next(number for number in itertools.count(1) if number not in taken)
        key = next(self._keys)
        self._sessions[key] = DebugSession(replace(info, number=number), peer, self._pauses)
        self._changed.set()
        return key

    async def read(
        self, key: int, output: str, function: str | None, lineno: int | None
    ) -> str | None:
        """Call `DebugSession.read` of an open session. Raises `LookupError` if there is none."""
        session = self._open(key)
        self._changed.set()
        return await session.read(output, function, lineno)

    def write(self, key: int, output: str) -> None:
        """Call `DebugSession.write` of an open session. Raises `LookupError` if there is none."""
        self._open(key).write(output)

    def end(self, key: int, output: str) -> None:
        """Close a session; closing it twice does nothing."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.end(output)

    def lost(self, peer: int) -> None:
        """Close the sessions of a process that has exited."""
        self.editors.pop(peer, None)
        for key, session in list(self._sessions.items()):
            if session.peer == peer:
                self.end(key, "")

    def _open(self, key: int) -> DebugSession:
        session = self._sessions.get(key)
        if session is None:
            raise LookupError(ENDED)
        return session

    async def some(self) -> None:
        """Wait until `infos` is not empty."""
        while not self.infos():
            self._changed.clear()
            await self._changed.wait()

    def find(self, actor_name: str, rank: int, number: int | None = None) -> DebugSession:
        """Return the session of a rank with this number.

        Without a number: the oldest stopped one, or else the oldest that runs. Raises `LookupError`
        with a message for the console if there is none.
        """
        of_actor = [s for s in self if s.info.actor_name == actor_name]
        if not of_actor:
            raise LookupError(f"No debug sessions for actor {actor_name}")
        of_rank = [s for s in of_actor if s.info.rank == rank]
        if not of_rank:
            raise LookupError(f"No debug session for rank {rank} for actor {actor_name}")
        if number is None:
            return next((s for s in of_rank if s.stopped), of_rank[0])
        for session in of_rank:
            if session.info.number == number:
                return session
        places = ", ".join(session.info.place for session in of_rank)
        raise LookupError(
            f"No debug session {rank}.{number} for actor {actor_name}; there is {places}"
        )

    def select(self, actor_name: str, ranks: Ranks) -> list[DebugSession]:
        """Return the sessions of an actor that ``ranks`` selects."""
        return [
            s
            for s in self
            if s.info.actor_name == actor_name
            and selects(ranks, s.info.rank, s.info.coords, s.info.number)
        ]

    def infos(self) -> list[DebugSessionInfo]:
        """Return where ranks have stopped, by actor and rank, without those asked to continue."""
        infos = [s.info for s in self if s.placed and not s.released]
        return sorted(infos, key=lambda info: (info.actor_name, info.rank, info.number))

    def table(self) -> str:
        """Return `infos` as a table in plain text."""
        infos = self.infos()
        several = any(i.number > 1 for i in infos)
        table = grid(
            ["Actor Name", "Rank", "Coords", "Hostname", "Function", "Line No."],
            [
                [
                    i.actor_name,
                    i.place if several else i.rank,
                    i.coords,
                    i.hostname,
                    i.function,
                    i.lineno,
                ]
                for i in infos
            ],
        )
        names = sorted(name for names in self.editors.values() for name in names)
        return f"{table}\nIn an editor: {', '.join(names)}" if names else table
