"""Casts between real hosts: one payload per host, order, failures, and the cost for the caller."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest

from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    SupervisionError,
    Supervisor,
    current_rank,
    endpoint,
    send,
    this_host,
)
from monarch.config import configured
from tests.integration.hosts.test_hosts import WAIT, attached, faults, secret, start, until
from tests.stopped import stop_process

__all__ = ["faults", "secret", "start"]


class Member(Actor):
    def __init__(self) -> None:
        self.noted: list[int] = []

    @endpoint
    def note(self, number: int) -> int:
        self.noted.append(number)
        return number

    @endpoint
    def keep(self, number: int, data: bytes) -> None:
        self.noted.append(number)

    @endpoint
    def hold(self, gates: Port[Port[None]]) -> None:
        """Send a port, and handle no other message until something arrives there."""
        gate, opened = Channel[None].open()
        gates.send(gate)
        opened.recv().get(timeout=WAIT)

    @endpoint
    def noted_all(self) -> list[int]:
        return self.noted

    @endpoint
    def length(self, data: bytes) -> tuple[int, int]:
        return current_rank().rank, len(data)

    @endpoint
    def back(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def odd(self) -> int:
        rank = current_rank().rank
        if rank % 2:
            raise ValueError(rank)
        return rank

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[int]) -> None:
        port.send(current_rank().rank)

    @endpoint(explicit_response_port=True)
    def last(self, port: Port[int]) -> None:
        """Answer and exit on odd ranks; answer later on even ones."""
        if current_rank().rank % 2:
            port.send(current_rank().rank)
            os._exit(0)
        threading.Timer(0.3, port.send, (current_rank().rank,)).start()

    @endpoint
    def ask_all(self, others: Any) -> None:
        others.note.call(1).get()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def exit(self) -> None:
        os._exit(1)

    @endpoint
    def call(self, others: Any, count: int) -> int:
        """Send to the others in turns: to all of them by a cast, then to each one alone."""
        flat = others.flatten("rank")
        for number in range(0, 2 * count, 2):
            others.note.broadcast(number)
            for rank in range(len(flat)):
                flat.slice(rank=rank).note.broadcast(number + 1)
        found: int = len(others.noted_all.call().get(timeout=WAIT))
        return found


def test_all_that_a_call_can_be(start: Any) -> None:
    """Values, errors, partial results, streams, ports, big payloads both ways, and slices."""
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 3}).spawn("members", Member)
        everybody = list(range(6))
        assert members.note.call(1).get(timeout=WAIT).values() == [1] * 6
        assert members.answer.call().get(timeout=WAIT).values() == everybody
        with pytest.raises(Exception, match="ValueError"):
            members.odd.call().get(timeout=WAIT)
        partial = members.odd.options(on_failure="partial").call().get(timeout=WAIT)
        assert [value for _, value in partial.successes()] == [0, 2, 4]
        assert len(partial.failures()) == 3
        stream = [future.get(timeout=WAIT) for future in members.length.stream(b"abc")]
        assert sorted(stream) == [(rank, 3) for rank in everybody]
        port, receiver = Channel[int].open()
        send(members.note, (2,), {}, port)
        assert [receiver.recv().get(timeout=WAIT) for _ in everybody] == [2] * 6
        for size in (70_000, 5_000_000):
            data = os.urandom(size)
            sizes = members.length.call(data).get(timeout=WAIT).values()
            assert sizes == [(rank, size) for rank in everybody]
            backs = members.back.call(size).get(timeout=WAIT).values()
            assert [len(each) for each in backs] == [size] * 6
        some = members.slice(gpus=slice(1, 3))
        assert [rank for rank, _ in some.length.call(b"").get(timeout=WAIT).values()] == [
            0,
            1,
            2,
            3,
        ]
        gates, arrived = Channel[Any].open()
        members.hold.broadcast(gates)
        held = [arrived.recv().get(timeout=WAIT) for _ in everybody]
        with pytest.raises(TimeoutError):
            members.note.options(timeout=0.0).call(3).get(timeout=WAIT)
        for gate in held:
            gate.send(None)
        assert members.noted_all.call().get(timeout=WAIT).values() == [[1, 2, 3]] * 6
        members.initialized.get(timeout=WAIT)  # type: ignore[attr-defined]
        until(lambda: not client_proc().casting.open)


def test_a_call_to_all_leaves_by_no_link_to_a_proc(start: Any) -> None:
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 4}).spawn("members", Member)
        data = os.urandom(8 << 20)
        members.length.call(b"").get(timeout=WAIT)
        links = [link for link in client_proc().links.values() if link is not client_proc().local]
        numbers = [(link.marked, link.casts) for link in links]
        members.length.call(data).get(timeout=WAIT)
        # No link carried a message: each counted the next cast and got no mark.
        assert [(marked, casts + 1) for marked, casts in numbers] == [
            (link.marked, link.casts) for link in links
        ]


@pytest.mark.parametrize("fanout", [1, 16])
def test_whatever_the_path_the_order_is_kept(start: Any, fanout: int) -> None:
    with configured(max_cast_fanout=fanout), attached(*(start()[0] for _ in range(3))) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        chance = random.Random(fanout)
        flat = members.flatten("rank")
        expected: list[list[int]] = [[] for _ in range(6)]
        for number in range(300):
            ranks = chance.choice([range(6), range(6), range(2), range(1, 6), [number % 6]])
            some = flat.slice(rank=slice(ranks[0], ranks[-1] + 1))
            some.note.broadcast(number)
            for rank in ranks:
                expected[rank].append(number)
        assert members.noted_all.call().get(timeout=WAIT).values() == expected


def test_threads_of_one_process_each_keep_their_order(start: Any) -> None:
    """The threads share the links to the procs and the numbers of casts."""
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        flat = members.flatten("rank")
        each = [flat.slice(rank=rank) for rank in range(4)]

        def run(first: int) -> None:
            for number in range(first, first + 400):
                if number % 3:
                    members.note.broadcast(number)
                else:
                    for member in each:
                        member.note.broadcast(number)

        threads = [threading.Thread(target=run, args=(1000 * who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for noted in members.noted_all.call().get(timeout=WAIT).values():
            for who in range(4):
                theirs = [number for number in noted if number // 1000 == who]
                assert theirs == list(range(1000 * who, 1000 * who + 400))


def test_workers_call_each_other_in_turns(start: Any) -> None:
    """The hosts have no session with each other when the cast leaves."""
    with configured(max_cast_fanout=1), attached(*(start()[0] for _ in range(3))) as hosts:
        procs = hosts.spawn_procs({"gpus": 2})
        members = procs.spawn("members", Member)
        callers = procs.spawn("callers", Member)
        caller = callers.slice(hosts=1, gpus=1)
        assert caller.call.call_one(members, 20).get(timeout=WAIT) == 6
        noted = members.noted_all.call().get(timeout=WAIT).values()
        assert noted == [list(range(40))] * 6
        local = this_host().spawn_procs({"n": 2}).spawn("local", Member)
        assert caller.call.call_one(local, 5).get(timeout=WAIT) == 2
        assert local.noted_all.call().get(timeout=WAIT).values() == [list(range(10))] * 2
        local._proc_mesh.stop().get(timeout=WAIT)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fanout", [1, 16])
def test_a_host_in_the_middle_that_is_killed(start: Any, faults: list[Any], fanout: int) -> None:
    started = [start() for _ in range(4)]
    with (
        configured(max_cast_fanout=fanout),
        attached(*(address for address, _ in started)) as hosts,
    ):
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        members.note.call(0).get(timeout=WAIT)
        started[1][1].send_signal(signal.SIGKILL)
        partial = members.note.options(on_failure="partial")
        lost = until(lambda: partial.call(1).get(timeout=WAIT).failures())
        assert {point["hosts"] for point, _ in lost} == {1}
        assert all(isinstance(error, SupervisionError) for _, error in lost)
        after = partial.call(2).get(timeout=WAIT)
        assert [point["hosts"] for point, _ in after.successes()] == [0, 0, 2, 2, 3, 3]
        rest = members.slice(hosts=slice(2, 4))
        assert [notes[-1] for notes in rest.noted_all.call().get(timeout=WAIT).values()] == [2] * 4
        until(lambda: faults)


def test_a_receiver_that_does_not_read_holds_its_casters_back(start: Any) -> None:
    """When the receiver continues, no message is lost or stuck."""
    with attached(start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        stopped, _ = members.pid.call().get(timeout=WAIT).values()
        stop_process(stopped)
        data = bytes(50_000)
        count = 3000

        def run() -> None:
            for number in range(count):
                members.keep.broadcast(number, data)

        thread = threading.Thread(target=run)
        thread.start()
        agent = client_proc().agent
        assert agent is not None
        until(lambda: agent.paused)
        assert thread.is_alive()
        os.kill(stopped, signal.SIGCONT)
        thread.join(WAIT)
        noted = members.noted_all.call().get(timeout=WAIT).values()
        assert noted == [list(range(count))] * 2
        until(lambda: not agent.paused)


def test_last_words_count(start: Any) -> None:
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        assert members.last.call().get(timeout=WAIT).values() == [0, 1, 2, 3]


def test_one_that_casts_to_itself_is_a_deadlock(start: Any) -> None:
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        with pytest.raises(ActorError, match="DeadlockError"):
            members.slice(hosts=1, gpus=0).ask_all.call_one(members).get(timeout=WAIT)
        assert members.note.call(2).get(timeout=WAIT).values() == [2] * 4


def test_procs_that_end_and_come_back(start: Any, faults: list[Any]) -> None:
    with attached(start()[0], start()[0]) as hosts:
        supervisor = Supervisor()
        members = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "members", Member)
        before = members.pid.call().get(timeout=WAIT).values()
        with pytest.raises(SupervisionError):
            members.slice(hosts=1, gpus=0).exit.call_one().get(timeout=WAIT)
        supervisor.healthy.get(timeout=WAIT)
        after = members.pid.call().get(timeout=WAIT).values()
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
        assert members.note.call(5).get(timeout=WAIT).values() == [5] * 4
