"""`StreamThread`: executes the commands of one stream in order; `Table`: what streams share.

A command that fails, or that reads a value that is lost, leaves a `Lost` in the place of its
results and of what it writes, and the stream goes on. So one mistake costs what depends on it, no
more. That holds for whatever goes wrong while a command is carried out, in code of the program, of
torch or of this package: the thread of a stream does not end before the actor does. Other streams,
processes and actors that wait for a value of the command get the `Lost` in its place.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.core.recorded import Part, Varying
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
    UNWRITTEN,
    references,
    renumbered,
)
from monarch._tensors.core.template import DELETE, FIRST, Command
from monarch._tensors.errors import CallFailed
from monarch._tensors.worker.argument import GroupArgument, MeshArgument, here
from monarch._tensors.worker.kept import Kept
from monarch._tensors.worker.loans import Loans
from monarch._tensors.worker.report import reported
from monarch._tensors.worker.shares import Key, hand_over
from monarch._tensors.worker.template import Lost, Raised, Reference, Template
from monarch._tensors.worker.transfers import Transfers

if TYPE_CHECKING:
    from monarch.actor import Port

__all__ = [
    "Question",
    "Report",
    "StreamThread",
    "Table",
]

_Failure = tuple[int, str, "bytes | None", "int | None"]
Report = tuple[int, list[_Failure], Any]
"""What a worker says to a confirmation or a question.

