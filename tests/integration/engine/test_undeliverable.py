"""Undeliverable one-way messages: the sender may be notified, and never fails because of them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.proc import Proc
from monarch.actor import (
    Actor,
    Channel,
    Port,
    SupervisionError,
    context,
    endpoint,
    send,
)

from .conftest import WAIT, Inside, kill, until

Fresh = Callable[..., Any]


class Receiver(Actor):
    @endpoint
    def take(self, value: Any = None) -> Any:
        return value

    @endpoint
    def die(self) -> None:
        raise SystemExit("died on request")

    @endpoint
    def hold(self, ready: Port[Port[None]]) -> None:
        go, gone = Channel[None].open()
        ready.send(go)
        gone.recv().get()
        context().actor_instance.stop("enough")

    @endpoint
    def open(self) -> Port[Any]:
        port, self.receiver = Channel[Any].open()
        return port


class Learner(Actor):
    """An actor that calls a dead mesh once, so that its process learns of the exit.

    Messages in flight to a process that dies are lost; those sent later are returned.
    """

    @endpoint
    def meet(self, mesh: Any) -> bool:
        try:
            mesh.take.call().get(timeout=WAIT)
        except SupervisionError:
            return True
        return False


class AsyncLearner(Actor):
    @endpoint
    async def meet(self, mesh: Any) -> bool:
        try:
            await mesh.take.call()
        except SupervisionError:
            return True
        return False


class Sender(Learner):
    """An actor that reports each returned message to `port`.

    It handles the messages to receivers named "wanted".
    """

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @endpoint
    def broadcast(self, mesh: Any, count: int = 1) -> None:
        for number in range(count):
            mesh.take.broadcast(number)

    @endpoint
    def send(self, mesh: Any, selection: str) -> None:
        send(mesh.take, (), {}, None, selection)  # type: ignore[arg-type]

    @endpoint
    def send_to(self, port: Port[Any], value: Any, wanted: bool = True) -> None:
        port.return_undeliverable = wanted
        port.send(value)

    @endpoint
    def call(self, mesh: Any) -> int:
        failures = 0
        futures = [mesh.take.call(), mesh.take.choose(), *mesh.take.stream()]
        for future in futures:
            try:
                future.get()
            except SupervisionError:
                failures += 1
        return failures

    @endpoint
    def dead_letters(self) -> int:
        return client_proc().dead_letters.count

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.port.send((message.sender(), message.dest(), message.error_msg()))
        if "raise" in message.dest():
            raise ValueError("the handler itself")
        return "wanted" in message.dest()


class AsyncSender(AsyncLearner):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @endpoint
    async def broadcast(self, mesh: Any, count: int = 1) -> None:
        for number in range(count):
            mesh.take.broadcast(number)

    @endpoint
    async def dead_letters(self) -> int:
        return client_proc().dead_letters.count

    async def _handle_undeliverable_message(self, message: Any) -> bool:
        context().actor_instance.proc.extent  # noqa: B018 - the context is this actor's
        self.port.send((message.sender(), message.dest(), message.error_msg()))
        return "wanted" in message.dest()


class HalfAsyncSender(AsyncSender):
    def _handle_undeliverable_message(self, message: Any) -> bool:  # type: ignore[override]
        self.port.send((message.sender(), message.dest(), message.error_msg()))
        return True


def dead(procs: Any, name: str, how: str) -> Any:
    """Return a mesh of one dead actor; its process survives unless `how` is "killed"."""
    mesh = procs.spawn(name, Receiver)
    if how == "stopped":
        mesh.stop().get(timeout=WAIT)
    elif how == "failed":
        with pytest.raises(SupervisionError):
            mesh.die.call_one().get(timeout=WAIT)
    else:
        kill(procs.spawn("inside", Inside).pid.call_one().get(timeout=WAIT))
        with pytest.raises(SupervisionError):
            until(lambda: mesh.take.call_one().get(timeout=WAIT))
    return mesh


WHY = {"stopped": "stopped", "failed": "died on request", "killed": "Killed"}


@pytest.mark.failures
@pytest.mark.parametrize("how", WHY)
@pytest.mark.parametrize("kind", [Sender, AsyncSender, HalfAsyncSender])
def test_the_sender_is_asked_about_each_message(fresh: Fresh, kind: Any, how: str) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", kind, port)
    mesh = dead(fresh(1), "wanted", how)
    assert sender.meet.call_one(mesh).get(timeout=WAIT)
    sender.broadcast.call_one(mesh, 3).get(timeout=WAIT)
    for _ in range(3):
        who, whom, why = returned.recv().get(timeout=WAIT)
        assert "Sender sender" in who
        assert "Receiver wanted" in whom
        assert WHY[how] in why
    assert sender.dead_letters.call_one().get(timeout=WAIT) == 0
    with pytest.raises(TimeoutError):
        returned.recv().get(timeout=0)


@pytest.mark.failures
@pytest.mark.parametrize("selection", ["all", "choose"])
def test_a_send_without_a_port_is_one_way_too(fresh: Fresh, selection: str) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    for how in ("stopped", "killed"):
        mesh = dead(fresh(1), "wanted", how)
        assert sender.meet.call_one(mesh).get(timeout=WAIT)
        sender.send.call_one(mesh, selection).get(timeout=WAIT)
        assert WHY[how] in returned.recv().get(timeout=WAIT)[2]


def test_what_waited_when_the_receiver_ended_comes_back(fresh: Fresh) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    mesh = fresh(1).spawn("wanted", Receiver)
    ready, gates = Channel[Port[None]].open()
    mesh.hold.broadcast(ready)
    go = gates.recv().get(timeout=WAIT)
    sender.broadcast.call_one(mesh, 5).get(timeout=WAIT)
    go.send(None)
    for _ in range(5):
        assert "enough" in returned.recv().get(timeout=WAIT)[2]


@pytest.mark.failures
def test_only_the_ranks_that_are_gone(fresh: Fresh) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    procs = fresh(3)
    mesh = procs.spawn("wanted", Receiver)
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=1).die.call_one().get(timeout=WAIT)
    sender.broadcast.call_one(mesh).get(timeout=WAIT)
    assert "{'gpus': 1/3}" in returned.recv().get(timeout=WAIT)[1]
    assert mesh.slice(gpus=0).take.call_one(1).get(timeout=WAIT) == 1
    with pytest.raises(TimeoutError):
        returned.recv().get(timeout=0)


@pytest.mark.failures
def test_a_call_fails_its_future_and_nothing_else(fresh: Fresh) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    for how in WHY:
        mesh = dead(fresh(1), "wanted", how)
        assert sender.call.call_one(mesh).get(timeout=WAIT) == 3
    with pytest.raises(TimeoutError):
        returned.recv().get(timeout=0)
    assert sender.dead_letters.call_one().get(timeout=WAIT) == 0


@pytest.mark.failures
def test_a_port_of_a_process_that_is_gone(fresh: Fresh) -> None:
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    procs = fresh(1)
    target = procs.spawn("opens", Receiver).open.call_one().get(timeout=WAIT)
    mesh = dead(procs, "beside", "killed")
    assert sender.meet.call_one(mesh).get(timeout=WAIT)
    sender.send_to.call_one(target, 1).get(timeout=WAIT)
    _, whom, why = returned.recv().get(timeout=WAIT)
    assert "port" in whom
    assert "Killed" in why
    before = sender.dead_letters.call_one().get(timeout=WAIT)
    sender.send_to.call_one(target, 2, wanted=False).get(timeout=WAIT)
    assert sender.dead_letters.call_one().get(timeout=WAIT) == before
    with pytest.raises(TimeoutError):
        returned.recv().get(timeout=0)


@pytest.mark.parametrize("name", ["unloved", "raise"])
def test_a_message_that_is_not_handled_fails_nobody(
    fresh: Fresh, faults: queue.Queue[Any], name: str
) -> None:
    """The message counts as a dead letter in the sender's process."""
    port, returned = Channel[Any].open()
    sender = fresh(1).spawn("sender", Sender, port)
    mesh = dead(fresh(1), name, "stopped")
    sender.broadcast.call_one(mesh, 3).get(timeout=WAIT)
    for _ in range(3):
        returned.recv().get(timeout=WAIT)
    assert until(lambda: sender.dead_letters.call_one().get(timeout=WAIT) == 3)
    assert faults.empty()


