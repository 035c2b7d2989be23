"""The cost of an operation on a distributed tensor as its mesh grows: 2, 8 and 32 processes.

The client's cost is the processor time of its process, all threads together: the processes of a
large mesh share the cores with the client, so its wall time would measure them.
"""

from time import perf_counter, process_time

import torch
from timing import SECONDS, emit, rounds

import monarch
from monarch.actor import this_host

MANY = 1000


def measured(count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of an add with `count` processes: of the client, and until executed."""
    procs = this_host().spawn_procs({"gpus": count})
    client, drained = [], []
    with procs.activate():
        x = torch.zeros(3, 4)
        monarch.fetch_shard(x).result()
        for _ in rounds(SECONDS, at_least=3):
            started, used = perf_counter(), process_time()
            for _ in range(MANY):
                last = x.add(1)
            client.append((process_time() - used) / MANY)
            monarch.fetch_shard(last).result()
            drained.append((perf_counter() - started) / MANY)
    procs.stop().get()
    return client[1:], drained[1:]


def main() -> None:
    figures = {}
    for count in (2, 8, 32):
        figures[f"client_{count}"], figures[f"drained_{count}"] = measured(count)
    emit(**figures)


if __name__ == "__main__":
    main()
