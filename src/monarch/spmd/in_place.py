"""`restarts`: a rank whose process survives the failure of another rank.

A script that asks for it keeps its process, with all that it has loaded, when another rank fails:

    for attempt in monarch.spmd.restarts():
        with attempt:
            torch.distributed.init_process_group("gloo")
            train(from_checkpoint())

The host has a connection to each rank (`CONTROL` has its descriptor). The rank reports ``asked``
when the loop begins. A thread reads orders. On ``interrupt`` it ends the attempt, wherever the main
thread is: blocked collectives are woken (`ProcessGroups`), and a signal raises `Interrupted` in
Python code. This is repeated until the main thread has left the attempt. Then the groups are
destroyed, the rank is ``ready``, and waits for ``go``, which has the variables of the next attempt.
A rank that has ``left`` its last attempt is no longer kept.

An error of a healthy rank's collective may arrive before the ``interrupt``, and looks like an error
of its own. So the rank reports it (``raised``) and waits. The launch answers ``interrupt`` if
another rank has failed or a host is lost, and else ``raise``. An error that cannot come from a
collective is reported as well (``failed``), since the process may take a while to exit.

Every wait has an end. A main thread that does not leave the attempt within `patience` has its
process killed, and is replaced like the rank that failed. The launch kills a process that is not
ready within ``--shutdown-timeout``. A rank that gets no answer for `_LIMIT`, or has lost its host,
fails.

Rejected: exceptions set from another thread (`PyThreadState_SetAsyncExc`), which do not wake a main
thread that sleeps or waits for a lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch.spmd.message import Messages, send
from monarch.spmd.process_groups import ProcessGroups

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CONTROL", "Attempt", "Interrupted", "restarts"]

CONTROL = "MONARCH_RUN_CONTROL"
"""The variable with the descriptor of the connection to the host, and the process that has it."""

_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_WAKE = 0.1  # seconds until new connections of an interrupted attempt are looked for
_AGAIN = 2.0  # seconds until an exception that the program has swallowed is raised again
_LIMIT = 900.0  # seconds for an order of the launch
_NEVER = float("-inf")

Hook = Callable[[], object]


class Interrupted(BaseException):
    """Ends an attempt in a healthy rank, since another rank has failed.

    It is no `Exception`, so that handlers of a program's errors let it pass.
    """


def restarts(
    *, before: Hook | None = None, after: Hook | None = None, patience: float = 10.0
) -> Iterator[Attempt]:
    """Iterate over the attempts of this rank, until the block of one has run to its end.

    Each attempt is a context manager around the part of the program that runs again: from
    ``init_process_group`` to the last collective. When another rank fails, or a host is lost, the
    block is ended by an exception, wherever it is; the context manager catches it and destroys the
    process groups. The next attempt begins in this same process, with new variables (``RANK``,
    ``WORLD_SIZE``, ``MASTER_PORT`` and so on). Only the rank that failed begins in a new process.

    >>> for attempt in restarts():
    ...     with attempt:
    ...         print("attempt", attempt.number)
    attempt 0

    Args:
        before: is called before each attempt but the first of this process, with its variables set.
        after: is called after each attempt that was interrupted, without a process group.
        patience: how many seconds an interrupted block has to end. Then this process is killed, and
            is replaced, too.

    The block may be interrupted between any two lines, so what it changes may be half changed. It
    should take its state from a checkpoint, or from a copy that it made between two steps. Code
    behind the block, in the loop, runs after interrupted attempts, too.

    An exception of the block is the rank's own failure, and leaves the block. For a RuntimeError or
    an OSError, which may be the effect of another rank's failure, the launch first finds out which,
    within a second or the time until a host is given up.

    Ranks that do not call this function, or have left their loop, begin in new processes after each
    failure, as all do without it. So does a rank that calls it a second time. Without
    ``monarch run``, and in a child process of a rank, there is one attempt, and the context manager
    does nothing.

    Raises ValueError if `patience` is not positive, and RuntimeError on another thread than the
    main one, or if a process group was formed before the attempt.
    """
    if not patience > 0:
        raise ValueError(f"patience must be a positive number of seconds, not {patience!r}")
    control = _take_control()
    if control is None:
        return iter([Attempt(None, _number(), None)])
    return _attempts(_Rank(control, before, after, patience))


class Attempt:
    """One attempt of a rank: a context manager for the part of the program that runs again.

    Attributes:
        number: how many failures the launch has had; an attempt that began since a host has joined
            has the number of the one before.
        failure: what ended the last attempt of this process, in words; None for the first attempt
            of a process. So a rank with a `failure` has the state of its last
            attempt in memory.
    """

    def __init__(self, rank: _Rank | None, number: int, failure: str | None) -> None:
        self.number = number
        self.failure = failure
        self._rank = rank

    def __enter__(self) -> Self:
        if self._rank is not None:
            self._rank.enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self._rank is not None and self._rank.leave(error)


def _take_control() -> socket.socket | None:
    """Return the connection to the host, if this process has one that was not taken yet."""
    fd, _, pid = os.environ.get(CONTROL, "").partition(":")
    if pid != str(os.getpid()):
        return None
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "restarts() was called on another thread than the main one of the rank, which is the "
            "only one that Python lets a signal interrupt"
        )
    del os.environ[CONTROL]
    return socket.socket(fileno=int(fd))


def _number() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _attempts(rank: _Rank) -> Iterator[Attempt]:
    while not rank.done:
        yield Attempt(rank, _number(), rank.failure)


class _Rank:
    """The state of this process between its attempts."""

    def __init__(
        self, control: socket.socket, before: Hook | None, after: Hook | None, patience: float
    ) -> None:
        self.done = False
        self.failure: str | None = None
        self._control = control
        self._before = before
        self._after = after
        self._patience = patience
        self._groups = ProcessGroups()
        self._inside = False
        self._raised_at = _NEVER
        self._interrupted = threading.Event()
        self._left = threading.Event()
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        signal.signal(_SIGNAL, self._raise)
        threading.Thread(target=self._read, name="monarch-restarts", daemon=True).start()
        self._tell("asked")

    def enter(self) -> None:
        """Enter an attempt."""
        if ProcessGroups.are_formed():
            raise RuntimeError(
                "a process group was formed before the attempt: call init_process_group() inside "
                "the block of the attempt, since each attempt has its own groups"
            )
        self._groups = ProcessGroups()
        self._inside = True

    def leave(self, error: BaseException | None) -> bool:
        """Leave an attempt. Return whether another one follows; wait for it."""
        self._inside = False
        if not self._is_interrupted(error):
            self.done = True
            ended = error is None or (isinstance(error, SystemExit) and not error.code)
            self._tell("left" if ended else "failed")
            return False
        self._groups.destroy()
        self._left.set()
        if self._after is not None:
            self._after()
        self._tell("ready")
        while self._order() != "go":
            pass
        if self._before is not None:
            self._before()
        return True

    def _is_interrupted(self, error: BaseException | None) -> bool:
        if error is not None and not isinstance(error, (Exception, Interrupted)):
            return False  # SystemExit, KeyboardInterrupt
        if not self._interrupted.is_set() and isinstance(error, (RuntimeError, OSError)):
            self._tell("raised")
            return self._order() == "interrupt"
        return self._interrupted.is_set()

    def _order(self) -> str:
        try:
            order = self._orders.get(timeout=_LIMIT)
        except queue.Empty:
            raise RuntimeError(f"the launch has sent no order for {_LIMIT:g} s") from None
        if order["op"] == "lost":
            raise RuntimeError(f"the launch of this rank cannot go on: {order['why']}")
        op: str = order["op"]
        return op

    def _raise(self, _number: int, frame: Any) -> None:
        """Handle the signal: raise `Interrupted` in the code of the attempt."""
        if not self._inside or time.monotonic() < self._raised_at + _AGAIN:
            return
        while frame is not None:
            if frame.f_code.co_filename == __file__:
                return  # the attempt is being entered or left
            frame = frame.f_back
        self._raised_at = time.monotonic()
        raise Interrupted

    def _tell(self, op: str) -> None:
        with contextlib.suppress(OSError):  # the host is lost, and this process ends with it
            send(self._control, {"op": op})

    # -- the thread that reads orders ------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_orders(Messages(self._control))
        except EOFError:
            self._orders.put({"op": "lost", "why": "its host has closed the connection"})
        except Exception as error:
            self._orders.put({"op": "lost", "why": f"{type(error).__name__}: {error}"})
        finally:
            self._control.close()

    def _read_orders(self, messages: Messages) -> None:
        while True:
            for message, _ in messages.read():
                if message["op"] == "interrupt":
                    self._interrupt(message)
                elif message["op"] == "go":
                    self._go(message)
                else:
                    self._orders.put(message)

    def _interrupt(self, message: dict[str, Any]) -> None:
        self._interrupted.set()
        self._orders.put(message)
        main = threading.main_thread().ident
        deadline = time.monotonic() + self._patience
        while not self.done and not self._left.is_set():
            self._groups.wake()
            if main is not None:
                signal.pthread_kill(main, _SIGNAL)
            if time.monotonic() > deadline:
                self._give_up()
            self._left.wait(_WAKE)

    def _give_up(self) -> None:
        sys.stderr.write(
            f"monarch.spmd.restarts: the block of the attempt has not ended {self._patience:g} s "
            "after the failure of another rank; this process is killed and replaced. It is at:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def _go(self, message: dict[str, Any]) -> None:
        os.environ.update(message["variables"])
        self.failure = message["failure"]
        self._raised_at = _NEVER
        self._interrupted.clear()
        self._left.clear()
        self._orders.put(message)
