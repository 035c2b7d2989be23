"""`SimulatedWorkers`: takes the place of the worker actors, behind the same interface.

A batch comes as bytes, as it would to processes. The table of values has a storage for each
reference, without data. Batches are executed at once, and questions are answered at once: a fetch
gives zeros. Functions of the program do not run, except those whose results nothing else describes:
with ``propagate="cached"`` one runs on fake tensors, and what `Remote.call` asks for is computed
here, from zeros.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch import _spi
from monarch._tensors.core.metadata import Metadata, interned, metadata_of
from monarch._tensors.core.recorded import Varying
from monarch._tensors.core.special import (
    ASK,
    BIND,
    BORROW,
    COMBINE,
    COMBINED,
    CONSTANT,
    COORDINATE,
    LEND,
    PROBE,
    RECEIVE,
    RECLAIM,
    REDUCE,
    REPLAY,
    RETURN,
    SEND,
    SHARE,
    renumbered,
)
from monarch._tensors.core.template import DELETE, FIRST, Command, operands_of
from monarch._tensors.propagate import fake_mode, fakes_of
from monarch._tensors.simulator.commands import (
    At,
    Await,
    CallFunction,
    Free,
    Made,
    Mark,
    Receive,
    Reduce,
    Run,
    Send,
)
from monarch._tensors.simulator.machine import groups_of
from monarch._tensors.simulator.work import work_of
from monarch._tensors.worker.argument import GroupArgument, MeshArgument
from monarch._tensors.worker.kept import Kept
from monarch._tensors.worker.template import Lost, Raised, Reference

if TYPE_CHECKING:
    from monarch._tensors.core.recorded import Recorded
    from monarch._tensors.simulator.engine import SimulatedEngine
    from monarch._tensors.worker.stream import Report
    from monarch.actor import Future

__all__ = ["SimulatedWorkers", "Storage", "Value"]


@dataclass(eq=False)
class Storage:
    """The bytes of some values on each rank; `count` values share it."""

    number: int
    count: int = 0


@dataclass(frozen=True)
class Value:
    """A tensor of the table: its metadata and its storage."""

    metadata: Metadata
    storage: Storage


@dataclass(frozen=True)
class _Results:
    """The results of a function that ran on fake tensors, until its parts get references."""

    kept: Kept
    given: tuple[int, ...]
    name: str


_Table = dict[int, Any]
_COLLECTIVES = {
    (False, False): "all_reduce",
    (False, True): "reduce_scatter",
    (True, False): "all_gather",
    (True, True): "all_to_all",
}


class SimulatedWorkers:
    """Executes the batches of an engine, and answers its questions.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._values: _Table = {}
        self._recordings: dict[int, Recorded] = {}
        self._works: dict[int, CallFunction | None] = {}
        self._storages = 0
        self._failures: list[tuple[int, str, bytes | None, int | None]] = []
        self.run = _Verb(self._run)
        self._special: dict[int, Callable[[int, At, Command, _Table], None]] = {
            DELETE: self._delete,
            CONSTANT: self._constant,
            COORDINATE: self._coordinate,
            REDUCE: self._reduce,
            SEND: self._send,
            RECEIVE: self._receive,
            ASK: self._ignore,
            PROBE: self._probe,
            REPLAY: self._replay,
            BIND: self._bind,
            LEND: self._lend,
            BORROW: self._borrow,
            RETURN: self._return,
            RECLAIM: self._reclaim,
            SHARE: self._ignore,
            COMBINE: self._combine,
            COMBINED: self._ignore,
        }

    def stop(self) -> Future[None]:
        """End; there is nothing to wait for."""
        return _spi.resolved(None)

    def __reduce__(self) -> Any:
        raise TypeError("simulated workers cannot be sent to processes")

    # -- batches ----------------------------------------------------------------------------------

    def _run(self, batch: bytes) -> Any:
        defined, forgotten, _, runs, asked = pickle.loads(batch)
        for definition in defined:
            if definition[0] == "recording":
                self._recordings[definition[1]] = pickle.loads(definition[2])
        for number in forgotten:
            self._works.pop(number, None)
        engine = self._engine
        for place, first, commands in runs:
            at = engine.at(place)
            for seq, command in enumerate(commands, first):
                try:
                    self._one(seq, at, command, self._values)
                except Exception as error:  # the supervision boundary of one command
                    self._lose(seq, command, error)
        return asked

    def ask(self, batch: bytes) -> list[Report]:
        """Execute a batch, and return the reports of all ranks."""
        last, question = self._run(batch)
        answer: Any = None
        ranks: Any = ()
        if question is not None:
            kind, ranks, asked = question[2]
            try:
                with _disable_current_modes():
                    answer = self._answer(kind, asked)
            except Exception as error:  # the supervision boundary of one question
                answer = Raised("".join(traceback.format_exception(error)), None)
        failures, self._failures = self._failures, []
        size = range(len(self._engine.procs))
        return [(last, failures, answer if rank in ranks else None) for rank in size]

    def _lose(self, seq: int, command: Command, error: Exception) -> None:
        """Put what stands for lost values in the places of what `command` defines."""
        reads, defines = self._engine.history.references(command)
        lost = next((v for ref in reads if type(v := self._values.get(ref)) is Lost), None)
        if lost is None:
            lost = Lost(seq)
            self._failures.append((seq, "".join(traceback.format_exception(error)), None, None))
        for ref in defines:
            if type(self._values.get(ref)) is not Value:
                self._values[ref] = lost

    def _one(self, seq: int, at: At, command: Command, table: _Table) -> None:
        if command[0] >= FIRST:
            self._function(seq, at, command, table)
        else:
            self._special[command[0]](seq, at, command, table)

    # -- the table --------------------------------------------------------------------------------

    def _put(self, table: _Table, ref: int, value: Any) -> None:
        if type(value) is Value:
            value.storage.count += 1
        table[ref] = value

    def _drop(self, seq: int, at: At, table: _Table, refs: Any) -> None:
        freed = []
        for ref in refs:
            value = table.pop(ref, None)
            if type(value) is Value:
                value.storage.count -= 1
                if value.storage.count == 0:
                    freed.append(value.storage.number)
        if freed:
            self._engine.execute(Free(seq, at, tuple(freed)))

    def _storage(self) -> Storage:
        self._storages += 1
        return Storage(self._storages)

    def _new(self, meta: Metadata) -> tuple[Value, Made]:
        storage = self._storage()
        return Value(meta, storage), _made(storage, meta)

    def _define(self, seq: int, at: At, ref: int, meta: Metadata, table: _Table) -> None:
        """Allocate a value that takes no time."""
        value, made = self._new(meta)
        self._put(table, ref, value)
        self._engine.execute(Run(seq, at, None, (made,)))

    # -- commands ---------------------------------------------------------------------------------

    def _function(self, seq: int, at: At, command: Command, table: _Table) -> None:
        plan = self._engine.plans[command[0]]
        operands = operands_of(plan, command)
        given = [table[operands[index]] for index in plan.tensors]
        number = plan.number
        if number not in self._works:
            self._works[number] = work_of(plan, [v.metadata for v in given], operands)
        allocated: list[Made] = []
        leaves: list[Value] = []
        refs = iter(command[1 : 1 + plan.new])
        for output in plan.outputs:
            if output.argument is not None:
                leaves.append(given[output.argument])
                continue
            assert output.metadata is not None
            if output.alias is None:
                value, made = self._new(output.metadata)
                allocated.append(made)
            else:
                shared = given[output.alias] if output.alias >= 0 else leaves[-1 - output.alias]
                value = Value(output.metadata, shared.storage)
            self._put(table, next(refs), value)
            leaves.append(value)
        for argument, meta in plan.resized:
            table[operands[plan.tensors[argument]]] = Value(meta, given[argument].storage)
        work = self._works[number]
        if work is not None or allocated:
            self._engine.execute(Run(seq, at, work, tuple(allocated)))

    def _delete(self, seq: int, at: At, command: Command, table: _Table) -> None:
        self._drop(seq, at, table, command[1:])

    def _constant(self, seq: int, at: At, command: Command, table: _Table) -> None:
        self._define(seq, at, command[1], metadata_of(command[2]), table)

    def _coordinate(self, seq: int, at: At, command: Command, table: _Table) -> None:
        self._define(seq, at, command[1], _INT64, table)

    def _reduce(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, result, _, out, _, spec = command
        made: tuple[Made, ...] = ()
        if not out:
            value, allocated = self._new(spec.result)
            self._put(table, result, value)
            made = (allocated,)
        elif result != out:
            self._put(table, result, Value(spec.result, table[out].storage))
        groups = groups_of(spec.ranks.sizes, spec.dims, tuple(spec.ranks))
        kind = _COLLECTIVES[spec.kind == "stack", spec.scatter]
        work = Reduce(kind, spec.names, len(groups[0]), spec.source)
        self._engine.execute(Run(seq, at, work, made, tuple(map(tuple, groups))))

    def _combine(self, seq: int, at: At, command: Command, table: _Table) -> None:
        spec = command[3]
        groups = tuple(map(tuple, groups_of(spec.ranks.sizes, spec.dims, tuple(spec.ranks))))
        kind = _COLLECTIVES[False, False]
        for source in spec.sources:
            work = Reduce(kind, spec.names, len(groups[0]), source)
            self._engine.execute(Run(seq, at, work, (), groups))

    def _send(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, source, number, pairs, _ = command
        self._engine.execute(Send(seq, at, number, pairs, table[source].metadata))

    def _receive(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, result, number, pairs, _, meta, _ = command
        value, made = self._new(meta)
        self._put(table, result, value)
        self._engine.execute(Receive(seq, at, number, pairs, meta, (made,)))

    def _lend(self, seq: int, at: At, command: Command, table: _Table) -> None:
        self._engine.execute(Mark(seq, at, ("loan", command[1])))

    def _borrow(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, ref, number, source = command
        self._put(table, ref, table[source])
        self._engine.execute(Await(seq, at, ("loan", number)))

    def _return(self, seq: int, at: At, command: Command, table: _Table) -> None:
        self._engine.execute(Mark(seq, at, ("return", command[1])))

    def _reclaim(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, number, is_used, *_ = command
        if is_used:
            self._engine.execute(Await(seq, at, ("return", number)))

    def _ignore(self, seq: int, at: At, command: Command, table: _Table) -> None:
        """Do nothing: the command has no effect on time or memory."""

    def _replay(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, number, refs, given, _, fresh, operands = command
        recorded = self._recordings[number]
        local: _Table = {}
        for (name, _), ref in zip(recorded.given, given, strict=True):
            self._put(local, name, table[ref])
        numbers = dict(zip(recorded.numbers, fresh, strict=True))
        for command_of_call, place in zip(recorded.commands, recorded.places, strict=True):
            inner = Varying.filled(command_of_call, operands)
            new = inner if inner[0] >= FIRST else renumbered(inner, numbers)
            self._one(seq, self._engine.at(place), new, local)
        for (name, _), ref in zip(recorded.results, refs, strict=True):
            self._put(table, ref, local[name])
        self._drop(seq, at, local, list(local))

    def _probe(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, kept, call, refs, _ = command
        function, args, kwargs = pickle.loads(call)
        _refuse_places((args, kwargs))
        given = [table[ref] for ref in refs]
        resolved = function.resolve()
        name = str(getattr(resolved, "__qualname__", resolved))
        storages = [value.storage.number for value in given]
        fakes = fakes_of([value.metadata for value in given], storages)
        with _disable_current_modes(), fake_mode():
            table[kept] = _Results(Kept.of(resolved, args, kwargs, fakes), refs, name)

    def _bind(self, seq: int, at: At, command: Command, table: _Table) -> None:
        _, kept, picks, *refs = command
        results: _Results = table.pop(kept)
        outputs, _, positions, written = results.kept.pattern()
        given = [table[ref] for ref in results.given]
        leaves: list[Value] = []
        allocated: list[Made] = []
        fresh: list[Metadata] = []
        for output in outputs:
            assert output.metadata is not None
            if output.alias is None:
                value, made = self._new(output.metadata)
                allocated.append(made)
                fresh.append(output.metadata)
            else:
                shared = given[output.alias] if output.alias >= 0 else leaves[-1 - output.alias]
                value = Value(output.metadata, shared.storage)
            leaves.append(value)
        at_position = dict(zip(positions, leaves, strict=True))
        for pick, ref in zip(picks, refs, strict=True):
            self._put(table, ref, at_position[pick])
        metas = tuple(value.metadata for value in given)
        changed = tuple(metas[number] for number in written)
        work = CallFunction(results.name, metas, (*fresh, *changed))
        self._engine.execute(Run(seq, at, work, tuple(allocated)))

    # -- questions --------------------------------------------------------------------------------

    def _answer(self, kind: str, asked: Any) -> Any:
        if kind == "value":
            return self._zeros(Reference(asked))
        if kind == "fetch":
            return pytree.tree_map(self._zeros, pickle.loads(asked))
        if kind == "probed":
            return self._values[asked].kept.pattern()
        function, args, kwargs = pickle.loads(asked)
        _refuse_places((args, kwargs))
        given, named = pytree.tree_map(self._zeros, (args, kwargs))
        with torch.enable_grad():
            value = function.resolve()(*given, **named)
        return pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _zeros(self, leaf: Any) -> Any:
        if type(leaf) is not Reference:
            return leaf
        meta = self._values[leaf.number].metadata
        return torch.zeros(meta.size, dtype=meta.dtype)


class _Verb:
    """An endpoint of the workers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def broadcast(self, *args: Any) -> None:
        self._function(*args)


def _made(storage: Storage, meta: Metadata) -> Made:
    return Made(storage.number, meta.extent() * meta.dtype.itemsize, meta.device.type)


def _refuse_places(arguments: Any) -> None:
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, MeshArgument | GroupArgument):
            raise TypeError(
                "a simulated function that runs has no process, so it cannot use a mesh or a "
                "process group; give it a propagate= function, which then runs in its place"
            )


_INT64 = interned((), (), 0, torch.int64, torch.device("cpu"))
