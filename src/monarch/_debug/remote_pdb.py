"""A pdb whose terminal is a `Link` to the client.

It differs from the ordinary pdb only where that one assumes a terminal, or a process of its own:

- It reads lines from the link and writes to the link. Output is sent along with the request for
  the next line, so a command costs one message each way.
- Its breakpoints are its own. The standard library keeps the breakpoints of all debuggers of a
  process in one table. Here another actor of the process neither stops at these breakpoints nor
  loses its own when they are cleared.
- ``quit``, ``clear`` and ``interact`` do not ask for confirmation on standard input, which a worker
  does not have.
- Stepping out of the endpoint does not stop in the engine.
- A breakpoint stops in its own frame. The ordinary pdb stops at the next line of any frame, such as
  a finaliser that the garbage collector happens to run just then.
- When an editor has attached to the process, the stopped thread is handed over to it (`editor`), at
  the line at which it is.

``quit`` fails the endpoint with `bdb.BdbQuit`, as in pdb. To leave the debugger without an effect
on the endpoint, the console has ``detach``, which never reaches pdb.

Known limit: two sessions of one process with a breakpoint on the same line share its hit count
and its condition, since both are kept in the standard library's table.
"""

from __future__ import annotations

import bdb
import code
import io
import pdb  # noqa: T100 - this is the debugger
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Protocol

from monarch._debug.link import place

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Link", "RemotePdb"]

_CHUNK = 1 << 16
"""The number of characters of output that are buffered until the next prompt."""

_table = threading.Lock()  # guards the standard library's table of breakpoints


class Link(Protocol):
    """The rank's end of a session. Each call blocks until the client has answered."""

    def read(self, output: str, function: str | None, lineno: int | None) -> str | None:
        """Show output and position; return the next line, or None for clear and continue.

        None as well if an editor has attached, which is handed the thread then.
        """

    def write(self, output: str) -> None:
        """Show output."""

    def end(self, output: str) -> None:
        """Show the last output and close the session."""


class _Terminal(io.TextIOBase):
    """Standard input and output of one pdb."""

    def __init__(self, debugger: RemotePdb, link: Link) -> None:
        self._debugger = debugger
        self._link = link
        self._held: list[str] = []
        self._size = 0

    def write(self, text: str) -> int:
        self._held.append(text)
        self._size += len(text)
        if self._size > _CHUNK:
            self._link.write(self.take())
        return len(text)

    def take(self) -> str:
        output = "".join(self._held)
        self._held.clear()
        self._size = 0
        return output

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]  # a terminal has lines, not sizes
        line = self._debugger.next_line(self.take())
        return line + "\n"


