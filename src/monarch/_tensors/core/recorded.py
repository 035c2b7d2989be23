"""`Recorded`: the commands of a compiled function, as the processes keep them."""

from __future__ import annotations

from dataclasses import dataclass

from monarch._tensors.core.template import Command

__all__ = ["Recorded"]


@dataclass(frozen=True)
class Recorded:
    """Commands with the references of one call.

    Attributes:
        commands: the commands.
        arguments: the references of the arguments in them.
        captured: the references of other tensors that exist.
        results: the references of the results in them.
    """

    commands: list[Command]
    arguments: tuple[int, ...]
    captured: tuple[int, ...]
    results: tuple[int, ...]
