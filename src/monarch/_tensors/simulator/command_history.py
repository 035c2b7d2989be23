"""`CommandHistory`: the commands of a program in a file, to simulate them again with other times.

The file is a pickle: load only files that you trust.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch._tensors.absent import Absent
from monarch._tensors.simulator.trace import file_path_with_iter

if TYPE_CHECKING:
    from monarch._tensors.simulator.commands import Command

__all__ = ["CommandHistory"]


class CommandHistory:
    """The commands for the simulated devices, in the order of the program.

    Args:
        world_size: the number of devices.
        maxlen: the number of commands that are kept, the newest ones.
        file_path: the file; `dump` adds the number of the iteration to its name.
    """

    convert_command = Absent("record() takes commands as they are")
    convert_msg = Absent("record() takes commands as they are")

    def __init__(
        self, world_size: int, *, maxlen: int = 10_000_000, file_path: str = "command_history.pt"
    ) -> None:
        self.world_size = world_size
        self.file_path = file_path
        self.commands: deque[Command] = deque(maxlen=maxlen)
        self._iteration = 0

    def record(self, cmd: Command) -> None:
        """Keep a command."""
        self.commands.append(cmd)

    def step(self) -> None:
        """Write the commands since the last step to a file, and forget them."""
        self.dump(file_path_with_iter(self.file_path, self._iteration))
        self._iteration += 1
        self.commands.clear()

    def dump(self, file_path: str | None = None) -> None:
        """Write the commands to a file."""
        with open(file_path or self.file_path, "wb") as file:
            pickle.dump((self.world_size, list(self.commands)), file, protocol=5)

    @classmethod
    def load(cls, file_path: str) -> CommandHistory:
        """Return the history in a file."""
        with open(file_path, "rb") as file:
            size, commands = pickle.load(file)
        history = cls(size, file_path=file_path)
        history.extend(commands)
        return history

    def extend(self, commands: Iterable[Command]) -> None:
        """Keep several commands."""
        self.commands.extend(commands)
