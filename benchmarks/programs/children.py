"""The cost of a handle in children of the script: the first call of a forked child, the next ones.

A child says when it begins and when it has its answer, by the system's clock, which all processes
share. Eight children begin when the last one is there.
"""

import multiprocessing
from time import perf_counter
from typing import Any

from timing import SECONDS, emit, rounds

from monarch.actor import Actor, endpoint, this_host

MANY = 8


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def first(echo: Any, pipe: Any, gate: Any) -> None:
    """Call once, when all children are there; send the times before and after."""
    gate.wait(60)
    began = perf_counter()
    assert echo.echo.call_one(7).get() == 7
    pipe.send((began, perf_counter()))


def many(echo: Any, pipe: Any, gate: Any) -> None:
    """Send the time of each of many calls."""
    gate.wait(60)
    taken = []
    for number in rounds(SECONDS):
        began = perf_counter()
        assert echo.echo.call_one(number).get() == number
        taken.append(perf_counter() - began)
    pipe.send(taken)


def children(work: Any, echo: Any, count: int = 1) -> list[Any]:
    """Return what so many children send that do `work`."""
    fork = multiprocessing.get_context("fork")
    gate = fork.Barrier(count)
    pipes = [fork.Pipe(duplex=False) for _ in range(count)]
    started = [fork.Process(target=work, args=(echo, theirs, gate)) for _, theirs in pipes]
    for child in started:
        child.start()
    sent = [ours.recv() for ours, _ in pipes]
    for child in started:
        child.join()
    return sent


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    echo = procs.spawn("echo", Echo)
    assert echo.echo.call_one(7).get() == 7
    ones = [children(first, echo)[0] for _ in rounds(at_least=10)]
    groups = [children(first, echo, MANY) for _ in rounds(at_least=5)]
    emit(
        first=[ended - began for began, ended in ones],
        call=children(many, echo)[0],
        eight=[max(ended for _, ended in each) - min(b for b, _ in each) for each in groups],
    )
    procs.stop().get()


if __name__ == "__main__":
    main()
