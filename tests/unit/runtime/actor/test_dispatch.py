"""Each message gets one answer, from its handler or from the actor's exit, in any order of these.

The loop of a sync actor runs in this thread, on a cell whose process and links record what they
were asked to send.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base import instrument
from monarch._engine.base.errors import BackpressureError
from monarch._engine.base.failure import Failure
from monarch._engine.runtime.actor.cell import DEAD, Cell, Handler, Identity
from monarch._engine.runtime.actor.dispatch import Died, construct, run_sync
from monarch._engine.wire.call_meta import call_meta
from monarch._engine.wire.codec import Payload, encode, encode_result
from monarch._engine.wire.frame import CALL, ERROR, STOP, Frame
from tests.hostile import HOSTILE, hostile

LIMIT = 1 << 20


class Link:
    """The link to a caller; it records the frames."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> bool:
        self.sent.append(data)
        return True


class Proc:
    """A proc that records the answers to callers: (port, "value" | "error" | "refused")."""

    hostname, pid, local, main = "host", 1, None, None

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.graves: dict[int, Failure] = {}
        self.cells: dict[int, Cell] = {}
        self.ending: dict[Cell, None] = {}
        self.setup = None
        timer = SimpleNamespace(cancel=lambda: None)
        self.reactor = SimpleNamespace(call_later=lambda *_: timer, call_soon=lambda *_: None)
        self.problems: list[Exception] = []  # the next sends raise these

    def encode_result(self, value: Any) -> Payload:
        return encode_result(value, LIMIT)

    def encode(self, value: Any) -> Payload:
        return encode(value, LIMIT)

    def send_one(
        self, link: Link, kind: int, port: int, _: int, rank: int, meta: bytes, body: Payload,
        flags: int = 0,
    ) -> bool:  # fmt: skip
        if self.problems and not isinstance(self.problems[0], BackpressureError):
            raise self.problems.pop(0)
        self.told.append((port, "error" if flags & ERROR else "value"))
        if self.problems:
            raise self.problems.pop(0)
        return True

    def refuse(self, link: Link, frame: Frame) -> None:
        if frame.port:
            self.told.append((frame.port, "refused"))

    def post_failure(self, link: Link, port: int, rank: int, failure: Failure) -> None:
        self.told.append((port, "refused"))

    def report_end(self, *_: Any) -> None: ...
    def cell_finished(self, cell: Cell) -> None: ...
    def flow(self, *_: Any) -> None: ...


class Actor:
    """A cell whose endpoints are the given functions."""

    def __init__(self, **endpoints: Callable[..., Any]) -> None:
        self.proc = Proc()
        self.link = Link()
        self.cell = Cell(
            self.proc,  # type: ignore[arg-type]
            1,
            0,
            2,
            Identity("name", "label", "<display>", lambda cell: self),  # type: ignore[arg-type,return-value]
            is_async=False,
        )
        self.routes: dict[bytes, Any] = {}
        self.handlers = {
            name: Handler(name, function, explicit=name == "explicit")
            for name, function in endpoints.items()
        }
        self.has_children = False
        self.tickets: list[int] = []
        self.cleaned: list[Exception | None] = []

    def extent_of(self, data: bytes) -> bytes:
        return data

    def enter(self, rank: int, extent: bytes) -> None: ...
    def plain_handler(self, name: str) -> None: ...
    def unheard(self) -> None: ...

    def cleanup(self, error: Exception | None) -> None:
        self.cleaned.append(error)

    def explicit_port(self, link: Link, frame: Frame, endpoint: str) -> int:
        self.tickets.append(self.cell.owe())
        return self.tickets[-1]

    def call(self, name: str, port: int) -> None:
        body = encode(((), {}), LIMIT).stream
        assert body is not None
        self.cell.put(self.link, Frame(CALL, 0, 1, port, 0, 0, call_meta(name, b""), body))

    def run(self) -> list[tuple[int, str]]:
        """Serve all messages; return the answers to the callers, values first."""
        self.call("finish", 0)
        run_sync(self.cell)
        ports = [int.from_bytes(data[16:24], "little") for data in self.link.sent]
        dest = [int.from_bytes(data[8:16], "little") for data in self.link.sent]
        assert not any(ports)
        return [(port, "value") for port in dest] + self.proc.told

    def end(self) -> None:
        """End the actor as `Instance.abort` in another thread does."""
        self.cell.abort(RuntimeError("it is over"))

    def give_up(self) -> None:
        """Stop the actor, and give it up as the reactor's timer does."""
        self.cell.request_stop(self.link, Frame(STOP, 0, 1, 0, 0, 0, b"", b"enough"))  # type: ignore[arg-type]
        self.cell._give_up()

    def died(self) -> None:
        raise Died((self.cell.own_failure("it is over"), None))


