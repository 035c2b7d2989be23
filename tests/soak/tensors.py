"""`python tests/soak/tensors.py [N=1000000]`: N operations on distributed tensors in flat memory.

The operations rebind a tensor, so each makes a value and releases one, and all are issued as fast
as the client can. Two processes execute them. After a tenth of the operations (the warm-up) and at
the end all work is awaited, and the resident memory of client and processes is read. Then the
processes are made slow, and the client issues more than may be under way: it must be held back.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
from footprint import MEMORY
from report import count, end

from monarch import inspect, remote
from monarch.actor import this_host

SLOW = 50_000
"""Operations that are issued while the processes sleep: more than may be unconfirmed."""
ASLEEP = 2.0
"""Seconds that they sleep."""


def resident(status: str) -> int:
    """Return the KiB of resident memory in a process's status."""
    return int(status.split("VmRSS:")[1].split(maxsplit=1)[0])


@remote
def own_resident() -> int:
    gc.collect()
    return resident(Path("/proc/self/status").read_text())


@remote(propagate="inspect")
def sleep() -> None:
    time.sleep(ASLEEP)


def figures() -> list[int]:
    """Return the KiB of the client and of each process, after all work."""
    gc.collect()
    workers = own_resident.call().get(timeout=600)
    own = resident(Path("/proc/self/status").read_text())
    return [own, *(kib for _, kib in workers.items())]


def main() -> None:
    operations = count(1_000_000)
    procs = this_host().spawn_procs({"gpus": 2})
    faults = []
    with procs.activate():
        value = torch.zeros(1000)

        def issue(number: int) -> None:
            nonlocal value
            for _ in range(number):
                value = value + 1

        issue(operations // 10)
        before = figures()
        start = time.perf_counter()
        issue(operations - operations // 10)
        after = figures()
        seconds = time.perf_counter() - start
        found = inspect(value.sum()).item() / 1000
        if found != operations:
            faults.append(f"{found} is the sum of {operations} ones")
        names = ("client", "rank 0", "rank 1")
        for name, first, last in zip(names, before, after, strict=True):
            if last > first + MEMORY:
                faults.append(f"{name}: {first} KiB before, {last} now")
        sleep()
        issued = time.perf_counter()
        issue(SLOW)
        if time.perf_counter() - issued < ASLEEP / 2:
            faults.append(f"{SLOW} operations were issued while the processes slept")
    procs.stop().get(timeout=600)
    sizes = ", ".join(
        f"{name} {first >> 10} MiB then {last >> 10}"
        for name, first, last in zip(names, before, after, strict=True)
    )
    print(sizes)
    end(f"{operations:,} operations on distributed tensors", seconds, faults)


if __name__ == "__main__":
    main()
