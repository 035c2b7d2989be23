"""The commands of the simulated machine: work that takes time, memory, waits between streams.

These are the commands of the engine, translated: they need no tables to be understood, so they can
be kept in a file and replayed with other times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch._tensors.core.metadata import Metadata

__all__ = [
    "At",
    "Await",
    "CallFunction",
    "Command",
    "Free",
    "Made",
    "Mark",
    "Receive",
    "Reduce",
    "Run",
    "Send",
    "SendTensor",
    "Work",
]


@dataclass(frozen=True)
class At:
    """Where a command runs: the ranks, the number of the stream and its name."""

    ranks: tuple[int, ...]
    stream: int
    name: str


@dataclass(frozen=True)
class CallFunction:
    """An operator of torch, or a function of the program.

    Attributes:
        function: its name, as "aten.mm".
        inputs: the tensors that it reads.
        outputs: the tensors that it makes or writes.
        flops: floating-point operations, as `torch.utils.flop_counter` counts; 0 if it does not.
        call: the operator with its overload, as "aten.mm.default", and its arguments, with metadata
            in place of tensors; None for a function of the program.
    """

    function: str
    inputs: tuple[Metadata, ...] = ()
    outputs: tuple[Metadata, ...] = ()
    flops: int = 0
    call: tuple[str, Any, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name in traces."""
        return self.function

    @property
    def nbytes(self) -> int:
        """The bytes that are read and written, if each tensor is once."""
        return sum(meta.nbytes() for meta in (*self.inputs, *self.outputs))


@dataclass(frozen=True)
class Reduce:
    """A collective.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        dims: the dimensions of the mesh along which it goes.
        size: the number of ranks in each group.
        source: the tensor that each rank puts in.
    """

    kind: str
    dims: tuple[str, ...]
    size: int
    source: Metadata

    @property
    def name(self) -> str:
        """The name in traces."""
        return self.kind


@dataclass(frozen=True)
class SendTensor:
    """A copy to another rank, or on one.

    Attributes:
        source: the tensor.
        is_local: whether it stays on its rank.
        is_same_host: whether it stays on its host.
    """

    source: Metadata
    is_local: bool = False
    is_same_host: bool = False
    name: str = "SendTensor"


Work = CallFunction | Reduce | SendTensor


@dataclass(frozen=True)
class Made:
    """A storage that a command allocates on each of its ranks."""

    storage: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class Command:
    """The common part of all commands.

    Attributes:
        seq: the number of the command of the program that it comes from.
        at: where it runs.
        tags: of `set_meta`.
        lines: where the program issued it, innermost last: file, line, function.
    """

    seq: int
    at: At
    tags: tuple[str, ...] = field(default=(), kw_only=True)
    lines: tuple[tuple[str, int, str], ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Run(Command):
    """Do `work`, and allocate `made` at its start; None is work that takes no time.

    `groups` are the ranks that do it together, for a collective.
    """

    work: CallFunction | Reduce | None
    made: tuple[Made, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Free(Command):
    """Release storages, when the stream has come so far."""

    storages: tuple[int, ...]


@dataclass(frozen=True)
class Mark(Command):
    """Note when the stream has come so far, under a name."""

    event: tuple[str, int]


@dataclass(frozen=True)
class Await(Command):
    """Let the stream wait for a mark of another stream."""

    event: tuple[str, int]


@dataclass(frozen=True)
class Send(Command):
    """Send a tensor from the first rank of each pair to the second."""

    number: int
    pairs: tuple[tuple[int, int], ...]
    source: Metadata


@dataclass(frozen=True)
class Receive(Command):
    """Receive what was sent, into a new storage."""

    number: int
    pairs: tuple[tuple[int, int], ...]
    source: Metadata
    made: tuple[Made, ...]
