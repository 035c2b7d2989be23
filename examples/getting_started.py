"""A tour in one program: processes, actors, calls, slices, futures, errors, and shared memory.

Each step prints what it shows. The pieces are explained in docs/getting_started.md; here they are
together, as a program that can be changed.

    python examples/getting_started.py
    python examples/getting_started.py --hosts 2 --procs 3    # on two hosts of this machine
"""

import argparse
import asyncio
import sys
from array import array

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    HostMesh,
    Port,
    ProcMesh,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from monarch.job import ProcessJob
from monarch.rdma import RDMABuffer

STEPS = 8


class Counter(Actor):
    """Keeps a number of its own."""

    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, step: int) -> int:
        self.value += step
        return self.value

    @endpoint
    def place(self) -> str:
        rank, size = current_rank(), current_size()
        return ", ".join(f"{name} {rank[name]} of {size[name]}" for name in size)

    @endpoint
    def divide(self, by: int) -> float:
        return self.value / by

    @endpoint
    def report(self, port: Port[int]) -> None:
        """Answer by a port that somebody else reads, now or later."""
        port.send(self.value)


class Weights(Actor):
    """Owns memory that others read without a call."""

    def __init__(self) -> None:
        self.values = array("d", range(STEPS))

    @endpoint
    def buffer(self) -> RDMABuffer:
        return RDMABuffer(memoryview(self.values).cast("B"))

    @endpoint
    def double(self) -> None:
        for place, value in enumerate(self.values):
            self.values[place] = 2 * value


class Reader(Actor):
    """Reads the weights of another actor."""

    @endpoint
    def total(self, weights: RDMABuffer) -> float:
        copy = array("d", bytes(weights.size()))
        weights.read_into(memoryview(copy).cast("B")).get()
        return sum(copy)


def calls(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter, 10)
    print("1. Each process has an actor:", *counters.place.call().get().values(), sep="\n   ")

    values = counters.add.call(1).get()
    assert set(values.values()) == {11}
    print(f"2. A call goes to all of them, and the answers have their shape: {values.sizes}")

    last = counters.flatten("rank").slice(rank=len(counters) - 1)
    assert last.add.call_one(5).get() == 16
    print("3. A slice is a mesh, too; the last counter is now 16")

    total = Accumulator(counters.add, 0, lambda sum_, value: sum_ + value)
    expected = 11 * len(counters) + 5
    assert total.accumulate(0).get() == expected
    print(f"4. Answers can be folded as they come: their sum is {expected}")

    port, receiver = Channel[int].open()
    counters.report.broadcast(port)
    seen = sorted(receiver.recv().get() for _ in range(len(counters)))
    assert sum(seen) == expected
    print(f"5. broadcast does not wait; the actors answer by a port: {seen}")

    try:
        counters.divide.call(0).get()
    except ActorError as error:
        halves = counters.divide.call(2).get().values()
        print(f"6. An error of an actor is raised here ({error.exception}); it lives on: {halves}")


async def together(procs: ProcMesh) -> None:
    counters = procs.spawn("others", Counter, 0)
    first, second = await asyncio.gather(counters.add.call(1), counters.add.call(2))
    assert set(first.values()) == {1}
    assert set(second.values()) == {3}
    print("7. Futures can be awaited, several at once; each actor still serves them in order")


def memory(procs: ProcMesh) -> None:
    owner = procs.flatten("rank").slice(rank=0).spawn("weights", Weights)
    readers = procs.spawn("readers", Reader)
    buffer = owner.buffer.call_one().get()
    before = set(readers.total.call(buffer).get().values())
    owner.double.call_one().get()
    after = set(readers.total.call(buffer).get().values())
    assert (before, after) == ({28.0}, {56.0})
    print("8. Readers copy an actor's memory without calling it: the sum was 28, then 56")


def run(hosts: HostMesh, count: int) -> None:
    procs = hosts.spawn_procs({"procs": count})
    calls(procs)
    asyncio.run(together(procs))
    memory(procs)
    procs.stop().get()


def main() -> int:
    parser = argparse.ArgumentParser(description="A tour of actors and meshes.")
    parser.add_argument("--hosts", type=int, default=1, help="of this machine (default: 1)")
    parser.add_argument("--procs", type=int, default=2, help="on each host (default: 2)")
    args = parser.parse_args()
    if args.hosts < 1 or args.procs < 1:
        parser.error("--hosts and --procs must be at least 1")

    if args.hosts == 1:
        run(this_host(), args.procs)
    else:
        job = ProcessJob({"hosts": args.hosts})
        try:
            run(job.state(cached_path=None).hosts, args.procs)
        finally:
            job.kill()
    print("The tour is complete.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