The number of the last command before which all are done, or -1; number, text, pickled exception and
index in a recording of each failure that the client has not confirmed; the answer to the question.
"""


class Table:
    """Values and templates of one client on this process, which its streams share.

    Args:
        name: the name of the client's engine.
        rank: the rank of this process.
        sizes: the dimensions of the proc mesh.
        address: the address at which processes reach each other; empty: that of the host name.
    """

    def __init__(self, name: str, rank: int, sizes: dict[str, int], address: str) -> None:
        self.name = name
        self.rank = rank
        self.address = address or socket.gethostname()
        self.peers: dict[int, tuple[Any, dict[str, int], bool]] = {}
        self.keeper = 0
        self.transfers = Transfers(self)
        self.loans = Loans(_spi.settings.tensor_collective_timeout)
        self.collective_timeout = _spi.settings.tensor_collective_timeout
        self.sizes = sizes
        self.values: dict[int, Any] = {}
        self.templates: dict[int, Template] = {}
        self.recordings: dict[int, dict[int, Part]] = {}  # by number and stream
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()
        self._collective: Any = None

    def fail(self, seq: int, error: BaseException, index: int | None = None) -> Lost:
        """Note a failure, and return what stands for the lost values."""
        text, content = reported(error, _user_part)
        with self._lock:
            self._failures.append((seq, text, content, index))
        return Lost(seq)

    def confirm(self, seq: int) -> None:
        """Forget the failures up to `seq`, which the client knows."""
        if self._failures:
            with self._lock:
                self._failures = [failure for failure in self._failures if failure[0] > seq]

    def failures(self) -> list[_Failure]:
        """Return the failures that the client has not confirmed."""
        if not self._failures:
            return []
        with self._lock:
            return list(self._failures)

    def call_failed(self, lost: Lost) -> CallFailed:
        """Return why an actor does not get a value that is lost."""
        for seq, text, content, index in self.failures():
            if seq == lost.seq:
                return CallFailed(text, content, lost=(self.name, self.rank, seq, index))
        text = f"operation {lost.seq} failed before"
        return CallFailed(text, None, lost=(self.name, self.rank, lost.seq, None))

    def store(self) -> Any:
        """Return the rendezvous of all workers of the engine."""
        from monarch._tensors.worker.store import RendezvousStore

        return RendezvousStore(self.name, self.keeper, self.collective_timeout)

    def worker_of(self, peers: int, rank: int) -> Any:
        """Return the worker of `rank`, of this engine or of another one."""
        workers, sizes, _ = self.peers[peers]
        at = {}
        for name, size in reversed(sizes.items()):
            rank, at[name] = divmod(rank, size)
        return workers.slice(**at)

    @property
    def collective(self) -> Any:
        """The reductions over processes; loaded at the first use."""
        if self._collective is None:
            with self._lock:
                if self._collective is None:
                    from monarch._tensors.worker.collective import Collective

                    self._collective = Collective(self)
        return self._collective


def _user_part(trace: Any) -> Any:
    """Return a traceback without the frames of this package."""
    own = __file__.rpartition("/")[0]
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if not (name.startswith(own) or name == "<template>"):
            break
        trace = trace.tb_next
    return trace


class StreamThread:
    """One stream on this process: a queue and a thread.

    Args:
        table: the values and templates.
        number: the number of the stream.
        is_default: whether it is the default stream of the device.
    """

    def __init__(self, table: Table, number: int, is_default: bool) -> None:
        self.table = table
        self.number = number
        self._is_default = is_default
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._given = 0  # counted by the actor's thread
        self._finished = 0  # counted by the stream's
        self._defect: Exception | None = None  # why it can execute nothing
        self._special: dict[int, Callable[[int, Command, dict[int, Any]], None]] = {
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
            SHARE: self._share,
            COMBINE: self._combine,
            COMBINED: self._combined,
        }
        others = (SEND, LEND, RETURN, SHARE)  # a stream, a process or an actor waits for the value
        self._handing_over = {kind: self._special[kind] for kind in others}
        threading.Thread(target=self._serve, name="monarch-tensors-stream", daemon=True).start()

    def put(self, first: int, commands: list[Command]) -> None:
        """Execute `commands`, numbered from `first`, after what is queued."""
        self._given += 1
        self._queue.put((first, commands))

    @property
    def is_done(self) -> bool:
        """Whether the values are those of all commands, and other threads may read them.

        On a GPU only the default queue of the device is the same for all threads.
        """
        shares_queue = self._is_default or not torch.cuda.is_available()
        return self._given == self._finished and shares_queue

    def call(self, function: Callable[[], None]) -> None:
        """Call `function()` on the stream's thread after what is queued."""
        self._given += 1
        self._queue.put((None, function))

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        here.stream = self
        get = self._queue.get
        with contextlib.ExitStack() as scope:
            try:
                scope.enter_context(self._device())
            except Exception as error:  # of the device; each command fails with it
                self._defect = error
            while True:
                item = get()
                if item is None:
                    return
                first, work = item
                if first is None:
                    work()
                else:
                    self._execute(first, work)
                item = work = None
                self._finished += 1

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        if self._is_default or not torch.cuda.is_available():
            return contextlib.nullcontext()
        device: contextlib.AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream())
        return device

    def _execute(self, seq: int, commands: list[Command]) -> None:
        values = self.table.values
        templates = self.table.templates
        if self._defect is not None:
            for number, command in enumerate(commands, seq):
                self._lose(number, command, self._defect, values)
            return
        for command in commands:
            number = command[0]
            try:
                if number >= FIRST:
                    templates[number].run(values, command)
                else:
                    self._special[number](seq, command, values)
            except BaseException as error:  # the supervision boundary of one command
                self._lose(seq, command, error, values)
            seq += 1

    def _lose(
        self,
        seq: int,
        command: Command,
        error: BaseException,
        values: dict[int, Any],
        index: int | None = None,
    ) -> None:
        """Put what stands for lost values in the places of what `command` defines and writes."""
        table = self.table
        reads: Iterable[int] = ()
        defines: Iterable[int] = ()
        with contextlib.suppress(Exception):  # of a command that cannot be read: `error` says why
            if command[0] >= FIRST:
                template = table.templates[command[0]]
                reads, defines = template.reads(command), template.defines(command)
            else:
                reads, defines = references(command)
        lost = next((v for ref in reads if type(v := values.get(ref)) is Lost), None)
        if lost is None:
            lost = table.fail(seq, error, index)
        for ref in defines:
            values[ref] = lost
        hands_over = self._handing_over.get(command[0])
        if hands_over is not None:
            with contextlib.suppress(Exception):  # the other side waits until its deadline
                hands_over(seq, command, _All(lost))

    def _replay(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        _, number, refs, given, changed, fresh, operands = command
        part = self.table.recordings[number].get(self.number)
        if part is None:
            return  # other streams of this process have work in it
        local = {name: values[given[position]] for position, name in part.given}
        numbers = dict(zip(part.numbers, fresh, strict=True))
        templates = self.table.templates
        for index, recorded in part.commands:
            if index in part.varying:
                inner = Varying.filled(recorded, operands)
            else:
                inner = recorded if recorded[0] >= FIRST else renumbered(recorded, numbers)
            try:
                if inner[0] >= FIRST:
                    templates[inner[0]].run(local, inner)
                else:
                    self._special[inner[0]](seq, inner, local)
            except BaseException as error:  # the supervision boundary of one command
                self._lose(seq, inner, error, local, index)
        for position, name in part.results:
            values[refs[position]] = local[name]
        lost = next((v for _, name in part.given if type(v := local[name]) is Lost), None)
        if lost is not None:
            for ref in dict(changed).get(self.number, ()):
                values[ref] = lost

    # -- commands of the engine -------------------------------------------------------------------

    def _delete(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        for ref in command[1:]:
            values.pop(ref, None)

    def _constant(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        values[command[1]] = command[2].clone()

    def _coordinate(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        _, ref, ranks, dims = command
        rank = self.table.rank
        value = rank
        if dims is not None:
            coordinates = ranks.coordinates(rank)
            value = 0
            for dim in dims:
                value = value * ranks.sizes[dim] + coordinates[dim]
        values[ref] = torch.tensor(value)

    def _reduce(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.collective.reduce(self, seq, command, values)

    def _combine(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.collective.combine(self, seq, command, values)

    def _combined(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.collective.combined(command, values)

    def _send(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.transfers.send(command, values)

    def _receive(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.transfers.receive(command, values)

    def _probe(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        _, kept, call, refs, _ = command
        given = [values[ref] for ref in refs]
        if any(type(value) is Lost for value in given):
            raise RuntimeError("an argument is lost")
        versions = [value._version for value in given]
        try:
            function, args, kwargs = pickle.loads(call)
            values[kept] = Kept.of(function.resolve(), args, kwargs, given)
        except Exception as error:
            if [value._version for value in given] != versions:
                raise  # all arguments are lost
            values[kept] = self.table.fail(seq, error, UNWRITTEN)

    def _bind(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        kept: Any = values.pop(command[1])
        for pick, ref in zip(command[2], command[3:], strict=True):
            values[ref] = kept.leaves[pick] if type(kept) is Kept else kept

    def _lend(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.loans.lend(command[1], values[command[2]])

    def _borrow(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        values[command[1]] = self.table.loans.borrow(command[2])

    def _return(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        self.table.loans.give_back(command[1], values[command[2]])

    def _reclaim(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        _, number, is_used, ref, source, aliases = command
        last = self.table.loans.reclaim(number, is_used)
        if ref and type(last) is Lost:
            for lost in (source, *aliases):
                values[lost] = last

    def _share(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        _, key, ref, ranks = command
        if self.table.rank in ranks:
            self.share(key, values[ref])

    def share(self, key: Key, value: Any) -> None:
        """Hand a value to an actor that waits for it, or the reason why it is lost."""
        table = self.table
        if type(value) is Lost:
            hand_over(table.name, key, error=table.call_failed(value))
        else:
            hand_over(table.name, key, value.detach() if isinstance(value, torch.Tensor) else value)

    def _ignore(self, seq: int, command: Command, values: dict[int, Any]) -> None:
        """Do nothing: the command is for the client's history."""

    # -- questions --------------------------------------------------------------------------------

    def answer(self, question: Any) -> Any:
        """Return the answer to a question, on this thread, or a `Lost`."""
        kind, ranks, asked = question
        if self.table.rank not in ranks:
            return None
        if kind == "value":
            return self._local(asked)
        if kind == "fetch":
            return self._fetched(pickle.loads(asked))
        if kind == "call":
            return self._called(pickle.loads(asked))
        if kind == "probed":
            kept = self.table.values[asked]
            return kept if type(kept) is Lost else kept.pattern()
        raise ValueError(f"unknown question {kind!r}")

    def _local(self, ref: int) -> Any:
        """Return a value for the client, or a `Lost`."""
        value = self.table.values[ref]
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    def _fetched(self, structure: Any) -> Any:
        lost: list[Lost] = []

        def local(leaf: Any) -> Any:
            if type(leaf) is not Reference:
                return leaf
            value = self._local(leaf.number)
            if type(value) is Lost:
                lost.append(value)
            return value

        fetched = pytree.tree_map(local, structure)
        return lost[0] if lost else fetched

    def _called(self, call: Any) -> Any:
        function, args, kwargs = call
        given = self._fetched_arguments(args, kwargs)
        if type(given) is Lost:
            return given
        with torch.enable_grad():
            value = function.resolve()(*given[0], **given[1])
        return pytree.tree_map(
            lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _fetched_arguments(self, args: Any, kwargs: Any) -> Any:
        lost: list[Lost] = []

        def local(leaf: Any) -> Any:
            if isinstance(leaf, MeshArgument | GroupArgument):
                return leaf.resolve()
            if type(leaf) is not Reference:
                return leaf
            value = self.table.values[leaf.number]
            if type(value) is Lost:
                lost.append(value)
            return value

        given = pytree.tree_map(local, (args, kwargs))
        return lost[0] if lost else given


class _All(dict[int, Any]):
    """A table in which each value is the same."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, ref: int) -> Any:
        return self._value


class Question:
    """A question on its way through streams: answered when all of them have come so far.

    Args:
        table: the values.
        port: where the report goes.
        question: what the first stream answers; None to answer only that it came so far.
        done: the number of the last command that is done then; -1 if that is not known.
        streams: the streams.
    """

    def __init__(
        self, table: Table, port: Port[Any], question: Any, done: int, streams: list[StreamThread]
    ) -> None:
        self._table = table
        self._port = port
        self._question = question
        self._done = done
        self._streams = streams
        self._left = len(streams)
        self._lock = threading.Lock()
        self._value: Any = None

    def put(self) -> None:
        """Queue it behind what the streams have to do.

        A question about values that are there is answered at once: to wake the thread of an idle
        stream takes longer than the answer.
        """
        if not self._streams:
            self._finish()
        is_reading = self._question is None or self._question[0] in ("value", "fetch")
        for stream in self._streams:
            if is_reading and stream.is_done:
                self._arrive(stream)
            else:
                stream.call(functools.partial(self._arrive, stream))

    def _arrive(self, stream: StreamThread) -> None:
        if self._question is not None:
            try:
                self._value = stream.answer(self._question)
            except BaseException as error:  # the supervision boundary of one question
                self._value = _raised(error)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._finish()

    def _finish(self) -> None:
        try:
            self._port.send((self._done, self._table.failures(), self._value))
        except BaseException as error:  # the value cannot be pickled
            with contextlib.suppress(RuntimeError):  # the actor was stopped, which was the answer
                self._port.send((self._done, self._table.failures(), _raised(error)))


def _raised(error: BaseException) -> Any:
    """Return the value that stands for an exception in an answer."""
    return Raised(*reported(error, _user_part))
