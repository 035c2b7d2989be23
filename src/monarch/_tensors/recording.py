"""`compile`: a function whose operations are recorded once, and replayed by one command per call.

The first call with arguments of a kind records: the function runs, and its commands are kept
instead of sent. They are a *recording*, which the processes get once. From then on a call sends one
command with the references of the arguments and of the results. The processes replay the recording
in a table of values of its own, so the references in it need no translation. Other effects of the
function than operations on tensors happen while it is recorded only.

While it is recorded the function gets stand-ins for its arguments, with the storages of these. So a
tensor that is an argument in one call is a captured tensor of the recording if the function has it
otherwise, too. A recording serves calls whose arguments share storages with captured tensors in the
same way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.active import active
from monarch._tensors.core.aliases import Aliases, Stack
from monarch._tensors.core.cache import structure_key
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.recorded import Recorded
from monarch._tensors.core.special import REPLAY
from monarch._tensors.core.template import DELETE, FIRST, Command, Operand, operands_of
from monarch._tensors.mesh import no_mesh
from monarch._tensors.misplaced import explain, place_of_call, refuse
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here, text_of

if TYPE_CHECKING:
    from monarch._tensors.engine import Engine
    from monarch._tensors.place import Place

__all__ = ["compile"]

_numbers = itertools.count()


@dataclass(eq=False)
class _Recording:
    """The operations of one kind of call.

    Attributes:
        number: its number for the processes.
        forms: its operations, for comparisons; see `_forms`.
        stacks: where the program issued each command.
        captured: tensors that it uses and that are no arguments.
        written: the numbers of the arguments, and after those of the captured tensors, that it
            writes to.
        outputs: for each result its metadata and the storage that it shares: the number of an
            argument or captured tensor, or of an earlier result n as -1 - n, or None.
        structure: the returned structure, with an `Operand` for each result.
        overlap: for each argument the first captured tensor with the same storage; see `_overlap`.
    """

    number: int
    forms: list[Any]
    stacks: list[Stack]
    captured: list[Tensor]
    written: tuple[int, ...]
    outputs: list[tuple[Metadata, int | None]]
    structure: Any
    overlap: list[int | None]
    is_verified: bool = False


def compile(fn: Callable[..., Any] | None = None, verify: bool = True) -> Any:  # noqa: A001 - the interface's name
    """Return a function that does what `fn` does, with one command to the processes per call.

    Use it as a decorator, with or without arguments. The tensors among the arguments may vary; for
    other shapes, other values of other arguments, another mesh or stream it records again. Tensors
    that `fn` uses without getting them as arguments are the same in each call. Tensors that it
    makes and does not return are dropped.

    Args:
        fn: a function of tensors and hashable values, with operations on one mesh and stream.
        verify: record the second call of each kind, too, and compare.

    A call raises RuntimeError if the second recording differs from the first, TypeError for
    arguments or results that require gradients, and NotImplementedError for operations on several
    meshes or streams and for fetches in `fn`.
    """
    if fn is None:
        return functools.partial(compile, verify=verify)
    recordings: dict[Any, list[_Recording]] = {}

    @functools.wraps(fn)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors and active.mesh is None:
            return fn(*args, **kwargs)
        name = getattr(fn, "__qualname__", str(fn))
        place: Place = place_of_call(name, args, kwargs, tensors)
        if place.engine.is_held:
            return fn(*args, **kwargs)  # a part of another recording, or of a coalesced block
        _refuse_gradients(name, tensors)
        key = (structure_key(spec), place, _kind(leaves))
        known = recordings.setdefault(key, [])
        recording = next((r for r in known if r.overlap == _overlap(tensors, r.captured)), None)
        if recording is None:
            recording = _record(fn, leaves, spec, place)
            known.append(recording)
            place.engine.history.recordings[recording.number] = recording.stacks
        elif verify and not recording.is_verified:
            again = _record(fn, leaves, spec, place)
            _compare(name, recording, again)
            recording.is_verified = True
        return _replay(name, recording, place, tensors)

    return compiled


def _kind(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what has to be equal for a recording to serve."""
    storages: dict[Aliases, int] = {}
    kind: list[Any] = []
    for leaf in leaves:
        if type(leaf) is Tensor:
            kind += (leaf._meta, storages.setdefault(leaf._aliases, len(storages)))
        else:
            kind += (type(leaf), leaf)
    return tuple(kind)


def _overlap(tensors: Sequence[Tensor], captured: Sequence[Tensor]) -> list[int | None]:
    """Return for each argument the first captured tensor that has the same storage, or None."""
    return [
        next((n for n, other in enumerate(captured) if other._aliases is tensor._aliases), None)
        for tensor in tensors
    ]


def _stand_ins(leaves: Sequence[Any], place: Place) -> dict[int, Tensor]:
    """Return tensors in the place of the arguments, by the identity of these."""
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if type(leaf) is Tensor and id(leaf) not in made:
            stand_in = place.engine.tensor(leaf._meta, place, leaf._aliases)
            made[id(leaf)] = stand_in.requires_grad_() if leaf.requires_grad else stand_in
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


