"""`Task`: a step of work on a stream, for programs that simulate streams themselves.

The machine of this simulator has no tasks: it knows the time of each command when it executes it.
These classes keep the rules by which a task begins and ends.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch._tensors.simulator.engine import tags

if TYPE_CHECKING:
    from traceback import FrameSummary

    from typing_extensions import Self

__all__ = ["Borrow", "EventTask", "Task", "TaskState"]


class TaskState(enum.Enum):
    """How far a task is."""

    PENDING = 1
    """It waits for its dependencies."""
    READY = 2
    """It can begin when it is the first of its stream."""
    EXECUTING = 3
    """It has begun."""
    EXECUTED = 4
    """It has ended."""


@dataclass
class Borrow:
    """A tensor that one stream has lent to another, by numbers."""

    ident: int
    tensor_src_id: int
    tensor_dst_id: int
    from_stream: int
    to_stream: int


class Task:
    """A step of work on a stream. Times are nanoseconds.

    Args:
        inputs: the numbers of the tensors that it reads.
        outputs: the numbers of the tensors that it makes.
        command_id: the number of its command.
        start_time: when it can begin.
        runtime: how long it takes.
        meta: its name, and more words; those of `set_meta` are added.
        collectives: the tasks of other devices with which it works: it ends when all have begun.
        waits: the tasks of other streams that it ends after.
        traceback: where the program issued it.

    Attributes:
        dependencies: the tasks that it begins after.
        end_time: when it has ended; 0 before.

    >>> first, second = Task([], [1], 0, 0, 10, ["mm"]), Task([1], [2], 1, 0, 5, ["cos"])
    >>> second.dependencies.append(first)
    >>> second.maybe_set_ready()
    False
    >>> for task in (first, second):
    ...     assert task.maybe_set_ready() and task.maybe_execute() and task.maybe_finish()
    >>> second.start_time, second.end_time
    (10, 15)
    """

    def __init__(
        self,
        inputs: list[int],
        outputs: list[int],
        command_id: int,
        start_time: int,
        runtime: int,
        meta: list[str],
        collectives: list[Task] | None = None,
        waits: list[Task] | None = None,
        traceback: Sequence[FrameSummary] = (),
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.command_id = command_id
        self.start_time = start_time
        self.end_time = 0
        self.runtime = runtime
        self.meta = [*meta, *tags()]
        self.dependencies: list[Task] = []
        self.collectives = collectives
        self.waits = waits
        self.traceback = traceback
        self._state = TaskState.PENDING

    @property
    def state(self) -> TaskState:
        """How far the task is."""
        return self._state

    def maybe_set_ready(self) -> bool:
        """Make a pending task ready if its dependencies have ended. Return whether it did."""
        if self._state is not TaskState.PENDING or not _have_ended(self.dependencies):
            return False
        self.start_time = max([self.start_time, *(task.end_time for task in self.dependencies)])
        self._state = TaskState.READY
        return True

    def maybe_execute(self) -> bool:
        """Let a ready task begin. Return whether it did."""
        if self._state is not TaskState.READY:
            return False
        self._state = TaskState.EXECUTING
        return True

    def maybe_finish(self) -> bool:
        """End a task that has begun, if it waits for no other. Return whether it did."""
        others, waits = self.collectives or [], self.waits or []
        have_begun = all(task._state.value >= TaskState.EXECUTING.value for task in others)
        if self._state is not TaskState.EXECUTING or not have_begun or not _have_ended(waits):
            return False
        begun = max([self.start_time, *(task.start_time for task in others)])
        self.end_time = max([begun + self.runtime, *(task.end_time for task in waits)])
        self._state = TaskState.EXECUTED
        return True

    def clone(self) -> Self:
        """Return a task that is as this one, and goes on by itself."""
        return copy.copy(self)

    def __repr__(self) -> str:
        return " ".join(self.meta)


class EventTask(Task):
    """A step in which a stream waits for a task of another stream.

    Args:
        recorded_task: the task that it ends after.
        event_stream: the number of the stream of that task.
        event_stream_name: the name of that stream.
        wait_stream: the number of the stream that waits.
        wait_stream_name: its name.
        start_time: when the wait can begin.
        command_id: the number of its command.
        runtime: how long it takes at least.
        borrow: the borrow that it belongs to.
        traceback: where the program issued it.
    """

    def __init__(
        self,
        recorded_task: Task,
        event_stream: int,
        event_stream_name: str,
        wait_stream: int,
        wait_stream_name: str,
        start_time: int,
        command_id: int,
        runtime: int = 1,
        borrow: Borrow | None = None,
        traceback: Sequence[FrameSummary] = (),
    ) -> None:
        super().__init__(
            *([], [], command_id, start_time, runtime, ["waiting for", event_stream_name]),
            waits=[recorded_task],
            traceback=traceback,
        )
        self.event_stream = event_stream
        self.event_stream_name = event_stream_name
        self.wait_stream = wait_stream
        self.wait_stream_name = wait_stream_name
        self.borrow = borrow


def _have_ended(tasks: Sequence[Task]) -> bool:
    return all(task._state is TaskState.EXECUTED for task in tasks)
