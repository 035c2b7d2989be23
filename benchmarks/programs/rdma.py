"""One-sided reads and writes of another process's memory, beside a plain copy of as many bytes.

The argument is SIZE:READERS:ROUTE[:WORDS], where SIZE is in bytes, or `many` for 32 reads of 4 kB,
in one action and as separate calls. The variable MONARCH_RDMA_ROUTES has to force the route (see
rows.py). This program only checks that the transfers use the route, if the engine can report it.
WORDS distinguish programs that differ in their environment only, such as the size of pages.

A single reader is the script itself: `read` and `write` are the times of whole transfers, future
included; `copy` is the lower bound, a copy within one process in the same run. Several readers are
processes that transfer for the same span of time: `together` is the time divided by the number of
all their transfers, and `alone` the same for one of them while the others are idle.
"""

from time import perf_counter

from timing import AT_LEAST, SECONDS, argument, emit, rounds, samples, unavailable

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

try:
    from monarch.rdma import explain
except ImportError:  # torchmonarch has one way only
    explain = None

COUNT, SMALL = 32, 4096
SPAN = SECONDS / 2
SPAN_OF_MANY = SECONDS / 4


class Owner(Actor):
    def __init__(self, size: int, pieces: int) -> None:
        self.memory = [bytearray(b"1") * size for _ in range(pieces)]

    @endpoint
    def give(self) -> list[RDMABuffer]:
        return [RDMABuffer(memoryview(memory)) for memory in self.memory]


class Reader(Actor):
    def __init__(self, buffer: RDMABuffer) -> None:
        self.buffer = buffer
        self.memory = memoryview(bytearray(b"2") * buffer.size())

    @endpoint
    def transfer(self, write: bool, span: float) -> int:
        """Transfer for `span` seconds, at least once; return the number of transfers."""
        act = self.buffer.write_from if write else self.buffer.read_into
        return sum(act(self.memory).get() is None for _ in rounds(span))


def make_sure(buffer: RDMABuffer, route: str) -> None:
    """End the program if transfers would not use this route."""
    if explain is not None:
        found = explain(buffer)
        if found.route != route:
            unavailable(next(way.reason for way in found.ways if way.kind == route))


def one(buffer: RDMABuffer) -> None:
    into = memoryview(bytearray(b"2") * buffer.size())
    source = memoryview(bytearray(b"3") * buffer.size())

    def copy() -> None:
        into[:] = source

    def read() -> None:
        buffer.read_into(into).get()

    def write() -> None:
        buffer.write_from(source).get()

    emit(
        copy=samples(copy, span=SPAN),
        read=samples(read, span=SPAN),
        write=samples(write, span=SPAN),
    )


def several(buffer: RDMABuffer, readers: int) -> None:
    procs = this_host().spawn_procs({"gpus": readers})
    everybody = procs.spawn("readers", Reader, buffer)
    nobody_else = everybody.slice(gpus=0)

    def cost(who: object, write: bool) -> list[float]:
        taken = []
        for turn in range(1 + AT_LEAST):
            span = SPAN_OF_MANY / AT_LEAST if turn else 0.0  # turn 0 only touches new memory
            started = perf_counter()
            transfers = sum(who.transfer.call(write, span).get().values())
            taken.append((perf_counter() - started) / transfers)
        return taken[1:]

    emit(
        read_alone=cost(nobody_else, False),
        read_together=cost(everybody, False),
        write_alone=cost(nobody_else, True),
        write_together=cost(everybody, True),
    )
    procs.stop().get()


def many(buffers: list[RDMABuffer]) -> None:
    into = [memoryview(bytearray(SMALL)) for _ in buffers]

    def action() -> None:
        batch = RDMAAction()
        for place, buffer in zip(into, buffers, strict=True):
            batch.read_remote(place, buffer)
        batch.submit().get()

    def calls() -> None:
        futures = [buffer.read_into(place) for place, buffer in zip(into, buffers, strict=True)]
        for future in futures:
            future.get()

    emit(action=samples(action, span=SPAN), calls=samples(calls, span=SPAN))


def main() -> None:
    size, readers, route, *_ = argument().split(":")
    if explain is not None:
        try:
            RDMABuffer(bytearray(8)).drop().get()
        except (RuntimeError, ValueError) as error:  # a route that this release does not have
            unavailable(str(error))
    procs = this_host().spawn_procs({"gpus": 1})
    shape = (SMALL, COUNT) if size == "many" else (int(size), 1)
    buffers = procs.spawn("owner", Owner, *shape).give.call_one().get()
    make_sure(buffers[0], route)
    if size == "many":
        many(buffers)
    elif readers == "1":
        one(buffers[0])
    else:
        several(buffers[0], int(readers))
    procs.stop().get()


if __name__ == "__main__":
    main()
