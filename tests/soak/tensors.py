"""`python tests/soak/tensors.py [N=1000000]`: N operations on distributed tensors in flat memory.

The operations rebind a tensor, so each makes a value and releases one, and all are issued as fast
as the client can. Two processes execute them. After a tenth of the operations (the warm-up) and at
the end all work is awaited, and the resident memory of client and processes is read. Then the
processes wait for a file, and the client issues more than may be under way. It must be held back
until it makes no progress; then the file is made, and all that it issued is done.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from pathlib import Path

import torch
from footprint import MEMORY
from report import count, end

from monarch import get_active_mesh, inspect, remote
from monarch.actor import this_host

MANY = 50_000
"""Operations that are issued while the processes wait: more than may be unconfirmed."""
STILL = 2.0
"""Seconds after which a client without progress is held back."""


def resident(status: str) -> int:
    """Return the KiB of resident memory in a process's status."""
    return int(status.split("VmRSS:")[1].split(maxsplit=1)[0])


@remote
def own_resident() -> int:
    gc.collect()
    return resident(Path("/proc/self/status").read_text())


@remote(propagate="inspect")
def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def figures() -> list[int]:
    """Return the KiB of the client and of each process, after all work."""
    gc.collect()
    workers = own_resident.call().get(timeout=600)
    own = resident(Path("/proc/self/status").read_text())
    return [own, *(kib for _, kib in workers.items())]


def issued_ahead() -> int:
    """Return how many operations a client issues to processes that do nothing: at most `MANY`."""
    mesh = get_active_mesh()
    issued = 0
    total = 0.0

    def issue() -> None:
        nonlocal issued, total
        with mesh.activate():
            value = torch.zeros(1)
            for _ in range(MANY):
                value = value + 1
                issued += 1
            total = inspect(value).item()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "go on"
        wait_for(str(file))
        thread = threading.Thread(target=issue)
        thread.start()
        before = 0
        while thread.is_alive() and (issued > before or not issued):
            before = issued
            thread.join(STILL)
        ahead = issued
        file.touch()
        thread.join()
    if total != MANY:
        raise RuntimeError(f"{total} is the sum of {MANY} ones, of which {issued} were added")
    return ahead


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
        ahead = issued_ahead()
        if ahead == MANY:
            faults.append(f"{MANY} operations were issued while the processes waited")
    procs.stop().get(timeout=600)
    sizes = ", ".join(
        f"{name} {first >> 10} MiB then {last >> 10}"
        for name, first, last in zip(names, before, after, strict=True)
    )
    print(f"{sizes}; {ahead:,} operations ahead of processes that wait")
    end(f"{operations:,} operations on distributed tensors", seconds, faults)


if __name__ == "__main__":
    main()
