"""How long the simulated devices take, as the program says.

Without a choice each kind of work takes a fixed time. That shows the order of things and what
overlaps; for times of some hardware use `cost_model.CostModel`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from monarch._tensors.simulator.commands import CallFunction, Reduce, SendTensor

__all__ = ["RuntimeEstimator", "TimingType"]


class TimingType(enum.Enum):
    """The causes of time: work of three kinds, the launch of work, a wait for another stream."""

    REDUCE = "reduce"
    SEND_TENSOR = "send_tensor"
    CALL_FUNCTION = "call_function"
    KERNEL_LAUNCH = "kernel_launch"
    WAIT_EVENT = "wait_event"


_LOCAL_COPY = 1_000  # nanoseconds of a copy on one rank
_DEFAULT: dict[TimingType, int] = {
    TimingType.CALL_FUNCTION: 10_000,
    TimingType.REDUCE: 100_000,
    TimingType.SEND_TENSOR: 100_000,
    TimingType.KERNEL_LAUNCH: 500,
    TimingType.WAIT_EVENT: 500,
}
_KINDS: dict[type, TimingType] = {
    CallFunction: TimingType.CALL_FUNCTION,
    Reduce: TimingType.REDUCE,
    SendTensor: TimingType.SEND_TENSOR,
}

Timing = int | Callable[[Any], int]


class RuntimeEstimator:
    """Times in nanoseconds: a function call takes 10 µs, a collective or a copy 100 µs.

    A launch and a wait for an event take 0.5 µs each, a copy on one rank 1 µs. `set_custom_timing`
    changes them.

    >>> estimator = RuntimeEstimator()
    >>> estimator.set_custom_timing({TimingType.CALL_FUNCTION: lambda call: call.nbytes // 1000})
    >>> estimator.get_runtime("kernel_launch"), estimator.get_runtime(CallFunction("aten.add"))
    (500, 0)
    """

    def __init__(self) -> None:
        self._timing: dict[TimingType, Timing] = {}

    def set_custom_timing(self, func_to_time: Mapping[TimingType, Timing]) -> None:
        """Set times: nanoseconds, or functions that return them for the work that they get.

        The work is a `CallFunction`, `Reduce` or `SendTensor`; for the launch of work and for waits
        it is "kernel_launch" and "wait_event". Raises TypeError for a key that is no `TimingType`.
        """
        for kind, timing in func_to_time.items():
            if not isinstance(kind, TimingType):
                raise TypeError(f"{kind!r} is no TimingType")
            if not callable(timing) and timing < 0:
                raise ValueError(f"the time of {kind} is {timing}: below 0")
        self._timing.update(func_to_time)

    def get_runtime(self, msg: CallFunction | Reduce | SendTensor | str) -> int:
        """Return the nanoseconds of some work; of "kernel_launch" or "wait_event"."""
        kind = TimingType(msg) if isinstance(msg, str) else _KINDS[type(msg)]
        timing = self._timing.get(kind)
        if timing is None:
            return self.estimate(kind, msg)
        return int(timing(msg)) if callable(timing) else timing

    def estimate(self, kind: TimingType, msg: Any) -> int:
        """Return the nanoseconds of work for which the program has set no time."""
        if kind is TimingType.SEND_TENSOR and msg.is_local:
            return _LOCAL_COPY
        return _DEFAULT[kind]
