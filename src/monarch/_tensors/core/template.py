"""Templates: the part of an operation that is the same each time the program issues it.

An operation is a function, arguments that vary (references of tensors, and numbers that have no
influence on shapes), and constants. The function, the constants and the places of the varying
arguments are a *template*, which is sent to the workers once and has a number from then on. A
*command* is sent for each operation: the number, the references of the results, and the varying
arguments, or *operands*:

    (template, result, result, ..., operand, operand, ..., aliases)

The last element is there only if the operation writes to a tensor that has aliases: the references
of those, whose values are lost, too, if the operation fails.

Templates below `FIRST` are commands of the engine itself; the worker has a method for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from monarch._tensors.core.metadata import Metadata

__all__ = [
    "DELETE",
    "FIRST",
    "Command",
    "Operand",
    "Output",
    "Plan",
    "operands_of",
    "reads",
    "results",
    "writes",
]

DELETE = 0
"""``(DELETE, ref, ref, ...)``: forget values."""
FIRST = 32

Command = tuple[Any, ...]


@dataclass(frozen=True)
class Operand:
    """The place of a varying argument in the constants of a template."""

    index: int


@dataclass(frozen=True)
class Output:
    """A result of an operation.

    `argument` is the number of the tensor argument that the function returns itself; then the rest
    does not count. Otherwise it is a new tensor with `metadata`. It shares the storage of the
    tensor argument `alias`, or of the result `-1 - alias` if that is negative, or of none.
    """

    metadata: Metadata | None = None
    alias: int | None = None
    argument: int | None = None


@dataclass(eq=False)
class Plan:
    """The work of a client for an operation, computed once; see `propagate`.

    `function`, `args` and `kwargs` (with an `Operand` in the place of each varying argument) are
    what workers need. `structure` rebuilds what the function returns from the list of its outputs;
    None if it returns its only output.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[int, ...]  # the numbers of the operands that are tensors
    outputs: tuple[Output, ...]
    written: tuple[int, ...]  # the numbers of the tensor arguments that it writes to
    structure: Any = None
    number: int = 0  # 0 until the workers know it
    recorded: bool = False  # whether a recording uses it, so that the workers must keep it
    new: int = 0  # the number of outputs that get a new reference
    only: Metadata | None = None  # of the only output, if that is new and not of another one
    shared: int | None = None  # the tensor argument whose storage that output shares
    resized: tuple[tuple[int, Metadata], ...] = ()  # tensor arguments whose metadata change
    picks: tuple[int, ...] = ()  # which leaves of the returned structure the new outputs are
    is_computable: bool = False  # whether the script can compute it, too: see `script_value`

    def __post_init__(self) -> None:
        self.new = sum(output.argument is None for output in self.outputs)
        first = self.outputs[0] if len(self.outputs) == 1 else None
        if (
            first is not None
            and (first.alias is None or first.alias >= 0)
            and self.structure is None
            and not self.written
            and not self.resized
        ):
            self.only = first.metadata
            self.shared = first.alias

    def expected(self) -> tuple[Any, ...]:
        """Return size and dtype of each new output."""
        made = (output.metadata for output in self.outputs if output.argument is None)
        return tuple((metadata.size, metadata.dtype) for metadata in made if metadata is not None)

    def definition(self) -> tuple[Any, ...]:
        """Return what a worker needs beside the function and the constants.

        Nothing in it is of the program, so each worker can read it.
        """
        is_alone = self.structure is None
        return self.tensors, self.new, self.picks, is_alone, self.written, self.expected()


def operands_of(plan: Plan, command: Command) -> Command:
    """Return the operands of a command."""
    return command[1 + plan.new :]


def results(plan: Plan, command: Command) -> Iterator[int]:
    """Return the references that a command defines."""
    return iter(command[1 : 1 + plan.new])


def reads(plan: Plan, command: Command) -> Iterator[int]:
    """Return the references that a command needs."""
    start = 1 + plan.new
    return (command[start + index] for index in plan.tensors)


def writes(plan: Plan, command: Command) -> Iterator[int]:
    """Return the references whose values a command changes, aliases included."""
    if not plan.written:
        return
    start = 1 + plan.new
    for number in plan.written:
        yield command[start + plan.tensors[number]]
    if type(command[-1]) is tuple:
        yield from command[-1]
