"""torch's profiler, with one trace file for each process and each cycle of the schedule.

This is the half that runs in the process that is profiled. See `process_file` for the names.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import record_function

from monarch._tensors import process_file

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Schedule", "profile", "record_function"]


class Schedule(NamedTuple):
    """The steps of a cycle: those that wait, warm up and are recorded; how many cycles (0: all).

    >>> Schedule(wait=1, warmup=1, active=2).repeat
    0
    """

    wait: int
    warmup: int
    active: int
    repeat: int = 0
    skip_first: int = 0


class profile:  # noqa: N801 - a name of the interface
    """Profile a block of this process, and write traces into the folder `on_trace_ready`.

    Other arguments are those of `torch.profiler.profile`, but for `schedule`, a `Schedule`: call
    `step()` after each step then. Without one, the whole block is one trace, written at its end.
    Each trace is a new file. Raise `AssertionError` if `on_trace_ready` is no string or `schedule`
    no `Schedule`.

    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with profile(on_trace_ready=folder):
    ...         _ = torch.ones(2) + 1
    ...     len(os.listdir(folder))
    1
    """

    PATH_KEY = "on_trace_ready"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder, schedule = kwargs.get(self.PATH_KEY), kwargs.get("schedule")
        if not isinstance(folder, str):
            raise AssertionError(  # noqa: TRY004 - the type is fixed by the interface
                f"{self.PATH_KEY} is the folder for traces: a str, not {type(folder).__name__}"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise AssertionError(
                f"schedule is a monarch.profiler.Schedule, not {type(schedule).__name__}"
            )
        kwargs[self.PATH_KEY] = lambda done: done.export_chrome_trace(
            process_file.create(folder, "trace", ".json")
        )
        if schedule is not None:
            kwargs["schedule"] = torch.profiler.schedule(**schedule._asdict())
        self._profiler = torch.profiler.profile(*args, **kwargs)

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)

    def step(self) -> None:
        """Say that a step of the schedule is done."""
        self._profiler.step()
