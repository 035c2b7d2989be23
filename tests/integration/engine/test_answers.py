"""Each message gets exactly one answer: from its endpoint, a port, or the actor's exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
    send,
)
from monarch.config import configured

from .conftest import WAIT, Inside, kill, until

Fresh = Callable[..., Any]


class Worker(Actor):
    """A synchronous actor; `hold` and `stop_after` block until the test releases them."""

    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def hold(self, ready: Port[Port[None]]) -> str:
        """Block until a message arrives on the port that is sent to `ready`, then answer."""
        go, gone = Channel[None].open()
        ready.send(go)
        gone.recv().get()
        return "held"

    @endpoint
    def stop_after(self, ready: Port[Port[None]]) -> str:
        go, gone = Channel[None].open()
        ready.send(go)
        gone.recv().get()
        context().actor_instance.stop("it is enough")
        return "the last"

    @endpoint
    def long_error(self, size: int) -> None:
        raise ValueError("x" * size)

    @endpoint
    def without_memory(self) -> bytes:
        def store(payload: Any) -> Any:
            raise OSError(28, "No space left on device")

        client_proc().segments.store = store  # type: ignore[method-assign]
        return bytes(2_000_000)

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint(explicit_response_port=True)
    def drop(self, port: Port[Any]) -> None:
        pass

    @endpoint
    def drop_kept(self) -> None:
        self.kept.clear()
        gc.collect()

    @endpoint
    def answer_kept(self, value: Any) -> list[str]:
        errors = []
        for port in self.kept:
            try:
                port.send(value)
            except RuntimeError as error:
                errors.append(str(error))
        return errors

    @endpoint(explicit_response_port=True)
    def answer_badly(self, port: Port[Any]) -> None:
        with contextlib.suppress(TypeError):
            port.send(threading.Lock())
        port.exception(KeyError("then this"))

    @endpoint(explicit_response_port=True)
    def pass_on(self, port: Port[Any], to: Any) -> None:
        to.take.call(port).get()

    @endpoint(explicit_response_port=True)
    def let_answer(self, port: Port[Any], other: Any) -> None:
        send(other.ping, (), {}, port)

    @endpoint
    def take(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint
    def owed(self) -> tuple[int, int, int]:
        proc = client_proc()
        cells = list(proc.cells.values())
        relays = sum(len(cell.ports) for cell in cells)
        return sum(len(cell.owed) for cell in cells), relays, len(proc.ports)


class AsyncWorker(Actor):
    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint
    async def ping(self) -> str:
        return "pong"

    @concurrent_endpoint(explicit_response_port=True)
    async def keep(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @concurrent_endpoint(explicit_response_port=True)
    async def drop(self, port: Port[Any]) -> None:
        pass

    @endpoint
    async def answer_kept(self, value: Any) -> None:
        for port in self.kept:
            port.send(value)

    @concurrent_endpoint
    async def forever(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def cancel_others(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def held(mesh: Any, method: str = "hold") -> tuple[Any, Port[None]]:
    """Return the future of a call that is running now, and the port that releases it."""
    ready, gates = Channel[Port[None]].open()
    future = getattr(mesh, method).call_one(ready)
    return future, gates.recv().get(timeout=WAIT)


# -- calls queued behind the actor's exit ----------------------------------------------------------


def test_calls_behind_one_that_stops_the_actor_are_all_refused(fresh: Fresh) -> None:
    """Even the first queued call, which the actor's thread already holds, is refused."""
    mesh = fresh(1).spawn("worker", Worker)
    last, go = held(mesh, "stop_after")
    queued = [mesh.ping.call_one() for _ in range(3)]
    go.send(None)
    assert last.get(timeout=WAIT) == "the last"
    for future in queued:
        with pytest.raises(SupervisionError, match="it is enough"):
            future.get(timeout=WAIT)


# -- answers that cannot be sent -------------------------------------------------------------------


def test_an_error_too_long_to_send_is_told_by_its_type(fresh: Fresh) -> None:
    with configured(codec_max_frame_length=1_000_000):
        mesh = fresh(1).spawn("worker", Worker)
        with pytest.raises(ActorError, match=r"ValueError .*codec_max_frame_length"):
            mesh.long_error.call_one(2_000_000).get(timeout=WAIT)
        assert mesh.ping.call_one().get(timeout=WAIT) == "pong"


