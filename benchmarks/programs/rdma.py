"""One-sided reads and writes of another process's memory, by size, beside a plain copy.

The argument is a size in bytes, or `many` for 32 reads of 4 kB in one action and as separate calls.
`read` and `write` are whole transfers, future and all; `copy` is a copy of as many bytes between
two places of one process, in the same run: the floor.
"""

from timing import argument, emit, samples

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

COUNT, SMALL = 32, 4096


class Owner(Actor):
    def __init__(self, size: int) -> None:
        self.memory = [bytearray(b"1") * size for _ in range(COUNT if size == SMALL else 1)]

    @endpoint
    def give(self) -> list[RDMABuffer]:
        return [RDMABuffer(memoryview(memory)) for memory in self.memory]


def one(buffer: RDMABuffer, size: int) -> None:
    into = memoryview(bytearray(b"2") * size)
    source = memoryview(bytearray(b"3") * size)

    def copy() -> None:
        into[:] = source

    def read() -> None:
        buffer.read_into(into).get()

    def write() -> None:
        buffer.write_from(source).get()

    emit(copy=samples(copy), read=samples(read), write=samples(write))


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

    emit(action=samples(action), calls=samples(calls))


def main() -> None:
    size = SMALL if argument() == "many" else int(argument())
    procs = this_host().spawn_procs({"gpus": 1})
    buffers = procs.spawn("owner", Owner, size).give.call_one().get()
    if argument() == "many":
        many(buffers)
    else:
        one(buffers[0], size)
    procs.stop().get()


if __name__ == "__main__":
    main()