def finish() -> None:
    raise SystemExit


def test_a_value_and_an_error_are_answers() -> None:
    actor = Actor(good=lambda: 1, bad=lambda: 1 / 0, lock=threading.Lock, finish=finish)
    for port, name in enumerate(("good", "bad", "lock", "nothing"), 1):
        actor.call(name, port)
    assert actor.run() == [(1, "value"), (2, "error"), (3, "error"), (4, "error")]


def test_an_actor_that_ended_meanwhile_does_not_answer_again() -> None:
    for outcome in (lambda: 1, lambda: 1 / 0):
        actor = Actor(busy=lambda: (actor.end(), outcome())[1], good=lambda: 1, finish=finish)  # noqa: B023
        actor.call("busy", 1)
        actor.call("good", 2)
        assert actor.run() == [(1, "refused"), (2, "refused")]


def test_the_message_in_hand_when_the_end_is_learnt_of_is_refused() -> None:
    """The exit is queued for the actor's thread, and so are three calls."""
    actor = Actor(good=lambda: actor.cell.interrupt(actor.died), finish=finish)
    for port in (1, 2, 3):
        actor.call("good", port)
    assert sorted(actor.run()) == [(1, "value"), (2, "refused"), (3, "refused")]


def test_a_message_that_ends_the_actor_is_refused_with_those_behind_it() -> None:
    actor = Actor(fatal=finish, good=lambda: 1, finish=finish)
    for port, name in enumerate(("good", "fatal", "good"), 1):
        actor.call(name, port)
    assert actor.run() == [(1, "value"), (2, "refused"), (3, "refused")]


def test_an_answer_for_later_is_owed_until_it_is_redeemed_or_refused() -> None:
    actor = Actor(explicit=lambda port: None, finish=finish)
    redeemed: list[bool] = []

    def redeem() -> None:
        redeemed.extend(actor.cell.redeem(ticket) for ticket in (*actor.tickets[:1], 1000, 0))

    actor.handlers["redeem"] = Handler("redeem", redeem)
    for port in (1, 2, 3):
        actor.call("explicit", port)
    actor.call("redeem", 4)
    told = actor.run()
    assert redeemed == [True, False, False]
    assert sorted(told) == [(2, "refused"), (3, "refused"), (4, "value")]
    assert not any(actor.cell.redeem(ticket) for ticket in actor.tickets)


def test_nothing_is_owed_by_an_actor_that_ended() -> None:
    actor = Actor(explicit=lambda port: None, finish=finish)
    enter = actor.enter
    actor.enter = lambda rank, extent: (enter(rank, extent), actor.end())  # type: ignore[method-assign,assignment,return-value]
    actor.call("explicit", 1)
    assert actor.run() == [(1, "refused")]
    assert actor.tickets == [0]


@pytest.mark.parametrize("problem", [OSError("no memory"), BackpressureError("no room")])
def test_an_answer_is_given_whatever_sending_it_runs_into(problem: Exception) -> None:
    """Out of memory, the answer is an error; out of room for long, the answer is still sent."""
    actor = Actor(big=lambda: bytes(2 * LIMIT), finish=finish)
    actor.proc.problems = [problem]
    actor.call("big", 1)
    assert actor.run() == [(1, "error" if isinstance(problem, OSError) else "value")]


