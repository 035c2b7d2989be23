"""`python tests/soak/round_trips.py [N=1000000]`: N calls that async actors of 8 procs await.

Most of the calls are the only one of their caller, so that event loops read the links themselves
(`runtime.actor.seat`); in between there are several at once, big ones, one-way messages, timers,
and calls of a sync actor in the same processes. A wake-up that is lost is a call that does not end.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from report import count, end

from monarch.actor import Actor, endpoint, this_host

WAIT = 1800
PROCS = 8


class Sync(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Async(Actor):
    def __init__(self) -> None:
        self.noted = [0] * PROCS

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def slow(self, value: Any) -> Any:
        await asyncio.sleep(0.0001)
        return value

    @endpoint
    async def note(self, sender: int) -> None:
        self.noted[sender] += 1

    @endpoint
    async def count(self, sender: int) -> int:
        return self.noted[sender]

    @endpoint
    async def drive(self, me: int, peers: Any, others: Any, calls: int) -> str:
        """Call the peers, `calls` times in all; return what went wrong."""
        chance = random.Random(me)
        notes = [0] * PROCS
        done = 0
        while done < calls:
            rank = chance.randrange(PROCS)
            peer, other = peers.slice(gpus=rank), others.slice(gpus=rank)
            for _ in range(chance.randrange(1, 200)):  # a conversation
                done += 1
                kind = chance.randrange(100)
                sent: Any = done
                if kind < 90:
                    got = await peer.echo.call_one(sent)
                elif kind < 92:
                    sent = [done, done + 1, done + 2]
                    got = await asyncio.gather(*(peer.echo.call_one(n) for n in sent))
                elif kind < 94:
                    got = await other.echo.call_one(sent)
                elif kind < 96:
                    got = await peer.slow.call_one(sent)
                elif kind < 97:
                    sent = bytes([done % 256]) * 200_000
                    got = await peer.echo.call_one(sent)
                else:
                    peer.note.broadcast(me)
                    notes[rank] += 1
                    sent, got = notes[rank], await peer.count.call_one(me)
                if got != sent:
                    return f"{me}: {str(got)[:50]} for {str(sent)[:50]} from {rank}"
        return ""


def main() -> None:
    each = -(-count(1_000_000) // PROCS)
    procs = this_host().spawn_procs(per_host={"gpus": PROCS})
    peers, others = procs.spawn("async", Async), procs.spawn("sync", Sync)
    # Drivers are actors of their own, so that they can be called while they wait.
    drivers = procs.spawn("drivers", Async)
    for mesh in (peers, others, drivers):
        mesh.initialized.get(timeout=WAIT)
    start = time.perf_counter()
    drives = [drivers.slice(gpus=me).drive.call_one(me, peers, others, each) for me in range(PROCS)]
    faults: list[str] = []
    for me, drive in enumerate(drives):
        try:
            faults += filter(None, [drive.get(timeout=WAIT)])
        except Exception as error:
            faults.append(f"{me}: {error}")
    seconds = time.perf_counter() - start
    end(f"{each * PROCS:,} calls of {PROCS} async actors by {PROCS} others", seconds, faults)


if __name__ == "__main__":
    main()