def _record(fn: Callable[..., Any], given: Sequence[Any], shape: Any, place: Place) -> _Recording:
    """Run `fn` and keep its commands instead of sending them."""
    engine = place.engine
    with engine.lock:
        own = engine.new_ref()  # below the stand-ins, which are dropped with the rest
        stand_ins = _stand_ins(given, place)
        tensors = [stand_ins[id(leaf)] for leaf in given if id(leaf) in stand_ins]
        args, kwargs = pytree.tree_unflatten(
            [stand_ins.get(id(leaf), leaf) for leaf in given], shape
        )
        first = engine.begin_recording()
        try:
            returned = fn(*args, **kwargs)
        except BaseException:
            engine.end_recording(place, first)
            engine.drop_recorded(own, here())
            raise
        commands, stacks = engine.end_recording(place, first)
        leaves, spec = pytree.tree_flatten(returned)
        results: list[Any] = [leaf for leaf in leaves if type(leaf) is Tensor]
        _refuse_gradients(getattr(fn, "__qualname__", str(fn)), results)
        arguments = {tensor._ref for tensor in tensors}
        used: dict[int, None] = {}
        written: set[int] = set()
        for command in commands:
            reads, defines = engine.history.references(command)
            used.update((ref, None) for ref in reads if ref < first and ref not in arguments)
            written.update(ref for ref in defines if ref < first)
        used.update((t._ref, None) for t in results if t._ref < first and t._ref not in arguments)
        captured = [engine.tensor_of(ref) for ref in used]
        outer = [*tensors, *captured]
        outputs: list[tuple[Metadata, int | None]] = []
        shown: list[Any] = []
        for leaf in leaves:
            if type(leaf) is not Tensor:
                shown.append(leaf)
                continue
            shown.append(Operand(len(outputs)))
            outputs.append((leaf._meta, _shares(leaf, outer, results[: len(outputs)])))
        recorded = Recorded(
            commands,
            tuple(tensor._ref for tensor in tensors),
            tuple(used),
            tuple(tensor._ref for tensor in results),
        )
        number = next(_numbers)
        engine.learn_recording(number, recorded)
        overlap = _overlap(tensors, captured)
        engine.drop_recorded(own, here())
        numbers = tuple(n for n, tensor in enumerate(outer) if tensor._ref in written)
        structure = pytree.tree_unflatten(shown, spec)
        forms = _forms(engine, commands, tensors, first)
        return _Recording(number, forms, stacks, captured, numbers, outputs, structure, overlap)


def _shares(leaf: Tensor, outer: Sequence[Tensor], earlier: Sequence[Tensor]) -> int | None:
    for number, tensor in enumerate(outer):
        if tensor._aliases is leaf._aliases:
            return number
    for number, tensor in enumerate(earlier):
        if tensor._aliases is leaf._aliases:
            return -1 - number
    return None


def _replay(name: str, recording: _Recording, place: Place, tensors: Sequence[Tensor]) -> Any:
    """Let the processes replay a recording, and return its results."""
    outer = [*tensors, *recording.captured]
    for tensor in outer:
        if not tensor._aliases.may_read():
            raise explain(name, outer, {}, active.mesh, place)
    changed: set[int] = set()
    for number in recording.written:
        aliases = outer[number]._aliases
        if not aliases.writable:
            raise refuse(
                name, outer[number], "MUTATING_BORROW", "it would be mutated while it is borrowed"
            )
        changed |= aliases.refs
    engine = place.engine
    refs = tuple(engine.new_ref() for _ in recording.outputs)
    given = tuple(tensor._ref for tensor in outer)
    engine.emit(place, (REPLAY, recording.number, refs, given, tuple(changed)), here())
    made: list[Tensor] = []
    for ref, (metadata, shares) in zip(refs, recording.outputs, strict=True):
        if shares is None:
            aliases = Aliases()
        else:
            aliases = outer[shares]._aliases if shares >= 0 else made[-1 - shares]._aliases
        made.append(new_tensor(metadata, place, ref, aliases))
    for number in recording.written:
        torch.autograd.graph.increment_version(outer[number])
    return pytree.tree_map(
        lambda leaf: made[leaf.index] if type(leaf) is Operand else leaf, recording.structure
    )


def _forms(
    engine: Engine, commands: Sequence[Command], tensors: Sequence[Tensor], first: int
) -> list[Any]:
    """Return the commands in a form that is equal for equal recordings.

    Each reference above `first` is replaced by where it comes from. Deletions are left out: when a
    tensor is released is no matter of the program alone.
    """
    origins: dict[int, Any] = {
        tensor._ref: ("argument", number) for number, tensor in enumerate(tensors)
    }
    forms: list[Any] = []
    number = 0
    for command in commands:
        if command[0] == DELETE:
            forms.append((DELETE, [], []))
            continue
        reads, defines = engine.history.references(command)
        if command[0] < FIRST:
            constants = [part for part in command[1:] if type(part) not in (int, tuple)]
        else:
            plan = engine.plans[command[0]]
            given = operands_of(plan, command)
            constants = [given[n] for n in range(len(given)) if n not in plan.tensors]
            constants = [part for part in constants if type(part) is not tuple]
        sources = [origins.get(ref, ref) for ref in reads]
        for place, ref in enumerate(ref for ref in defines if ref > first):
            origins.setdefault(ref, ("made", number, place))
        forms.append((command[0], sources, constants))
        number += 1
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
