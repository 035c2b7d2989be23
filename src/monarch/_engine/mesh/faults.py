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
from typing import TYPE_CHECKING

from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import Verdict
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.client import client_proc

if TYPE_CHECKING:
    from monarch._engine.runtime.driver import Thread

__all__ = ["Faults"]

_PAUSE = 1.0  # seconds between two interrupts of the main thread
_REMEMBERED = 100  # faults that are not printed again


class Faults:
    """The faults of one client; `Faults.current` is that of this process."""

    current: Faults

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[Thread] = []  # asking the hook
        self._shown: dict[Verdict, set[tuple[str, int]]] = {}  # by what happened: ranks named
        self._interrupt_at = -_PAUSE  # when the main thread was interrupted
        self._waiting = False  # an interrupt is due
        self._closed = False
        self._late = 0

    def add(self, failure: Failure) -> None:
        """A failure reached the root (any thread; returns at once)."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        ask = functools.partial(self._ask, failure)
        self._threads.append(drivers.current.start_thread("monarch-fault", ask))

    def close(self) -> None:
        """The program is over."""
        with self._lock:
            self._closed = True

    def at_exit(self, patience: float) -> bool:
        """Whether there are faults that the main thread was not told; waits for the hook."""
        while self._threads:
            self._threads.pop().join(patience)
        return self._waiting or self._late > 0

    def _ask(self, failure: Failure) -> None:
        facade = sys.modules["monarch.actor"]
        try:
            facade.unhandled_fault_hook(MeshFailure(failure))
        except BaseException:  # any exception says: not handled
            with self._lock:
                if self._show(failure):
                    if self._closed:
                        self._late += 1
                    else:
                        self._interrupt()

    def _interrupt(self) -> None:
        now = drivers.current.now()
        if self._waiting:
            return
        if now >= self._interrupt_at + _PAUSE:
            self._interrupt_at = now
            self._late += not drivers.current.interrupt_main()
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
        what = root.verdict._replace(host="", pid=0, when=0.0)
        hit = {(root.mesh_name, rank) for rank in root.ranks}
        named = self._shown.get(what)
        if named is None:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            text = (
                f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, "
                f"PID={os.getpid()} at time {when}:\n{failure.report()}\n"
            )
            while len(self._shown) >= _REMEMBERED:
                del self._shown[next(iter(self._shown))]
            others = root.others.items()
            self._shown[what] = hit | {(mesh, rank) for mesh, ranks in others for rank in ranks}
            is_new = True
        else:
            text = f"The same happened to {root.actor} {root.where()}"
            is_new = root.mesh_name not in {mesh for mesh, _ in named}
            if hit and hit <= named:
                return False
            named |= hit
        # One piece, also beside what other threads print.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        return is_new


Faults.current = Faults()
