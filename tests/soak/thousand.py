"""`python tests/soak/thousand.py [N=1000]`: N procs, spawned, called and stopped; none is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

from footprint import excess, footprint
from report import count, end

from monarch.actor import Actor, endpoint, this_host

WAIT = 120


class Who(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def run(size: int) -> list[int]:
    """Spawn, call, stop; return the pids that answered."""
    procs = this_host().spawn_procs(per_host={"gpus": size})
    pids = procs.spawn("who", Who).pid.call().get(timeout=WAIT).values()
    procs.stop().get(timeout=WAIT)
    return list(pids)


def main() -> None:
    procs = count(1000)
    run(2)  # warm-up
    before = footprint()
    start = time.perf_counter()
    pids = set(run(procs))
    seconds = time.perf_counter() - start
    faults = [] if len(pids) == procs else [f"{len(pids)} answered"]
    faults += excess(before)
    faults += [f"process {pid} runs on" for pid in pids if Path(f"/proc/{pid}").exists()]
    end(f"{procs:,} procs spawned, called and stopped", seconds, faults)


if __name__ == "__main__":
    main()
