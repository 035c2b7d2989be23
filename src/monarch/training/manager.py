"""`Manager`: the side of a rank. It agrees with the other replicas on every step.

All methods block, and must be called on one thread, in a synchronous endpoint. Every wait ends: by
an answer of the coordinator, which bounds waits for other ranks, or with the script's process.
"""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from monarch import _spi
from monarch.actor import current_rank
from monarch.rdma import RdmaError
from monarch.training import disk
from monarch.training.coordinator import Coordinator
from monarch.training.errors import TrainingError
from monarch.training.exchange import Exchange
from monarch.training.membership import DISK, VOTE, Begin, Role, Source, State, members_at
from monarch.training.snapshots import Snapshots
from monarch.training.state import Lent, Packed, lend, pack, read, unpack

__all__ = ["Manager", "Share"]

_log = logging.getLogger("monarch.training")
_numbers = itertools.count()


class Share:
    """A part of the batch of one step.

    Attributes:
        step: the step, from 0.
        number: which part.
        count: the number of parts.
    """

    __slots__ = ("_reported", "count", "number", "step")

    def __init__(self, step: int, number: int, count: int) -> None:
        self.step = step
        self.number = number
        self.count = count
        self._reported = 0.0

    def report(self, value: float) -> None:
        """Report a number, such as the loss. `Manager.reported` is the mean over all shares."""
        self._reported = float(value)

    def of(self, batch: Any) -> Any:
        """Return this share of a batch: every `count`-th element, from `number` on.

        >>> Share(0, 1, 3).of([10, 11, 12, 13, 14])
        [11, 14]
        """
        return batch[self.number :: self.count]

    def __repr__(self) -> str:
        return f"Share(step={self.step}, number={self.number}, count={self.count})"


Share.__module__ = "monarch.training"


