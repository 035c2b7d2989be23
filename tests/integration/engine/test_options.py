"""`endpoint.options`: call deadlines, and partial results with failures in place of values."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.mesh.call.endpoint import ActorEndpoint
from monarch._engine.runtime.proc.proc import Proc
from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    BootstrapCommand,
    Channel,
    Port,
    SupervisionError,
    as_endpoint,
    current_rank,
    endpoint,
    send,
    this_host,
)
from monarch.config import configured

from .conftest import WAIT, Inside, kill, until

Fresh = Callable[..., Any]
SOON = 0.05


class Worker(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def hold(self, ready: Port[Port[None]], ranks: list[int] | None = None) -> int:
        """Return the rank; on `ranks`, or on all by default, block first.

        A blocked call sends a port to `ready`, and continues when a message arrives there.
        """
        self.calls += 1
        rank = current_rank().rank
        if ranks is None or rank in ranks:
            go, gone = Channel[None].open()
            ready.send(go)
            gone.recv().get()
        return rank

    @endpoint
    def count(self) -> int:
        return self.calls

    @endpoint
    def fail(self, ranks: list[int]) -> Any:
        rank = current_rank().rank
        if rank in ranks:
            raise ValueError(f"rank {rank} fails")
        return rank

    @endpoint
    def exception_as_value(self) -> Exception:
        return ValueError("only a value")

    @endpoint(explicit_response_port=True)
    def interrupt(self, port: Port[Any]) -> None:
        port.exception(KeyboardInterrupt("through the port"))

    @endpoint
    def fragile(self) -> Any:
        return Fragile()

    @endpoint
    def large(self, ready: Port[Port[None]]) -> bytes:
        go, gone = Channel[None].open()
        ready.send(go)
        gone.recv().get()
        return bytes(4_000_000)

    def plain(self) -> str:
        return "plain"


class Fragile:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be rebuilt")

    def __getstate__(self) -> Any:
        return {"state": 1}


def expire(proc: Proc, endpoint: Any) -> None:
    """Expire the deadlines of all pending calls of `endpoint` now."""

    def fire() -> None:
        reactor = proc.reactor
        for timer in [*reactor._new, *(timer for *_, timer in reactor._timers)]:
            called = getattr(timer.callback, "args", ())  # of a call: the call itself, and more
            if any(getattr(each, "_endpoint", None) is endpoint for each in called):
                timer.callback()  # type: ignore[misc]

    proc.reactor.call_soon(fire)


def gates(count: int, receiver: Any) -> list[Port[None]]:
    return [receiver.recv().get(timeout=WAIT) for _ in range(count)]


@pytest.fixture(scope="module")
def four() -> Any:
    """Yield four procs that tests share, so no test makes an actor fail there."""
    procs = this_host().spawn_procs({"gpus": 4})
    yield procs
    procs.stop().get(timeout=WAIT)


# -- options ---------------------------------------------------------------------------------------


def test_an_endpoint_with_options_is_an_endpoint(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    quick = mesh.rank.options(timeout=WAIT)
    assert isinstance(quick, ActorEndpoint)
    assert type(quick).__name__ == type(mesh.rank).__name__
    for _ in range(2):  # the options hold for each call
        assert quick.call().get(timeout=WAIT).values() == [0, 1, 2, 3]
    assert quick.choose().get(timeout=WAIT) in range(4)
    assert sorted(future.get(timeout=WAIT) for future in quick.stream()) == [0, 1, 2, 3]
    one = mesh.slice(gpus=2).rank.options(timeout=WAIT)
    assert one.call_one().get(timeout=WAIT) == 0
    with pytest.raises(ValueError, match="exactly 1 actor"):
        quick.call_one()
    with pytest.raises(TypeError, match="too many"):
        quick.call(1)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(quick)
    assert Accumulator(quick, 0, int.__add__).accumulate().get(timeout=WAIT) == 6
    plain = as_endpoint(mesh.plain).options(timeout=WAIT)
    assert plain.call().get(timeout=WAIT).values() == ["plain"] * 4


def test_options_compose(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    both = mesh.fail.options(timeout=WAIT).options(on_failure="partial")
    assert (both._timeout, len(both.call([1]).get(timeout=WAIT).failures())) == (WAIT, 1)
    forever = both.options(timeout=None)
    assert (forever._timeout, len(forever.call([1]).get(timeout=WAIT).failures())) == (None, 1)
    with pytest.raises(ActorError, match="rank 1 fails"):
        both.options(on_failure="raise").call([1]).get(timeout=WAIT)
    assert mesh.fail._timeout is None
    assert both.options()._timeout == WAIT


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, math.inf, -math.inf, 10**400])
def test_impossible_timeouts(four: Any, timeout: Any) -> None:
    mesh = four.spawn("worker", Worker)
    with pytest.raises(ValueError, match="finite, non-negative number of seconds, or None"):
        mesh.rank.options(timeout=timeout)


@pytest.mark.parametrize("timeout", [True, False, "1", "1s", [1], 1j])
def test_timeouts_that_are_no_numbers(four: Any, timeout: Any) -> None:
    mesh = four.spawn("worker", Worker)
    with pytest.raises(TypeError, match="number of seconds, or None"):
        mesh.rank.options(timeout=timeout)


@pytest.mark.parametrize("on_failure", ["ignore", "", True, 1, ["raise"]])
def test_unknown_ways_to_fail(four: Any, on_failure: Any) -> None:
    mesh = four.spawn("worker", Worker)
    with pytest.raises(ValueError, match="'raise' or 'partial'"):
        mesh.rank.options(on_failure=on_failure)


def test_what_waits_for_no_answer_has_no_deadline(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    port, receiver = Channel[int].open()
    quick = mesh.rank.options(timeout=1)
    with pytest.raises(ValueError, match=r"broadcast .*timeout.* use call"):
        quick.broadcast()
    with pytest.raises(ValueError, match=r"send .*timeout.* use .*recv"):
        send(quick, (), {}, port)
    forever = quick.options(timeout=None, on_failure="partial")
    forever.broadcast()
    send(forever, (), {}, port)
    assert sorted(receiver.recv().get(timeout=WAIT) for _ in range(4)) == [0, 1, 2, 3]


# -- deadlines -------------------------------------------------------------------------------------


def test_a_call_of_one_that_takes_too_long(four: Any, proc: Proc) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    one = mesh.slice(gpus=3).hold.options(timeout=SOON)
    before = len(proc.ports)
    for adverb in (one.call_one, one.choose):
        future = adverb(ready)
        with pytest.raises(TimeoutError) as caught:
            future.get(timeout=WAIT)
        assert type(caught.value) is TimeoutError
        text = str(caught.value)
        for part in ("worker.hold()", "0.05 s", "{'gpus': 3/4}", "goes on running", "options("):
            assert part in text
        with pytest.raises(TimeoutError, match="goes on running"):  # again on each `get`
            future.get()
        until(lambda: len(proc.ports) <= before)
        (go,) = gates(1, receiver)
        go.send(None)
    assert mesh.slice(gpus=3).count.call_one().get(timeout=WAIT) == 2


def test_an_endpoint_goes_on_and_its_late_answer_is_dropped(four: Any, proc: Proc) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    one = mesh.slice(gpus=0)
    one.rank.call_one().get(timeout=WAIT)  # opens the link
    gc.collect()
    segments, ports, descriptors = proc.segments.statistics[0], len(proc.ports), _descriptors()
    future = one.large.options(timeout=SOON).call_one(ready)
    (go,) = gates(1, receiver)
    with pytest.raises(TimeoutError):
        future.get(timeout=WAIT)
    go.send(None)
    assert one.rank.call_one().get(timeout=WAIT) == 0  # arrives after the late answer
    with pytest.raises(TimeoutError, match="goes on"):
        future.get(timeout=WAIT)
    # Sizes may also shrink, since remains of earlier meshes may be released meanwhile.
    until(lambda: proc.segments.statistics[0] <= segments and len(proc.ports) <= ports)
    until(lambda: _descriptors() <= descriptors + 1)  # both sides pool segments


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_call_of_all_names_those_without_an_answer(four: Any, proc: Proc) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    before = len(proc.ports)
    hour = mesh.hold.options(timeout=3600)
    future = hour.call(ready, [1, 3])
    running = gates(2, receiver)
    until(lambda: future._missing == 2)  # type: ignore[attr-defined]
    expire(proc, hour)
    with pytest.raises(TimeoutError) as caught:
        future.get(timeout=WAIT)
    assert "2 of 4 actors: {'gpus': 1/4}, {'gpus': 3/4}." in str(caught.value)
    assert 'on_failure="partial"' in str(caught.value)
    until(lambda: len(proc.ports) <= before)
    for go in running:
        go.send(None)
    assert mesh.rank.call().get(timeout=WAIT).values() == [0, 1, 2, 3]


def test_the_remedy_of_a_late_call_is_one_that_helps(four: Any, proc: Proc) -> None:
    """Partial results are no remedy if no answer came in time, and no other adverb has them."""
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    hour = mesh.hold.options(timeout=3600)
    every = hour.call(ready, [0, 1, 2, 3])
    running = gates(4, receiver)
    kept = hour.options(on_failure="partial")
    partial = kept.call(None, [])
    chosen = hour.choose(None, [])
    stream = list(hour.stream(None, []))
    expire(proc, kept)
    expire(proc, hour)
    for future in [every, chosen, *stream]:
        with pytest.raises(TimeoutError) as caught:
            future.get(timeout=WAIT)
        assert str(caught.value).endswith("Give it more time with options(timeout=...).")
    for _, error in partial.get(timeout=WAIT).failures():
        assert str(error).endswith("Give it more time with options(timeout=...).")
    for go in running:
        go.send(None)


def test_a_stream_hands_out_what_came_in_time(four: Any, proc: Proc) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    before = len(proc.ports)
    hour = mesh.hold.options(timeout=3600)
    *answers, last = hour.stream(ready, [2])
    (go,) = gates(1, receiver)
    assert sorted(future.get(timeout=WAIT) for future in answers) == [0, 1, 3]
    expire(proc, hour)
    with pytest.raises(TimeoutError, match=r"\{'gpus': 2/4\}"):
        last.get(timeout=WAIT)
    until(lambda: len(proc.ports) <= before)
    go.send(None)
    assert mesh.slice(gpus=2).rank.call_one().get(timeout=WAIT) == 0


def test_the_deadline_is_the_callers_whoever_looks_and_when(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    one = mesh.slice(gpus=1)

    def go_on() -> None:
        gates(1, receiver)[0].send(None)

    async def look() -> None:
        late = one.hold.options(timeout=SOON).call_one(ready)
        with pytest.raises(TimeoutError, match="no answer within"):
            await late
        await asyncio.to_thread(go_on)
        assert await one.rank.options(timeout=WAIT).call_one().as_asyncio() == 0

    asyncio.run(asyncio.wait_for(look(), WAIT))
    future = one.hold.options(timeout=SOON).call_one(ready)
    until(lambda: future._phase)  # completes though no caller waits on it
    go_on()
    assert isinstance(future.exception(timeout=0), TimeoutError)


def test_an_answer_in_time_cancels_the_deadline(four: Any, proc: Proc) -> None:
    mesh = four.spawn("worker", Worker)
    hour = mesh.rank.options(timeout=3600)
    for _ in range(300):
        hour.call().get(timeout=WAIT)
        hour.choose().get(timeout=WAIT)
        list(hour.stream())[-1].get(timeout=WAIT)
    event = threading.Event()
    proc.reactor.call_soon(event.set)
    assert event.wait(WAIT)
    assert len(proc.reactor._timers) + len(proc.reactor._new) < 200


def test_a_deadline_of_nothing_is_over_at_once(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    ready, receiver = Channel[Port[None]].open()
    future = mesh.slice(gpus=0).hold.options(timeout=0).call_one(ready)
    with pytest.raises(TimeoutError, match="within 0 s"):
        future.get(timeout=WAIT)
    gates(1, receiver)[0].send(None)


def test_a_call_inside_an_actor_has_a_deadline_too(four: Any) -> None:
    mesh = four.slice(gpus=0).spawn("worker", Worker)
    caller = four.slice(gpus=1).spawn("caller", Caller)
    ready, receiver = Channel[Port[None]].open()
    assert "no answer within" in caller.call_with_deadline.call_one(mesh, ready).get(timeout=WAIT)
    gates(1, receiver)[0].send(None)
    beside = four.slice(gpus=1).spawn("beside", Worker)  # in the caller's process
    assert "no answer within" in caller.call_with_deadline.call_one(beside, ready).get(timeout=WAIT)
    gates(1, receiver)[0].send(None)
    assert beside.rank.call_one().get(timeout=WAIT) == 0


class Caller(Actor):
    @endpoint
    def call_with_deadline(self, mesh: Any, ready: Any) -> str:
        try:
            mesh.hold.options(timeout=SOON).call_one(ready).get()
        except TimeoutError as error:
            return str(error)
        return ""


# -- partial results -------------------------------------------------------------------------------


def test_failures_stand_where_values_are_missing(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    answers = mesh.fail.options(on_failure="partial").call([1, 2]).get(timeout=WAIT)
    assert [(point["gpus"], value) for point, value in answers.successes()] == [(0, 0), (3, 3)]
    assert [point["gpus"] for point, _ in answers.failures()] == [1, 2]
    for (point, error), (where, value) in zip(answers.failures(), list(answers)[1:3], strict=True):
        assert isinstance(error, ActorError)
        assert str(error.exception) == f"rank {point.rank} fails"
        assert (where, value) == (point, error)
    assert answers.values()[::3] == [0, 3]
    assert answers.get(1) is answers.item(gpus=1) is answers.values()[1]


def test_a_mesh_without_failures_is_like_any_other(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    for answers in (
        mesh.rank.call().get(timeout=WAIT),
        mesh.rank.options(on_failure="partial").call().get(timeout=WAIT),
    ):
        assert answers.failures() == []
        assert [value for _, value in answers.successes()] == answers.values() == [0, 1, 2, 3]


def test_a_partial_mesh_is_sliced_and_pickled(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    answers = mesh.fail.options(on_failure="partial").call([1, 2]).get(timeout=WAIT)
    half = answers.slice(gpus=slice(2, 4))
    assert [point.rank for point, _ in half.failures()] == [0]
    assert [(point["gpus"], value) for point, value in half.successes()] == [(1, 3)]
    again = pickle.loads(pickle.dumps(answers))
    assert again.successes() == answers.successes()
    assert [str(error) for _, error in again.failures()] == [
        str(error) for _, error in answers.failures()
    ]
    assert "rank 1 fails" in repr(again)
    assert len(again) == 4


def test_an_exception_that_was_returned_is_a_value(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    partial = mesh.exception_as_value.options(on_failure="partial")
    answers = partial.call().get(timeout=WAIT)
    assert answers.failures() == []
    assert [str(value) for _, value in answers.successes()] == ["only a value"] * 4


def test_failures_are_exceptions_whatever_was_raised(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    for method, text in ((mesh.interrupt, "through the port"), (mesh.fragile, "cannot be rebuilt")):
        answers = method.options(on_failure="partial").call().get(timeout=WAIT)
        assert len(answers.failures()) == 4
        for _, error in answers.failures():
            assert isinstance(error, Exception)
            assert text in str(error)


def test_other_adverbs_raise_as_usual(four: Any) -> None:
    mesh = four.spawn("worker", Worker)
    partial = mesh.fail.options(on_failure="partial")
    for future in (
        mesh.slice(gpus=0).fail.options(on_failure="partial").call_one([0]),
        partial.choose([0, 1, 2, 3]),
        *partial.stream([0, 1, 2, 3]),
    ):
        with pytest.raises(ActorError):
            future.get(timeout=WAIT)


@pytest.mark.failures
def test_each_rank_has_its_own_outcome(fresh: Fresh, proc: Proc) -> None:
    """One call returns a value, an exception, a dead actor, a dead process and a timeout."""
    procs = fresh(5)
    mesh = procs.spawn("worker", Mixed)
    pids = procs.spawn("inside", Inside).pid.call().get(timeout=WAIT).values()
    ready, receiver = Channel[Port[None]].open()
    before = len(proc.ports)
    hour = mesh.differ.options(timeout=3600, on_failure="partial")
    future = hour.call(ready)
    running = gates(2, receiver)
    kill(pids[3])
    until(lambda: future._missing == 1)  # type: ignore[attr-defined]
    expire(proc, hour)
    answers = future.get(timeout=WAIT)
    value, error, actor_died, process_died, late = answers.values()
    assert value == 0
    assert isinstance(error, ActorError)
    assert isinstance(actor_died, SupervisionError)
    assert "the actor ends" in str(actor_died)
    assert isinstance(process_died, SupervisionError)
    assert "Killed" in str(process_died)
    assert isinstance(late, TimeoutError)
    assert "{'gpus': 4/5}" in str(late)
    assert "on_failure" not in str(late)
    assert [point.rank for point, _ in answers.failures()] == [1, 2, 3, 4]
    until(lambda: len(proc.ports) <= before)
    for go in running:
        go.send(None)
    # A mesh with dead ranks can be called again.
    alive = mesh.ping.options(on_failure="partial").call().get(timeout=WAIT)
    healthy = [point for point, _ in alive.successes()]
    assert [point["gpus"] for point in healthy] == [0, 1, 4]
    assert mesh.slice(**healthy[1]).ping.call_one().get(timeout=WAIT) == "pong"


class Mixed(Actor):
    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def differ(self, ready: Port[Port[None]]) -> int:
        rank = current_rank().rank
        if rank == 1:
            raise ValueError("one fails")
        if rank == 2:
            raise SystemExit("the actor ends")
        if rank >= 3:
            go, gone = Channel[None].open()
            ready.send(go)
            gone.recv().get()
        return rank


@pytest.mark.failures
def test_processes_that_never_began_are_failures(fresh: Fresh) -> None:
    command = BootstrapCommand("/does/not/exist", None, [], {})
    mesh = fresh(2, bootstrap_command=command).spawn("worker", Worker)
    answers = mesh.rank.options(on_failure="partial").call().get(timeout=WAIT)
    assert [type(error) for _, error in answers.failures()] == [ValueError] * 2


def test_a_mailbox_that_is_full(fresh: Fresh) -> None:
    with configured(mailbox_limit=4):
        mesh = fresh(1).spawn("worker", Worker)
        ready, receiver = Channel[Port[None]].open()
        mesh.hold.broadcast(ready)
        (go,) = gates(1, receiver)
        quick = mesh.rank.options(timeout=SOON)
        with pytest.raises(RuntimeError, match=r"full for 0.05 s"):
            call_until_it_fails(quick)
        go.send(None)
        until(lambda: mesh.rank.call_one().get(timeout=WAIT) == 0)


def call_until_it_fails(endpoint: Any) -> None:
    while True:
        endpoint.call_one()
