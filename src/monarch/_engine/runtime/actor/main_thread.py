"""The main thread of a worker: it runs one actor at a time, and can be interrupted.

Python runs signal handlers on the main thread, and installs them there only (`signal.signal`,
`loop.add_signal_handler`). So the reactor of a worker has a thread of its own, and the main thread
runs the first actor that another process spawns here. Further actors have threads of their own
(`Environment.start_actor`). When the actor has ended, the next one that comes gets the main thread.

A stop that no longer waits for an endpoint interrupts it (`interrupt`): the handler of a signal
raises `Interrupted` wherever the endpoint is, also in a sleep or a wait, so that `finally` blocks
run. Three rules keep that safe:

* The handler raises only if the innermost frame is one of the program, or a wait of the program for
  the engine (`WAITS`). In other code of this package it does nothing, and the signal is repeated.
* It raises once. A `finally` block is not interrupted, and a program that catches the exception
  is given up, as one in native code.
* It raises nothing once the endpoint has ended (`Cell.spared`), so `__cleanup__` is left alone.

A handler of the program may raise anywhere, also between two messages. Then a message may be lost
that was just taken, and its caller would wait without end. So such an error ends the process, as it
ends any other Python program.

Rejected: exceptions set from another thread (`PyThreadState_SetAsyncExc`), which would reach actors
that are not on the main thread. They do not wake a thread that waits, they arrive when it next runs
Python code, however late, and the thread may be in the middle of a send by then.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NoReturn

from monarch._engine.base.errors import is_package_frame
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.stacks import leave_out_callers

if TYPE_CHECKING:
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["WAITS", "Interrupted", "MainThread", "fail"]

WAITS: set[CodeType] = set()
"""The code of functions of the engine in which the program waits, and may be interrupted."""

_SIGNAL = signal.SIGURG  # ignored by default, so one that arrives in another program does no harm
_AGAIN = 0.005  # seconds until the signal is repeated
_CLOSING = 1.0  # seconds for an actor that has finished to leave the main thread
_LIBRARY = ("<frozen", os.path.dirname(os.__file__) + os.sep)


class Interrupted(BaseException):
    """Ends an endpoint that a stop of its actor no longer waits for.

    It is no `Exception`, so that handlers of a program's errors let it pass.
    """


class MainThread:
    """See the module. To be made on the main thread.

    Args:
        proc: this process.
        finalise: called with `proc` when its reactor has stopped; must not return.
    """

    def __init__(self, proc: Proc, finalise: Callable[[Proc], NoReturn]) -> None:
        self._proc = proc
        self._finalise = finalise
        self._ident = threading.get_ident()
        self._cell: Cell | None = None  # the actor that has the thread
        self._next = environments.current.mailbox()  # of functions to call, and a None at the end
        self._left = environments.current.event()
        self._ending = threading.Lock()
        signal.signal(_SIGNAL, self._raise)

    def run(self) -> None:
        """Run the reactor on a thread, and actors on this one, until the process ends."""
        leave_out_callers()
        environments.current.start_thread("monarch-reactor", self._react)
        while (serve := self._next.get()) is not None:
            contextvars.Context().run(serve)  # as on a new thread
            self._cell = None
        self._left.set()
        self._end()

    def take(self, cell: Cell, run: Callable[[Cell], None]) -> bool:
        """Run the loop of an actor here, unless another one does; on the reactor thread."""
        if self._cell is not None:
            return False
        self._cell = cell
        cell.thread_id = self._ident

        def serve() -> None:
            run(cell)
            if cell.broken is not None:
                fail(cell.broken)

        self._next.put(serve)
        return True

    def interrupt(self, cell: Cell) -> bool:
        """Interrupt the endpoint of `cell` if it is here; return whether. On the reactor thread."""
        if cell is not self._cell:
            return False

        def again() -> None:
            if not (cell.spared or cell.finished.is_set()):
                signal.pthread_kill(self._ident, _SIGNAL)
                self._proc.reactor.call_later(_AGAIN, again)

        # An event loop that turns cancels the endpoint by itself.
        self._proc.reactor.call_later(_AGAIN if cell.is_async else 0.0, again)
        return True

    def _raise(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal: raise `Interrupted` in the code of the program."""
        cell = self._cell
        if cell is None or cell.spared or cell.grave is None or not _is_programs(frame):
            return
        cell.spared = True
        raise Interrupted(f"the actor has ended: {cell.grave.error}")

    def _react(self) -> None:
        try:
            self._proc.reactor.run()
        except BaseException as error:  # without it the process would answer no message
            fail(error)
        self._next.put(None)
        if not self._left.wait(_CLOSING):  # the main thread is in an endpoint that does not end
            self._end()

    def _end(self) -> None:
        with self._ending:  # not released before the process exits
            self._finalise(self._proc)


def fail(error: BaseException) -> NoReturn:
    """End this process by an error after which it may lack messages, or serve none."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
    finally:
        os._exit(1)


def _is_programs(frame: FrameType | None) -> bool:
    """Whether the program executes `frame`, perhaps in the standard library, or waits there."""
    while frame is not None and frame.f_code not in WAITS:
        file = frame.f_code.co_filename
        if is_package_frame(file) or not file.startswith(_LIBRARY):
            return not is_package_frame(file)
        frame = frame.f_back
    return frame is not None
