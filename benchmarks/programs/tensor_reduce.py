"""All-reduce of a distributed tensor on two processes, against bare gloo.

Bare gloo is two plain processes that call `torch.distributed.all_reduce`. The two take turns, 20
reductions at a time, so that a temporary load of the machine slows both.
"""

import os
import subprocess
import sys
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from timing import SECONDS, emit, rounds

import monarch
from monarch.actor import this_host

SIZES = {"12": 12, "1M": 1 << 18, "16M": 1 << 22}  # float32 elements
REPEATED = 20


class Bare:
    """Two processes that reduce on request."""

    def __init__(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "bare", str(rank), str(store.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]

    def reduce(self, size: int) -> float:
        """Return the seconds of each of `REPEATED` reductions of `size` elements."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{size}\n")
            process.stdin.flush()
        taken = []
        for process in self._processes:
            assert process.stdout is not None
            taken.append(float(process.stdout.readline()))
        return max(taken)

    def stop(self) -> None:
        for process in self._processes:
            process.communicate(timeout=30)


def bare(rank: int, port: int) -> None:
    """Reduce as often as the standard input says; print the seconds of one reduction."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    for line in sys.stdin:
        value = torch.zeros(int(line))
        dist.all_reduce(value)
        started = perf_counter()
        for _ in range(REPEATED):
            dist.all_reduce(value)
        print((perf_counter() - started) / REPEATED, flush=True)
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 2:
        bare(int(sys.argv[2]), int(sys.argv[3]))
        return
    others = Bare()
    procs = this_host().spawn_procs({"gpus": 2})
    figures: dict[str, list[float] | float] = {}
    with procs.activate():
        for name, size in SIZES.items():
            x = torch.zeros(size)
            ours, theirs = [], []
            for number in rounds(SECONDS, at_least=4):
                monarch.fetch_shard(x.reduce_("gpus")[0]).result()
                started = perf_counter()
                for _ in range(REPEATED):
                    x.reduce_("gpus")
                monarch.fetch_shard(x[0]).result()
                taken = (perf_counter() - started) / REPEATED
                alone = others.reduce(size)
                if number:
                    ours.append(taken)
                    theirs.append(alone)
            figures[f"ours_{name}"], figures[f"bare_{name}"] = ours, theirs
            figures[f"added_{name}"] = median(ours) - median(theirs)
    others.stop()
    emit(**figures)
    procs.stop().get()


if __name__ == "__main__":
    main()
