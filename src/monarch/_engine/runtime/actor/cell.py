"""The cell: one actor as the runtime sees it, with its mailbox, thread, state and exit.

A SPAWN frame creates a cell on the reactor, and the cell gets a thread: the actor's constructor,
endpoints and hooks run there and nowhere else. It is a thread of its own or, for one actor of a
worker, the main one (`main_thread`). A *behaviour*, made by the mesh layer from the SPAWN body on
that thread, knows the user's class. The cell knows messages.

States: ``STARTING`` (constructing) -> ``RUNNING`` -> ``DEAD``. An actor ends by a failure or by a
stop. Either way two steps happen, once each, in this order:

* `settle` sets the *grave*, the `Failure` that answers all messages from now on. It answers the
  messages that wait, and keeps the grave for later ones.
* Then the meshes that the actor owns are stopped and the user's `__cleanup__` runs. After that,
  `finish` acknowledges stops and notifies the owner.

No caller waits for an answer that cannot come: a message is answered by its handler, by `settle`,
or by the loss of the link.

Mailboxes are bounded in messages and bytes (see `flow_control`).

A stop is a message like any other: earlier messages are handled first. If the actor does not reach
the stop within `stop_actor_timeout` (it is stuck in an endpoint), it is given up: its callers are
answered, and its thread is left behind. On the main thread the endpoint is interrupted first, and
has `cleanup_timeout` to end.
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

from monarch._engine.base import instrument
from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import format_all, format_remote, headline, is_ours
from monarch._engine.base.failure import Failure
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED, INTERNAL, STOPPED, SYSTEM, USER, Verdict
from monarch._engine.runtime.actor.flow_control import FlowControl
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.fault_file import note_error
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import CALL, HURRY, Frame

if TYPE_CHECKING:
    import asyncio

    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Behaviour", "Cell", "Handler", "Identity"]

STARTING = "starting"
RUNNING = "running"
DROPPING = "dropping"  # running, and some messages that wait were recalled
DEAD = "dead"

_GRAVES = 10_000  # graves kept beyond the configured number


class Handler:
    """One endpoint, ready to call."""

    __slots__ = (
        *("concurrent", "explicit", "function", "instrument", "is_async", "name"),
        "recorded",
    )

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
        self.recorded: Any = None  # kept here for the receiver of `instrument.traffic`


class Behaviour(Protocol):
    """The user's object seen through its endpoints, supplied by the mesh layer."""

    handlers: dict[str, Handler]
    routes: dict[bytes, tuple[Handler, Any]]
    """Endpoint and extent by the meta of a CALL; a cache, filled by the loop that reads it."""
    has_children: bool

    def extent_of(self, data: bytes) -> Any:
        """Return the extent that `enter` takes."""

    def enter(self, rank: int, extent: Any, /) -> None:
        """Make the message's rank in `extent` the current one."""

    def plain_handler(self, name: str) -> Handler | None:
        """Return a handler for a method that is no endpoint, for callers that wrapped it in one."""

    def explicit_port(self, link: FrameLink, frame: Frame, endpoint: str) -> Any:
        """Return the port object for an endpoint that answers by itself."""

    def call_ended(self, error: BaseException | None) -> None:
        """Run the callbacks registered in `Cell.watchers` for the call that ended."""

    def stop_children(self) -> Any:
        """Stop the meshes of this actor and wait until they have (within the configured time).

        Async actors return an awaitable that does so.
        """

    def unheard(self) -> Any:
        """Handle the failures of children that arrived while the actor stopped.

        Return this actor's failure by one that was not handled, or None; async actors return an
        awaitable of that.
        """

    def cleanup(self, error: Exception | None) -> Any:
        """Call `__cleanup__`; return None or an awaitable."""

    def cleanup_failed(self, error: BaseException) -> None:
        """Report that `__cleanup__` raised; the stop goes on."""


