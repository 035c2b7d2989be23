"""`SimulatedEngine`: the client's engine on a simulated machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch import _spi
from monarch._tensors.engine import Engine
from monarch._tensors.mesh import mesh_of
from monarch._tensors.propagate import fake_mode
from monarch._tensors.simulator.commands import At
from monarch._tensors.simulator.moves import Moves
from monarch._tensors.simulator.workers import SimulatedWorkers
from monarch._tensors.where import Tagged, lines_of
from monarch.actor import Slice as NDSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._tensors.core.aliases import Stack
    from monarch._tensors.core.template import Command as EngineCommand
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place
    from monarch._tensors.simulator.commands import Command
    from monarch.actor import Future, ProcMesh

__all__ = ["SimulatedEngine", "SimulatedProcs", "mocked", "set_meta", "tags"]

_counter = itertools.count()
_LINES = 4  # of the program, for each command in a trace
_APART = "a tensor cannot be copied between simulated devices and others: it has no data"


class SimulatedProcs:
    """The dimensions of a proc mesh that has no processes."""

    def __init__(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, and has to be a positive number")
        self.sizes = sizes
        self.slice = NDSlice.new_row_major(list(sizes.values()))

    def __len__(self) -> int:
        return len(self.slice)

    def __repr__(self) -> str:
        return f"<simulated devices {self.sizes}>"

    def _uids(self) -> list[int]:
        """Return the processes: none, so no actor is on them."""
        return []


class _Tags(threading.local):
    values: tuple[str, ...] = ()


_tags = _Tags()


@contextlib.contextmanager
def set_meta(new_value: Any) -> Generator[None, None, None]:
    """Tag the operations within the ``with`` block; traces of the simulator show the tags.

    Blocks within each other add up. The tag is the text of `new_value`.
    """
    old = _tags.values
    _tags.values = (*old, str(new_value))
    try:
        yield
    finally:
        _tags.values = old


def tags() -> tuple[str, ...]:
    """Return the tags that operations of this thread get now."""
    return _tags.values


class SimulatedEngine(Engine):
    """An engine that sends its batches to `SimulatedWorkers`.

    It sends them when they are full, or when something has to be known; there is no thread that
    sends earlier ones. So the same program gives the same commands.

    Args:
        sizes: the dimensions of the mesh.
        sink: called with each command for the machine.
        finish: called when the program has ended the engine.
    """

    is_simulated = True

    def __init__(
        self,
        sizes: dict[str, int],
        sink: Callable[[Command], None],
        finish: Callable[[], None],
    ) -> None:
        self._sink = sink
        self._finish = finish
        self._notes: dict[int, tuple[Stack, tuple[str, ...]]] = {}
        self._at: dict[int, At] = {}
        super().__init__(cast("ProcMesh", SimulatedProcs(sizes)))

    def _start(self) -> None:
        self.name = f"simulated.{next(_counter)}"
        self.workers = SimulatedWorkers(self)
        self.died_later = self.died  # memory is free when the program releases it

    def device_mesh(self) -> DeviceMesh:
        """Return the mesh of all simulated devices."""
        procs = cast("SimulatedProcs", self.procs)
        return mesh_of(self, procs.slice, tuple(procs.sizes))

    def beneath(self) -> contextlib.AbstractContextManager[object]:
        """Let tensors be made on devices that this machine lacks: torch asks no driver then."""
        beneath = contextlib.ExitStack()
        beneath.enter_context(fake_mode())
        if not torch.cuda.is_available():
            beneath.enter_context(Moves())
        return beneath

    def rendezvous(self) -> int:
        """Do nothing: the devices need not find each other."""
        return 0

    def peer(self, other: Engine) -> int:
        """Return 0, the number of these devices. Raises ValueError for another engine."""
        if other is not self:
            raise ValueError(_APART)
        return 0

    def exit(self) -> None:
        """End the engine, write the files of the simulation, and raise an unreported error."""
        if self.ended is None:
            try:
                super().exit()
            finally:
                self._finish()

    def emit(self, place: Place, command: EngineCommand, where: Stack) -> None:
        """Append a command, with the tags that it has now; it may stay on a tape for a while."""
        super().emit(place, command, Tagged(where, _tags.values))

    def _append(self, place: Place, command: EngineCommand, where: Stack) -> None:
        super()._append(place, command, where)
        tags = where.tags if isinstance(where, Tagged) else _tags.values
        self._notes[self._seq - 1] = (where, tags)

    def at(self, number: int) -> At:
        """Return where the commands of a place run."""
        found = self._at.get(number)
        if found is None:
            place = self._places[number]
            ranks = tuple(place.mesh.processes)
            found = self._at[number] = At(ranks, place.stream.number, place.stream.name)
        return found

    def execute(self, command: Command) -> None:
        """Give a command to the machine, with where the program issued it and its tags."""
        where, tags = self._notes.get(command.seq, ((), ()))
        self._sink(dataclasses.replace(command, tags=tags, lines=_lines(where)))

    def _call(self, asked: Any, function: Callable[[Any], Any]) -> Future[Any]:
        return _spi.then(_spi.resolved(iter(self.workers.ask(self._batch(asked)))), function)

    def _sent(self, question: Any, confirm: bool, function: Callable[[Any], Any]) -> Any:
        with _disable_current_modes():  # constants are pickled, and unpickled, as they are
            answer = super()._sent(question, confirm, function)
        self._notes.clear()
        return answer


def _lines(stack: Stack) -> tuple[tuple[str, int, str], ...]:
    """Return the innermost lines of the program in a stack, innermost last."""
    return tuple(lines_of(stack)[-_LINES:])


def mocked(sizes: dict[str, int]) -> DeviceMesh:
    """Return a device mesh without processes; what is sent to it has no effect."""

    def ignore(_command: object = None) -> None:
        """Let a command have no effect."""

    return SimulatedEngine(sizes, ignore, ignore).device_mesh()
