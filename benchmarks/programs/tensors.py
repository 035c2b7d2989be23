"""Distributed tensors on two processes: operations, remote functions, fetches, a training step.

An operation is measured from its issue until both processes have done it: 1,000 are issued and the
last result is fetched. `add_issued` is without the fetch: what the operation costs the program.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from timing import SECONDS, emit, rounds, samples

import monarch
from monarch.actor import this_host
from monarch.common._coalescing import compile as compiled

MANY = 1000
REPLAYED = 100
LAYERS = 10


@monarch.remote(propagate=torch.empty_like)
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def drain(x: torch.Tensor) -> None:
    monarch.fetch_shard(x).result()


def fetch_and_read(x: torch.Tensor) -> None:
    fetched = monarch.fetch_shard(x).result()
    with monarch.no_mesh.activate():
        fetched.sum()


def drained(operation: Callable[[], Any], count: int = MANY) -> list[float]:
    """Return the seconds of an operation, issued `count` times and executed."""

    def action() -> None:
        for _ in range(count - 1):
            operation()
        drain(operation())

    return samples(action, per_action=count)


def issued(operation: Callable[[], Any]) -> list[float]:
    """Return the seconds that the calls of an operation take; the execution is not timed."""
    taken = []
    for _ in rounds(SECONDS, at_least=3):
        started = perf_counter()
        for _ in range(MANY - 1):
            operation()
        last = operation()
        taken.append((perf_counter() - started) / MANY)
        drain(last)
    return taken


def coalesced(x: torch.Tensor) -> list[float]:
    def action() -> None:
        with monarch.coalescing():
            for _ in range(MANY):
                last = x.add(1)
        drain(last)

    return samples(action, per_action=MANY)


def replayed(x: torch.Tensor) -> list[float]:
    """Return the seconds of each of 100 adds that one call replays."""

    @compiled(verify=False)
    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(REPLAYED):
            value = value.add(1)
        return value

    calls = drained(lambda: chain(x), MANY // REPLAYED)
    return [seconds / REPLAYED for seconds in calls]


def training() -> list[float]:
    """Return the seconds of a step of ten layers: forward, backward, gradient descent."""
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
    x = torch.rand(8, 16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return drained(step, 10)


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    with procs.activate():
        x = torch.zeros(3, 4)
        weight, bias = torch.rand(4, 4), torch.rand(4)
        drain(x)
        figures = {
            "add": drained(lambda: x.add(1)),
            "add_issued": issued(lambda: x.add(1)),
            "add_inplace": drained(lambda: x.add_(1)),
            "linear": drained(lambda: torch.nn.functional.linear(x, weight, bias)),
            "remote": drained(lambda: double(x)),
            "coalesced": coalesced(x),
            "replayed": replayed(x),
            "fetch": samples(lambda: drain(x)),
            "step": training(),
        }
        large = torch.zeros(1 << 24)
        figures["fetch_64"] = samples(lambda: drain(large))
        figures["fetch_64_read"] = samples(lambda: fetch_and_read(large))
    emit(**figures)
    procs.stop().get()


if __name__ == "__main__":
    main()
