"""`compile`: a function whose operations are recorded once, and replayed by one command per call.

The first call with arguments of a kind records: the function runs, and its commands are kept
instead of sent. They are a *recording*, which the processes get once. From then on a call sends one
command with the references of the arguments and of the results. The processes replay the recording
in a table of values of its own, so the references in it need no translation. Numbers that change
from call to call are computed in the script (`numbers`). Other effects of the function happen while
it is recorded only.

While it is recorded the function gets stand-ins for its arguments, with the storages of these. So a
tensor that is an argument in one call is a captured tensor of the recording if the function has it
otherwise, too. A recording serves calls whose arguments share storages with captured tensors in the
same way.

A function may use several streams and meshes. Each stream of a process replays its own part (see
`core.recorded`), so the streams wait for each other where the function says so, and nowhere else.
For each engine there is a recording with a command of its own. The parts of a call find each other
by the numbers of copies and borrows, which are new in each call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.active import active, collecting, enter, leave
from monarch._tensors.core.aliases import Aliases, Stack
from monarch._tensors.core.cache import structure_key
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.recorded import Recorded
from monarch._tensors.core.special import (
    BORROW,
    COMBINE,
    CONSTANT,
    COORDINATE,
    RECEIVE,
    RECLAIM,
    REDUCE,
    REPLAY,
    RETURN,
    SEND,
    new_number,
    number_of,
)
from monarch._tensors.core.template import DELETE, FIRST, Command, Operand, operands_of
from monarch._tensors.engine import engines
from monarch._tensors.mesh import no_mesh
from monarch._tensors.misplaced import explain, place_at, refuse
from monarch._tensors.numbers import Number, Numbers
from monarch._tensors.stream import main
from monarch._tensors.tape import Collection, Tape, open_collections, tape_of
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.watched import Watched
from monarch._tensors.where import here, program_level, text_of

if TYPE_CHECKING:
    from monarch._tensors.borrow import Borrow
    from monarch._tensors.engine import Engine
    from monarch._tensors.place import Place

__all__ = ["compile"]

_numbers = itertools.count()


@dataclass(eq=False)
class _Part:
    """The recording of one engine.

    Attributes:
        number: its number for the processes.
        place: the place of the command that replays it: all places of its commands.
        given: which of the arguments and captured tensors it gets.
        results: which of the results it makes.
        numbers: the numbers of copies and borrows in its commands.
    """

    engine: Engine
    number: int
    place: Place
    given: list[int]
    results: list[int]
    numbers: tuple[int, ...]


@dataclass(eq=False)
class _Recording:
    """The operations of one kind of call.

    Attributes:
        parts: the recording of each engine.
        forms: its operations, for comparisons; see `_forms`.
        stacks: where the program issued each command.
        captured: tensors that it uses and that are no arguments.
        written: the numbers of the arguments, and after those of the captured tensors, that it
            writes to.
        outputs: for each result its metadata, its place, and the storage that it shares: the number
            of an argument or captured tensor, or of an earlier result n as -1 - n, or None.
        structure: the returned structure, with an `Operand` for each result.
        overlap: for each argument the first captured tensor with the same storage; see `_overlap`.
        numbers: what it computes with numbers.
        state: of the modules and optimizers, see `Watched.state`.
    """

    parts: list[_Part]
    forms: list[Any]
    stacks: list[Stack]
    captured: list[Tensor]
    written: tuple[int, ...]
    outputs: list[tuple[Metadata, Place, int | None]]
    structure: Any
    overlap: list[int | None]
    numbers: Numbers
    state: Any = None
    is_verified: bool = False


def compile(fn: Callable[..., Any] | None = None, verify: bool = True) -> Any:  # noqa: A001 - the interface's name
    """Return a function that does what `fn` does, with one command to the processes per call.

    Use it as a decorator, with or without arguments. Tensors and floats among the arguments may
    vary, as may the numbers in the groups of the optimizers that `fn` uses, and what it reads of
    small tensors that the script has made from numbers. For other shapes, other values of other
    arguments, another mesh or stream, other modes, modules or variables of `fn`, and where a number
    makes it decide otherwise, it records again, up to 8 times; then a call that fits no recording
    runs uncompiled, and a warning says so. The first call with an optimizer that has made no step
    runs uncompiled. Tensors that `fn` uses without getting them as arguments are the same in each
    call. Tensors that it makes and does not return are dropped.

    `fn` may use several streams, and several meshes that were used before, also of several
    `spawn_procs`: then the processes of each get one command. Other tasks and threads go on while
    it records. Their operations are no part of it, except those on a tensor that it made or was
    given, such as those of the threads in which autograd computes a backward.

    Args:
        fn: a function of tensors and hashable values.
        verify: record the second call of each kind, too, and compare.

    A call raises RuntimeError if the second recording differs from the first, or if `fn` does not
    drop a borrow that it began; ValueError if it drops one that began before; TypeError for
    arguments or results that require gradients; and NotImplementedError for fetches in `fn`, and
    for a number that changes as a result.
    """
    if fn is None:
        return functools.partial(compile, verify=verify)
    recordings: dict[Any, list[_Recording]] = {}
    name = getattr(fn, "__qualname__", str(fn))
    watching: dict[Any, Watched] = {}

    @functools.wraps(fn)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors and active().mesh is None:
            return fn(*args, **kwargs)
        _check(name, args, kwargs, tensors)
        if collecting() is not None or _is_collected(tensors):
            return fn(*args, **kwargs)  # a part of another recording, or of a coalesced block
        _refuse_gradients(name, tensors)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        key = (structure_key(spec), active().mesh, active().stream or main, modes, _kind(leaves))
        try:
            known = recordings.setdefault(key, [])
        except TypeError as error:
            raise TypeError(
                f"the compiled function {name} has an argument that cannot be hashed, so its calls "
                f"cannot be told apart ({error}): pass tensors, and plain values in tuples"
            ) from None
        watched = watching.get(key)
        if watched is None or not watched.is_current():
            watched = watching[key] = Watched(fn, leaves)
        if watched.begins():
            return fn(*args, **kwargs)
        state = watched.state()
        fitting = _fitting(known, tensors, leaves, state)
        if fitting is None:
            if sum(map(len, recordings.values())) >= _MOST:
                _give_up(name)
                return fn(*args, **kwargs)
            recording = _record(name, fn, leaves, spec, watched)
            recording.state = state
            known.append(recording)
        else:
            recording, found = fitting
            if recording.is_verified or not verify:
                return _replay(name, recording, tensors, found)
            _compare(name, recording, _record(name, fn, leaves, spec, watched))
            recording.is_verified = True
        found = recording.numbers.run(leaves)
        if found is None:  # it makes a value unknown that it reads, so no call fits
            return fn(*args, **kwargs)
        return _replay(name, recording, tensors, found)

    return compiled


def _fitting(
    known: Sequence[_Recording], tensors: Sequence[Tensor], leaves: Sequence[Any], state: Any
) -> tuple[_Recording, Any] | None:
    """Return the recording that serves a call, and what `Numbers.run` returns for it."""
    for recording in known:
        overlap = _overlap(tensors, recording.captured)
        if recording.overlap == overlap and recording.state == state:
            found = recording.numbers.run(leaves)
            if found is not None:
                return recording, found
    return None


def _is_collected(tensors: Sequence[Any]) -> bool:
    """Whether an operation that is not sent yet makes one of these tensors."""
    if not open_collections:
        return False
    for tensor in tensors:
        engine = tensor._place.engine
        with engine.lock:
            if tape_of(engine, (tensor._ref,)) is not None:
                return True
    return False


def _check(name: str, args: Any, kwargs: Any, tensors: Sequence[Any]) -> None:
    """Raise `Misplaced` unless all tensors are distributed, and may be read."""
    for tensor in tensors:
        if type(tensor) is not Tensor:
            far = [other for other in tensors if type(other) is Tensor]
            raise explain(name, args, kwargs, active().mesh, place_at(far, active().mesh))
        if not tensor._aliases.may_read():
            raise explain(name, (tensor,), {}, active().mesh, tensor._place)


def _kind(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what has to be equal for a recording to serve."""
    storages: dict[Aliases, int] = {}
    same: dict[int, int] = {}  # one tensor twice is not two with one storage
    kind: list[Any] = []
    for leaf in leaves:
        if type(leaf) is Tensor:
            storage = storages.setdefault(leaf._aliases, len(storages))
            kind += (leaf._meta, leaf._place, storage, same.setdefault(leaf._ref, len(same)))
        elif type(leaf) is float:
            kind.append(float)  # a number of the recording
        else:
            kind += (type(leaf), leaf)
    return tuple(kind)


