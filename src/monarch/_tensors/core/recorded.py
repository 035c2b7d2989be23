"""`Recorded`: the commands of a compiled function for one engine, and `Part`: those of one stream.

Values go from one stream to another by borrows and copies only, and these have numbers. So the
streams of a process replay their parts beside each other, each with a table of values of its own,
as they would execute the commands of the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monarch._tensors.core.template import Command

__all__ = ["Part", "Recorded", "Varying"]


@dataclass(frozen=True)
class Varying:
    """The place of a number that each call of a recording has anew."""

    index: int

    @staticmethod
    def filled(command: Command, numbers: Sequence[float]) -> Command:
        """Return a command with the numbers of a call."""
        return tuple(numbers[x.index] if type(x) is Varying else x for x in command)


@dataclass
class Part:
    """The commands that one stream of a process replays.

    Attributes:
        commands: the commands, each with its index in the recording.
        given: the position of each argument and captured tensor of the stream in a call, and its
            reference in the commands.
        results: the same for each result.
        numbers: the numbers of copies and borrows in the commands of the recording.
        varying: the indices of commands that have places for numbers.
    """

    numbers: tuple[int, ...]
    commands: list[tuple[int, Command]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    varying: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Recorded:
    """Commands with the references of one call, and the number of the place of each of these.

    Attributes:
        commands: the commands.
        places: the place of each command.
        given: reference and place of each argument, and then of each captured tensor.
        results: reference and place of each result.
        numbers: the numbers of copies and borrows.
    """

    commands: list[Command]
    places: list[int]
    given: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]

    def parts(self, stream_of: Callable[[int], int | None]) -> dict[int, Part]:
        """Return what a process replays, by stream.

        Args:
            stream_of: the stream of a place; None if the process is not in that place.
        """
        parts: dict[int, Part] = {}

        def part(place: int) -> Part | None:
            stream = stream_of(place)
            return None if stream is None else parts.setdefault(stream, Part(self.numbers))

        for index, (command, place) in enumerate(zip(self.commands, self.places, strict=True)):
            if (own := part(place)) is not None:
                own.commands.append((index, command))
                if any(type(operand) is Varying for operand in command):
                    own.varying.add(index)
        for position, (ref, place) in enumerate(self.given):
            if (own := part(place)) is not None:
                own.given.append((position, ref))
        for position, (ref, place) in enumerate(self.results):
            if (own := part(place)) is not None:
                own.results.append((position, ref))
        return parts
