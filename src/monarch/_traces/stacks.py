"""Stacks of many processes, added up: what a flame graph shows. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["ENGINE", "Frame", "Profile", "Stacks"]

ENGINE = "[monarch]"
"""The name of the frame that stands for all of this library, unless these are asked for."""
_STANDARD = re.compile(r"/python\d+\.\d+/(?!(site|dist)-packages/)")
_SEPARATE = 64  # processes whose own stacks are kept


class Frame(NamedTuple):
    """A function, or with `line` a line of it; `file` is empty for names of other things."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        """Return the frame as flame graphs show it.

        >>> str(Frame("step", "/home/me/train.py", 7)), str(Frame("trainers", "", 0))
        ('step (train.py:7)', 'trainers')
        """
        if not self.file:
            return self.name
        place = self.file.rpartition("/")[2]
        return f"{self.name} ({place}:{self.line})" if self.line else f"{self.name} ({place})"


class Stacks:
    """Stacks of frames, the outermost first, each with nanoseconds and a number of samples."""

    def __init__(self) -> None:
        self.weights: dict[tuple[Frame, ...], list[int]] = {}

    def add(self, stack: tuple[Frame, ...], weight: int, samples: int = 1) -> None:
        """Add samples of a stack."""
        found = self.weights.get(stack)
        if found is None:
            self.weights[stack] = [weight, samples]
        else:
            found[0] += weight
            found[1] += samples

    def update(self, other: Stacks) -> None:
        """Add all stacks of another one."""
        for stack, (weight, samples) in other.weights.items():
            self.add(stack, weight, samples)

    @property
    def total(self) -> int:
        """The nanoseconds of all stacks."""
        return sum(weight for weight, _ in self.weights.values())

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(samples for _, samples in self.weights.values())

    def rows(self) -> Iterator[tuple[tuple[Frame, ...], int]]:
        """Yield the stacks in order, with their nanoseconds."""
        for stack in sorted(self.weights):
            yield stack, self.weights[stack][0]

    def hottest(self, most: int, *, wall: bool = False) -> list[tuple[Frame, int]]:
        """Return the functions that spent most themselves, with nanoseconds.

        `wall`: the stacks are of the time that passes. Then those that wait for messages are left
        out (see `idle`), and a wait for an answer is that of the function which asked.

        >>> stacks = Stacks()
        >>> a, b = Frame("a", "x.py", 1), Frame("b", "x.py", 9)
        >>> stacks.add((a, b), 5); stacks.add((a,), 2)
        >>> [(frame.name, weight) for frame, weight in stacks.hottest(1)]
        [('b', 5)]
        """
        own: dict[Frame, int] = {}
        for stack, (weight, _) in self.weights.items():
            if not stack or (wall and _is_idle(stack)):
                continue
            frame = stack[-2] if wall and stack[-1].name == ENGINE else stack[-1]
            own[frame] = own.get(frame, 0) + weight
        return sorted(own.items(), key=lambda item: (-item[1], item[0]))[:most]

    @property
    def idle(self) -> int:
        """The nanoseconds of stacks without a function of the program, which wait for messages."""
        return sum(weight for stack, (weight, _) in self.weights.items() if _is_idle(stack))


def _is_idle(stack: tuple[Frame, ...]) -> bool:
    return all(
        not frame.file or frame.file.startswith("<") or _STANDARD.search(frame.file)
        for frame in stack
    )


class Profile:
    """A profile of a job: the stacks of all its processes, and how they were taken.

    Attributes:
        unit: what the weights are: "CPU" or "wall" time.
        stacks: those of all processes.
        processes: those of each process by name, of the first 64.
        notes: what is missing, in sentences.
        failures: processes whose sampling ended with an error, in sentences.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.stacks = Stacks()
        self.processes: dict[str, Stacks] = {}
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.count = 0
        self.seconds = 0.0
        self.lost = 0

    def add(self, found: Mapping[str, Any]) -> None:
        """Add the `ProcessProfile` of a process."""
        frames = [Frame(*frame) for frame in found["frames"]]
        stacks = Stacks()
        rows: list[list[int]] = found["stacks"]
        for row in rows:
            stacks.add(tuple(frames[position] for position in row[2:]), row[0], row[1])
        self.add_stacks(f"{found['label']} (pid {found['pid']} on {found['machine']})", stacks)
        self.seconds = max(self.seconds, found["seconds"])
        self.lost += found["lost"]
        if found["cut"]:
            self.notes.append(
                f"process {found['pid']} had more stacks than there is room for: "
                f"{found['cut']} samples are shown with their outermost frames only"
            )

    def add_stacks(self, name: str, stacks: Stacks) -> None:
        """Add the stacks of a process."""
        self.count += 1
        self.stacks.update(stacks)
        if len(self.processes) < _SEPARATE:
            self.processes[name] = stacks

    def title(self) -> str:
        """Return a line about the profile."""
        processes = "1 process" if self.count == 1 else f"{self.count} processes"
        total = self.stacks.total / 1e9
        return f"{total:.2f} s of {self.unit} time in {processes}, over {self.seconds:.1f} s"
