"""Futures as arguments of calls: when the call is sent, what it raises, and its order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import queue
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch
from monarch._engine.runtime.io import environment as environments
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    DeadlockError,
    Future,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
    send,
    this_host,
)

from .conftest import WAIT, kill, until

Gate = Any
"""The port that ends a call in progress."""


class Cell(Actor):
    def __init__(self) -> None:
        self.handled: list[Any] = []

    @endpoint
    def hold(self, opened: Any, value: Any) -> Any:
        """Send a gate to `opened`, and return `value` when a message arrives through the gate."""
        gate, receiver = Channel.open()
        opened.send(gate)
        receiver.recv().get()
        return value

    @endpoint
    def fail(self) -> None:
        raise ValueError("as told")

    @endpoint
    def note(self, *values: Any, **named: Any) -> Any:
        self.handled.append(values or named)
        return values or named

    @endpoint
    def seen(self) -> list[Any]:
        return self.handled

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other: Any, me: Any) -> Any:
        """Call the other with a value that this actor would have to compute."""
        return me.note.call_one(other.pass_on.call_one(me)).get()

    @endpoint
    def forward(self, source: Any, sink: Any, opened: Any) -> Any:
        return sink.note.call_one(source.hold.call_one(opened, 1)).get()

    @endpoint
    def pass_on(self, other: Any) -> Any:
        return other.note.call_one(1).get()


class Async(Actor):
    @endpoint
    async def relay(self, source: Any, sink: Any) -> Any:
        return await sink.note.call_one(source.note.call_one(7))

    @concurrent_endpoint
    async def cut(self, source: Any, sink: Any, opened: Any) -> str:
        try:
            await asyncio.wait_for(sink.note.call_one(source.hold.call_one(opened, 1)), 0.01)
        except asyncio.TimeoutError:
            return "late"
        return "in time"


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get()


@pytest.fixture
def source(procs: Any) -> Any:
    return procs.slice(gpus=0).spawn("source", Cell)


@pytest.fixture
def sink(procs: Any) -> Any:
    return procs.slice(gpus=1).spawn("sink", Cell)


@pytest.fixture
def held(source: Any) -> tuple[Future[Any], Gate]:
    """Return the future of a call in progress, which will have the value 5, and its gate."""
    opened, receiver = Channel.open()
    future = source.hold.call_one(opened, 5)
    return future, receiver.recv().get(timeout=WAIT)


def test_the_call_is_sent_when_the_value_is_there(held: Any, sink: Any) -> None:
    future, gate = held
    call = sink.note.call_one(1, future)
    named = sink.note.call_one(a=future, b=2)
    assert sink.note.call_one("meanwhile").get(timeout=WAIT) == ("meanwhile",)
    assert not call.done()
    gate.send(None)
    assert call.get(timeout=WAIT) == (1, 5)
    assert named.get(timeout=WAIT) == {"a": 5, "b": 2}
    handled = sink.seen.call_one().get(timeout=WAIT)
    assert handled[0] == ("meanwhile",), "a call that waits is overtaken, as the page says"
    assert len(handled) == 3


def test_a_value_that_is_there_keeps_the_order(
    source: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = source.note.call_one(5)
    future.get(timeout=WAIT)
    monkeypatch.delattr(environments.Environment, "start_thread")  # which would not keep it
    calls = [sink.note.call_one(future), sink.note.call_one("next")]
    assert [call.get(timeout=WAIT) for call in calls] == [((5,),), ("next",)]
    assert sink.seen.call_one().get(timeout=WAIT) == [((5,),), ("next",)]


def test_each_adverb_with_an_answer_takes_futures(procs: Any, source: Any) -> None:
    sinks = procs.spawn("sinks", Cell)
    future = source.note.call_one(5)
    assert sinks.note.call(future).get(timeout=WAIT).values() == [((5,),)] * 2
    assert sinks.note.choose(future).get(timeout=WAIT) == ((5,),)
    partial = sinks.note.options(timeout=WAIT, on_failure="partial")
    assert partial.call(source.note.call_one(6)).get(timeout=WAIT).values() == [((6,),)] * 2
    both = sinks.note.call(source.note.call_one(1), source.note.call_one(2))
    assert both.get(timeout=WAIT).values() == [((1,), (2,))] * 2
    chained = source.note.call_one(source.note.call_one(source.note.call_one(0)))
    assert chained.get(timeout=WAIT) == (((0,),),)


def test_where_no_answer_can_raise_its_error_a_future_is_refused(held: Any, procs: Any) -> None:
    future, gate = held
    sinks = procs.spawn("sinks", Cell)
    port, _ = Channel.open()
    refused: list[Callable[[], object]] = [
        lambda: sinks.note.broadcast(future),
        lambda: sinks.note.stream(future),
        lambda: send(sinks.note, (future,), {}, port),
        lambda: sinks.note.call([future]),
    ]
    for call in refused:
        with pytest.raises(
            TypeError, match=r"argument .* of \w+.*, a Future, cannot be sent: .*; send its result"
        ):
            call()
    gate.send(None)


def test_futures_of_other_kinds_and_messages(sink: Any) -> None:
    promised: concurrent.futures.Future[int] = concurrent.futures.Future()
    port, receiver = Channel[int].open()
    call = sink.note.call_one(promised, receiver.recv())
    port.send(2)
    promised.set_result(1)
    assert call.get(timeout=WAIT) == (1, 2)
    broken: concurrent.futures.Future[int] = concurrent.futures.Future()
    call = sink.note.call_one(broken)
    broken.set_exception(LookupError("lost"))
    with pytest.raises(LookupError, match="lost"):
        call.get(timeout=WAIT)


def test_an_error_of_the_future_is_that_of_the_call(source: Any, sink: Any) -> None:
    failed = source.fail.call_one()
    call = sink.note.call_one(failed)
    for future in (call, failed, call):
        with pytest.raises(ActorError, match="as told"):
            future.get(timeout=WAIT)
    assert isinstance(sink.note.call_one(failed).exception(timeout=WAIT), ActorError)
    assert sink.seen.call_one().get(timeout=WAIT) == []


def test_an_error_that_nothing_looks_at_is_reported_once(
    source: Any, sink: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    call = sink.note.call_one(source.fail.call_one())
    until(call.done)
    assert "never retrieved" not in capfd.readouterr().err
    del call
    gc.collect()
    reported: list[str] = []
    until(lambda: reported.append(capfd.readouterr().err) or "never retrieved" in "".join(reported))
    assert "".join(reported).count("source.fail() failed and its result was never retrieved") == 1


def test_what_cannot_be_sent_beside_the_value_is_raised_by_the_call(held: Any, sink: Any) -> None:
    future, gate = held
    call = sink.note.call_one(future, (x for x in "abc"))
    gate.send(None)
    with pytest.raises(TypeError, match=r"argument values\[1\] of sink.note, a generator"):
        call.get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("victim", [0, 1])
def test_the_loss_of_either_end_ends_the_call(fresh: Any, victim: int) -> None:
    procs = fresh(2)
    source, sink = (procs.slice(gpus=i).spawn(name, Cell) for i, name in enumerate(("a", "b")))
    pids = [each.pid.call_one().get(timeout=WAIT) for each in (source, sink)]
    opened, receiver = Channel.open()
    future = source.hold.call_one(opened, 5)
    gate = receiver.recv().get(timeout=WAIT)
    call = sink.note.call_one(future)
    kill(pids[victim])
    if victim == 1:
        with pytest.raises(SupervisionError):
            sink.pid.call_one().get(timeout=WAIT)
        assert not call.done(), "it was not sent yet"
        gate.send(None)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        call.get(timeout=WAIT)


def test_cancellation(held: Any, sink: Any, source: Any) -> None:
    future, gate = held
    call, other = sink.note.call_one(future), sink.note.call_one(future)
    assert call.cancel()
    assert call.cancelled()
    gate.send(None)
    assert other.get(timeout=WAIT) == (5,)
    assert sink.seen.call_one().get(timeout=WAIT) == [(5,)], "the cancelled call was never sent"
    opened, receiver = Channel.open()
    future = source.hold.call_one(opened, 5)
    gate = receiver.recv().get(timeout=WAIT)
    call = sink.note.call_one(future)
    future.cancel()
    until(call.done)
    assert call.cancelled()
    gate.send(None)


def test_a_call_that_is_cancelled_in_the_last_moment_is_not_sent(held: Any, sink: Any) -> None:
    future, gate = held
    call: Any = sink.note.call_one(future)
    assert call.cancel()
    gate.send(None)
    future.get(timeout=WAIT)
    call._send()  # as a thread does that was about to
    assert sink.seen.call_one().get(timeout=WAIT) == []
    assert call._sent is None


def test_a_cancelled_call_leaves_its_message_to_others(sink: Any) -> None:
    port, receiver = Channel[int].open()
    sink.note.call_one(receiver.recv()).cancel()
    port.send(3)
    assert receiver.recv().get(timeout=WAIT) == 3


def test_time_limits(held: Any, sink: Any) -> None:
    future, gate = held
    call = sink.note.options(timeout=WAIT).call_one(future)
    with pytest.raises(TimeoutError, match=r"sink.note\(\) was not sent within 0.01 s: 1 of"):
        call.get(timeout=0.01)
    gate.send(None)
    assert call.get(timeout=WAIT) == (5,)


def test_on_an_event_loop(source: Any, sink: Any, procs: Any) -> None:
    relay = procs.slice(gpus=0).spawn("relay", Async)
    assert relay.relay.call_one(source, sink).get(timeout=WAIT) == ((7,),)
    opened, receiver = Channel.open()
    assert relay.cut.call_one(source, sink, opened).get(timeout=WAIT) == "late"
    receiver.recv().get(timeout=WAIT).send(None)

    async def main() -> Future[Any]:
        return sink.note.call_one(source.note.call_one(8))

    future = asyncio.run(main())  # its loop is closed when the value arrives, or before
    assert future.get(timeout=WAIT) == ((8,),)


def test_the_wait_functions_take_it(held: Any, sink: Any) -> None:
    future, gate = held
    call = sink.note.call_one(future)
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call.add_done_callback(called.put)
    assert concurrent.futures.wait([call], timeout=0.01).done == set()
    gate.send(None)
    assert concurrent.futures.wait([call], timeout=WAIT).done == {call}
    assert called.get(timeout=WAIT) is call
    assert repr(call).startswith("<Future resolved")


def test_a_deadlock_by_way_of_an_argument_is_found(source: Any, sink: Any) -> None:
    with pytest.raises(ActorError) as caught:
        source.ask.call_one(sink, source).get(timeout=WAIT)
    error: BaseException = caught.value
    while isinstance(error, ActorError):
        error = error.exception
    assert isinstance(error, DeadlockError)


def test_the_diagnosis_follows_the_wait_to_the_argument(procs: Any, source: Any, sink: Any) -> None:
    waiter = procs.slice(gpus=1).spawn("waiter", Cell)
    opened, receiver = Channel.open()
    forwarded = waiter.forward.call_one(source, sink, opened)
    gate = receiver.recv().get(timeout=WAIT)
    until(lambda: re.search(r"waiter\.forward\(\).* for source\.hold\(\)", str(monarch.diagnose())))
    gate.send(None)
    assert forwarded.get(timeout=WAIT) == (1,)


def test_calls_without_futures_are_as_before(sink: Any) -> None:
    with pytest.raises(TypeError, match="a generator, cannot be sent"):
        sink.note.call_one(x for x in "abc")


def test_values_of_the_future_are_released(procs: Any, source: Any, sink: Any) -> None:
    call = sink.note.call_one(source.note.call_one(b"x" * 10))
    call.get(timeout=WAIT)
    assert call._awaited == []  # type: ignore[attr-defined]
