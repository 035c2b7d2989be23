"""The end of the line: a failure that no owner handled reaches the script.

The program's `unhandled_fault_hook` is asked, on a thread of its own. If it does not handle the
failure, that is printed and the main thread is interrupted, as by Ctrl-C. Faults come in crowds: a
process takes all its actors along, and what one rank of a mesh cannot do, the others cannot either.
Hence:

* What happened is printed in full once. Whom else the same happened to gets a line, or none if the
  first report named it already: the cause stays on the screen.
* Ranks of one mesh that fail of the same are one fault, and interrupt once. An interrupt for
  another one waits until `_PAUSE` after the last. A second KeyboardInterrupt amid the first one's
  unwinding would break what the program does in `finally`, or the interpreter's own end. It is not
  lost: a program that caught the first gets it, and one that ends meanwhile does not exit with 0.
* A failure that a call of the script raises, or is about to raise in a thread that waits for it, is
  the script's business: it is neither printed nor interrupts. If the script does not catch it, that
  ends the script.
* Once the program is over (`close`, or what the driver sees of the main thread) nothing is
  interrupted; what arrives makes it a failed one.

Rejected: to wait a little before the first interrupt, and collect. Every failure would cost it.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, cast

from monarch._engine.base.errors import ActorError, SupervisionError
from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import Verdict
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io import environment as environments

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from monarch._engine.runtime.io.environment import Thread

__all__ = ["Faults", "set_is_script", "set_looks"]

_PAUSE = 1.0  # seconds between two interrupts of the main thread
_REMEMBERED = 100  # faults that are not printed again
_REMEDY = (
    "Nothing handled this failure, so it ends the script. To go on, spawn the mesh with a "
    "Supervisor, or set monarch.actor.unhandled_fault_hook; see docs/failures.md."
)


class Faults:
    """The faults of one client; `Faults.current` is that of this process."""

    current: Faults

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[Thread] = []  # asking the hook
        self._unasked: deque[Callable[[], None]] = deque()  # `at_exit` asks it
        self._given: dict[Verdict, None] = {}  # what calls of the script have raised
        self._held: list[str] = []  # to be printed when the traceback that is being printed is over
        self._shown: dict[Verdict, set[tuple[str, int]]] = {}  # by what happened: ranks named
        self._interrupt_at = -_PAUSE  # when the main thread was interrupted
        self._waiting = False  # an interrupt is due
        self._closed = False
        self._late = 0
        self.unhandled: Failure | None = None  # the last one that the hook has not handled

    def add(self, failure: Failure) -> None:
        """A failure reached the root (any thread; returns at once)."""
        environments.current.note_failure(failure)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        ask = functools.partial(self._ask, failure)
        try:
            self._threads.append(environments.current.start_thread("monarch-fault", ask))
        except RuntimeError:  # Python 3.12 starts no thread at its exit
            self._unasked.append(ask)

    def given(self, error: BaseException) -> None:
        """A call raises `error`: a failure that the script gets this way does not interrupt it."""
        while issubclass(type(error), ActorError):
            error = cast("ActorError", error).exception
        if not issubclass(type(error), SupervisionError) or not _is_script():
            return
        failure = cast("SupervisionError", error).failure
        if failure is not None:
            root = failure._failure.root
            with self._lock:
                while len(self._given) >= _REMEMBERED:
                    del self._given[next(iter(self._given))]
                self._given[root.verdict] = None
                self._name(root)

    def close(self) -> None:
        """The program is over."""
        with self._lock:
            self._closed = True

    def at_exit(self, patience: float) -> bool:
        """Whether there are faults that the main thread was not told; waits for the hook."""
        while self._threads:
            self._threads.pop().join(patience)
        while self._unasked:
            self._unasked.popleft()()
        with self._lock:
            while self._held:
                self._write(self._held.pop(0))
        return self._waiting or self._late > 0

    def _ask(self, failure: Failure) -> None:
        facade = sys.modules["monarch.actor"]
        try:
            facade.unhandled_fault_hook(MeshFailure(failure))
        except BaseException:  # any exception says: not handled
            environments.current.let_waits_end(_looks)  # a call that waited for it raises it first
            with self._lock:
                if failure.root.verdict in self._given:
                    return
                self.unhandled = failure
                if self._show(failure):
                    if self._closed:
                        self._late += 1
                    else:
                        self._interrupt()

    def _interrupt(self) -> None:
        now = environments.current.now()
        if self._waiting:
            return
        if now >= self._interrupt_at + _PAUSE:
            self._interrupt_at = now
            self._late += not environments.current.interrupt_main()
        else:
            self._waiting = True
            client_proc().reactor.call_later(self._interrupt_at + _PAUSE - now, self._resume)

    def _resume(self) -> None:
        with self._lock:
            if not self._closed:
                self._waiting = False
                self._interrupt()

    def _show(self, failure: Failure) -> bool:
        """Print it, unless the screen has it already. Whether the program does not know it yet."""
        root = failure.root
        hit = {(root.mesh_name, rank) for rank in root.ranks}
        named = self._shown.get(_what(root))
        if named is None:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            text = (
                f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, "
                f"PID={os.getpid()} at time {when}:\n{failure.report()}\n{_REMEDY}\n"
            )
            self._name(root)
            is_new = True
        else:
            text = f"The same happened to {root.actor} {root.where()}"
            is_new = root.mesh_name not in {mesh for mesh, _ in named}
            if hit and hit <= named:
                return False
            named |= hit
        if environments.current.is_traceback_printed():  # piece by piece, by the main thread
            self._held.append(text)
        else:
            self._write(text)
        return is_new

    def _name(self, root: Failure) -> None:
        """The screen has this failure, and what ended with it; or the script has it."""
        while len(self._shown) >= _REMEMBERED:
            del self._shown[next(iter(self._shown))]
        named = self._shown.setdefault(_what(root), set())
        named.update((root.mesh_name, rank) for rank in root.ranks)
        named.update((mesh, rank) for mesh, ranks in root.others.items() for rank in ranks)

    def _write(self, text: str) -> None:
        # One piece, also beside what other threads print.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _what(root: Failure) -> Verdict:
    """The event, without the rank that it hit."""
    return root.verdict._replace(host="", pid=0, when=0.0)


def set_is_script(is_script: Callable[[], bool]) -> None:
    """Say how to know code of the script from that of actors (contexts are built on this)."""
    global _is_script
    _is_script = is_script


def set_looks(looks: Callable[[FrameType | None], bool]) -> None:
    """Say how to know a thread that is about to see what it waited for (futures use this)."""
    global _looks
    _looks = looks


_is_script: Callable[[], bool]
_looks: Callable[[FrameType | None], bool]

Faults.current = Faults()
