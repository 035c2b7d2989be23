"""The cell: one actor as the runtime sees it. Mailbox, thread, state, end.

A cell is created by a SPAWN frame on the reactor and starts a thread of its own: the actor's
constructor, endpoints and hooks run there and nowhere else. A *behaviour*, made by the mesh layer
from the SPAWN body on that thread, knows the user's class; the cell knows messages.

Life: ``STARTING`` (constructing) -> ``RUNNING`` -> ``DEAD``. A cell dies of a failure, or of a
stop. Whatever the way, two things happen once each, in this order: `settle` digs a grave, answers
every message that waits with it, and lets it answer later ones; then, after the meshes the actor
owns were stopped and the user's `__cleanup__` ran, `finish` acknowledges stops and tells the owner.
Nobody who called the actor waits for an answer that cannot come: a message is answered by the
handler, by `settle`, or by the link's loss.

Mailboxes are bounded in messages and bytes (see `flow_control`).

A stop is a message like any other: what was sent before it is handled first. An actor that does
not come to it within `stop_actor_timeout` (stuck in an endpoint) is given up: its thread is left
behind, its callers are answered.
"""

from __future__ import annotations

import _queue
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import format_all, format_remote, headline, is_ours
from monarch._engine.base.failure import Failure
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED, INTERNAL, STOPPED, SYSTEM, USER, Verdict
from monarch._engine.runtime.actor.flow_control import Gauge
from monarch._engine.runtime.io import environment as drivers
from monarch._engine.runtime.io.fault_file import note_error
from monarch._engine.wire.frame import CALL, HURRY, Frame

if TYPE_CHECKING:
    import asyncio

    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Behaviour", "Cell", "Handler", "Identity"]

STARTING = "starting"
RUNNING = "running"
DROPPING = "dropping"  # running, and some messages that wait were recalled
DEAD = "dead"

_GRAVES = 10_000  # the ends of actors remembered beyond the configured number


class Handler:
    """One endpoint, ready to call."""

    __slots__ = ("concurrent", "explicit", "function", "instrument", "is_async", "name")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        explicit: bool = False,
        concurrent: bool = False,
        is_async: bool = False,
        instrument: bool = False,
    ) -> None:
        self.name = name
        self.function = function
        self.explicit = explicit
        self.concurrent = concurrent
        self.is_async = is_async
        self.instrument = instrument  # whether calls are spans, see `spans`


class Behaviour(Protocol):
    """What the mesh layer supplies: the user's object, seen through its endpoints."""

    handlers: dict[str, Handler]
    routes: dict[bytes, tuple[Handler, Any]]
    """The endpoint and extent by the meta of a CALL; a cache, filled by the loop that reads it."""
    has_children: bool

    def extent_of(self, data: bytes) -> Any:
        """The extent that `enter` takes."""

    def enter(self, rank: int, extent: Any, /) -> None:
        """Make the message's rank in `extent` the current one."""

    def plain_handler(self, name: str) -> Handler | None:
        """A method that is no endpoint, for callers that wrapped it in one."""

    def explicit_port(self, link: Any, frame: Frame, endpoint: str) -> Any:
        """The port object handed to an endpoint that answers by itself."""

    def call_ended(self, error: BaseException | None) -> None:
        """Run what was registered in `Cell.watchers` for the call that ended."""

    def stop_children(self) -> Any:
        """Stop the meshes this actor owns and wait for it (within the configured time).

        Of async actors, an awaitable that does.
        """

    def unheard(self) -> Any:
        """Handle the failures of children that came while the actor stopped.

        The actor's own end by one that was not handled, or None; of async actors, an awaitable.
        """

    def cleanup(self, error: Exception | None) -> Any:
        """Call `__cleanup__`; None or an awaitable."""

    def cleanup_failed(self, error: BaseException) -> None:
        """`__cleanup__` raised: say so; the stop goes on."""