def test_a_value_without_memory_to_send_it_is_an_error_of_the_call(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("worker", Worker)
    with pytest.raises(ActorError, match="No space left"):
        mesh.without_memory.call_one().get(timeout=WAIT)
    assert mesh.ping.call_one().get(timeout=WAIT) == "pong"


def test_what_cannot_be_sent_through_a_port_is_not_the_answer(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("worker", Worker)
    with pytest.raises(KeyError, match="then this"):
        mesh.answer_badly.call_one().get(timeout=WAIT)


# -- ports that are kept, dropped, passed on -------------------------------------------------------


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_port_that_is_dropped_unanswered_says_so(fresh: Fresh, kind: type[Any]) -> None:
    mesh = fresh(2).spawn("worker", kind)
    one = mesh.slice(gpus=0)
    calls = [one.drop.call_one(), one.drop.choose(), mesh.drop.call(), *mesh.drop.stream()]
    for future in calls:
        with pytest.raises(ActorError, match="dropped its response port") as caught:
            future.get(timeout=WAIT)
        assert isinstance(caught.value.exception, RuntimeError)
        assert "worker.drop" in str(caught.value)
    assert mesh.ping.call().get(timeout=WAIT).values() == ["pong", "pong"]


def test_a_port_that_is_kept_is_answered_later(fresh: Fresh) -> None:
    for kind in (Worker, AsyncWorker):
        mesh = fresh(1).spawn("worker", kind)
        future = mesh.keep.call_one()
        mesh.answer_kept.call_one("late").get(timeout=WAIT)
        assert future.get(timeout=WAIT) == "late"


def test_a_port_that_is_dropped_later_says_so_then(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("worker", Worker)
    future = mesh.keep.call_one()
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    mesh.drop_kept.call_one().get(timeout=WAIT)
    with pytest.raises(ActorError, match="dropped its response port"):
        future.get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_port_that_is_kept_is_refused_by_the_end(fresh: Fresh, end: str, kind: Any) -> None:
    procs = fresh(1)
    mesh = procs.spawn("worker", kind)
    pid = procs.spawn("inside", Inside).pid.call_one().get(timeout=WAIT)
    port, answers = Channel[Any].open()
    calls = [mesh.keep.call_one(), mesh.keep.call(), *mesh.keep.stream()]
    send(mesh.keep, (), {}, port)
    mesh.ping.call_one().get(timeout=WAIT)
    if end == "stop":
        mesh.stop().get(timeout=WAIT)
    else:
        kill(pid)
    for future in [*calls, answers.recv()]:
        with pytest.raises(SupervisionError):
            future.get(timeout=WAIT)


def test_a_channel_is_not_told_of_an_endpoint_that_has_nothing_to_say(fresh: Fresh) -> None:
    """Neither a dropped port nor the exit of the actor or its process sends it an error."""
    procs = fresh(1)
    mesh = procs.spawn("worker", Worker)
    port, answers = Channel[Any].open()
    for _ in range(3):
        send(mesh.drop, (), {}, port)
    send(mesh.ping, (), {}, port)
    assert answers.recv().get(timeout=WAIT) == "pong"
    assert mesh.owed.call_one().get(timeout=WAIT)[0] == 0
    procs.stop().get(timeout=WAIT)
    send(fresh(1).spawn("worker", Worker).ping, (), {}, port)
    assert answers.recv().get(timeout=WAIT) == "pong"


def test_a_port_that_was_passed_on_is_answered_once_by_whoever_is_first(fresh: Fresh) -> None:
    procs = fresh(3)
    caller = procs.slice(gpus=0).spawn("called", Worker)
    others = procs.slice(gpus=slice(1, 3)).spawn("others", Worker)
    before = caller.owed.call_one().get(timeout=WAIT)
    future = caller.pass_on.call_one(others)
    until(lambda: caller.owed.call_one().get(timeout=WAIT)[:2] == (1, 1))
    assert others.slice(gpus=0).answer_kept.call_one("first").get(timeout=WAIT) == []
    assert future.get(timeout=WAIT) == "first"
    assert others.slice(gpus=1).answer_kept.call_one("second").get(timeout=WAIT) == []
    again = others.slice(gpus=0).answer_kept.call_one("again").get(timeout=WAIT)
    assert "OncePortRef already used" in again[0]
    assert caller.owed.call_one().get(timeout=WAIT) == before


def test_a_port_that_was_passed_on_is_refused_by_the_end_of_the_actor_called(fresh: Fresh) -> None:
    procs = fresh(2)
    called = procs.slice(gpus=0).spawn("called", Worker)
    other = procs.slice(gpus=1).spawn("other", Worker)
    beside = procs.slice(gpus=0).spawn("beside", Worker)
    before = beside.owed.call_one().get(timeout=WAIT)
    future = called.pass_on.call_one(other)
    called.ping.call_one().get(timeout=WAIT)
    called.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        future.get(timeout=WAIT)
    assert beside.owed.call_one().get(timeout=WAIT) == before
    assert other.answer_kept.call_one("too late").get(timeout=WAIT) == []


def test_another_actor_may_be_called_to_answer(fresh: Fresh) -> None:
    """The answering actor's rank in its mesh differs from the rank that was called.

    The mesh call still receives all of its answers.
    """
    procs = fresh(2)
    mesh = procs.spawn("called", Worker)
    other = procs.slice(gpus=1).spawn("other", Worker)
    assert mesh.let_answer.call(other).get(timeout=WAIT).values() == ["pong", "pong"]


# -- answers that channels are owed ----------------------------------------------------------------


@pytest.mark.failures
def test_a_channel_is_owed_an_answer_of_every_rank_also_of_those_that_die(fresh: Fresh) -> None:
    procs = fresh(3)
    mesh = procs.spawn("worker", Worker)
    inside = procs.spawn("inside", Inside)
    pids = inside.pid.call().get(timeout=WAIT).values()
    ready, gates = Channel[Port[None]].open()
    port, answers = Channel[Any].open_ranked()
    send(mesh.hold, (ready,), {}, port)
    running = [gates.recv().get(timeout=WAIT) for _ in range(3)]
    send(mesh.ping, (), {}, port)
    kill(pids[1])
    for _ in range(2):
        with pytest.raises(SupervisionError, match="Killed"):
            answers.recv().get(timeout=WAIT)
    for go in running:
        go.send(None)
    found = sorted(answers.recv().get(timeout=WAIT) for _ in range(4))
    assert found == [(0, "held"), (0, "pong"), (2, "held"), (2, "pong")]
    send(mesh.slice(gpus=1).ping, (), {}, port)
    with pytest.raises(SupervisionError):
        answers.recv().get(timeout=WAIT)
    with pytest.raises(TimeoutError):
        answers.recv().get(timeout=0)


class Asks(Actor):
    @endpoint
    def ask(self, mesh: Any, ready: Any, port: Port[Any]) -> None:
        send(mesh.hold, (ready,), {}, port)


@pytest.mark.failures
def test_also_a_channel_of_another_process(fresh: Fresh) -> None:
    asker = fresh(1).spawn("asks", Asks)
    procs = fresh(1)
    pid = procs.spawn("inside", Inside).pid.call_one().get(timeout=WAIT)
    ready, gates = Channel[Port[None]].open()
    port, answers = Channel[Any].open()
    asker.ask.call_one(procs.spawn("worker", Worker), ready, port).get(timeout=WAIT)
    gates.recv().get(timeout=WAIT)
    kill(pid)
    with pytest.raises(SupervisionError, match="Killed"):
        answers.recv().get(timeout=WAIT)


def test_arguments_that_cannot_be_sent_leave_nothing_owed(fresh: Fresh) -> None:
    procs = fresh(1)
    mesh = procs.spawn("worker", Worker)
    mesh.ping.call_one().get(timeout=WAIT)
    port, answers = Channel[Any].open()
    for selection in ("all", "choose"):
        with pytest.raises(TypeError):
            send(mesh.take, (threading.Lock(),), {}, port, selection)  # type: ignore[arg-type]
    procs.stop().get(timeout=WAIT)
    port.send("nothing else")
    assert answers.recv().get(timeout=WAIT) == "nothing else"


# -- tasks -----------------------------------------------------------------------------------------


def test_tasks_that_user_code_cancels_are_answered(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("worker", AsyncWorker)
    calls = [mesh.forever.call_one() for _ in range(3)]
    mesh.cancel_others.call_one()
    for future in calls:
        with pytest.raises(ActorError, match="Cancelled"):
            future.get(timeout=WAIT)
