"""`python tests/soak/registrations.py [N=1000]`: N times register and drop 64 MB, without a leak.

There are two series. In the first the buffer is dropped explicitly, after another process has read
it. In the second the buffer has the option to be released with its last handle, and the handles are
deleted.
"""

from __future__ import annotations

import gc
import time

from footprint import excess, footprint
from report import count, end

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

WAIT = 60
WARM_UP = 5
SIZE = 64 << 20


class Reader(Actor):
    def __init__(self) -> None:
        self.memory = bytearray(SIZE)

    @endpoint
    def ends(self, buffer: RDMABuffer) -> bytes:
        """Read the whole buffer; return its first and its last byte."""
        buffer.read_into(self.memory, timeout=WAIT).get()
        return bytes((self.memory[0], self.memory[-1]))


def main() -> None:
    cycles = count(1000)
    reader = this_host().spawn_procs().spawn("reader", Reader)

    def memory(number: int) -> bytearray:
        return bytearray(bytes((number % 251,))) * SIZE

    def dropped(number: int) -> bool:
        with RDMABuffer(memory(number)) as buffer:
            found: bytes = reader.ends.call_one(buffer).get(timeout=WAIT)
        return found == bytes((number % 251,)) * 2

    def forgotten(number: int) -> None:
        RDMABuffer(memory(number), release="last-handle", grace=0)

    for number in range(WARM_UP):
        dropped(number)
        forgotten(number)
    gc.collect()
    before = footprint()
    start = time.perf_counter()
    wrong = sum(not dropped(number) for number in range(cycles))
    faults = [f"{wrong} were read wrongly"] if wrong else []
    faults += [f"dropped: {fault}" for fault in excess(before)]
    for number in range(cycles):
        forgotten(number)
    faults += [f"forgotten: {fault}" for fault in excess(before)]
    seconds = time.perf_counter() - start
    end(f"{cycles:,} registrations of 64 MB dropped, and as many forgotten", seconds, faults)


if __name__ == "__main__":
    main()
