"""How long debuggers have stopped ranks of the program: time that no time limit counts.

A program has one clock of pauses, in the client's process. It runs while any rank is stopped, also
for calls that do not wait for that rank: a stopped rank delays others in ways that no caller sees.
When a time limit has passed, the waiting process asks for the part of it that was a pause. So a
program without a debugger pays nothing before a limit has passed, and then one request to the
client, which answers on its reactor thread.

Rejected: to tell all processes of each pause. A command of pdb is a pause of milliseconds, and
there may be thousands of processes, of which most wait for nothing.

This file is loaded by any process that misses a time limit, so it imports little.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING

from monarch._spi import ask, client_proc, environment, is_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from monarch._spi import Step

__all__ = ["PAUSES", "SERVICE", "Pauses", "settle_limit", "stopped_at", "time_left"]

SERVICE = "debugger"
"""The service of the client's process that ranks at breakpoints ask, see `desk`."""

_PATIENCE = 2.0  # seconds for a client that does not answer
_NEXT = 0.25  # seconds until a wait that is over but for a pause asks again
_KEPT = 10_000  # pauses


class Pauses:
    """The clock of pauses: it runs while there is a reason. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: set[Hashable] = set()
        self._since = 0.0
        self._past: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def begin(self, reason: Hashable) -> None:
        """Begin a pause for `reason`, unless there is one."""
        with self._lock:
            if not self._reasons:
                self._since = environment.current.now()
            self._reasons.add(reason)

    def end(self, reason: Hashable) -> None:
        """End the pause for `reason`, if there is one."""
        with self._lock:
            if reason in self._reasons:
                self._reasons.remove(reason)
                if not self._reasons:
                    self._past.append((self._since, environment.current.now()))

    def within(self, seconds: float) -> tuple[float, bool]:
        """Return how many of the last `seconds` were a pause, and whether there is one now."""
        with self._lock:
            now = environment.current.now()
            begin, paused = now - seconds, 0.0
            for since, until in reversed(self._past):
                if until <= begin:
                    break
                paused += until - max(since, begin)
            if self._reasons:
                paused += now - max(self._since, begin)
            return paused, bool(self._reasons)


PAUSES = Pauses()
"""The pauses of the program; in the client's process."""


def settle_limit(limit: float, began: float, settle: Callable[[float], None]) -> None:
    """Call `settle(left)` with the seconds that a time limit has left: 0 if it is over.

    The limit of `limit` seconds began at `began`, and has passed. Does not block; `settle` is
    called here, or on the reactor thread.
    """
    if is_simulated():  # there, virtual time stands still in a breakpoint
        settle(0.0)
        return
    proc = client_proc()
    elapsed = environment.current.now() - began
    passed = max(elapsed, limit)
    client: int | None = proc.spec.get("client")
    if proc.client or client is None:
        settle(_left(limit, passed, *PAUSES.within(elapsed)))
        return
    asked = json.dumps({"op": "paused", "seconds": elapsed}).encode()
    answer = ask(client, SERVICE, asked, _PATIENCE)

    def answered() -> None:
        if answer._has_error():  # the client is lost, or hangs: no debugger works there
            settle(0.0)
        else:
            settle(_left(limit, passed, *json.loads(answer._content)))

    answer._notify(answered)


def time_left(limit: float, began: float) -> float:
    """Return the seconds that a time limit has left, see `settle_limit`; waits for the answer."""
    found: list[float] = []
    done = threading.Event()

    def settle(left: float) -> None:
        found.append(left)
        done.set()

    settle_limit(limit, began, settle)
    done.wait()  # the request has a time limit
    return found[0]


def _left(limit: float, passed: float, paused: float, still: bool) -> float:
    left = limit - (passed - paused)
    if left <= 0:
        return 0.0
    return max(left, _NEXT) if still else left


_STOPPED = {
    "monarch._debug.remote_pdb": "interaction",
    "monarch._debug.editor": "stop",
    "pydevd": "_do_wait_suspend",
}
"""The functions in which a thread waits while a debugger has stopped it, by their modules."""

_DEBUGGERS = ("bdb", "cmd", "pdb", "monarch._debug", "pydevd", "_pydevd")
"""How the names of modules of debuggers begin."""


def stopped_at(steps: Sequence[Step]) -> Sequence[Step] | None:
    """Return the part of a stack, innermost first, at which a debugger has stopped the thread.

    None if no debugger has stopped the thread.
    """
    stops = False
    for depth, step in enumerate(steps):
        module = step.module.get("__name__", "")
        if _STOPPED.get(module) == step.name:
            stops = True
        elif stops and not module.startswith(_DEBUGGERS):
            return steps[depth:]
    return None
