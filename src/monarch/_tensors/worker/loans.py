"""`Loans`: values that one stream lends to another, on one process.

The streams run beside each other, so each end of a loan is a point that one stream reaches and the
other waits for. On a GPU the threads only issue work, so the points are events of the device, too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["Loans"]


class _Loan:
    def __init__(self) -> None:
        self.lent = _Point()
        self.returned = _Point()


class _Point:
    """A point in the work of one stream, for which others wait."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._event: Any = None
        self._value: Any = None

    def reach(self, value: Any) -> None:
        """Let the streams that wait go on with `value`."""
        self._value = value
        if isinstance(value, torch.Tensor) and value.is_cuda:
            self._event = torch.cuda.current_stream().record_event()
        self._reached.set()

    def wait(self, timeout: float) -> Any:
        """Return the value when the point is reached; RuntimeError after `timeout` seconds."""
        if not self._reached.wait(timeout):
            raise RuntimeError(f"the other stream of a borrow did not come within {timeout:g} s")
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._value


class Loans:
    """The loans of one client on this process.

    Args:
        timeout: seconds that a stream waits for another one.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loans: dict[int, _Loan] = {}
        self._lock = threading.Lock()

    def _loan(self, number: int) -> _Loan:
        with self._lock:
            return self._loans.setdefault(number, _Loan())

    def lend(self, number: int, value: Any) -> None:
        """Let another stream have `value`."""
        self._loan(number).lent.reach(value)

    def borrow(self, number: int) -> Any:
        """Return the value, when the stream that lends it has come so far."""
        return self._loan(number).lent.wait(self._timeout)

    def give_back(self, number: int, value: Any) -> None:
        """End the use of a value; `value` is what became of it."""
        self._loan(number).returned.reach(value)

    def reclaim(self, number: int, is_used: bool) -> Any:
        """Return what became of a value, when the stream that borrowed it is done with it."""
        value = self._loan(number).returned.wait(self._timeout) if is_used else None
        with self._lock:
            self._loans.pop(number, None)
        return value