class Identity:
    """Who an actor is; `build(cell)` makes its behaviour on the actor's own thread."""

    __slots__ = ("build", "display", "label", "name")

    def __init__(
        self, name: str, label: str, display: str, build: Callable[[Cell], Behaviour]
    ) -> None:
        self.name = name  # as given to spawn
        self.label = label  # label-uid, as failures call the mesh
        self.display = display  # <root>.<module.Class name{rank}>
        self.build = build


class Cell:
    """See the module. `proc` is the process it lives in, `uid` its mesh, `rank` its place there."""

    def __init__(
        self,
        proc: Proc,
        uid: int,
        rank: int,
        owner: int,
        identity: Identity,
        *,
        is_async: bool,
    ) -> None:
        self.proc = proc
        self.uid = uid
        self.rank = rank
        self.owner = owner
        self.identity = identity
        self.is_async = is_async
        self.state = STARTING
        self.behaviour: Behaviour | None = None
        self.mailbox: Any = deque() if is_async else drivers.current.mailbox()
        self.control: deque[Callable[[], Any]] = deque()  # to run between messages
        self.wake: Callable[[], None] = self._wake_sync
        self.put: Callable[[Any, Frame], None] = self._enqueue  # a fence may stand before it
        self.idle = False
        self.current: tuple[Any, Frame] | None = None  # the message in hand, until it is answered
        self.owed: dict[int, tuple[Any, int, int]] = {}  # link, port, rank of answers for later
        # Calls (link, port) that tasks are to answer.
        self.aside: dict[tuple[Any, int], asyncio.Task[None]] = {}
        self._recalled: set[tuple[Any, int]] = set()  # calls to drop
        self._recalled_within = 0  # so many messages
        self.ports: set[int] = set()  # those that close with the actor
        self._tickets = itertools.count(1)
        self.thread_id = 0
        self.serving: asyncio.Task[Any] | None = None  # an async actor's, on its loop
        self.grave: Failure | None = None
        self.gauge = Gauge(proc, uid, self.depth)
        self._end_lock = threading.RLock()
        self._stop_acks: list[tuple[Any, Frame]] = []
        self._stop_timer: Any = None
        self.finished = threading.Event()
        self.fatal: BaseException | None = None
        self.missed: Failure | None = None  # the end by a child's failure, while it stopped
        self.watchers: dict[int, list[Callable[[BaseException | None], None]]] = {}
        self.at_end: dict[Callable[[], object], None] = {}  # to call when the last act is done

    def start(self, run: Callable[[Cell], None]) -> None:
        """Serve: construct the actor and handle its messages, on a thread of its own."""
        drivers.current.start_actor(self, run)

    # -- mailbox ---------------------------------------------------------------------------------

    def _enqueue(self, link: Any, frame: Frame) -> None:
        """Queue a message; on the reactor thread, or a local sender's."""
        if self.is_async:
            self.mailbox.append((link, frame))
            if self.idle:
                self.wake()
        else:
            self.mailbox.put((link, frame))
        if self.state is DEAD:  # it died between the look-up and the put
            self.refuse_queued()
        else:
            depth = len(self.mailbox) if self.is_async else self.mailbox.qsize()
            self.gauge.put(link, len(frame.body), depth)

    def depth(self) -> int:
        """Messages waiting."""
        return len(self.mailbox) if self.is_async else self.mailbox.qsize()

    def taken(self, frame: Frame) -> None:
        """The actor took `frame` from its mailbox."""
        self.gauge.take(len(frame.body))

    def _wake_sync(self) -> None:
        self.mailbox.put(None)

    def interrupt(self, action: Callable[[], Any]) -> None:
        """Run `action` on the actor's thread (or loop) before the messages that wait."""
        self.control.append(action)
        self.wake()

    # -- recalled messages -----------------------------------------------------------------------

    def recall(self, link: Any, port: int) -> None:
        """The caller has cancelled a call: it need not be handled. On the reactor thread."""
        if self.is_async:
            for item in list(self.mailbox):
                if item[0] is link and item[1].port == port and item[1].kind == CALL:
                    with contextlib.suppress(ValueError):  # the actor has just taken it
                        self.mailbox.remove(item)
                        self.taken(item[1])
                        return
        if self.state is not STARTING or not self.is_async:
            self.interrupt(functools.partial(self._recall, link, port))

    def _recall(self, link: Any, port: int) -> None:
        if not self.is_async:
            self._recalled.add((link, port))
            self._recalled_within = self.mailbox.qsize() + 1  # and the one in hand
            self._turn(RUNNING, DROPPING)
        elif (task := self.aside.get((link, port))) is not None:
            task.cancel()
        elif self.serving is not None and self._has_in_hand(link, port):
            self.serving.cancel()

    def _has_in_hand(self, link: Any, port: int) -> bool:
        current = self.current
        return current is not None and current[0] is link and current[1].port == port

    def drops(self, link: Any, frame: Frame) -> bool:
        """Whether this message was recalled; asked for each, in state DROPPING, by its actor."""
        self._recalled_within -= 1
        dropped = frame.kind == CALL and (link, frame.port) in self._recalled
        if dropped:
            self._recalled.discard((link, frame.port))
            self.taken(frame)
        if not self._recalled or self._recalled_within <= 0:  # (it came after the answer)
            self._recalled.clear()
            self._turn(DROPPING, RUNNING)
        return dropped

    def _turn(self, before: str, after: str) -> None:
        with self._end_lock:
            if self.state == before:
                self.state = after

    # -- the end by an error ---------------------------------------------------------------------

    def abort(self, error: BaseException, failure: Failure | None = None) -> None:
        """Fail this actor from any thread; its endpoints under way may still run to their end."""
        failure = failure or self.failure_of(error)

        def die() -> None:
            self.fatal = error

        if self.settle(failure):
            self.interrupt(die)

    # -- the end ---------------------------------------------------------------------------------

    def request_stop(self, link: Any, frame: Frame) -> None:
        """A STOP frame arrived: stop after the messages before it; acknowledged when done."""
        if frame.flags & HURRY and self._stop_acks:
            self._give_up()
            return
        with self._end_lock:
            if not self.finished.is_set():
                self._stop_acks.append((link, frame))
                if len(self._stop_acks) > 1 or self.state is DEAD:
                    return
                patience = (
                    settings.cleanup_timeout
                    if self.state is STARTING
                    else settings.stop_actor_timeout
                )
                self._stop_timer = self.proc.reactor.call_later(patience, self._give_up)
                if self.is_async:
                    self.mailbox.append((link, frame))
                    if self.idle:
                        self.wake()
                else:
                    self.mailbox.put((link, frame))
                return
        self._acknowledge(link, frame)

    def _give_up(self) -> None:
        for _, frame in self._stop_acks[:1]:  # none: it has come to its end just now
            reason = bytes(frame.body).decode(errors="replace")
            self.settle(self.own_failure(reason, STOPPED))
            self.finish()

    def settle(self, grave: Failure) -> bool:
        """The actor is over: answer everybody. True for the first caller, who ended it."""
        with self._end_lock:
            if self.state is DEAD:
                return False
            self.grave = grave
            self.state = DEAD
        proc = self.proc
        proc.graves[self.uid] = grave
        proc.ending[self] = None  # first: it is always in one of the two
        proc.cells.pop(self.uid, None)
        if len(proc.graves) > settings.terminated_snapshot_retention + _GRAVES:
            proc.graves.pop(next(iter(proc.graves)))
        current, self.current = self.current, None
        if current is not None:
            self.refuse(*current)
        self.refuse_queued()
        self._refuse_owed(grave)
        for port in list(self.ports):
            proc.close_port(port)
        self.gauge.close()
        return True

    def finish(self) -> None:
        """The actor's last act is done: acknowledge stops, tell the owner of a failure."""
        with self._end_lock:
            if self.finished.is_set():
                return
            while self.at_end:
                self.at_end.popitem()[0]()
            acks, self._stop_acks = self._stop_acks, []
            timer = self._stop_timer
            # A stop that nobody asked for is news to the owner, too. Told before the first stop
            # can be acknowledged: that says that there is no more news.
            end = self.missed or self.grave
            if end is not None and (end.kind == FAILED or not acks):
                self.proc.report_end(self.owner, self.uid, self.rank, end)
            self.finished.set()
        if timer is not None:
            timer.cancel()
        for link, frame in acks:
            self._acknowledge(link, frame)
        self.proc.cell_finished(self)

    def _acknowledge(self, link: Any, frame: Frame) -> None:
        if frame.port:
            self.proc.post(link, frame.port, frame.rank, None)

    def refuse_queued(self) -> None:
        while True:
            try:
                item = self.mailbox.popleft() if self.is_async else self.mailbox.get_nowait()
            except (IndexError, _queue.Empty):
                return
            if item is not None:
                self.refuse(*item)

    def refuse(self, link: Any, frame: Frame) -> None:
        if frame.kind == CALL:
            self.proc.refuse(link, frame)

    # -- answers that come later -----------------------------------------------------------------

    def owe(self) -> int:
        """The message in hand is answered later, by whoever redeems this ticket; 0: it is already.

        A message has one answer. Who gives it must have taken it away first, in one step: the
        message from `current`, or the ticket from `owed`. So has `settle`, for what is left.
        """
        current, self.current = self.current, None
        if current is None:
            return 0
        link, frame = current
        ticket = next(self._tickets)
        self.owed[ticket] = (link, frame.port, frame.rank)
        if self.grave is not None:  # it was settled between the two steps
            self._refuse_owed(self.grave)
        return ticket

    def owe_again(self, link: Any, frame: Frame) -> None:
        """The answer of a message that was claimed could not be given: the actor's end answers."""
        self.owed[next(self._tickets)] = (link, frame.port, frame.rank)
        if self.grave is not None:
            self._refuse_owed(self.grave)

    def redeem(self, ticket: int) -> bool:
        """Whether the answer of this ticket is still owed: by the caller alone, from now on."""
        return self.owed.pop(ticket, None) is not None

    def _refuse_owed(self, grave: Failure) -> None:
        while self.owed:
            try:
                _, (link, port, rank) = self.owed.popitem()
            except KeyError:  # redeemed by another thread just now
                return
            self.proc.post_failure(link, port, rank, grave)

    def own_failure(
        self, error: str, kind: str = FAILED, cause: str = USER, trace: str = ""
    ) -> Failure:
        """What happened to this actor, here and now."""
        proc = self.proc
        now = drivers.current.wall_time()
        verdict = Verdict(kind, error, cause, proc.hostname, proc.pid, now, trace=trace)
        return Failure(self.identity.display, verdict, self.identity.label, (self.rank,))

    def failure_of(self, error: BaseException) -> Failure:
        """The failure of this actor by an exception."""
        text = f"actor explicitly aborted due to: {headline(error)}"
        if self.behaviour is None:
            text += " (its constructor raised)"
        return self.own_failure(text, trace=format_remote(error))

    def unable_to_start(self, error: RuntimeError) -> None:
        """The actor got no thread."""
        text = (
            f"the process could not start a thread for this actor: {headline(error)}. "
            "Raise the limit of processes (ulimit -u, pids.max of the cgroup), or have fewer actors"
        )
        self.settle(self.own_failure(text, cause=SYSTEM))
        self.finish()

    def broken_by(self, error: BaseException) -> None:
        """The actor's loop itself is over, by what passed all boundaries around user code."""
        if is_ours(error):
            text = f"internal error: {headline(error)}"
            trace = format_all(error)
            note_error(trace)
            failure = self.own_failure(text, cause=INTERNAL, trace=trace)
        else:
            failure = self.failure_of(error)
        self.settle(failure)
        self.finish()
