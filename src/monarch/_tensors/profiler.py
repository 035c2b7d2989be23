"""torch's profiler in every process of the active mesh, with a trace file for each and each cycle.

`profile` and `record_function` are the script's halves. While a mesh is active they have an object
in each process, which works in the order of the operations. Without one they are about the process
that calls them, such as in a remote function. See `process_file` for the names of files.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monarch._tensors import process_file
from monarch._tensors.active import active
from monarch._tensors.remote_class import ControllerRemoteClass

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Schedule", "WorkerProfile", "WorkerRecordFunction", "profile", "record_function"]


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


class WorkerProfile:
    """The profiler of one process; its arguments are those of `profile`."""

    def __init__(self, *args: Any, on_trace_ready: str, **kwargs: Any) -> None:
        if "schedule" in kwargs:
            kwargs["schedule"] = torch.profiler.schedule(**kwargs["schedule"]._asdict())
        self._profiler = torch.profiler.profile(
            *args,
            on_trace_ready=lambda done: done.export_chrome_trace(
                process_file.create(on_trace_ready, "trace", ".json")
            ),
            **kwargs,
        )

    def start(self) -> None:
        """Begin to record what this thread executes."""
        self._profiler.__enter__()

    def step(self) -> None:
        """Note that a step of the schedule is done."""
        self._profiler.step()

    def stop(self) -> None:
        """End, and write what was recorded."""
        self._profiler.__exit__(None, None, None)


class WorkerRecordFunction:
    """A named block in the profile of one process."""

    def __init__(self, name: str, args: str | None = None) -> None:
        self._block = torch.profiler.record_function(name, args)

    def start(self) -> None:
        """Begin the block."""
        self._block.__enter__()

    def stop(self) -> None:
        """End the block."""
        self._block.__exit__(None, None, None)


class _Halves(ControllerRemoteClass):
    """An object in each process of the active mesh, or in this process without one."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self._here: Any = None
        if active().mesh is None:
            self._here = cls(*args, **kwargs)
        else:
            super().__init__(f"{cls.__module__}.{cls.__qualname__}", *args, **kwargs)

    def _do(self, name: str) -> None:
        """Call a method of these objects."""
        if self._here is None:
            self._call(name)
        else:
            getattr(self._here, name)()

    def __enter__(self) -> Self:
        self._do("start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do("stop")


class profile(_Halves):  # noqa: N801 - a name of the interface
    """Profile a block, and write traces into the folder `on_trace_ready`.

    While a mesh is active, each of its processes profiles what it executes of the active stream,
    and writes files of its own; without one, the process that calls does. Other arguments are those
    of `torch.profiler.profile`, but for `schedule`, a `Schedule`: call `step()` after each step
    then. Without one, the whole block is one trace, written at its end. Each trace is a new file.
    Raise `AssertionError` if `on_trace_ready` is no string or `schedule` no `Schedule`.

    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with profile(on_trace_ready=folder):
    ...         _ = torch.ones(2) + 1
    ...     len(os.listdir(folder))
    1
    """

    PATH_KEY = "on_trace_ready"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder = kwargs.get(self.PATH_KEY)
        schedule = kwargs.pop("schedule", None)
        if not isinstance(folder, str):
            raise AssertionError(  # noqa: TRY004 - the type is fixed by the interface
                f"{self.PATH_KEY} is the folder for traces: a str, not {type(folder).__name__}"
            )
        if schedule is not None:
            if not isinstance(schedule, Schedule):
                raise AssertionError(
                    f"schedule is a monarch.profiler.Schedule, not {type(schedule).__name__}"
                )
            kwargs["schedule"] = schedule
        super().__init__(WorkerProfile, *args, **kwargs)

    def step(self) -> None:
        """Note that a step of the schedule is done."""
        self._do("step")


class record_function(_Halves):  # noqa: N801 - a name of the interface
    """Give a block of operations a name in the profiles: of the active mesh, or of this process.

    Args:
        name: the name of the block.
        args: a text that the profile has beside it.
    """

    def __init__(self, name: str, args: str | None = None) -> None:
        super().__init__(WorkerRecordFunction, name, args)
