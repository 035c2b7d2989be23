"""Channels, ports, receivers and accumulators."""

import asyncio
import gc
import operator
import threading

import cloudpickle
import pytest

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    Port,
    PortReceiver,
    concurrent_endpoint,
    current_rank,
    endpoint,
    send,
)


class Sender(Actor):
    @endpoint
    def send(self, port, values):
        for value in values:
            port.send(value)

    @endpoint
    def send_rank(self, port):
        port.send(current_rank().rank)

    @endpoint
    def send_exception(self, port, error):
        port.exception(error)

    @endpoint
    def give_back(self, port):
        return port

    @endpoint
    def open(self):
        port, self.receiver = Channel.open()
        return port

    @endpoint
    def receive(self):
        return self.receiver.recv().get()

    @endpoint
    def from_thread(self, port, n):
        def work():
            for i in range(n):
                port.send(i)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    @endpoint
    def value(self, x):
        return x

    @endpoint
    def rank(self):
        return current_rank().rank

    @endpoint
    def fail(self):
        raise ValueError("no value")


class AsyncReceiver(Actor):
    @endpoint
    async def open(self):
        port, self.receiver = Channel.open()
        return port

    @endpoint
    async def receive(self, n):
        return [await self.receiver.recv() for _ in range(n)]


# --- channels ------------------------------------------------------------------------------------


def test_a_channel_is_a_port_and_a_receiver():
    port, receiver = Channel.open()
    assert isinstance(port, Port)
    assert isinstance(receiver, PortReceiver)
    assert Channel[int].open() is not None
    future = receiver.recv()
    assert isinstance(future, Future)
    assert port.send(1) is None
    assert future.get() == 1


def test_values_arrive_in_order():
    port, receiver = Channel.open()
    for i in range(100):
        port.send(i)
    assert [receiver.recv().get() for _ in range(100)] == list(range(100))


def test_receiving_before_sending():
    port, receiver = Channel.open()
    first, second = receiver.recv(), receiver.recv()
    with pytest.raises(TimeoutError):
        first.get(timeout=0.01)
    port.send("a")
    port.send("b")
    assert first.get() == "a"
    assert second.get() == "b"


def test_recv_can_be_awaited():
    port, receiver = Channel.open()

    async def main():
        waiting = asyncio.ensure_future(_await(receiver.recv()))
        await asyncio.sleep(0)
        port.send(1)
        port.send(2)
        return await waiting, await receiver.recv()

    assert asyncio.run(main()) == (1, 2)


async def _await(future):
    return await future


def test_a_timed_out_recv_keeps_its_place():
    port, receiver = Channel.open()
    future = receiver.recv()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    port.send("kept")
    assert future.get() == "kept"


def test_channels_are_independent():
    first, first_receiver = Channel.open()
    second, second_receiver = Channel.open()
    second.send(2)
    first.send(1)
    assert first_receiver.recv().get() == 1
    assert second_receiver.recv().get() == 2


def test_a_received_value_is_a_copy():
    port, receiver = Channel.open()
    mine = [1]
    port.send(mine)
    mine.append(2)
    got = receiver.recv().get()
    assert got == [1]
    assert got is not mine


def test_an_exception_through_a_port_is_itself(pair):
    port, receiver = Channel.open()
    port.exception(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        receiver.recv().get()
    pair.slice(gpus=0).spawn("s", Sender).send_exception.call_one(port, OSError("theirs")).get()
    with pytest.raises(OSError, match="theirs"):
        receiver.recv().get()
    port.send("and on")
    assert receiver.recv().get() == "and on"


def test_what_cannot_be_pickled_cannot_be_sent():
    port, receiver = Channel.open()
    with pytest.raises(TypeError, match="pickle"):
        port.send(threading.Lock())
    port.send("next")
    assert receiver.recv().get() == "next"


# --- once channels -------------------------------------------------------------------------------


def test_a_once_channel_takes_one_message():
    port, receiver = Channel.open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match="OncePortRef already used"):
        port.send(2)
    assert receiver.recv().get() == 1
    with pytest.raises(ValueError, match="OncePort is already used"):
        receiver.recv().get()


def test_a_once_channel_in_a_message(pair):
    port, receiver = Channel.open(once=True)
    pair.slice(gpus=0).spawn("s", Sender).send.call_one(port, ["once"]).get()
    assert receiver.recv().get() == "once"


# --- ports travel --------------------------------------------------------------------------------


def test_ports_in_messages(pair):
    mesh = pair.spawn("senders", Sender)
    port, receiver = Channel.open()
    mesh.send_rank.call(port).get()
    assert sorted(receiver.recv().get() for _ in range(2)) == [0, 1]
    mesh.slice(gpus=0).send.call_one(port, list(range(50))).get()
    assert [receiver.recv().get() for _ in range(50)] == list(range(50))


def test_ports_in_results(pair):
    mesh = pair.slice(gpus=0).spawn("senders", Sender)
    port, receiver = Channel.open()
    back = mesh.give_back.call_one({"port": port}).get()["port"]
    back.send("round trip")
    assert receiver.recv().get() == "round trip"


def test_an_actor_opens_a_channel_for_others(pair):
    first, second = (pair.slice(gpus=i).spawn("s", Sender) for i in range(2))
    port = first.open.call_one().get()
    port.send("from the client")
    assert first.receive.call_one().get() == "from the client"
    second.send.call_one(port, ["from a peer"]).get()
    assert first.receive.call_one().get() == "from a peer"