def _overlap(tensors: Sequence[Tensor], captured: Sequence[Tensor]) -> list[int | None]:
    """Return for each argument the first captured tensor that has the same storage, or None."""
    return [
        next((n for n, other in enumerate(captured) if other._aliases is tensor._aliases), None)
        for tensor in tensors
    ]


def _stand_ins(session: Session, leaves: Sequence[Any]) -> dict[int, Tensor]:
    """Return tensors in the place of the arguments, by the identity of these."""
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if type(leaf) is Tensor and id(leaf) not in made:
            made[id(leaf)] = session.stand_in(leaf)
    return made


def _refuse_gradients(name: str, tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise refuse(
                name,
                tensor,
                "REQUIRES_GRAD",
                "a compiled function passes no gradients on; call it under torch.no_grad()",
            )


# -- recording ------------------------------------------------------------------------------------


class Session(Collection):
    """A function that is recorded: what it issues to any engine is kept instead of sent.

    Args:
        name: the name of the function.

    Attributes:
        borrows: those that it began.
    """

    is_recording = True

    def __init__(self, name: str) -> None:
        super().__init__(engines())
        self.name = name
        self.numbers = Numbers()
        self.borrows: list[Borrow] = []
        self._first_number = new_number()

    def takes(self, command: Command) -> bool:
        """Leave out the first use and the end of a borrow that began before."""
        if command[0] == BORROW:
            return bool(command[2] >= self._first_number)
        return command[0] not in (RETURN, RECLAIM) or command[1] >= self._first_number

    def keeps(self, tape: Tape, ref: int) -> bool:
        """Whether the function has made a value that is deleted."""
        return tape.makes((ref,))

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the place of an argument."""
        place = tensor._place
        made: Tensor = place.engine.tensor(tensor._meta, place, tensor._aliases)
        self.tape(place.engine).stand_ins.add(made._ref)
        if tensor.requires_grad:
            made.requires_grad_()
        return made

    @contextlib.contextmanager
    def hold(self) -> Generator[None, None, None]:
        """Keep what the function makes within the ``with`` block, and drop it at its end."""
        with self:
            try:
                yield
            finally:
                for tape in self.tapes.values():
                    tape.engine.drop_recorded(tape, here())

    def run(self, function: Callable[[], Any]) -> Any:
        """Call `function()`, and keep what it issues on the tapes.

        Raises RuntimeError if it has not dropped a borrow that it began.
        """
        enter(self, "collection", self)
        try:
            result = function()
        except BaseException:
            self._abandon()
            raise
        finally:
            leave(self)
        left = self._abandon()
        if left:
            raise RuntimeError(
                f"the compiled function {self.name} has not dropped a borrow; drop it before the "
                f"function returns. It began here:\n{left[0].traceback_string}"
            )
        return result

    def close(self) -> list[Tape]:
        """End the tapes, and return them; deletions of what was there before are sent."""
        for tape in self.tapes.values():
            with tape.engine.lock:
                tape.is_open = False
                kept = list(tape)
                tape.commands, tape.stacks, tape.places = [], [], []
                for command, where, place in kept:
                    if command[0] == DELETE:
                        outer = tuple(ref for ref in command[1:] if not tape.makes((ref,)))
                        if outer:
                            tape.engine.emit(place, (DELETE, *outer), where)
                        inner = tuple(ref for ref in command[1:] if ref not in outer)
                        if inner:
                            tape.append(place, (DELETE, *inner), where)
                    else:
                        tape.append(place, command, where)
        return list(self.tapes.values())

    def _abandon(self) -> list[Borrow]:
        """Take back the borrows that were not dropped; return them."""
        left = [borrow for borrow in self.borrows if not borrow.is_dropped]
        for borrow in left:
            borrow.abandon()
        return left


def _record(
    name: str, fn: Callable[..., Any], given: Sequence[Any], shape: Any, watched: Watched
) -> _Recording:
    """Run `fn` and keep its commands instead of sending them."""
    session = Session(name)
    numbers = session.numbers
    with session.hold():
        stand_ins = _stand_ins(session, given)
        tensors = [stand_ins[id(leaf)] for leaf in given if id(leaf) in stand_ins]
        shown_leaves = [
            numbers.argument(at, leaf) if type(leaf) is float else stand_ins.get(id(leaf), leaf)
            for at, leaf in enumerate(given)
        ]
        args, kwargs = pytree.tree_unflatten(shown_leaves, shape)
        end = watched.number(numbers)
        try:
            returned = session.run(lambda: fn(*args, **kwargs))
        finally:
            end()
        returned = pytree.tree_map_only(Number, _returned, returned)
        numbers.close()
        leaves, spec = pytree.tree_flatten(returned)
        results: list[Any] = [leaf for leaf in leaves if type(leaf) is Tensor]
        _refuse_gradients(name, results)
        captured: list[Tensor] = []
        written: set[Tensor] = set()
        tapes = session.close()
        for tape in tapes:
            captured += _captured(tape, tensors, results, written)
        outer = [*tensors, *captured]
        outputs: list[tuple[Metadata, Place, int | None]] = []
        shown: list[Any] = []
        for leaf in leaves:
            if type(leaf) is not Tensor:
                shown.append(leaf)
                continue
            shown.append(Operand(len(outputs)))
            shares = _shares(leaf, outer, results[: len(outputs)])
            outputs.append((leaf._meta, leaf._place, shares))
        parts = [part for tape in tapes if (part := _part(tape, outer, results)) is not None]
        written_numbers = tuple(n for n, tensor in enumerate(outer) if tensor in written)
        overlap = _overlap(tensors, captured)
        structure = pytree.tree_unflatten(shown, spec)
        forms = _forms(tapes, tensors)
        stacks = [where for tape in tapes for where in tape.stacks]
        return _Recording(
            *(parts, forms, stacks, captured, written_numbers, outputs, structure, overlap, numbers)
        )


def _captured(
    tape: Tape, arguments: Sequence[Tensor], results: Sequence[Tensor], written: set[Tensor]
) -> list[Tensor]:
    """Return the tensors of other origin that a tape uses; add those that are written."""
    engine = tape.engine
    given = {tensor._ref: tensor for tensor in arguments if tensor._place.engine is engine}
    used: dict[int, None] = {}
    changed: set[int] = set()
    for command in tape.commands:
        reads, defines = engine.history.references(command)
        used.update((ref, None) for ref in reads if ref not in tape.made and ref not in given)
        changed.update(ref for ref in defines if ref not in tape.made)
    for tensor in results:
        if tensor._place.engine is engine and tensor._ref not in tape.made:
            used.setdefault(tensor._ref)
    found = {ref: engine.tensor_of(ref) for ref in used if ref not in given}
    outer = {**given, **found}
    written.update(outer[ref] for ref in changed if ref in outer)
    return list(found.values())


def _part(tape: Tape, outer: Sequence[Tensor], results: Sequence[Tensor]) -> _Part | None:
    """Let the processes of an engine know their recording; None if they have nothing to do."""
    engine = tape.engine
    given = [n for n, tensor in enumerate(outer) if tensor._place.engine is engine]
    made = [n for n, tensor in enumerate(results) if tensor._place.engine is engine]
    if not tape.commands and not made:
        return None
    numbers = tuple(
        dict.fromkeys(n for c in tape.commands if c[0] < FIRST and (n := number_of(c)) is not None)
    )
    recorded = Recorded(
        tape.commands,
        [place.number for place in tape.places],
        tuple((outer[n]._ref, outer[n]._place.number) for n in given),
        tuple((results[n]._ref, results[n]._place.number) for n in made),
        numbers,
    )
    number = next(_numbers)
    pairs = (*recorded.given, *recorded.results)
    place = engine.joint_place([*recorded.places, *(at for _, at in pairs)])
    engine.learn_recording(number, recorded)
    engine.history.recordings[number] = tape.stacks
    return _Part(engine, number, place, given, made, numbers)


def _shares(leaf: Tensor, outer: Sequence[Tensor], earlier: Sequence[Tensor]) -> int | None:
    for number, tensor in enumerate(outer):
        if tensor._aliases is leaf._aliases:
            return number
    for number, tensor in enumerate(earlier):
        if tensor._aliases is leaf._aliases:
            return -1 - number
    return None


# -- replay ---------------------------------------------------------------------------------------


def _replay(name: str, recording: _Recording, tensors: Sequence[Tensor], found: Any) -> Any:
    """Let the processes replay a recording, and return its results.

    `found` is what `Numbers.run` has returned for the call.
    """
    operands, states, effects = found
    outer = [*tensors, *recording.captured]
    for tensor in outer:
        if not tensor._aliases.may_read():
            raise explain(name, (tensor,), {}, active().mesh, tensor._place)
    changed: dict[Place, set[int]] = {}
    for number in recording.written:
        tensor = outer[number]
        if not tensor._aliases.writable:
            raise refuse(name, tensor, "MUTATING_BORROW", "it would be mutated while borrowed")
        tensor._aliases.forget()
        changed.setdefault(tensor._place, set()).update(tensor._aliases.refs)
    refs = [place.engine.new_ref() for _, place, _ in recording.outputs]
    fresh: dict[int, int] = {}
    where = here()
    for part in recording.parts:
        for number in part.numbers:
            fresh.setdefault(number, new_number())
        streams: dict[int, set[int]] = {}
        for place, written in changed.items():
            if place.engine is part.engine:
                streams.setdefault(place.stream.number, set()).update(written)
        command = (
            *(REPLAY, part.number),
            tuple(refs[n] for n in part.results),
            tuple(outer[n]._ref for n in part.given),
            tuple((stream, tuple(written)) for stream, written in streams.items()),
            tuple(fresh[number] for number in part.numbers),
            operands,
        )
        part.engine.emit(part.place, command, where)
    made: list[Tensor] = []
    for ref, (metadata, place, shares) in zip(refs, recording.outputs, strict=True):
        if shares is None:
            aliases = Aliases()
        else:
            aliases = outer[shares]._aliases if shares >= 0 else made[-1 - shares]._aliases
        made.append(new_tensor(metadata, place, ref, aliases))
    for number in recording.written:
        torch.autograd.graph.increment_version(outer[number])
    for aliases, storage in states:
        aliases.know(storage)
    for group, key, value in effects:
        group[key] = value
    return pytree.tree_map(
        lambda leaf: made[leaf.index] if type(leaf) is Operand else leaf, recording.structure
    )


_MOST = 8  # recordings of a function


def _give_up(name: str) -> None:
    """Warn, once for each line, that a function is not recorded any more."""
    warnings.warn(
        f"the compiled function {name} has {_MOST} recordings, and this call fits none of them: "
        "shapes, modes, modules, or numbers that it decides by are others each time. It runs "
        "uncompiled from now on where none fits",
        UserWarning,
        stacklevel=program_level(),
    )


def _returned(number: Number) -> float:
    raise NotImplementedError(
        "a compiled function returns a number that changes from call to call: return a tensor, or "
        "compute the number outside of it"
    )


# -- comparison -----------------------------------------------------------------------------------

_CONSTANTS = {
    CONSTANT: (2,),
    COORDINATE: (2, 3),
    REDUCE: (5,),
    SEND: (3, 4),
    RECEIVE: (3, 5, 6),
    RECLAIM: (2,),
    COMBINE: (3,),
}
"""The places of what is neither a reference nor a number in special commands."""


def _forms(tapes: Sequence[Tape], tensors: Sequence[Tensor]) -> list[Any]:
    """Return the commands in a form that is equal for equal recordings.

    Each reference that the function made is replaced by where it comes from, as are the numbers of
    copies and borrows; a stream stands for itself by its order. Deletions are left out: when a
    tensor is released is no matter of the program alone.
    """
    forms: list[Any] = []
    numbers: dict[int, int] = {}
    streams: dict[Any, int] = {}
    for tape in tapes:
        engine = tape.engine
        origins: dict[int, Any] = {
            tensor._ref: ("argument", number)
            for number, tensor in enumerate(tensors)
            if tensor._place.engine is engine
        }
        count = 0
        for command, place in zip(tape.commands, tape.places, strict=True):
            if command[0] == DELETE:
                forms.append((DELETE, [], []))
                continue
            reads, defines = engine.history.references(command)
            constants: list[Any] = [place.mesh, streams.setdefault(place.stream, len(streams))]
            if command[0] < FIRST:
                constants += [command[at] for at in _CONSTANTS.get(command[0], ())]
                number = number_of(command)
                if number is not None:
                    constants.append(numbers.setdefault(number, len(numbers)))
            else:
                plan = engine.plans[command[0]]
                given = operands_of(plan, command)
                others = [given[n] for n in range(len(given)) if n not in plan.tensors]
                constants += [part for part in others if type(part) is not tuple]
            sources = [origins.get(ref, ref) for ref in reads]
            for at, ref in enumerate(ref for ref in defines if ref in tape.made):
                origins.setdefault(ref, ("made", count, at))
            forms.append((command[0], sources, constants))
            count += 1
    return forms


def _operations(recording: _Recording) -> list[tuple[Any, Stack]]:
    pairs = zip(recording.forms, recording.stacks, strict=True)
    return [(form, where) for form, where in pairs if form[0] != DELETE]


def _compare(name: str, first: _Recording, second: _Recording) -> None:
    """Raise RuntimeError unless two recordings issue the same operations."""
    firsts, seconds = _operations(first), _operations(second)
    for number, (one, two) in enumerate(itertools.zip_longest(firsts, seconds)):
        if one is None or two is None or not _same(one[0], two[0]):
            where = [
                "  (no operation)\n" if found is None else text_of(found[1]) for found in (one, two)
            ]
            raise RuntimeError(
                f"{name} failed to verify recording. Recording diverges at operation {number}: a "
                f"compiled function must issue the same operations in each call.\n"
                f"The first call issued it here:\n{where[0]}The second call here:\n{where[1]}"
            )


def _same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, torch.Tensor):
        with no_mesh.activate():
            return bool(torch.equal(one, two))
    return bool(one == two)
