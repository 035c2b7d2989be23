"""`Engine`: the client's side of the distributed tensors on one proc mesh.

It numbers references and commands, collects commands in batches, and sends each batch once to all
processes. A batch leaves when it is full, when something has to be answered (a fetch, a call of an
actor), or a millisecond after its first command: up to four on meshes of 8 and more processes,
whose batches are larger. One batch in each 4,096 commands is a call whose answers confirm what is
done; a client that is more than `_AHEAD` of these ahead waits, so it cannot fill the memory of
slower processes.

Any thread may issue operations. Each has the lock of the engine for the time in which a command
joins the batch, or the batch is sent; no code of the program runs then. So a function, a hook or a
backward may wait for a thread that issues operations, also in `compile` and `coalescing`, whose
operations are on a tape (`tape`). With the lock a thread waits for the processes only: when they
are to become the default group of torch.distributed, or meet for their first collective. A thread
that waits for slow processes to confirm has given the lock back.

An engine whose process is lost ends: each later operation raises the `SupervisionError` that calls
of actors raise. Before the processes are stopped, the engine waits for the outcome of all work, so
that errors which nothing has raised can be reported at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from monarch import _spi
from monarch._tensors.active import collecting, recording
from monarch._tensors.core.aliases import Aliases, Stack
from monarch._tensors.core.cache import Cache
from monarch._tensors.core.history import Failure, History, Run
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.recorded import Recorded
from monarch._tensors.core.special import ASK, SHARE
from monarch._tensors.core.template import DELETE, FIRST, Command, Plan
from monarch._tensors.errors import RemoteException, rebuilt
from monarch._tensors.place import Place
from monarch._tensors.tape import Tape, keeper_of, open_collections, tape_for, tape_of
from monarch._tensors.tensor import Live, Tensor, new_tensor
from monarch._tensors.where import frames_of
from monarch._tensors.worker.actor import Report, TensorWorker
from monarch._tensors.worker.shares import Key

if TYPE_CHECKING:
    from monarch._tensors.stream import Stream
    from monarch.actor import Future, ProcMesh

__all__ = ["Engine", "engine_of", "engines"]

R = TypeVar("R")

_BATCH = 256  # commands after which a batch is sent, times the scale of the engine
_DELAY = 0.001  # seconds after which it is sent in any case, times that
_SCALE = 4  # at most; a batch is sent to each process, so larger meshes have larger batches
_IDLE = 0.5  # seconds after which released tensors are deleted if no operation follows
_CONFIRM = 16  # batches between two confirmations, divided by the scale
_AHEAD = 4  # confirmations that may be outstanding
_TEMPLATES = 8192  # distinct operations that are kept, twice
_LATER = 32  # small tensors that the program has released and whose deletion is not yet issued

_NO_CALL = "NYI: calling actors with tensors in a coalescing block, or in a compiled function"


class Engine:
    """The commands and references of one client on one proc mesh.

    Args:
        procs: the proc mesh; a worker actor is spawned on each process.
    """

    is_simulated = False

    def __init__(self, procs: ProcMesh) -> None:
        if recording() is not None:
            raise NotImplementedError(
                f"a compiled function cannot be the first to use {procs}: activate it once before "
                "the function is called"
            )
        self.procs = procs
        self.name = ""
        self.workers: Any = None
        self._keeping: Future[int] | None = None
        self._keeper = 0
        self._unwatch: Callable[[], None] = _nothing
        self._withdraw: Callable[[], None] = _nothing
        self.ended: Exception | None = None  # why no operation is possible
        self._loss: _spi.Failure | None = None
        self._uids: list[int] = []  # the processes
        self.lock: Any = threading.RLock()  # the interface does not have `_is_owned`
        self._peers: dict[Engine, int] = {}
        self.live: dict[int, Live] = {}
        self._dead: list[Live] = []  # released, to be deleted with the next operation
        self.died: Callable[[Any], object] = self._dead.append
        self._dead_later: list[Live] = []  # small ones, which are deleted together
        self.died_later: Callable[[Any], object] = self._dead_later.append
        self.plans: dict[int, Plan] = {}
        self.cache: Cache[Plan] = Cache(_TEMPLATES, self.forget)
        self.history = History(self.plans)
        self.new_ref: Callable[[], int] = itertools.count(1).__next__
        """Return the next reference number."""
        self._numbers = itertools.count(FIRST)
        self._calls = itertools.count()
        self._seq = 0
        self._runs: list[Run] = []
        self._run: Run | None = None
        self._waiting = 0  # commands that are not sent
        self._defined: list[Any] = []  # templates and places that the workers do not know yet
        self._places: list[Place] = []
        self._joint: dict[tuple[int, ...], Place] = {}
        self._outstanding: deque[Future[Any]] = deque()
        self._batches = 0
        self._scale = min(_SCALE, max(1, len(procs) // 4))
        self._timed = False
        self._begun = threading.Event()
        self._pause = threading.Event()  # never set
        self._confirmed = -1
        self._unlearned: deque[tuple[int, int]] = deque()
        self.is_connected = False  # whether torch's default group is that of the workers
        self.owns_procs = False  # whether `exit` ends the processes
        self.meshes: dict[Any, Any] = {}
        self._start()
        if collecting() is not None:
            collecting().tape(self)
        _engines.add(self)
        _report_at_exit()

    def _start(self) -> None:
        """Spawn the workers, and start the thread that sends what is collected."""
        procs = self.procs
        self._uids = list(map(_spi.successor_of, procs._uids()))
        self.name = f"{_spi.own_uid():x}.{next(_counter)}"
        hosts = 1 if procs._hosts is None else len(procs._hosts)
        self.workers, self._unwatch = _spi.spawn_watched(
            procs,
            "tensors",
            TensorWorker,
            self.name,
            dict(procs.sizes),
            "127.0.0.1" if hosts == 1 else "",
            ended=self._lose,
            before_stop=self._before_stop,
        )
        first = self.workers.slice(**dict.fromkeys(procs.sizes, 0))
        self._keeping = first.keep.call_one()
        self._withdraw = _spi.before_calls(self.push)
        _spi.start_thread("monarch-tensors-flush", self._flush_late)

    def beneath(self) -> contextlib.AbstractContextManager[object]:
        """Return what is entered while a mesh of this engine is active, below its mode."""
        return contextlib.nullcontext()

    def covers(self, procs: ProcMesh) -> bool:
        """Whether all processes of `procs` have a worker of this engine."""
        own = self.procs._shape.ndslice
        return own.offset == 0 and own.is_contiguous and max(procs._shape.ndslice) < len(own)

    # -- references -------------------------------------------------------------------------------

    def place(self, mesh: Any, stream: Stream) -> Place:
        """Return the place of `mesh` and `stream`; the same object each time."""
        place: Place | None = mesh._places.get(stream)
        if place is None:
            with self.lock:
                place = mesh._places.get(stream)
                if place is not None:  # another thread was first
                    return place
                place = Place(self, mesh, stream, len(self._places))
                self._places.append(place)
                ranks = None if mesh.is_whole else tuple(mesh.processes)
                self._defined.append(("place", place.number, ranks, stream.number, stream.default))
                mesh._places[stream] = place
        return place

    def joint_place(self, numbers: Sequence[int]) -> Place:
        """Return the place of commands that several places get; they are given by their numbers."""
        known = tuple(dict.fromkeys(numbers))
        with self.lock:
            first = self._places[known[0]]
            if len(known) == 1:
                return first
            place = self._joint.get(known)
            if place is None:
                place = Place(self, first.mesh, first.stream, len(self._places))
                self._places.append(place)
                self._joint[known] = place
                self._defined.append(("joint", place.number, known))
            return place

    def tensor(self, meta: Metadata, place: Place, aliases: Aliases | None = None) -> Tensor:
        """Return a new tensor with a reference of its own."""
        return new_tensor(meta, place, self.new_ref(), aliases or Aliases())

    def peer(self, other: Engine) -> int:
        """Return the number by which the workers know those of `other`."""
        if other.is_simulated:
            raise ValueError("a tensor cannot be copied to simulated devices: they have no data")
        with self.lock:
            number = self._peers.get(other)
            if number is None:
                number = self._peers[other] = len(self._peers)
                sizes = dict(other.procs.sizes)
                self._defined.append(("peer", number, other.workers, sizes, other is self))
            return number

    def rendezvous(self) -> int:
        """Let the workers know where they meet, before their first collective; blocks.

        Returns the process that keeps the keys.
        """
        with self.lock:
            keeping, self._keeping = self._keeping, None
            if keeping is not None:
                self._keeper = keeping.get()
                self._defined.append(("keeper", self._keeper))
            return self._keeper

    def connect(self) -> None:
        """Make the workers' processes the default group of `torch.distributed`; blocks.

        Raises RuntimeError if one of them is in another one.
        """
        with self.lock:
            if self.is_connected:
                return
            if self.ended is not None:
                self._refuse()
            free = list(self.workers.is_free.call().get().values())
            if not all(free):
                taken = [rank for rank, is_free in enumerate(free) if not is_free]
                raise RuntimeError(
                    f"the processes {taken} of {self.procs} are in another default process group "
                    "of torch.distributed, which the program or another tensor engine has made. A "
                    "process can be in one only: activate a whole mesh before its parts, so that "
                    "they share an engine"
                )
            hosts = self.procs._hosts
            is_local = hosts is None or len(hosts) == 1
            self.workers.connect.call(self.rendezvous(), self._uids, is_local).get()
            self.is_connected = True

    def learn(self, plan: Plan, definition: Any) -> None:
        """Give a plan a number, and let the workers know its definition before its first use.

        Raises the errors of pickling the definition.
        """
        pickled = pickle.dumps(definition, protocol=5)
        with self.lock:
            plan.number = next(self._numbers)
            self.plans[plan.number] = plan
            self._defined.append(("template", plan.number, pickled))

    def keep(self, key: Hashable, plan: Plan) -> Plan:
        """Keep the plan of operations with `key`; return it, or that of a thread that was first."""
        with self.lock:
            known = self.cache.get(key)
            if known is None:
                self.cache.put(key, plan)
                return plan
            self.forget(plan)
            return known

    def forget(self, plan: Plan) -> None:
        """Let the workers forget a plan when all operations that use it are done."""
        collection = collecting()
        if collection is not None:
            collection.tape(self).forgotten.append(plan)
        elif not plan.recorded:
            self._unlearned.append((self._seq, plan.number))

    def drop(self, tensor: Tensor, where: Stack) -> None:
        """Delete the values of a tensor and of all its aliases."""
        with self.lock:
            aliases = tensor._aliases
            refs = tuple(aliases.refs)
            aliases.drop(where)
            for ref in refs:
                self.live.pop(ref, None)
            aliases.refs.clear()
            if refs:
                self.emit(tensor._place, (DELETE, *refs), where)

    def _bury(self) -> None:
        """Delete the values of the tensors that the program has released."""
        gone: dict[tuple[Place, Tape | None], list[int]] = {}
        for dead in (self._dead, self._dead_later):
            while dead:
                live = dead.pop()
                if self.live.pop(live.number, None) is None:
                    continue  # dropped before
                live.aliases.refs.discard(live.number)
                tape = keeper_of(self, live.number) if open_collections else None
                gone.setdefault((live.place, tape), []).append(live.number)
        for (place, tape), refs in gone.items():
            (self._append if tape is None else tape.append)(place, (DELETE, *refs), ())

    # -- commands ---------------------------------------------------------------------------------

    def emit(self, place: Place, command: Command, where: Stack) -> None:
        """Append a command for `place`, or keep it on a tape. It may wait for slow workers."""
        with self.lock:
            if self.ended is not None:
                self._refuse()
            if open_collections:
                self._bury()  # so that recordings of the same calls have the same deletions
                tape = tape_for(self, command)
                if tape is not None:
                    tape.append(place, command, where)
                    return
            elif self._dead or len(self._dead_later) > _LATER:
                self._bury()
            self._append(place, command, where)
            is_full = self._waiting >= _BATCH * self._scale
            if is_full:
                self._send(None)
            elif not self._timed:
                self._timed = True
                self._begun.set()
        if is_full:
            self.catch_up()

    def _append(self, place: Place, command: Command, where: Stack) -> None:
        run = self._run
        if run is None or run.place != place.number:
            run = self._run = Run(place.number, self._seq)
            self._runs.append(run)
        # In this order, and numbered by what is there: Ctrl-C may come between any two lines.
        run.stacks.append(where)
        run.commands.append(command)
        self._seq = run.first + len(run.commands)
        self._waiting += 1

    def _flush_late(self) -> None:
        """Send what was collected for a while; the body of a thread."""
        while self.ended is None:
            if self._begun.wait(_IDLE):
                self._begun.clear()
                self._pause.wait(_DELAY * self._scale)
                self._timed = False
            try:
                if all(map(_spi.settled, self._excess())):  # an error is for the next operation
                    self._send_all()
            except Exception as error:  # each later operation raises it
                self._end(error)
        self._withdraw()
        if self._loss is not None:
            self._unwatch()
            for receiver in list(self._peers):
                if receiver.ended is None:
                    receiver.workers.peer_lost.broadcast(self.name)
            self.workers.stop()  # those that are left give up the tensors' memory
        if not self.history.unraised():
            _engines.discard(self)

    def _excess(self) -> list[Future[Any]]:
        """Return the confirmations that have to come before more is sent."""
        return list(self._outstanding)[: max(0, len(self._outstanding) - _AHEAD)]

    def _lose(self, failure: _spi.Failure) -> None:
        """Take note that a process or its worker has ended; any thread, without the lock."""
        if self.ended is None:
            self._loss = failure
            self.ended = RuntimeError("a process of the mesh is lost")
            self._begun.set()

    def note(self, error: Exception) -> None:
        """Take note of a loss that a call raises, before the program learns of it."""
        failure = _spi.loss_of(error)
        if failure is not None:
            self._lose(failure)

    def has_ended(self) -> bool:
        """Whether no operation is possible, also if the loss of a process is not yet noted here.

        A failed fetch, or the end of a restart, may wake the program before `_lose` is called.
        """
        return self.ended is not None or any(map(_spi.is_gone, self._uids))

    def _end(self, error: Exception) -> None:
        """Note why no operation is possible; the loss of a process is noted by `_lose`."""
        if self.ended is None and not any(map(_spi.is_gone, self._uids)):
            self.ended = error

    def _refuse(self) -> NoReturn:
        """Raise why no operation is possible."""
        if self._loss is not None:
            _spi.raise_loss(self._loss)
        assert self.ended is not None
        raise self.ended.with_traceback(None)

    def _before_stop(self) -> None:
        """Wait for all work before the processes are stopped, as long as an actor may take."""
        self.finish(_spi.settings.stop_actor_timeout)

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all work and take note of its errors; later operations raise RuntimeError."""
        with self.lock:
            if self.ended is not None:
                return
            asked = self._send(None, confirm=True)
        if _spi.settled(asked, timeout):
            self.settle(asked.get())
        elif not asked.done():
            _log.warning(
                "the processes of %s are stopped while operations run on them, whose errors will "
                "not be known",
                self.procs,
            )
        if self.ended is None:
            self.ended = RuntimeError("the processes of this mesh have been stopped")

    def splice(self, tape: Tape) -> None:
        """Send what a tape has kept."""
        with self.lock:
            tape.is_open = False
            for command, where, place in tape:
                self._append(place, command, where)
            self._forget_all(tape)
        self.flush()

    def discard(self, tape: Tape, where: Stack) -> None:
        """Send nothing of what a tape has kept but deletions; the results are dropped."""
        with self.lock:
            tape.is_open = False
            for command, _, place in tape:
                if command[0] == DELETE:
                    self._append(place, command, ())
                else:
                    self._unmake(command, where)
            self._forget_all(tape)
        self.flush()

    def _forget_all(self, tape: Tape) -> None:
        for plan in tape.forgotten:
            self.forget(plan)

    def learn_recording(self, number: int, recorded: Recorded) -> None:
        """Let the workers know a recording before its first use."""
        for command in recorded.commands:
            if command[0] >= FIRST:
                self.plans[command[0]].recorded = True
        pickled = pickle.dumps(recorded, protocol=5)
        with self.lock:
            self._defined.append(("recording", number, pickled))

    def tensor_of(self, ref: int) -> Tensor:
        """Return the tensor with a reference number. Raises RuntimeError if it was released."""
        live = self.live.get(ref)
        tensor = None if live is None else live()
        if tensor is None:
            raise RuntimeError("a compiled function used a tensor that the program has released")
        return tensor

    def drop_recorded(self, tape: Tape, where: Stack) -> None:
        """Drop the tensors that were made while commands were recorded: they have no values."""
        with self.lock:
            tape.is_open = False
            self._forget_all(tape)
            for ref in (*tape.stand_ins, *tape.made):
                live = self.live.pop(ref, None)
                if live is not None:
                    live.aliases.refs.discard(ref)
                    tensor = live()
                    if tensor is not None:
                        tensor._aliases = Aliases()
                        tensor._aliases.drop(where)

    def _unmake(self, command: Command, where: Stack) -> None:
        """Drop the results of a command that is not sent."""
        for ref in self.history.references(command)[1]:
            live = self.live.get(ref)
            if live is not None and command[1:].count(ref):
                live.aliases.drop(where)

    def flush(self) -> None:
        """Send what is collected; it waits while too much is unconfirmed."""
        self._send_all()
        self.catch_up()

    def _send_all(self) -> None:
        with self.lock:
            if self._dead or self._dead_later:
                self._bury()
            if self._runs:
                self._send(None)

    def catch_up(self) -> None:
        """Wait while too much is unconfirmed; not with the lock, for which others may wait."""
        if self.lock._is_owned():
            return
        while excess := self._excess():
            asked = excess[0]
            try:
                reports = asked.get()
            except Exception:
                self._taken(asked)
                raise
            with self.lock:
                if self._taken(asked):
                    self.settle(reports)

    def _taken(self, asked: Future[Any]) -> bool:
        """Take the oldest confirmation out, unless another thread that waited for it has."""
        with self.lock:
            is_there = bool(self._outstanding) and self._outstanding[0] is asked
            if is_there:
                self._outstanding.popleft()
            return is_there

    def new_call(self) -> int:
        """Return a number for a call of actors with tensors.

        Raises NotImplementedError while this context collects operations without sending them.
        """
        if collecting() is not None:
            raise NotImplementedError(_NO_CALL)
        return next(self._calls)

    def share(self, tensor: Tensor, key: Key, ranks: tuple[int, ...], where: Stack) -> None:
        """Let actors on `ranks` have the local tensors; they ask for `key`.

        Raises NotImplementedError if an operation that is not sent yet makes the tensor.
        """
        with self.lock:
            if tape_of(self, (tensor._ref,)) is not None:
                raise NotImplementedError(_NO_CALL)
            tensor._aliases.forget()  # the actor may write to it
            self.emit(tensor._place, (SHARE, key, tensor._ref, ranks), where)

    def push(self) -> None:
        """Send what is collected, before a call of an actor.

        It waits neither for confirmations nor for another thread, which may be sending already.
        """
        if not self._runs or self.ended is not None:
            return
        if self.lock.acquire(blocking=False):
            try:
                if self._runs:
                    self._send(None)
            except Exception as error:  # the processes are lost: each later operation raises it
                self._end(error)
            finally:
                self.lock.release()

    def _batch(self, asked: Any = None) -> bytes:
        runs, self._runs, self._run = self._runs, [], None
        self._waiting = 0
        for run in runs:
            self.history.add(run)
        defined, self._defined = self._defined, []
        forgotten = []
        while self._unlearned and self._unlearned[0][0] <= self._confirmed:
            number = self._unlearned.popleft()[1]
            forgotten.append(number)
            self.plans.pop(number, None)
        wire = [(run.place, run.first, run.commands) for run in runs]
        if runs and runs[-1].commands[-1][0] == ASK:  # it is for the history only
            place, first, commands = wire.pop()
            if len(commands) > 1:
                wire.append((place, first, commands[:-1]))
        self._batches += 1
        return pickle.dumps((defined, forgotten, self._confirmed, wire, asked), protocol=5)

    def _send(
        self, question: Any, confirm: bool = False, function: Callable[[Any], Any] = list
    ) -> Any:
        """Send the batch, as a call if `question` or a confirmation is due.

        Return the future of ``function(reports)`` then; the reports are an iterator, by rank.
        """
        try:
            return self._sent(question, confirm, function)
        except Exception:
            raise
        except BaseException as error:  # of a handler of a signal, such as that of Ctrl-C
            self.ended = RuntimeError(
                f"sending operations was interrupted ({type(error).__name__}), so the processes "
                "may lack some of them; activate the mesh again, and make its tensors again"
            )
            raise

    def _sent(self, question: Any, confirm: bool, function: Callable[[Any], Any]) -> Any:
        if question is not None or confirm:
            return self._call((self._seq - 1, question), function)
        if (self._batches + 1) % (_CONFIRM // self._scale) == 0:
            self._outstanding.append(self._call((self._seq - 1, None), list))
        else:
            self.workers.run.broadcast(self._batch())
        return None

    def _call(self, asked: Any, function: Callable[[Any], Any]) -> Future[Any]:
        """Send the batch with a question; return the future of ``function(reports)``."""
        return _spi.call_each(self.workers.ask, (self._batch(asked),), function, self.note)

    def ask(
        self,
        place: Place,
        question: Any,
        refs: tuple[int, ...],
        ticket: int,
        where: Stack,
        function: Callable[[Iterator[Report]], R],
    ) -> Future[R]:
        """Send what is collected and a question about the values `refs`.

        Return the future of ``function(reports)``, of the reports of all workers, by rank. The
        reference `ticket`, a new one, stands for the question in the history.
        """
        with self.lock:
            if self.ended is not None:
                self._refuse()
            if collecting() is not None or tape_of(self, refs) is not None:
                raise NotImplementedError(
                    "NYI: fetching results during a coalescing block, or in a compiled function, "
                    "which have not sent their operations yet: fetch after it"
                )
            if self._dead or self._dead_later:
                self._bury()
            self._append(place, (ASK, ticket, refs), where)
            asked = place.number, place.stream.number, question
            answer: Future[R] = self._send(asked, function=function)
            return answer

    # -- confirmations ----------------------------------------------------------------------------

    def settle(self, reports: Sequence[Report]) -> None:
        """Take note of the reports of all workers: what is done, and what failed."""
        with self.lock:
            done = None
            for rank, (finished, failures, _) in enumerate(reports):
                for seq, text, pickled, index in failures:
                    if seq > self._confirmed or seq in self.history.failures:
                        self.history.fail(rank, seq, text, pickled, index)
                done = finished if done is None else min(done, finished)
            if done is not None and done > self._confirmed:
                self._confirmed = done
                self.history.confirm(done)

    def _await(self, asked: Future[Any]) -> None:
        """Wait for the reports of all workers, and take note of them."""
        self.settle(asked.get())

    def check(self, ref: int) -> None:
        """Raise `RemoteException` if the value of `ref` is known to be lost."""
        failure = self.history.failure_of(ref)
        if failure is not None:
            raise self.exception_of(failure)

    def exception_of(self, failure: Failure) -> RemoteException:
        """Return the exception of a failure, which counts as reported from now on."""
        failure.raised = True
        original = rebuilt(failure.pickled)
        ranks = sorted(failure.ranks)
        return RemoteException(failure.text, frames_of(failure.where), ranks[0], ranks, original)

    def fail(
        self, rank: int, seq: int, text: str, pickled: bytes | None, index: int | None
    ) -> RemoteException:
        """Note a failure that became known otherwise than by a report; return its exception."""
        with self.lock:
            self.history.fail(rank, seq, text, pickled, index)
            return self.exception_of(self.history.failures[seq])

    def sync(self) -> None:
        """Wait until all workers have done everything, and raise the first unreported error."""
        with self.lock:
            asked = None if self.ended is not None else self._send(None, confirm=True)
        if asked is not None:
            self._await(asked)
        unraised = self.history.unraised()
        if unraised:
            raise self.exception_of(unraised[0])

    def exit(self) -> None:
        """Wait for all work, end the workers, and raise the first error that no future has raised.

        Later operations raise RuntimeError. Raises SupervisionError if a process was lost.
        """
        if self._loss is not None:
            _spi.raise_loss(self._loss)
        if self.ended is not None:
            return
        try:
            self.sync()
        finally:
            self.ended = RuntimeError("the tensor engine of this mesh has ended by exit()")
            self._unwatch()
            self.workers.stop().get()
            _engines.discard(self)
            if self.owns_procs:
                self.procs.stop().get()


def _nothing() -> None:
    """Do nothing: no stop of processes is awaited."""


_counter = itertools.count()
_log = logging.getLogger("monarch.tensors")
_engines: set[Engine] = set()  # that may know of errors which nothing has raised
_of: dict[int, list[Engine]] = {}  # by the base of the uids of a `spawn_procs`
_lock = threading.Lock()


def engine_of(procs: ProcMesh) -> Engine:
    """Return the engine that has the processes of `procs`; it is made at their first use.

    A slice of a mesh that has an engine shares it. So the whole mesh is best used first.
    """
    with _lock:
        known = _of.setdefault(procs._base, [])
        known[:] = [engine for engine in known if not engine.has_ended()]
        for engine in known:
            if engine.covers(procs):
                return engine
        engine = Engine(procs)
        known.append(engine)
        return engine


def engines() -> list[Engine]:
    """Return the engines of this process that have not ended."""
    return [engine for engine in _engines if engine.ended is None]


@functools.cache
def _report_at_exit() -> None:
    """Have `_report` called at exit, before the client ends its processes."""
    atexit.register(_report)  # handlers run in reverse order, and the client has registered its own


def _report() -> None:
    """Report, at exit, the errors that no future has raised; then the exit status is 1."""
    for engine in list(_engines):
        engine.finish()
        for error in map(engine.exception_of, engine.history.unraised()):
            _spi.fail_at_exit()
            sys.stderr.write(f"A distributed operation failed, and no call raised it:\n{error}\n")
