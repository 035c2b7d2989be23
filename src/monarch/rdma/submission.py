"""Turn a list of operations into one future: group them by route and start a transfer for each.

The transfers of one submit run concurrently. The future of the submit waits for all of them and
reports all failures. A small submit on a single route is complete before `submit` returns: a thread
would cost more than the copy.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from monarch import _spi
from monarch.actor import Future
from monarch.rdma import routes
from monarch.rdma.errors import RdmaError, RdmaTimeout, joined
from monarch.rdma.routes import Route, Unavailable
from monarch.rdma.table import Contended
from monarch.rdma.transfer import WRITE, Op, Transfer

__all__ = ["Submission", "submit", "timeout_of"]


class Submission:
    """The transfers of one submit, and the future that waits for them."""

    __slots__ = (
        "_failures",
        "_left",
        "_lock",
        "_routes",
        "_seconds",
        "_timer",
        "deadline",
        "promise",
    )

    def __init__(self, groups: dict[Route, list[Op]], seconds: float) -> None:
        self.promise = _spi.Promise[None].pending()
        self.deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._failures: list[tuple[str, RdmaError]] = []
        self._lock = threading.Lock()
        self._routes = {Transfer(self, ops): route for route, ops in groups.items()}
        self._left = len(groups)
        self._timer: Any = None

    def start(self) -> Future[None]:
        """Start all transfers; return the future of the whole submit."""
        self._timer = _spi.call_later(self._seconds, self._expire)
        for transfer, route in list(self._routes.items()):
            route.start(transfer)
        return self.promise

    def reroute(self, transfer: Transfer, reason: Unavailable) -> None:
        """Move a transfer to the next kind of route, and do not use this kind to that owner again.

        A transfer with an atomic operation and others beside it fails instead: part of it may have
        been carried out, and an atomic operation must not be carried out twice.
        """
        first = transfer.ops[0]
        if len(transfer.ops) > 1 and not _repeatable(transfer.ops):
            transfer.fail(RdmaError(f"the way to {first.handle.owner} was lost: {reason}"))
            return
        routes.refuse(first.handle, first.local.device, self._routes[transfer].kind, reason)
        try:
            route = self._routes[transfer] = routes.route_to(first.handle, first.local.device)
        except RdmaError as error:
            transfer.fail(error)
        except Warning as warning:  # the program's filters turn this warning into an error
            transfer.fail(RdmaError(str(warning)))
        else:
            route.start(transfer)

    def late(self) -> RdmaTimeout:
        """Return the error of a submit that has timed out."""
        return _late(self._seconds)

    def _expire(self) -> None:
        for transfer in list(self._routes):
            transfer.expire()

    def ended(self, transfer: Transfer, error: RdmaError | None) -> None:
        """Note the end of a transfer. Called once for each, on any thread."""
        with self._lock:
            if error is not None:
                self._failures.append((self._routes[transfer].kind, error))
            self._left -= 1
            if self._left:
                return
        if self._timer is not None:  # a transfer may end before `start` has returned
            self._timer.cancel()
        self._routes = {}  # releases the memory that the transfers keep alive
        if self._failures:
            self.promise.fail(joined(self._failures))
        else:
            self.promise.resolve(None)


def timeout_of(timeout: Any) -> float:
    """Return a user's `timeout` in seconds.

    Raises TypeError and OverflowError, as the reference interface does.
    """
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout: a number of seconds is wanted, not {type(timeout).__name__}")
    if not 0 <= timeout < 1 << 64:  # NaN fails this test, too
        raise OverflowError(
            f"timeout must fit in an unsigned 64-bit integer, and {timeout} does not"
        )
    return timeout


def _late(seconds: float) -> RdmaTimeout:
    return RdmaTimeout(f"submit timed out after {seconds:g} s")


def _repeatable(ops: list[Op]) -> bool:
    """Whether they may be carried out twice: atomic operations may not."""
    return all(op.kind <= WRITE for op in ops)


def submit(ops: list[Op], seconds: float) -> Future[None]:
    """Carry out all of `ops`, in any order. Returns without waiting for long.

    A small submit on a single route that copies is complete when this returns.
    """
    if not ops:
        return _spi.resolved(None)
    if not seconds:
        return _spi.failed(joined([("", _late(seconds))]))
    groups: dict[Route, list[Op]] = {}
    total = 0
    try:
        for op in ops:
            total += op.nbytes
            groups.setdefault(routes.route_to(op.handle, op.local.device), []).append(op)
    except RdmaError as error:
        return _spi.failed(joined([("", error)]))
    (route, *others) = groups
    if not others and total <= route.inline and (len(ops) == 1 or _repeatable(ops)):
        try:
            route.run(ops)
        except RdmaError as error:
            return _spi.failed(joined([(route.kind, error)]))
        except (Unavailable, Contended):
            pass  # start again as a Submission, which can change the route or wait
        else:
            return _spi.resolved(None)
    return Submission(groups, seconds).start()