def test_a_message_that_cannot_be_answered_at_all_ends_the_actor_which_answers_it() -> None:
    for endpoint in (lambda: bytes(2 * LIMIT), lambda: 1 / 0):
        actor = Actor(bad=endpoint, good=lambda: 1, finish=finish)
        actor.proc.problems = [MemoryError(), MemoryError(), MemoryError()]
        actor.call("bad", 1)
        actor.call("good", 2)
        assert sorted(actor.run()) == [(1, "refused"), (2, "refused")]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_an_exception_does_when_it_is_reported_answers_its_caller(name: str) -> None:
    actor = Actor(bad=lambda: raise_(hostile(name)), good=lambda: 1, finish=finish)
    actor.call("bad", 1)
    actor.call("good", 2)
    assert sorted(actor.run()) == [(1, "error"), (2, "value")]


def test_an_idle_actor_keeps_no_message_alive() -> None:
    class Body(bytearray):
        """The content of a message, which can be watched."""

    class Mailbox(SimpleQueue[Any]):
        """A mailbox that looks, before each message, for what is left of the first."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            gc.collect()
            kept.append(watched() is not None)
            return super().get(block, timeout)

    kept: list[bool] = []
    body = Body(encode(((), {}), LIMIT).stream or b"")
    watched = weakref.ref(body)
    actor = Actor(good=lambda: 1, finish=finish)
    actor.cell.mailbox = Mailbox()
    actor.cell.put(actor.link, Frame(CALL, 0, 1, 1, 0, 0, call_meta("good", b""), body))  # type: ignore[arg-type]
    del body
    assert actor.run() == [(1, "value")]
    assert kept == [True, False]


def test_the_result_of_a_message_without_a_caller_is_dropped_whatever_it_is() -> None:
    actor = Actor(lock=threading.Lock, good=lambda: 1, finish=finish)
    actor.call("lock", 0)
    actor.call("good", 1)
    assert actor.run() == [(1, "value")]


def test_an_actor_is_idle_once_it_is_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    traffic = SimpleNamespace(status=lambda _, status, why: told.append(status))
    monkeypatch.setattr(instrument, "traffic", traffic)
    for ends_meanwhile in (False, True):
        actor = Actor()
        if ends_meanwhile:
            actor.cell.identity.build = lambda _, actor=actor: (actor.end(), actor)[1]  # type: ignore[assignment,misc]
        assert construct(actor.cell)
    assert told == ["Initializing", "Idle", "Initializing", "Failed"]


def raise_(error: BaseException) -> None:
    raise error


def test_many_threads_redeem_each_ticket_once() -> None:
    actor = Actor(finish=finish)
    cell = actor.cell
    tickets = []
    for port in range(1, 2001):
        cell.current = (actor.link, Frame(CALL, 0, 1, port, 0, 0, b"", b""))
        tickets.append(cell.owe())
    won: list[int] = []
    start = threading.Barrier(4)

    def redeem() -> None:
        start.wait()
        won.extend(ticket for ticket in tickets if cell.redeem(ticket))

    threads = [threading.Thread(target=redeem) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    actor.end()
    for thread in threads:
        thread.join()
    assert len(won) + len(actor.proc.told) == 2000
    assert len(set(won)) == len(won)


def serve(actor: Actor) -> None:
    """Run the actor on a thread, as it is in a process; it must come to its end."""
    thread = threading.Thread(target=run_sync, args=(actor.cell,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the thread of an actor that has ended waits for messages"


@pytest.mark.parametrize("how", ["end", "give_up"])
def test_an_actor_that_is_ended_in_its_constructor_cleans_up(how: str) -> None:
    actor = Actor()

    def build(_: Cell) -> Any:
        getattr(actor, how)()
        return actor

    actor.cell.identity.build = build
    serve(actor)
    assert actor.cell.state is DEAD
    assert actor.cell.finished.is_set()
    assert [error is None for error in actor.cleaned] == [how == "give_up"]


def test_an_actor_whose_stop_was_given_up_cleans_up_when_its_endpoint_returns() -> None:
    actor = Actor(busy=lambda: actor.give_up())
    actor.call("busy", 1)
    serve(actor)
    assert actor.proc.told == [(1, "refused")]
    assert actor.cleaned == [None]


def test_a_message_after_the_end_is_refused_and_does_not_keep_the_thread_asleep() -> None:
    actor = Actor(good=lambda: 1)
    actor.end()
    actor.call("good", 1)
    assert actor.proc.told == [(1, "refused")]
    serve(actor)
    assert len(actor.cleaned) == 1
