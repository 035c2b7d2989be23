"""Bandwidth between two actors: memory goes to and fro, and each arrival is checked.

Two actors each register memory once. A *ping* is a write of the first actor into the memory of the
second, a *pong* a read back, and both happen without a message to the owner of the memory. The
first actor fills its memory with new random bytes for every round. Only a checksum of what arrived
(CRC-32) is compared by calls, outside of the measured time.

    python examples/rdma_ping_pong.py --megabytes 64 --rounds 5
    python examples/rdma_ping_pong.py --hosts 2     # from one host of this machine to another

Within a host the memory is shared, so a transfer is one copy; between hosts it goes through
sockets, or a network card if there is one.
"""

import argparse
import sys
import time
import zlib

from monarch.actor import Actor, HostMesh, endpoint, this_host
from monarch.job import ProcessJob
from monarch.rdma import RDMABuffer


class Player(Actor):
    """Owns memory, and reads and writes that of another."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)

    @endpoint
    def buffer(self) -> RDMABuffer:
        self.registered = RDMABuffer(memoryview(self.memory))
        return self.registered

    @endpoint
    def fill(self, seed: int) -> int:
        """Fill the memory with bytes that `seed` determines; return their checksum."""
        block = zlib.compress(str(seed).encode() * 64) * 7919
        for start in range(0, len(self.memory), len(block)):
            part = memoryview(self.memory)[start : start + len(block)]
            part[:] = block[: len(part)]
        return zlib.crc32(self.memory)

    @endpoint
    def checksum(self) -> int:
        return zlib.crc32(self.memory)

    @endpoint
    def ping(self, other: RDMABuffer) -> float:
        """Write this memory into the other's; return the seconds that it took."""
        began = time.perf_counter()
        other.write_from(memoryview(self.memory)).get()
        return time.perf_counter() - began

    @endpoint
    def pong(self, other: RDMABuffer) -> float:
        """Read the other's memory into this one, which is cleared first."""
        self.memory[:] = bytes(len(self.memory))
        began = time.perf_counter()
        other.read_into(memoryview(self.memory)).get()
        return time.perf_counter() - began


def play(hosts: HostMesh, size: int, rounds: int) -> int:
    """Play the rounds; return how many transfers arrived wrong."""
    procs = hosts.spawn_procs({"procs": 2 // len(hosts)})
    players = procs.spawn("players", Player, size).flatten("player")
    server, receiver = players.slice(player=0), players.slice(player=1)
    theirs = receiver.buffer.call_one().get()
    wrong = 0
    for number in range(1, rounds + 1):
        sent = server.fill.call_one(number).get()
        for name in ("ping", "pong"):
            seconds = getattr(server, name).call_one(theirs).get()
            arrived = (receiver if name == "ping" else server).checksum.call_one().get()
            verdict = "PASS" if arrived == sent else "FAIL"
            wrong += verdict == "FAIL"
            print(f"[{number}] {name} {seconds:.3f}s {size / seconds / 1e9:.2f} GB/s {verdict}")
    procs.stop().get()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure and check transfers of memory.")
    parser.add_argument("--megabytes", type=int, default=64, help="of memory (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="(default: 1)")
    args = parser.parse_args()
    if args.megabytes < 1 or args.rounds < 1:
        parser.error("--megabytes and --rounds must be at least 1")

    size = args.megabytes << 20
    if args.hosts == 1:
        wrong = play(this_host(), size, args.rounds)
    else:
        job = ProcessJob({"hosts": 2})
        try:
            wrong = play(job.state(cached_path=None).hosts, size, args.rounds)
        finally:
            job.kill()
    print(f"{2 * args.rounds - wrong} of {2 * args.rounds} transfers arrived whole.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