class Manager:
    """Keeps this rank's module and optimizer equal to those of the other replicas.

    Make it in the constructor of an actor that `Replicas.spawn` spawns. Then each step of the
    training is:

        while manager.quorum(until=1000):
            for share in manager.shares():
                loss = loss_of(module, batch(share))
                loss.backward()
                share.report(loss)
            if manager.should_commit():
                optimizer.step()

    Args:
        coordinator: `Replicas.coordinator`.
        module: its parameters must be on one device.
        optimizer: of this module. Its `step` raises RuntimeError unless `should_commit` has just
            returned True.
        state: more objects with `state_dict` and `load_state_dict` that belong to the state, such
            as a scheduler of the learning rate, by name. They must be equal on all replicas.

    Raises TypeError for a module with buffers that cannot be averaged.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._module = module
        self._optimizer = optimizer
        self._state = dict(state or {})
        if not {"model", "optimizer"}.isdisjoint(self._state):
            raise ValueError("the names 'model' and 'optimizer' in `state` are taken")
        self.rank: int = current_rank().rank
        self._position = self.rank % coordinator.width
        self._number = next(_numbers)
        self._exchange = Exchange(module)
        self._snapshots = Snapshots()
        self._writer = disk.Writer()
        self._lent: list[Lent] = []  # of this rank's live state
        self._mark: int | None = None
        self._version = 0
        self._begin: Begin | None = None  # the round that is under way
        self._role: Role | None = None
        self._why = ""  # why this rank's part of the round has failed
        self._void = False  # the round was aborted
        self._averaged = False
        self._owed = False  # the optimizer has to make the step that was committed
        self._watching = False
        self.reported: float | None = None
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        _spi.at_actor_end(self._end)

    @property
    def step(self) -> int:
        """The number of committed steps in the state of this rank."""
        return self._version

    @property
    def group(self) -> int:
        """The replica group of this rank."""
        return self.rank // self._coordinator.width

    @property
    def participants(self) -> tuple[int, ...]:
        """The replica groups that take part in the present round."""
        return self._begin.groups if self._begin is not None else ()

    # -- one step --------------------------------------------------------------------------------

    def quorum(self, until: int | None = None) -> bool:
        """Wait for the next round of which this rank is a member; get the state if it has none.

        Return False when `until` steps are committed, and all replicas have them. Each call begins
        a round, and gives up a round that is under way.

        Raises `TrainingError` if training cannot go on, RuntimeError if the optimizer did not make
        the step that was committed.
        """
        self._watch_call()
        if self._owed:
            self._owed, self._mark = False, None
            raise RuntimeError(
                "should_commit() returned True, but optimizer.step() was not called: this replica "
                "would differ from the others"
            )
        if self._begin is not None:
            self._exchange.restore()
        self._begin = self._role = None
        while True:
            self._take_snapshot(self._mark)
            done = until is not None and self._mark is not None and self._version >= until
            stock, direct = self._snapshots.stock, self._exchange.direct
            answer = self._ask("ask", self._mark, _host(), done, stock, direct)
            if answer[0] == "closed":
                return False
            if answer[0] == "failed":
                raise TrainingError(answer[1])
            _, begin, role, path = answer
            if not self._enter(begin, role, path):
                continue
            if until is not None and self._version >= until:
                self._arrive(VOTE, None)
                continue
            self._begin, self._role = begin, role
            self._why, self._void, self._averaged = "", False, False
            self._exchange.begin(role.shares)
            return True

    def shares(self) -> Iterator[Share]:
        """Yield the shares of the batch that this rank computes, usually one.

        Clears the gradients before each, and stores them after it, so the loop must not be left
        early: `should_commit` raises RuntimeError then. A replica that has just got its state has
        no share in that step.
        """
        begin, role = self._current()
        for number in role.shares:
            share = Share(begin.version, number, len(begin.owners))
            self._exchange.clear()
            yield share
            self._exchange.keep(number, share._reported)

    def average(self) -> None:
        """Replace the gradients by their mean over all shares of this step.

        `should_commit` does so, too. Call it before to clip the gradients, for example. If a
        replica is lost meanwhile, the gradients are left alone, and `should_commit` returns False.
        """
        begin, _ = self._current()
        if self._averaged:
            return
        if missing := sorted(self._exchange.missing):
            raise RuntimeError(
                f"shares {missing} of this step have no gradients on rank {self.rank}: take all "
                "that shares() yields before average() or should_commit()"
            )
        self._averaged = True
        width, timeout = self._coordinator.width, self._coordinator.timeout
        ranks = [rank for rank, _ in self._members()]
        peers = members_at(ranks, width, self._position)
        owners = [group * width + self._position for group in begin.owners]
        if not self._arrive(0, True):
            return
        try:
            self._exchange.gather(self.rank, peers, owners, begin.direct, timeout)
            if not begin.direct:
                if not self._arrive(1, True):
                    return
                self._exchange.collect(self.rank, peers, timeout)
        except RdmaError as error:
            self._why = f"cannot read the gradients of a peer: {error}"
            return
        self.reported = self._exchange.take_gradients()

    def should_commit(self) -> bool:
        """Return whether all replicas of this round apply the step: all do, or none.

        After True call `optimizer.step()`, once. After False go on with `quorum`: the step is tried
        again, by the replicas that are left.
        """
        self._current()
        self.average()
        committed = False
        if not self._void:
            committed = self._arrive(VOTE, not self._why, self._why)
        begin = self._begin
        assert begin is not None
        self._begin = self._role = None
        if not committed:
            self._exchange.restore()
            return False
        self._exchange.take_buffers()
        self._version = begin.version + 1
        self._mark = begin.round
        self._owed = True
        return True

    # -- inside ----------------------------------------------------------------------------------

    def _current(self) -> tuple[Begin, Role]:
        if self._begin is None or self._role is None:
            raise RuntimeError("call quorum() first: no round is under way")
        return self._begin, self._role

    def _members(self) -> list[tuple[int, int]]:
        begin, _ = self._current()
        width = self._coordinator.width
        return [
            (rank, group)
            for group in begin.groups
            for rank in range(group * width, (group + 1) * width)
        ]

    def _ask(self, operation: str, *arguments: Any) -> Any:
        body = pickle.dumps((operation, self.rank, self._number, *arguments))
        try:
            answer = _spi.ask(self._coordinator.uid, self._coordinator.service, body).get()
        except _spi.Refused as error:
            self._mark = None
            raise TrainingError(str(error)) from None
        except _spi.Unreachable as error:
            raise TrainingError(f"the script of the training has exited: {error}") from None
        return pickle.loads(answer)

    def _tell(self, operation: str, *arguments: Any) -> None:
        body = pickle.dumps((operation, *arguments))
        _spi.tell(self._coordinator.uid, self._coordinator.service, body)

    def _arrive(self, phase: int, vote: bool | None, why: str = "") -> bool:
        """Wait at a barrier. Return whether all have arrived; for a vote, whether all agree."""
        begin = self._begin
        number = begin.round if begin is not None else self._entered
        memory = self._exchange.memory() if phase == 0 and vote else None
        report = self.reported if phase == VOTE and vote else None
        answer = self._ask("arrive", number, phase, vote, why, report, memory)
        if answer[0] == "void":
            self._void = True
            return False
        _, committed, handles = answer
        self._exchange.learn(handles)
        return bool(committed) if phase == VOTE else True

    def _enter(self, begin: Begin, role: Role, path: str) -> bool:
        """Prepare for a round; return whether this rank can take part."""
        self._entered = begin.round
        self._unlend()
        self._snapshots.keep(begin.keep)
        if not begin.version and role.member and role.source is None:
            self._take_snapshot(begin.mark)
        for position, mark in role.serve:
            state = (position, mark)
            if state in self._snapshots:
                manifest = self._snapshots.manifest(state)
            else:
                lent = lend(self._pack())
                self._lent.append(lent)
                manifest = lent.manifest
            key = (self.rank, position, mark)
            self._tell("offer", self.rank, self._number, key, manifest)
        if role.source is not None:
            try:
                self._load(role.source, path)
            except (RdmaError, _spi.Refused, _spi.Unreachable, OSError) as error:
                self._mark = None
                self._arrive(0, False, f"cannot get the state from {_name(role.source)}: {error}")
                return False
        if role.member:
            self._mark, self._version = begin.mark, begin.version
        copied = functools.partial(self._copied, begin.round)
        self._snapshots.pull(role.pull, self._fetch, self._coordinator.timeout, copied)
        if begin.write == self.group and role.member:
            self._write(begin)
        return role.member

    def _load(self, source: Source, path: str) -> None:
        state = (source.position, source.mark)
        if source.rank == DISK:
            packed = disk.load(path, source.position)
        elif source.rank == self.rank:
            packed = self._snapshots.get(state).clone()  # the optimizer would go on to change it
        else:
            packed = read(self._fetch(source), self._coordinator.timeout)
        self._mark = None  # until it is complete
        loaded = unpack(packed)
        self._module.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        for name, each in self._state.items():
            each.load_state_dict(loaded[name])

    def _fetch(self, source: Source) -> bytes:
        body = pickle.dumps(("fetch", (source.rank, source.position, source.mark)))
        place = self._coordinator
        return _spi.ask(place.uid, place.service, body, place.timeout).get()

    def _copied(self, number: int, state: State, why: str) -> None:
        self._tell("copied", self.rank, self._number, number, state, why)

    def _pack(self) -> Packed:
        """Take this rank's state apart; copy what a forward pass may change."""
        state = {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
        state |= {name: each.state_dict() for name, each in self._state.items()}
        packed = pack(state)
        constant = {each.data_ptr() for each in self._module.parameters()}
        constant |= {
            each.data_ptr()
            for values in self._optimizer.state.values()
            for each in values.values()
            if isinstance(each, torch.Tensor)
        }
        tensors = [each if each.data_ptr() in constant else each.clone() for each in packed.tensors]
        return Packed(packed.rest, tensors)

    def _take_snapshot(self, mark: int | None) -> None:
        """Keep a copy of the present state, if one is due."""
        every = self._coordinator.copy_every
        if not every or mark is None or self._version % every:
            return
        state = (self._position, mark)
        if state not in self._snapshots:
            self._snapshots.add(state, self._pack().clone())

    def _write(self, begin: Begin) -> None:
        place = self._coordinator
        path = disk.place(place.folder, begin.version, begin.mark, place.run, place.width)

        def done() -> None:
            self._tell("saved", begin.mark, self._position, path)

        self._writer.write(path, self._position, self._pack().clone(), done)

    def _unlend(self) -> None:
        for lent in self._lent:
            lent.drop()
        self._lent.clear()

    def _before_step(self, *_: Any) -> None:
        if not self._owed:
            raise RuntimeError(
                "optimizer.step() without should_commit(): this replica would differ from the "
                "others"
            )

    def _after_step(self, *_: Any) -> None:
        self._owed = False

    def _watch_call(self) -> None:
        """Leave when the present call ends, so that the others do not wait for this rank."""
        if self._watching:
            return
        if not _spi.at_call_end(self._call_ended):
            raise RuntimeError("quorum() must be called in an endpoint of an actor")
        self._watching = True

    def _call_ended(self, error: BaseException | None) -> None:
        self._watching = False
        if self._owed:  # the step may be half done
            self._owed, self._mark = False, None
        if self._begin is not None:
            self._exchange.restore()
        self._begin = self._role = None
        why = f"rank {self.rank} has returned" if error is None else f"rank {self.rank}: {error!r}"
        failed = error is not None and not isinstance(error, TrainingError)
        self._tell("leave", self.rank, self._number, why, failed)

    def _end(self) -> None:
        why = f"the actor of rank {self.rank} has ended"
        self._tell("leave", self.rank, self._number, why, False)
        self._unlend()
        self._snapshots.close()
        self._exchange.close()


Manager.__module__ = "monarch.training"


def _host() -> str:
    """Return the host of this process, by a name that no other host of the job has."""
    host: str = _spi.client_proc().spec.get("host", _spi.HOME)
    return host


def _name(source: Source) -> str:
    return "disk" if source.rank == DISK else f"rank {source.rank}"