class RemotePdb(pdb.Pdb):
    """The debugger of one endpoint call, or of code that runs outside of one.

    The session of a call ends with the call. Outside of calls (``scoped`` false) the session ends
    when the code continues and no breakpoint is left.
    """

    def __init__(self, link: Link, *, scoped: bool = True) -> None:
        self.thread = threading.get_ident()
        self.finished = False
        self._link = link
        self._scoped = scoped
        self._releasing = False
        self._editor: Any = None  # the module `editor`, once the thread is to be handed over
        self._lost = False  # the client no longer answers
        self._first: FrameType | None = None  # the frame of a breakpoint that has not stopped yet
        self._error: BaseException | None = None  # that of the call, once it has ended
        self._place: tuple[str | None, int | None] | None = None
        self._mine: list[bdb.Breakpoint] = []
        self._terminal = _Terminal(self, link)
        super().__init__(
            stdin=self._terminal,  # type: ignore[arg-type]  # pdb uses three methods of it
            stdout=self._terminal,  # type: ignore[arg-type]  # the same
            skip=["monarch._*"],
            nosigint=True,
        )
        self.breaks: dict[str, list[int]] = {}  # drop those of other debuggers, from the table

    # The start, the continuation and the end of a session.

    def call_ended(self, error: BaseException | None) -> None:
        """Close the session at the end of its call; after an exception, stop once more before."""
        if self.finished:
            return
        self._stop_tracing()
        self._error = error
        try:
            quits = self._lost or isinstance(error, bdb.BdbQuit)
            if isinstance(error, Exception) and not quits:
                self.reset()
                self.interaction(None, error.__traceback__)
        finally:
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.clear_all_breaks()
        if not self._lost:
            self._link.end(self._terminal.take())

    def _stop_tracing(self) -> None:
        if threading.get_ident() == self.thread:
            sys.settrace(None)

    def set_trace(self, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Stop in the given frame. The caller returns to that frame without any other call."""
        sys.settrace(None)  # otherwise the calls below would be traced as well
        self._first = frame
        super().set_trace(frame, **kwargs)

    def stop_here(self, frame: FrameType) -> bool:
        """Whether a step ends in `frame`; the first one after `set_trace` in its frame only."""
        return self._first in (None, frame) and super().stop_here(frame)

    def set_continue(self) -> None:
        """Continue the code; end tracing if no breakpoint is left."""
        self._releasing = False
        super().set_continue()
        self._left()

    def set_quit(self) -> None:
        """Make the code fail with `bdb.BdbQuit`."""
        super().set_quit()
        self._left()

    def _left(self) -> None:
        if not self._scoped and not self.finished and (self.quitting or not self.breaks):
            self._finish()

    # Prompts and output.

    def interaction(self, frame: FrameType | None, traceback: Any, *args: Any) -> None:
        """Stop in ``frame`` and run commands."""
        self._place = self._first = None
        super().interaction(frame, traceback, *args)
        if sys.gettrace() not in (None, self.trace_dispatch):
            sys.settrace(self.trace_dispatch)  # an editor has connected, and not attached
        if self._editor is not None:
            editor, self._editor = self._editor, None
            self._finish()
            if frame is not None:
                editor.stop(frame)
            elif self._error is not None:
                editor.stop(self.stack[-1][0], self._error)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of Python's tracing; the result is the trace function of the frame."""
        after = super().trace_dispatch(frame, event, arg)
        return frame.f_trace if self.finished else after

    def next_line(self, output: str) -> str:
        """Send the output and the present position to the client; return the next line."""
        if not self._releasing:
            if self._place is None:
                self._place = self._here()
            try:
                line = self._link.read(output, *self._place)
            except Exception:
                self._lost = True
                raise
            if line is not None:
                return line
            editor: Any = sys.modules.get("monarch._debug.editor")
            if editor is not None and editor.is_attached():
                self._editor = editor
            # At any kind of prompt "continue" is valid input, until `set_continue` is reached.
            self.clear_all_breaks()
            self._releasing = True
        return "continue"

    def _here(self) -> tuple[str | None, int | None]:
        if not self.stack:
            return None, None
        frame, lineno = self.stack[self.curindex]
        return place(frame), lineno

    # Commands whose originals need a terminal, or a whole program.

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit: fail the endpoint with BdbQuit. To leave it as it is: detach."""
        self.set_quit()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - pdb's name for the end of input

    def do_clear(self, arg: str) -> None:
        """cl(ear) [filename:lineno | bpnumber ...]: without argument, all of this session."""
        if arg:
            super().do_clear(arg)
        else:
            self.clear_all_breaks()

    do_cl = do_clear

    def do_run(self, arg: str) -> None:
        """An endpoint call can't be run again."""
        self.error("an endpoint call can't be restarted; call it again")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact: an interpreter with the names of this frame, until exit()."""
        if self.curframe is not None:
            names = {**self.curframe.f_globals, **self.curframe.f_locals}
            with redirect_stdout(self._terminal), redirect_stderr(self._terminal):
                _Interpreter(self, self._terminal, names).interact("*interactive*", "*end*")

    @property
    def releasing(self) -> bool:
        """Whether the client has asked this session to clear its breakpoints and continue."""
        return self._releasing

    # Breakpoints: those of this session, among all of the process.

    def set_break(
        self,
        filename: str,
        lineno: int,
        temporary: bool = False,
        cond: str | None = None,
        funcname: str | None = None,
    ) -> str | None:
        with _table:
            known = len(bdb.Breakpoint.bpbynumber)
            refused = super().set_break(filename, lineno, temporary, cond, funcname)
            self._mine += filter(None, bdb.Breakpoint.bpbynumber[known:])
        return refused

    def get_bpbynumber(self, arg: Any) -> bdb.Breakpoint:
        found = super().get_bpbynumber(arg)
        if found not in self._mine:
            raise ValueError(f"Breakpoint {arg} belongs to another session")
        return found

    def clear_bpbynumber(self, arg: Any) -> str | None:
        try:
            self._clear([self.get_bpbynumber(arg)])
        except ValueError as error:
            return str(error)
        return None

    def clear_break(self, filename: str, lineno: int) -> str | None:
        place = self.canonic(filename), lineno
        there = [mine for mine in self._mine if (mine.file, mine.line) == place]
        self._clear(there)
        return None if there else f"There is no breakpoint at {filename}:{lineno}"

    def clear_all_breaks(self) -> None:
        self._clear(self._mine)

    def _clear(self, cleared: list[bdb.Breakpoint]) -> None:
        with _table:
            for mine in list(cleared):
                mine.deleteMe()
                self._mine.remove(mine)
        self.breaks.clear()
        for mine in self._mine:
            self.breaks.setdefault(mine.file, []).append(mine.line)


class _Interpreter(code.InteractiveConsole):
    """The interpreter of ``interact``."""

    def __init__(self, debugger: RemotePdb, terminal: _Terminal, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._debugger = debugger
        self._terminal = terminal

    def raw_input(self, prompt: str = "") -> str:
        self._terminal.write(prompt)
        line = self._terminal.readline().rstrip("\n")
        if self._debugger.releasing or line.strip() in {"exit()", "quit()"}:
            raise EOFError
        return line

    def write(self, data: str) -> None:
        self._terminal.write(data)
