"""The console of one debugger: prompt, command, answer.

At the prompt the console runs commands. While attached, the console sends lines to the pdb of one
rank and shows the output, until ``detach``, the end of the session, or the end of the connection.
Input is read at most one line ahead. A line that is typed while the rank is busy waits, and if the
session ends meanwhile, that line is the next command. So a script may send all its lines at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from monarch._debug.commands import (
    HELP,
    Attach,
    Cast,
    CommandError,
    Continue,
    Help,
    ListCommand,
    Quit,
    parse,
)
from monarch._debug.io import DebugIOError

if TYPE_CHECKING:
    from monarch._debug.io import DebugIO
    from monarch._debug.sessions import DebugSession, DebugSessions

__all__ = ["BANNER", "PROMPT", "Console"]

BANNER = f"""

{" MONARCH DEBUGGER ":*^66}
'list' shows where ranks have stopped, 'help' shows all commands.

"""
PROMPT = "monarch_dbg> "

_SETTLE = 0.5
"""How many seconds the prompt waits for ranks to finish a command that many of them got."""


class Console:
    """The dialogue with one debugger at ``io`` about ``sessions``."""

    def __init__(self, sessions: DebugSessions, io: DebugIO) -> None:
        self._sessions = sessions
        self._io = io
        self._ahead: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Serve the debugger until it quits or its connection is lost. Sessions are kept."""
        try:
            await self._io.output(BANNER)
            while await self._command():
                pass
        except DebugIOError:
            return  # the connection was lost, so no output can be sent
        finally:
            if self._ahead is not None and not self._ahead.cancel():
                self._ahead.exception()  # retrieved, so that asyncio does not report it

    def _typed(self) -> asyncio.Task[str]:
        """Return a task for the next line of input, the same task until `_taken` is called."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._io.input())
        return self._ahead

    def _taken(self) -> None:
        self._ahead = None

    async def _command(self) -> bool:
        """Prompt for one command and run it. Return False if it was the last."""
        await self._io.output(PROMPT)
        line = await self._typed()
        self._taken()
        if not line.strip():
            return True
        try:
            command = parse(line)
        except CommandError as error:
            await self._io.output(f"Error parsing input: {error}\n")
            return True
        if isinstance(command, Quit):
            await self._io.output("Quitting debug session...\n")
            return False
        if isinstance(command, Help):
            await self._io.output(HELP)
        elif isinstance(command, ListCommand):
            await self._io.output(self._sessions.table() + "\n")
        elif isinstance(command, Continue):
            every = list(self._sessions)
            for session in every:
                session.release()
            await _settled(every)
        elif isinstance(command, Attach):
            await self._attach_to(command)
        elif isinstance(command, Cast):
            await self._cast(command)
        return True

    async def _cast(self, command: Cast) -> None:
        chosen = self._sessions.select(command.actor_name, command.ranks)
        for session in chosen:
            session.send(command.command)
        await _settled(chosen)
        if not chosen:
            await self._io.output(f"No debug session of {command.actor_name} is meant by that\n")

    async def _attach_to(self, command: Attach) -> None:
        try:
            session = self._sessions.find(command.actor_name, command.rank, command.number)
        except LookupError as error:
            await self._io.output(f"Error processing command: {error.args[0]}\n")
            return
        await self._io.output(f"Attached to debug session for {session}\n")
        if session.seen:
            info = session.info
            await self._io.output(
                f"<last pdb output for {info.actor_name} {info.place} follows>\n{session.seen}"
            )
        session.attached = True
        try:
            await self._attached(session)
        finally:
            session.attached = False
        await self._io.output(
            f"Detaching from debug session for {session}\n"
            f"Detached from debug session for {session}\n"
        )

    async def _attached(self, session: DebugSession) -> None:
        """Forward lines and output until ``detach`` or the end of the session."""
        while True:
            news: asyncio.Future[Any] = session.news()
            try:
                output = session.take_output()
                if output:
                    await self._io.output(output)
                if session.ended:
                    return
                typed = self._typed()
                if typed.done():
                    line = typed.result()
                    if line.strip() == "detach":
                        self._taken()
                        return
                    if session.stopped:
                        self._taken()
                        session.send(line)
                        continue
                    await news
                else:
                    waits: set[asyncio.Future[Any]] = {typed, news}
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()


async def _settled(sessions: list[DebugSession]) -> None:
    """Wait a limited time for ranks to stop again, so that a following `list` is up to date."""
    waits = asyncio.gather(*(session.settled() for session in sessions))
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(waits, _SETTLE)
