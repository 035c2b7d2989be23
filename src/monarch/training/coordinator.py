"""The coordinator: carries out the decisions of `membership` in the process of the script.

Ranks send requests to a service of this process, which answers on its reactor thread. No actor and
no thread takes part, so there are no locks: requests, losses of processes and timers are events of
one loop. A request that has to wait is answered later. The loss of a process is an event of the
cluster's membership, so the coordinator needs no heartbeats of its own.

Payloads are pickled tuples and handles of memory. Their senders are processes of this cluster,
which have proved that they know its secret, as all that send messages here.

The coordinator is a star: a step takes three or four requests of each rank, a fraction of a
millisecond each. That suits hundreds of ranks. Gradients and states never pass through it.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch import _spi
from monarch.training.membership import (
    EARLIER,
    Aborted,
    Begin,
    Closed,
    Effect,
    Expelled,
    Failed,
    Membership,
    Released,
    State,
)

__all__ = ["Authority", "Coordinator", "Event"]

_log = logging.getLogger("monarch.training")
_numbers = itertools.count()
_EVENTS = 1_000_000

Ticket = tuple[int, int]
"""The process of a rank, and a number of the manager in it."""

Key = tuple[int, int, int]
"""A state in the memory of a rank: rank, position, mark."""


class Coordinator(NamedTuple):
    """Where managers find the training that they belong to. Pass it to their actors.

    Attributes:
        uid: the process of the script.
        service: the name of its service.
        groups: the number of replica groups.
        width: the number of ranks in each.
        timeout: the longest wait for another rank, in seconds.
        copy_every: steps between two snapshots in memory, or 0.
        folder: of checkpoints on disk, or "".
        run: a name for this training, in the names of its checkpoints.
    """

    uid: int
    service: str
    groups: int
    width: int
    timeout: float
    copy_every: int
    folder: str
    run: str


Coordinator.__module__ = "monarch.training"


class Event(NamedTuple):
    """One thing that happened to a training.

    Attributes:
        seconds: the time since the training was made.
        kind: "begin" (a round began), "commit", "abort", "lost" (a rank), "saved" (on disk),
            "closed" or "failed".
        version: the number of committed steps at that time.
        groups: the replica groups that took part in the round, if it is about one.
        report: the mean of what the shares reported, for "commit".
        rolled_back: the number of committed steps that were lost, for "begin".
        detail: the reason, or which rank.
    """

    seconds: float
    kind: str
    version: int
    groups: tuple[int, ...] = ()
    report: float | None = None
    rolled_back: int = 0
    detail: str = ""


Event.__module__ = "monarch.training"


class Authority:
    """The service of one training. All methods but `__init__` run on the reactor thread.

    Args:
        core: decides.
        timeout: seconds, see `Coordinator`.
        folder: of checkpoints.
        found: a directory in it with a complete checkpoint, to start from, or "".
    """

    def __init__(self, core: Membership, *, timeout: float, folder: str, found: str) -> None:
        self._core = core
        self._timeout = timeout
        self._start = _spi.environment.current.now()
        self._asking: dict[int, _spi.Request] = {}
        self._arriving: dict[int, _spi.Request] = {}
        self._handles: dict[int, tuple[Ticket, int, bytes]] = {}  # rank -> its newest memory
        self._sent: dict[tuple[int, Ticket], dict[int, tuple[Ticket, int]]] = {}
        self._offers: dict[Key, bytes] = {}
        self._fetching: dict[Key, list[_spi.Request]] = {}
        self._watched: set[Ticket] = set()
        self._timer: _spi.TimeLimit | None = None
        self._waits: Any = None
        self._round: Begin | None = None
        self._report: float | None = None
        self._written: dict[int, set[int]] = {}  # mark -> positions that are on disk
        self._paths: dict[int, str] = {EARLIER: found}
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        service = f"training-{next(_numbers)}"
        _spi.serve(service, self._handle)
        self.handle = Coordinator(
            uid=_spi.own_uid(),
            service=service,
            groups=core.groups,
            width=core.width,
            timeout=timeout,
            copy_every=core.copy_every,
            folder=folder,
            run=secrets.token_hex(4),
        )

    def note(self, kind: str, **more: Any) -> None:
        """Record an event of this kind, at the present step and time."""
        seconds = _spi.environment.current.now() - self._start
        self.events.append(Event(seconds, kind, self._core.committed, **more))

    # -- requests --------------------------------------------------------------------------------

    def _handle(self, request: _spi.Request) -> None:
        operation, *arguments = pickle.loads(request.body)
        handlers: dict[str, Callable[..., None]] = {
            "ask": self._ask,
            "arrive": self._arrive,
            "leave": self._leave,
            "offer": self._offer,
            "fetch": self._fetch,
            "saved": self._saved,
            "copied": self._copied,
        }
        try:
            handlers[operation](request, *arguments)
        except (PermissionError, ValueError) as error:  # fenced, or no rank of this training
            request.refuse(str(error))

    def _ask(
        self,
        request: _spi.Request,
        rank: int,
        number: int,
        mark: int | None,
        host: str,
        done: bool,
        stock: tuple[tuple[int, int], ...],
        direct: bool,
    ) -> None:
        ticket = (request.peer, number)
        effects = self._core.ask(
            rank, ticket, mark, host=host, done=done, stock=stock, direct=direct
        )
        if ticket not in self._watched:
            self._watched.add(ticket)
            _spi.when_gone(request.peer, lambda reason: self._gone(rank, ticket, reason))
        self._asking[rank] = request
        self.perform(effects)

    def _arrive(
        self,
        request: _spi.Request,
        rank: int,
        number: int,
        at: int,
        phase: int,
        vote: bool | None,
        why: str,
        report: float | None,
        memory: tuple[int, bytes] | None,
    ) -> None:
        ticket = (request.peer, number)
        effects = self._core.arrive(rank, ticket, at, phase, vote, why)
        if memory is not None:
            self._handles[rank] = (ticket, *memory)
        if report is not None:
            self._report = report
        self._arriving[rank] = request
        self.perform(effects)

    def _leave(self, request: _spi.Request, rank: int, number: int, why: str, failed: bool) -> None:
        ticket = (request.peer, number)
        current = self._core.known(rank) == ticket
        self.perform(self._core.leave(rank, ticket, why))
        if failed and current:  # an error of the program: other ranks would have it as well
            self.stop(why)

    def stop(self, why: str) -> None:
        """End the training of all ranks, with an error."""
        self.perform(self._core.stop(why))

    def _gone(self, rank: int, ticket: Ticket, reason: str) -> None:
        self._watched.discard(ticket)
        self._sent.pop((rank, ticket), None)
        if self._core.known(rank) == ticket:
            self.note("lost", detail=f"rank {rank}: {reason}")
            self._refuse_fetches(rank, f"rank {rank} has exited: {reason}")
        self.perform(self._core.lost(rank, ticket, f"rank {rank} has exited: {reason}"))

    def _refuse_fetches(self, rank: int, why: str) -> None:
        """Answer those that wait for a state of a rank that was lost."""
        for key in [key for key in self._fetching if key[0] == rank]:
            for request in self._fetching.pop(key):
                request.refuse(why)

    def _offer(self, request: _spi.Request, rank: int, number: int, key: Key, body: bytes) -> None:
        if self._core.known(rank) == (request.peer, number):
            self._offers[key] = body
            for waiting in self._fetching.pop(key, ()):
                waiting.answer(body)

    def _fetch(self, request: _spi.Request, key: Key) -> None:
        if key in self._offers:
            request.answer(self._offers[key])
        elif self._core.known(key[0]) is None:
            request.refuse(f"rank {key[0]} has exited")
        else:
            self._fetching.setdefault(key, []).append(request)

    def _saved(self, request: _spi.Request, mark: int, position: int, path: str) -> None:
        positions = self._written.setdefault(mark, set())
        positions.add(position)
        if len(positions) == self._core.width:
            self._core.saved(mark)
            self._paths[mark] = path
            self.note("saved", detail=path)

    def _copied(
        self, request: _spi.Request, rank: int, number: int, at: int, state: State, why: str
    ) -> None:
        self.perform(self._core.copied(rank, (request.peer, number), at, state, why))

    # -- effects ---------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """Carry out what the core has decided."""
        for effect in effects:
            if isinstance(effect, Begin):
                self._begin(effect)
            elif isinstance(effect, Released):
                self._release(effect)
            elif isinstance(effect, Aborted):
                self._abort(effect)
            elif isinstance(effect, Closed):
                self.note("closed")
                self._answer_asking(effect.ranks, ("closed",))
            elif isinstance(effect, Failed):
                self.note("failed", detail=effect.reason)
                self._answer_asking(effect.ranks, ("failed", effect.reason))
            else:
                self._expel(effect)
        self._watch()

    def _begin(self, begin: Begin) -> None:
        self._round, self._report = begin, None
        self._offers.clear()
        for requests in self._fetching.values():
            for request in requests:
                request.refuse("the round is over")
        self._fetching.clear()
        # Positions of one checkpoint may be written in different rounds.
        self._written = {
            mark: at for mark, at in self._written.items() if self._core.may_save(mark)
        }
        self.note("begin", groups=begin.groups, rolled_back=begin.rolled_back)
        common = begin._replace(roles={})
        for rank, role in begin.roles.items():
            path = self._paths.get(role.source.mark, "") if role.source is not None else ""
            answer = ("begin", common, role, path)
            self._asking.pop(rank).answer(pickle.dumps(answer))

    def _answer_asking(self, ranks: tuple[int, ...], answer: tuple[Any, ...]) -> None:
        for rank in ranks:
            self._asking.pop(rank).answer(pickle.dumps(answer))

    def _release(self, effect: Released) -> None:
        if effect.committed:
            assert self._round is not None
            self.note("commit", groups=self._round.groups, report=self._report)
        for rank in effect.ranks:
            news = self._news_for(rank, effect.ranks) if effect.phase == 0 else {}
            answer = ("go", effect.committed, news)
            self._arriving.pop(rank).answer(pickle.dumps(answer))

    def _news_for(self, rank: int, ranks: tuple[int, ...]) -> dict[int, bytes]:
        """Return the handles of peers' memory that `rank` does not have yet."""
        ticket = self._core.known(rank)
        assert isinstance(ticket, tuple)
        sent = self._sent.setdefault((rank, ticket), {})
        width = self._core.width
        news: dict[int, bytes] = {}
        for other in ranks:
            if other != rank and other % width == rank % width and other in self._handles:
                owner, number, body = self._handles[other]
                if sent.get(other) != (owner, number):
                    sent[other] = (owner, number)
                    news[other] = body
        return news

    def _abort(self, effect: Aborted) -> None:
        if self._round is not None and self._round.round == effect.round:
            self.note("abort", groups=self._round.groups, detail=effect.reason)
            self._round = None
        for rank in effect.ranks:
            self._arriving.pop(rank).answer(pickle.dumps(("void", effect.reason)))

    def _expel(self, effect: Expelled) -> None:
        _log.warning("%s", effect.reason)
        self.note("lost", detail=effect.reason)
        self._refuse_fetches(effect.rank, effect.reason)
        uid = effect.ticket[0] if isinstance(effect.ticket, tuple) else 0
        if uid != _spi.own_uid():
            _spi.client_proc().kill_procs([uid])

    def _watch(self) -> None:
        """Bound the wait of ranks for others."""
        waits = self._core.waits
        if waits == self._waits:
            return
        self._waits = waits
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waits is not None:
            self._timer = _spi.call_within(self._timeout, self._expire)

    def _expire(self) -> None:
        self._waits = self._timer = None
        self.perform(self._core.expire())