class Identity:
    """The names of an actor; `build(cell)` makes its behaviour on the actor's own thread."""

    __slots__ = ("build", "display", "label", "name")

    def __init__(
        self, name: str, label: str, display: str, build: Callable[[Cell], Behaviour]
    ) -> None:
        self.name = name  # as given to spawn
        self.label = label  # label-uid, the name of the mesh in failures
        self.display = display  # <root>.<module.Class name{rank}>
        self.build = build

    def short(self) -> tuple[str, str]:
        """Return the module and class of the actor, and its name with its rank."""
        chain = self.display
        start = chain.find(f" {self.name}", chain.rfind(".<") + 1)
        return chain[chain.rfind("<", 0, start) + 1 : start], chain[start + 1 :].removesuffix(">")


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
        self.mailbox: Any = deque() if is_async else environments.current.mailbox()
        self.control: deque[Callable[[], Any]] = deque()  # actions to run between messages
        self.wake: Callable[[], None] = self._wake_sync
        # Replaced while an epoch barrier is up.
        self.put: Callable[[FrameLink, Frame], None] = self._enqueue
        self.idle = False
        # The message being handled, until it is answered, and when that began. Before the first
        # message: when the constructor began.
        self.current: tuple[FrameLink, Frame] | None = None
        self.began = environments.current.now()
        self.owed: dict[
            int, tuple[FrameLink, int, int]
        ] = {}  # answers given later: link, port, rank
        # The tasks that answer calls, by link and port of the call.
        self.aside: dict[tuple[Any, int], asyncio.Task[None]] = {}
        self._recalled: set[tuple[Any, int]] = set()  # calls to drop
        self._recalled_within = 0  # messages left among which those calls can be
        self.ports: set[int] = set()  # ports that close with the actor
        self._tickets = itertools.count(1)
        self.thread_id = 0
        self.serving: asyncio.Task[Any] | None = None  # the task of an async actor, on its loop
        self.grave: Failure | None = None
        self.flow_control = FlowControl(proc, uid, self.depth)
        self._end_lock = threading.RLock()
        self._stop_acks: list[tuple[FrameLink, Frame]] = []
        self._stop_timer: Any = None
        self.finished = threading.Event()
        self.fatal: BaseException | None = None
        self.broken: BaseException | None = None  # left the loop, and was raised by no endpoint
        self.spared = False  # no endpoint runs that a stop could interrupt
        self.missed: Failure | None = None  # the actor's failure by a child's, found during a stop
        self.watchers: dict[int, list[Callable[[BaseException | None], None]]] = {}
        self.at_end: dict[Callable[[], object], None] = {}  # callbacks of `finish`

    def start(self, run: Callable[[Cell], None]) -> None:
        """Construct the actor and handle its messages, on a thread of its own."""
        environments.current.start_actor(self, run)

    # -- mailbox ---------------------------------------------------------------------------------

    def _enqueue(self, link: FrameLink, frame: Frame) -> None:
        """Queue a message; on the reactor thread, or a local sender's."""
        traffic = instrument.traffic
        if traffic is not None:
            traffic.arrived(frame)
        if self.is_async:
            self.mailbox.append((link, frame))
            if self.idle:
                self.wake()
        else:
            self.mailbox.put((link, frame))
        if self.state is DEAD:  # the actor ended between the look-up and the put
            self.refuse_queued()
        else:
            depth = len(self.mailbox) if self.is_async else self.mailbox.qsize()
            self.flow_control.put(link, len(frame.body), depth)

    def depth(self) -> int:
        """Return how many messages wait."""
        return len(self.mailbox) if self.is_async else self.mailbox.qsize()

    def taken(self, frame: Frame) -> None:
        """Record that the actor took `frame` from its mailbox."""
        self.flow_control.take(len(frame.body))

    def _wake_sync(self) -> None:
        self.mailbox.put(None)

    def interrupt(self, action: Callable[[], Any]) -> None:
        """Run `action` on the actor's thread (or loop) before the messages that wait."""
        self.control.append(action)
        self.wake()

    # -- recalled messages -----------------------------------------------------------------------

    def recall(self, link: FrameLink, port: int) -> None:
        """Drop a call that its caller has cancelled. On the reactor thread."""
        if self.is_async:
            for item in list(self.mailbox):
                if item[0] is link and item[1].port == port and item[1].kind == CALL:
                    with contextlib.suppress(ValueError):  # the actor has just taken it
                        self.mailbox.remove(item)
                        self.taken(item[1])
                        return
        if self.state is not STARTING or not self.is_async:
            self.interrupt(functools.partial(self._recall, link, port))

    def _recall(self, link: FrameLink, port: int) -> None:
        if not self.is_async:
            self._recalled.add((link, port))
            self._recalled_within = self.mailbox.qsize() + 1  # including the one being handled
            self.turn(RUNNING, DROPPING)
        elif (task := self.aside.get((link, port))) is not None:
            task.cancel()
        elif self.serving is not None and self._has_in_hand(link, port):
            self.serving.cancel()

    def _has_in_hand(self, link: FrameLink, port: int) -> bool:
        current = self.current
        return current is not None and current[0] is link and current[1].port == port

    def drops(self, link: FrameLink, frame: Frame) -> bool:
        """Whether this message was recalled; the actor asks for each message, in state DROPPING."""
        self._recalled_within -= 1
        dropped = frame.kind == CALL and (link, frame.port) in self._recalled
        if dropped:
            self._recalled.discard((link, frame.port))
            self.taken(frame)
        # In the second case a recall came after the answer.
        if not self._recalled or self._recalled_within <= 0:
            self._recalled.clear()
            self.turn(DROPPING, RUNNING)
        return dropped

    def turn(self, before: str, after: str) -> bool:
        """Change the state from `before` to `after`; return whether it was `before`."""
        with self._end_lock:
            if self.state != before:
                return False
            self.state = after
            return True

    # -- failure by an error -----------------------------------------------------------------------

    def abort(self, error: BaseException, failure: Failure | None = None) -> None:
        """Fail this actor, from any thread; endpoints that are running may still complete."""
        if self.settle(failure or self.failure_of(error), error):
            self.wake()

    # -- stop and exit -----------------------------------------------------------------------------

    def request_stop(self, link: FrameLink, frame: Frame) -> None:
        """Stop after the messages before this STOP frame; the stop is acknowledged when done."""
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
        for _, frame in self._stop_acks[:1]:  # empty if the actor has finished just now
            reason = bytes(frame.body).decode(errors="replace")
            settled = self.settle(self.own_failure(reason, STOPPED))
            main = self.proc.main
            if settled and main is not None and main.interrupt(self):
                patience = settings.cleanup_timeout
                self._stop_timer = self.proc.reactor.call_later(patience, self._give_up)
            else:
                self.finish()
            self.wake()  # to clean up, once its thread is free

    def settle(self, grave: Failure, fatal: BaseException | None = None) -> bool:
        """End the actor and answer every caller. Returns True for the first call only.

        `fatal`: the exception that `__cleanup__` gets.
        """
        with self._end_lock:
            if self.state is DEAD:
                return False
            self.grave = grave
            self.fatal = fatal
            self.state = DEAD
        if grave.kind == FAILED:
            self._report("Failed", grave)
        else:
            self._report("Stopping")
        proc = self.proc
        proc.graves[self.uid] = grave
        proc.ending[self] = None  # set first: a cell is always in `cells` or in `ending`
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
        self.flow_control.close()
        return True

    def finish(self) -> None:
        """Acknowledge stops and report a failure to the owner, after the actor's clean-up."""
        with self._end_lock:
            if self.finished.is_set():
                return
            while self.at_end:
                self.at_end.popitem()[0]()
            acks, self._stop_acks = self._stop_acks, []
            timer = self._stop_timer
            # A stop without a request is reported to the owner, too. The report precedes the first
            # acknowledgement of a stop, which promises that no report follows.
            end = self.missed or self.grave
            if end is not None and (end.kind == FAILED or not acks):
                self.proc.report_end(self.owner, self.uid, self.rank, end)
            self.finished.set()
        if end is not None and self.grave is not None and self.grave.kind != FAILED:
            self._report("Failed" if end.kind == FAILED else "Stopped", end)
        if timer is not None:
            timer.cancel()
        for link, frame in acks:
            self._acknowledge(link, frame)
        self.proc.cell_finished(self)

    def _report(self, status: str, end: Failure | None = None) -> None:
        """Report the state that the actor has reached, where a program records that."""
        traffic = instrument.traffic
        if traffic is not None:
            reason = "" if end is None else end.verdict.trace or end.error
            traffic.status(self, status, reason)

    def _acknowledge(self, link: FrameLink, frame: Frame) -> None:
        if frame.port:
            self.proc.post(link, frame.port, frame.rank, None)

    def refuse_queued(self) -> None:
        woken = False
        while True:
            try:
                item = self.mailbox.popleft() if self.is_async else self.mailbox.get_nowait()
            except (IndexError, _queue.Empty):
                break
            if item is not None:
                self.refuse(*item)
            woken = woken or item is None
        if woken:  # the actor's thread may not have woken yet
            self.wake()

    def refuse(self, link: FrameLink, frame: Frame) -> None:
        if frame.kind == CALL:
            self.proc.refuse(link, frame)

    # -- answers that come later -----------------------------------------------------------------

    def owe(self) -> int:
        """Promise a later answer to the message being handled; 0 if it is answered already.

        A message has one answer. The thread that gives it must first have taken it away in one
        step: the message from `current`, or the ticket from `owed`. `settle` does the same with all
        that are left.
        """
        current, self.current = self.current, None
        if current is None:
            return 0
        link, frame = current
        ticket = next(self._tickets)
        self.owed[ticket] = (link, frame.port, frame.rank)
        if self.grave is not None:  # settled between the two steps above
            self._refuse_owed(self.grave)
        return ticket

    def owe_again(self, link: FrameLink, frame: Frame) -> None:
        """Record that a claimed message could not be answered; the grave will answer it."""
        self.owed[next(self._tickets)] = (link, frame.port, frame.rank)
        if self.grave is not None:
            self._refuse_owed(self.grave)

    def redeem(self, ticket: int) -> bool:
        """Whether the answer of this ticket is still owed; then only the caller may give it."""
        return self.owed.pop(ticket, None) is not None

    def _refuse_owed(self, grave: Failure) -> None:
        while self.owed:
            try:
                _, (link, port, rank) = self.owed.popitem()
            except KeyError:  # another thread has just redeemed it
                return
            self.proc.post_failure(link, port, rank, grave)

    def own_failure(
        self, error: str, kind: str = FAILED, cause: str = USER, trace: str = ""
    ) -> Failure:
        """Return a failure of this actor, at this place and time."""
        proc = self.proc
        now = environments.current.wall_time()
        verdict = Verdict(kind, error, cause, proc.hostname, proc.pid, now, trace=trace)
        return Failure(self.identity.display, verdict, self.identity.label, (self.rank,))

    def failure_of(self, error: BaseException) -> Failure:
        """Return the failure of this actor by an exception."""
        text = f"actor explicitly aborted due to: {headline(error)}"
        if self.behaviour is None:
            text += f" (its constructor raised){see_page('constructor-raised')}"
        return self.own_failure(text, trace=format_remote(error))

    def unable_to_start(self, error: RuntimeError) -> None:
        """End an actor for which no thread could be started."""
        text = (
            f"the process could not start a thread for this actor: {headline(error)}. "
            "Raise the limit of processes (ulimit -u, pids.max of the cgroup), or have fewer actors"
        )
        self.settle(self.own_failure(text, cause=SYSTEM))
        self.finish()

    def broken_by(self, error: BaseException) -> None:
        """End an actor whose loop was left by an error, past all boundaries around user code."""
        if is_ours(error):
            text = f"internal error: {headline(error)}"
            trace = format_all(error)
            note_error(trace)
            failure = self.own_failure(text, cause=INTERNAL, trace=trace)
        else:
            failure = self.failure_of(error)
            # A task of the program may leave an event loop by these two.
            if not (self.is_async and isinstance(error, (SystemExit, KeyboardInterrupt))):
                self.broken = error
        self.settle(failure)
        self.finish()
