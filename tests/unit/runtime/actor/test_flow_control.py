"""The last flow-control message to every sender is true, however threads interleave."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.failure import Failure
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import STOPPED, Verdict
from monarch._engine.runtime.actor.cell import Cell, Identity
from monarch._engine.runtime.actor.flow_control import FlowControl
from monarch._engine.wire.frame import CALL, Frame

LIMIT, BYTES = 10, 100_000
WAIT = 60.0


class Sender:
    """A link: whether its sender must wait, and how many flow-control messages it got."""

    def __init__(self) -> None:
        self.waits = False
        self.told = 0


class Proc:
    def flow(self, link: Sender, dest: int, full: bool) -> None:
        assert dest == 7
        assert link.waits is not full, "told twice"
        link.waits = full
        link.told += 1


class Queue:
    """A bounded queue that uses a flow control as mailboxes and ports do."""

    def __init__(self) -> None:
        self.items: deque[int] = deque()
        with settings.configured(mailbox_limit=LIMIT, mailbox_bytes_limit=BYTES):
            self.flow_control = FlowControl(Proc(), 7, self.items.__len__)  # type: ignore[arg-type]

    def put(self, sender: Sender, size: int) -> None:
        self.items.append(size)
        self.flow_control.put(sender, size, len(self.items))

    def take(self) -> None:
        self.flow_control.take(self.items.popleft())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.sampled_from([0, 10, 1023, 1024, 5_000, 200_000])),
            st.just("take"),
            st.just("release"),
        ),
        max_size=120,
    )
)
def test_any_history(history: list[Any]) -> None:
    queue, senders = Queue(), [Sender() for _ in range(3)]
    for step in history:
        if step == "release":
            queue.flow_control.release()
            assert not any(sender.waits for sender in senders)
        elif step == "take":
            if queue.items:
                queue.take()
        else:
            queue.put(senders[step[0]], step[1])
            nbytes = sum(size for size in queue.items if size >= 1024)
            assert queue.flow_control.bytes == nbytes
            if len(queue.items) > LIMIT or nbytes > BYTES:
                assert senders[step[0]].waits
    while queue.items:
        queue.take()
    assert queue.flow_control.bytes == 0
    assert not any(sender.waits for sender in senders)


def test_senders_go_on_when_half_is_taken_and_not_before() -> None:
    queue, sender = Queue(), Sender()
    for _ in range(LIMIT + 1):
        queue.put(sender, 0)
    assert sender.waits
    while len(queue.items) > LIMIT // 2 + 1:
        queue.take()
    assert sender.waits
    queue.take()
    assert not sender.waits


def test_only_those_who_send_above_the_limit_wait() -> None:
    queue, early, late = Queue(), Sender(), Sender()
    for _ in range(LIMIT):
        queue.put(early, 0)
    queue.put(late, 0)
    assert (early.waits, late.waits) == (False, True)


def test_threads_leave_nobody_waiting() -> None:
    queue, senders, turns = Queue(), [Sender() for _ in range(4)], 5000
    available = threading.Semaphore(0)

    def produce(sender: Sender) -> None:
        for number in range(turns):
            queue.put(sender, 2000 if number % 3 else 0)
            available.release()

    def consume() -> None:
        for _ in range(turns * len(senders)):
            available.acquire()
            queue.take()

    threads = [threading.Thread(target=produce, args=(sender,)) for sender in senders]
    threads.append(threading.Thread(target=consume))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not queue.items
    assert queue.flow_control.bytes == 0
    assert not any(sender.waits for sender in senders)
    assert sum(sender.told for sender in senders) > 0


def test_telling_a_sender_may_put_again() -> None:
    """A finaliser that runs inside a send may send to the same queue."""
    queue, sender, other = Queue(), Sender(), Sender()

    class Reentrant(Proc):
        def flow(self, link: Sender, dest: int, full: bool) -> None:
            super().flow(link, dest, full)
            if full and link is sender:
                queue.put(other, 0)

    queue.flow_control._proc = Reentrant()  # type: ignore[assignment]
    for _ in range(LIMIT + 1):
        queue.put(sender, 0)
    assert (sender.waits, other.waits) == (True, True)
    while queue.items:
        queue.take()
    assert (sender.waits, other.waits) == (False, False)


@pytest.mark.parametrize("is_async", [False, True])
def test_nobody_waits_for_an_actor_that_ends_while_a_message_comes_in(is_async: bool) -> None:
    """The actor ends between the reads of its state and its queue; a sender would wait forever."""
    told = Proc()
    proc: Any = SimpleNamespace(
        reactor=SimpleNamespace(call_later=lambda *_: None, call_soon=lambda *_: None),
        flow=told.flow,
        refuse=lambda link, frame: None,
        graves={},
        cells={},
        ending={},
    )
    identity = Identity("name", "label", "<display>", lambda cell: None)  # type: ignore[arg-type,return-value]

    class EndsNow(FlowControl):
        def put(self, link: Any, size: int, depth: int) -> None:
            cell.settle(Failure("<display>", Verdict(STOPPED, "stopped")))
            super().put(link, size, depth)

    with settings.configured(mailbox_limit=LIMIT, mailbox_bytes_limit=BYTES):
        cell = Cell(proc, 7, 0, 2, identity, is_async=is_async)
        cell.flow_control = EndsNow(proc, 7, cell.depth)
    sender = Sender()
    cell.put(sender, Frame(CALL, 0, 7, 0, 0, 0, b"", bytes(2 * BYTES)))
    assert cell.depth() == 0
    assert not sender.waits
