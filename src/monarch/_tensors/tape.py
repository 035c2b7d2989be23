"""`Collection`: operations that a part of the program issues and that are kept instead of sent.

A coalescing block and a function that `compile` records collect what their context issues
(`active`). Threads that know nothing of it work for it, too: a thread of autograd computes the
backward, or the function itself starts one and waits for it. So a command that uses a value made in
a collection belongs to it, in whatever thread. All other commands are sent as ever. No thread waits
for a collection.

Each collection has a `Tape` for each `Engine`, whose module is above this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._tensors.active import collecting
from monarch._tensors.core.special import RETURN
from monarch._tensors.core.template import DELETE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from monarch._tensors.core.aliases import Stack
    from monarch._tensors.core.template import Command, Plan
    from monarch._tensors.place import Place

__all__ = ["Collection", "Tape", "keeper_of", "open_collections", "tape_for", "tape_of"]

open_collections: list[Collection] = []
"""Those of all contexts."""


class Tape:
    """The commands of a collection for one engine, whose lock the caller holds.

    Attributes:
        commands: those that were issued.
        stacks: where the program issued each.
        places: where each is to run.
        stand_ins: references that stand for others in the collection.
        is_open: whether it takes commands.
        forgotten: plans that its commands may use, to be forgotten after them.
    """

    def __init__(self, engine: Any, collection: Collection) -> None:
        self.engine = engine
        self.collection = collection
        self.commands: list[Command] = []
        self.stacks: list[Stack] = []
        self.places: list[Place] = []
        self.stand_ins: set[int] = set()
        self.is_open = True
        self.forgotten: list[Plan] = []
        self._first = engine.new_ref()
        self._made: set[int] = set()
        self._used: set[int] = set()
        self._read = 0  # commands of which the two know

    def __iter__(self) -> Iterator[tuple[Command, Stack, Place]]:
        # One without its end is left out: Ctrl-C came while it was added.
        return zip(self.commands, self.stacks, self.places, strict=False)

    def append(self, place: Place, command: Command, where: Stack) -> None:
        """Keep a command. Ctrl-C may come between any two lines: the last one counts."""
        at = len(self.commands)
        self.stacks[at:] = [where]
        self.places[at:] = [place]
        self.commands.append(command)

    @property
    def made(self) -> set[int]:
        """The references that its commands have defined."""
        self._learn()
        return self._made

    @property
    def used(self) -> set[int]:
        """All references in its commands."""
        self._learn()
        return self._used

    def _learn(self) -> None:
        for command in self.commands[self._read :]:
            self._read += 1
            reads, defines = self.engine.history.references(command)
            self._used.update(reads, defines)
            # A value that is older, or an argument as well, is written and not made.
            self._made.update(ref for ref in defines if ref >= self._first and ref not in reads)

    def makes(self, refs: Iterable[int]) -> bool:
        """Whether one of these references is known in the collection only."""
        made = self.made
        return any(ref in made or ref in self.stand_ins for ref in refs)


class Collection:
    """The commands that a context collects; `tapes` has them by engine.

    Within its ``with`` block `tape_for` gives its tapes, unless they are closed.

    Args:
        engines: those that there are. A new one asks for its tape before its first command.
    """

    is_recording = False
    is_open = False

    def __init__(self, engines: Iterable[Any]) -> None:
        self.tapes: dict[Any, Tape] = {}
        for engine in engines:
            self.tape(engine)

    def tape(self, engine: Any) -> Tape:
        """Return the tape for an engine."""
        tape = self.tapes.get(engine)
        if tape is None:
            tape = self.tapes.setdefault(engine, Tape(engine, self))
        return tape

    def takes(self, command: Command) -> bool:
        """Whether it keeps a command that its context issues."""
        return True

    def keeps(self, tape: Tape, ref: int) -> bool:
        """Whether the deletion of a value has to come after its commands."""
        return ref in tape.used

    def __enter__(self) -> None:
        open_collections.append(self)
        self.is_open = True

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        open_collections.remove(self)


def tape_for(engine: Any, command: Command) -> Tape | None:
    """Return the tape that gets a command which this context issues; None if it is to be sent."""
    own: Collection | None = collecting()
    if own is not None:
        return own.tape(engine) if own.takes(command) else None
    if command[0] in (DELETE, RETURN):
        refs = command[1 if command[0] == DELETE else 2 :]
    else:
        refs = engine.history.references(command)[0]
    return tape_of(engine, refs)


def tape_of(engine: Any, refs: Iterable[int]) -> Tape | None:
    """Return the tape whose collection has made one of these values; None if there is none."""
    return next((tape for tape in _open_tapes(engine) if tape.makes(refs)), None)


def keeper_of(engine: Any, ref: int) -> Tape | None:
    """Return the tape that gets the deletion of a value; None if it is to be sent."""
    return next((tape for tape in _open_tapes(engine) if tape.collection.keeps(tape, ref)), None)


def _open_tapes(engine: Any) -> Iterator[Tape]:
    for collection in open_collections:
        tape = collection.tapes.get(engine)
        if tape is not None and tape.is_open:
            yield tape
