"""Timers of the work of one process: on the GPU by its events, else by the clock.

A GPU computes while the program goes on, so the clock of the program says little about it. The
timers then record an event on the current stream at each end of a measurement, and ask for the time
between the two when a result is wanted: measuring does not wait for the GPU, reading does. Without
a GPU, or with `use_cpu=True`, a timer reads the clock.

Timers have names, and belong to the process. Any thread may start and stop them, but the two ends
of a measurement with the same name cannot overlap with another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

__all__ = [
    "ExecutionTimer",
    "execution_timer_start",
    "execution_timer_stop",
    "get_execution_timer_average_ms",
    "get_execution_timer_summary",
    "get_latest_timer_measurement",
    "get_time_perfcounter",
]

DEFAULT = "default"

_log = logging.getLogger(__name__)


class ExecutionTimer:
    """Measure named parts of a program; the class itself has the measurements of this process.

    >>> ExecutionTimer.reset()
    >>> for _ in range(3):
    ...     with ExecutionTimer.time("step"):
    ...         pass
    >>> ExecutionTimer.summary()["step"]["count"]
    3
    """

    _lock = threading.Lock()
    _running: ClassVar[dict[str, Any]] = {}
    _measured: ClassVar[dict[str, list[Any]]] = {}

    @classmethod
    @contextmanager
    def time(cls, name: str | None = None, use_cpu: bool = False) -> Generator[None, None, None]:
        """Return a context manager that measures its block. An exception in the block counts, too.

        >>> with ExecutionTimer.time("load", use_cpu=True):
        ...     pass
        """
        cls.start(name, use_cpu)
        try:
            yield
        finally:
            cls.stop(name, use_cpu)

    @classmethod
    def start(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Begin a measurement. Raise `RuntimeError` if one of that name is under way."""
        name = name or DEFAULT
        begin = _now(use_cpu)
        with cls._lock:
            if name in cls._running:
                raise RuntimeError(f"timer {name!r} has been started already; stop it first")
            cls._running[name] = begin

    @classmethod
    def stop(cls, name: str | None = None, use_cpu: bool = False) -> None:  # noqa: ARG003 - interface
        """End a measurement. Raise `RuntimeError` if none of that name is under way.

        Whether the clock or the GPU measures was decided by `start`.
        """
        name = name or DEFAULT
        with cls._lock:
            begin = cls._running.pop(name, None)
            if begin is None:
                raise RuntimeError(f"timer {name!r} has not been started")
            cls._measured.setdefault(name, []).append((begin, _now(isinstance(begin, float))))

    @classmethod
    def reset(cls) -> None:
        """Forget all measurements, those under way included."""
        with cls._lock:
            cls._running.clear()
            cls._measured.clear()

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """Return count, mean, total, minimum and maximum of each timer, in milliseconds.

        Block until the GPU has done what was measured.

        >>> ExecutionTimer.reset()
        >>> ExecutionTimer.start(); ExecutionTimer.stop()
        >>> sorted(ExecutionTimer.summary()["default"])
        ['count', 'max_ms', 'mean_ms', 'min_ms', 'total_ms']
        """
        return {
            name: {
                "count": len(times),
                "mean_ms": sum(times) / len(times),
                "total_ms": sum(times),
                "min_ms": min(times),
                "max_ms": max(times),
            }
            for name, times in cls._milliseconds().items()
        }

    @classmethod
    def get_latest_measurement(cls, name: str | None = None) -> float:
        """Return the last measurement in milliseconds; 0.0, with a warning in the log, if none."""
        times = cls._milliseconds(name or DEFAULT).get(name or DEFAULT)
        if not times:
            _log.warning("timer %r has measured nothing", name or DEFAULT)
            return 0.0
        return times[-1]

    @classmethod
    def _milliseconds(cls, only: str | None = None) -> dict[str, list[float]]:
        """Return the measurements, after those of the GPU have become numbers."""
        with cls._lock:
            for name, measured in cls._measured.items():
                if only is None or name == only:
                    measured[:] = [_milliseconds(each) for each in measured]
            return {name: list(measured) for name, measured in cls._measured.items()}


def _now(use_cpu: bool) -> Any:
    """Return the time in seconds, or an event of the GPU's current stream."""
    if use_cpu or not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(measured: Any) -> float:
    if isinstance(measured, float):
        return measured
    begin, end = measured
    if isinstance(begin, float):
        took: float = (end - begin) * 1e3
    else:
        end.synchronize()
        took = begin.elapsed_time(end)
    return took


def execution_timer_start(name: str | None = None, use_cpu: bool = False) -> None:
    """Begin a measurement: `ExecutionTimer.start` as a function, to be run on other processes."""
    ExecutionTimer.start(name, use_cpu)


def execution_timer_stop(name: str | None = None, use_cpu: bool = False) -> None:
    """End a measurement: `ExecutionTimer.stop` as a function."""
    ExecutionTimer.stop(name, use_cpu)


def get_execution_timer_average_ms(name: str = DEFAULT) -> Any:
    """Return the mean of a timer as a scalar tensor of float64: 0.0, with a warning, if none."""
    of_name = ExecutionTimer.summary().get(name)
    if of_name is None:
        _log.warning("timer %r has measured nothing", name)
    return torch.tensor(of_name["mean_ms"] if of_name else 0.0, dtype=torch.float64)


def get_latest_timer_measurement(name: str | None = None) -> Any:
    """Return the last measurement of a timer as a scalar tensor of float64."""
    return torch.tensor(ExecutionTimer.get_latest_measurement(name), dtype=torch.float64)


def get_execution_timer_summary() -> dict[str, dict[str, float]]:
    """Return `ExecutionTimer.summary()`."""
    return ExecutionTimer.summary()


def get_time_perfcounter() -> Any:
    """Return the clock of the process in seconds, as a scalar tensor of float64."""
    return torch.tensor(time.perf_counter(), dtype=torch.float64)