def test_a_sender_without_a_handler_goes_on(
    fresh: Fresh, proc: Proc, faults: queue.Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The script and most actors have no handler for undeliverable messages.

    Repeated losses are logged once.
    """
    procs = fresh(1)
    mesh = dead(procs, "gone", "killed")
    for _ in ("gone", "inside"):
        faults.get(timeout=WAIT)
    before = proc.dead_letters.count
    with caplog.at_level(logging.INFO, "monarch"):
        for _ in range(5):
            mesh.take.broadcast()
        until(lambda: proc.dead_letters.count >= before + 5)
    (record,) = [r for r in caplog.records if "without a waiting caller" in r.getMessage()]
    assert "Receiver gone" in record.getMessage()
    assert "Killed" in record.getMessage()
    assert faults.empty()


def test_dead_letters_of_a_stopped_actor_are_nothing_to_warn_of(
    fresh: Fresh, capfd: pytest.CaptureFixture[str]
) -> None:
    """These messages count as dead letters in the actor's process, which logs no warning."""
    procs = fresh(1)
    mesh = dead(procs, "gone", "stopped")
    beside = procs.spawn("beside", Letters)
    for _ in range(5):
        mesh.take.broadcast()
    assert beside.count.call_one().get(timeout=WAIT) == 5
    procs.stop().get(timeout=WAIT)
    assert "without a waiting caller" not in "".join(capfd.readouterr())


class Letters(Actor):
    @endpoint
    def count(self) -> int:
        return client_proc().dead_letters.count


def test_a_sender_that_ended_is_not_asked(fresh: Fresh) -> None:
    port, returned = Channel[Any].open()
    procs = fresh(1)
    sender = procs.spawn("sender", Sender, port)
    inside = procs.spawn("inside", Inside)
    sender.dead_letters.call_one().get(timeout=WAIT)  # wait for the constructor
    before = inside.tables.call_one().get(timeout=WAIT)["ports"]
    other = procs.spawn("other", Sender, port)
    other.stop().get(timeout=WAIT)
    assert inside.tables.call_one().get(timeout=WAIT)["ports"] == before
    mesh = dead(fresh(1), "wanted", "stopped")
    sender.broadcast.call_one(mesh).get(timeout=WAIT)
    assert "Sender sender" in returned.recv().get(timeout=WAIT)[0]
