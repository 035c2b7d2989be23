"""The sessions of the debugger: ranks that reached a breakpoint, as the client sees them.

A session lasts from the first breakpoint of an endpoint call to the end of that call. It connects
two sides. The *rank* is blocked inside its pdb and requests one line at a time (`read`), each time
with the new output of pdb. The *debugger* queues lines (`send`), reads output, and waits for
changes (`news`). Neither side waits for the other's connection: a debugger may connect late,
disconnect, or be replaced while the rank stays stopped. Lines that are queued for a busy rank are
delivered in order.

Several sessions can have one name and rank, because slices of a mesh number their ranks anew, and
because concurrent endpoints overlap. So each session has a number of its own. A command that gives
name and rank means the oldest session that has stopped.

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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from monarch._debug.commands import Ranks

__all__ = ["DebugSession", "DebugSessionInfo", "DebugSessions"]

_KEPT = 1 << 20
"""The number of characters of output that are kept while no debugger reads them."""


@dataclass(frozen=True)
class DebugSessionInfo:
    """Where a rank has stopped."""

    actor_name: str
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    lineno: int | None


class DebugSession:
    """One endpoint call that reached a breakpoint."""

    def __init__(self, info: DebugSessionInfo) -> None:
        self.info = info
        self.placed = False  # whether the call has stopped, so that `info` has its position
        self.ended = False
        self.released = False  # the rank was asked to continue; pdb has not taken that up yet
        self.attached = False  # a debugger shows output as it arrives
        self.seen = ""  # output since the last line that pdb took, already shown
        self._output = ""  # output since the last line that pdb took, not yet shown
        self._lines: deque[str] = deque()
        self._reading = False
        self._line_came = asyncio.Event()
        self._news = asyncio.Event()

    def __str__(self) -> str:
        info = self.info
        return f"{info.actor_name} {info.rank} ({info.hostname})"

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
        self.write(output)
        try:
            while not self._lines and not self.released and not self.ended:
                self._line_came.clear()
                await self._line_came.wait()
        finally:
            self._reading = False
        if self.ended:
            raise LookupError("the actor was stopped while it was at a breakpoint")
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
    """All sessions, oldest first."""

    def __init__(self) -> None:
        self._sessions: dict[int, DebugSession] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[DebugSession]:
        return iter(list(self._sessions.values()))

    def start(self, info: DebugSessionInfo) -> int:
        """Open a session and return its number."""
        number = next(self._numbers)
        self._sessions[number] = DebugSession(info)
        return number

    async def read(
        self, number: int, output: str, function: str | None, lineno: int | None
    ) -> str | None:
        """Call `DebugSession.read` of an open session. Raises `LookupError` if there is none."""
        self._changed.set()
        return await self._sessions[number].read(output, function, lineno)

    def write(self, number: int, output: str) -> None:
        """Call `DebugSession.write` of an open session. Raises `LookupError` if there is none."""
        self._sessions[number].write(output)

    def end(self, number: int, output: str) -> None:
        """Close a session; closing it twice does nothing."""
        session = self._sessions.pop(number, None)
        if session is not None:
            session.end(output)

    async def some(self) -> None:
        """Wait until `infos` is not empty."""
        while not self.infos():
            self._changed.clear()
            await self._changed.wait()

    def find(self, actor_name: str, rank: int) -> DebugSession:
        """Return the oldest stopped session of a rank, or else the oldest that runs.

        Raises `LookupError` with a message for the console if there is none.
        """
        of_actor = [s for s in self if s.info.actor_name == actor_name]
        if not of_actor:
            raise LookupError(f"No debug sessions for actor {actor_name}")
        of_rank = [s for s in of_actor if s.info.rank == rank]
        if not of_rank:
            raise LookupError(f"No debug session for rank {rank} for actor {actor_name}")
        return next((s for s in of_rank if s.stopped), of_rank[0])

    def select(self, actor_name: str, ranks: Ranks) -> list[DebugSession]:
        """Return the sessions of an actor that ``ranks`` selects."""
        return [
            s
            for s in self
            if s.info.actor_name == actor_name and selects(ranks, s.info.rank, s.info.coords)
        ]

    def infos(self) -> list[DebugSessionInfo]:
        """Return where ranks have stopped, by actor and rank, without those asked to continue."""
        infos = [s.info for s in self if s.placed and not s.released]
        return sorted(infos, key=lambda info: (info.actor_name, info.rank))

    def table(self) -> str:
        """Return `infos` as a table in plain text."""
        return grid(
            ["Actor Name", "Rank", "Coords", "Hostname", "Function", "Line No."],
            [
                [i.actor_name, i.rank, i.coords, i.hostname, i.function, i.lineno]
                for i in self.infos()
            ],
        )