def test_an_async_actor_receives(pair):
    receiver = pair.slice(gpus=0).spawn("receiver", AsyncReceiver)
    port = receiver.open.call_one().get()
    waiting = receiver.receive.call_one(3)
    for i in range(3):
        port.send(i)
    assert waiting.get() == [0, 1, 2]


def test_any_thread_of_an_actor_may_send(pair):
    port, receiver = Channel.open()
    pair.slice(gpus=0).spawn("s", Sender).from_thread.call_one(port, 10).get()
    assert [receiver.recv().get() for _ in range(10)] == list(range(10))


def test_any_thread_of_the_client_may_send():
    port, receiver = Channel.open()
    threads = [
        threading.Thread(target=lambda k=k: [port.send((k, i)) for i in range(20)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [receiver.recv().get() for _ in range(80)]
    for k in range(4):
        assert [i for who, i in got if who == k] == list(range(20))


def test_ports_pickle_and_receivers_do_not():
    port, receiver = Channel.open()
    cloudpickle.loads(cloudpickle.dumps(port)).send("copied port")
    assert receiver.recv().get() == "copied port"
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(receiver)


def test_sending_to_a_dropped_receiver_is_silent(faults):
    port, receiver = Channel.open()
    del receiver
    gc.collect()
    port.send("nobody listens")
    other, other_receiver = Channel.open()
    other.send("barrier")
    assert other_receiver.recv().get() == "barrier"
    assert faults.drain() == []


def test_return_undeliverable_is_a_switch():
    port, _receiver = Channel.open()
    assert port.return_undeliverable is True
    port.return_undeliverable = False
    assert port.return_undeliverable is False


def test_port_attributes():
    port, _receiver = Channel.open()
    assert type(port).__module__ == "monarch._src.actor.actor_mesh"
    assert port._port_ref is not None


# --- ranked channels -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["open_ranked", "ranked"])
def test_a_ranked_receiver_names_the_sender(grid, how):
    mesh = grid.spawn("senders", Sender)
    if how == "ranked":
        port, plain = Channel.open()
        receiver = plain.ranked()
    else:
        port, receiver = Channel.open_ranked()
    send(mesh.rank, (), {}, port)
    got = [receiver.recv().get() for _ in range(4)]
    assert sorted(got) == [(i, i) for i in range(4)]
    send(mesh.slice(rows=1).rank, (), {}, port)
    assert sorted(receiver.recv().get() for _ in range(2)) == [(0, 0), (1, 1)]


def test_a_ranked_receiver_wants_a_rank():
    port, receiver = Channel.open_ranked()
    port.send("no rank")
    with pytest.raises(ValueError, match="without a rank"):
        receiver.recv().get()


# --- accumulators --------------------------------------------------------------------------------


def test_an_accumulator_folds_every_result(grid):
    mesh = grid.spawn("senders", Sender)
    total = Accumulator(mesh.rank, 100, operator.add)
    future = total.accumulate()
    assert isinstance(future, Future)
    assert future.get() == 106
    assert total.accumulate().get() == 106
    joined = Accumulator(mesh.value, [], lambda acc, x: [*acc, x])
    assert joined.accumulate("v").get() == ["v"] * 4
    assert joined.accumulate(x="k").get() == ["k"] * 4


def test_an_accumulator_awaited(pair):
    mesh = pair.spawn("senders", Sender)
    assert asyncio.run(_await(Accumulator(mesh.rank, 0, operator.add).accumulate())) == 1


def test_an_accumulator_folds_where_it_is_observed(pair):
    mesh = pair.spawn("senders", Sender)
    seen = set()

    def combine(acc, value):
        seen.add(threading.current_thread())
        return acc + value

    assert Accumulator(mesh.rank, 0, combine).accumulate().get() == 1
    assert len(seen) == 1


def test_errors_of_an_accumulator(pair):
    mesh = pair.spawn("senders", Sender)
    with pytest.raises(ActorError, match="no value"):
        Accumulator(mesh.fail, 0, operator.add).accumulate().get()
    with pytest.raises(ZeroDivisionError):
        Accumulator(mesh.value, 1, operator.truediv).accumulate(0).get()


# --- a channel as a queue between actors ---------------------------------------------------------


class Producer(Actor):
    @endpoint
    def produce(self, port, n):
        for i in range(n):
            port.send((current_rank().rank, i))
        port.send((current_rank().rank, None))


class Consumer(Actor):
    @endpoint
    async def open(self):
        port, self.receiver = Channel.open()
        return port

    @concurrent_endpoint
    async def consume(self, producers):
        seen, finished = {}, 0
        while finished < producers:
            who, item = await self.receiver.recv()
            if item is None:
                finished += 1
            else:
                seen.setdefault(who, []).append(item)
        return seen


def test_producers_and_a_consumer(pair):
    consumer = pair.slice(gpus=0).spawn("consumer", Consumer)
    port = consumer.open.call_one().get()
    consumed = consumer.consume.call_one(2)
    pair.spawn("producers", Producer).produce.broadcast(port, 30)
    assert consumed.get() == {0: list(range(30)), 1: list(range(30))}
