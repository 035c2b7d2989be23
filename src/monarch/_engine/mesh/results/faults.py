"""Unhandled failures: a failure that no owner handled reaches the script.

The program's `unhandled_fault_hook` is called, on a thread of its own. If it does not handle the
failure, the failure is printed and the main thread is interrupted, as by Ctrl-C. Failures come in
groups: all actors of a process fail with it, and the ranks of a mesh often fail for the same
reason. Hence:

* A failure is printed in full once. The same failure of another actor is printed as one line, or
  not at all if the first report named that actor. So the cause stays on the screen.
* Ranks of one mesh that fail for the same reason are one fault, and interrupt once. So are those of
  other meshes that ended by the same events: all actors of the same processes. The interrupt
  for another fault is delayed until `_PAUSE` after the last one. A second KeyboardInterrupt during
  the unwinding of the first would break the program's `finally` clauses, or the interpreter's exit.
  The delayed interrupt is not lost: a program that caught the first one receives it, and a program
  that exits meanwhile does not exit with 0.
* A failure that a call of the script raises, or is about to raise in a thread that makes the call
  or waits for it, belongs to the script: it is neither printed nor does it interrupt. If the script
  does not catch it, it ends the script.
* A failure that is *held* (`hold`) does not interrupt: later calls of the script will raise it. It
  is printed at the exit, and makes the exit code one of failure, if no call has.
* Once the program is over (`close`, or the main thread has left it) there is no interrupt. A later
  failure only makes the exit code one of failure.

Rejected: waiting a little before the first interrupt, to collect failures. Every failure would be
reported later.
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

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import ActorError, SupervisionError
from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import Verdict
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io import environment as environments

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from monarch._engine.runtime.io.environment import Thread
    from monarch._engine.runtime.io.stacks import Stack

__all__ = ["Faults", "set_is_script", "set_looks"]

_PAUSE = 1.0  # seconds between two interrupts of the main thread
_REMEMBERED = 100  # faults that are not printed again
_REMEDY = (
    "Nothing handled this failure, so it ends the script. To go on, spawn the mesh with a "
    "Supervisor, or set monarch.actor.unhandled_fault_hook; see docs/failures.md."
)
_HELD = (
    "No call of the script raised this failure before the script ended, so it is reported here. To "
    "handle such failures, set monarch.actor.unhandled_fault_hook; see docs/failures.md."
)


class Faults:
    """The faults of one client; `Faults.current` is that of this process."""

    current: Faults

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[Thread] = []  # threads that run the hook
        # Calls of the hook that are left to `at_exit`.
        self._unasked: deque[Callable[[], None]] = deque()
        self._given: dict[Verdict, None] = {}  # failures that calls of the script have raised
        self._held: list[str] = []  # texts to print after the traceback that is being printed
        self._shown: dict[Verdict, set[tuple[str, int]]] = {}  # by event: the ranks that were named
        self._interrupt_at = -_PAUSE  # when the main thread was interrupted
        self._waiting = False  # whether a delayed interrupt is due
        self._closed = False
        self._late = 0
        self._until_exit: list[Failure] = []  # failures that were held
        self.unhandled: Failure | None = None  # the last failure that the hook did not handle

    def add(self, failure: Failure) -> None:
        """Handle a failure that reached the root (any thread; returns at once)."""
        environments.current.note_failure(failure)
        self._start(functools.partial(self._ask, failure))

    def hold(self, failure: Failure) -> None:
        """Handle a failure that later calls of the script raise (any thread; returns at once)."""
        environments.current.note_failure(failure)
        self._start(functools.partial(self._ask_and_hold, failure))

    def fail(self) -> None:
        """Make the exit code of the program one of failure."""
        with self._lock:
            self._late += 1

    def _start(self, ask: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        try:
            self._threads.append(environments.current.start_thread("monarch-fault", ask))
        except RuntimeError:  # Python 3.12 starts no thread at its exit
            self._unasked.append(ask)

    def given(self, error: BaseException) -> None:
        """Note that a call raises `error`: a failure that the script gets must not interrupt it."""
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

    def was_given(self, failure: Failure) -> bool:
        """Whether a call of the script has raised this failure."""
        with self._lock:
            return failure.root.verdict in self._given

    def settle(self, patience: float) -> None:
        """Wait until the hook was called with all failures so far, `patience` seconds for each."""
        for thread in list(self._threads):
            thread.join(patience)

    def close(self) -> None:
        """Note that the program is over."""
        with self._lock:
            self._closed = True

    def at_exit(self, patience: float) -> bool:
        """Whether there are faults without an interrupt of the main thread; waits for the hook."""
        while self._threads:
            self._threads.pop().join(patience)
        while self._unasked:
            self._unasked.popleft()()
        with self._lock:
            while self._held:
                self._write(self._held.pop(0))
            for failure in self._until_exit:
                if failure.root.verdict not in self._given:
                    self.unhandled = failure
                    self._late += self._show(failure, _HELD)
            self._until_exit.clear()
        return self._waiting or self._late > 0

    def _ask(self, failure: Failure) -> None:
        facade = sys.modules["monarch.actor"]
        try:
            facade.unhandled_fault_hook(MeshFailure(failure))
        except BaseException:  # any exception means: not handled
            environments.current.let_waits_end(_looks, _inside)  # waiting calls raise it first
            with self._lock:
                if failure.root.verdict in self._given:
                    return
                self.unhandled = failure
                if self._show(failure):
                    if self._closed:
                        self._late += 1
                    else:
                        self._interrupt()

    def _ask_and_hold(self, failure: Failure) -> None:
        facade = sys.modules["monarch.actor"]
        try:
            facade.unhandled_fault_hook(MeshFailure(failure))
        except BaseException:  # any exception means: not handled
            with self._lock:
                self._until_exit.append(failure)

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

    def _show(self, failure: Failure, remedy: str = _REMEDY) -> bool:
        """Print a failure, unless it is on the screen. Return whether it is a new fault."""
        root = failure.root
        hit = {(root.mesh_name, rank) for rank in root.ranks}
        named = self._shown.get(_what(root))
        if named is None:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            text = (
                f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, "
                f"PID={os.getpid()} at time {when}:\n{failure.report()}\n{remedy}"
                f"{see_page('unhandled-failure')}\n"
            )
            self._name(root)
            is_new = True
        else:
            text = f"The same happened to {root.actor} {root.where()}"
            is_new = {mesh for mesh, _ in named}.isdisjoint({root.mesh_name, *root.others})
            if is_new:
                text += f"\n{remedy}"
            if hit and hit <= named:
                return False
            named |= hit
        # The main thread prints it in several writes.
        if environments.current.is_traceback_printed():
            self._held.append(text)
        else:
            self._write(text)
        return is_new

    def _name(self, root: Failure) -> None:
        """Note that a failure, with all that failed through it, was printed or raised."""
        while len(self._shown) >= _REMEMBERED:
            del self._shown[next(iter(self._shown))]
        named = self._shown.setdefault(_what(root), set())
        named.update((root.mesh_name, rank) for rank in root.ranks)
        named.update((mesh, rank) for mesh, ranks in root.others.items() for rank in ranks)

    def _write(self, text: str) -> None:
        # Written at once, so that the output of other threads does not split it.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _what(root: Failure) -> Verdict:
    """Return the event, without the rank concerned."""
    return root.verdict._replace(host="", pid=0, when=0.0)


def set_is_script(is_script: Callable[[], bool]) -> None:
    """Set the function that tells the script's code from actors' (for contexts)."""
    global _is_script
    _is_script = is_script


def set_looks(looks: Callable[[Stack], bool | None], inside: CodeType) -> None:
    """Set the function that knows a thread about to see its result (for futures).

    It gets stacks with the variables of the code `inside`.
    """
    global _looks, _inside
    _looks, _inside = looks, inside


_is_script: Callable[[], bool]
_looks: Callable[[Stack], bool | None]
_inside: CodeType

Faults.current = Faults()
