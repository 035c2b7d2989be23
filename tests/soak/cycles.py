"""`python tests/soak/cycles.py [N=1000]`: N times spawn two procs, call, stop, without a leak."""

from __future__ import annotations

import time

from footprint import excess, footprint
from report import count, end

from monarch.actor import Actor, endpoint, this_host

WAIT = 60
WARM_UP = 20


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def cycle(number: int) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    echo = procs.spawn("echo", Echo)
    answers = echo.echo.call(number).get(timeout=WAIT).values()
    if answers != [number, number]:
        raise RuntimeError(f"cycle {number} was answered {answers}")
    procs.stop().get(timeout=WAIT)


def main() -> None:
    cycles = count(1000)
    for number in range(WARM_UP):
        cycle(number)
    before = footprint()
    start = time.perf_counter()
    for number in range(cycles):
        cycle(number)
    seconds = time.perf_counter() - start
    end(f"{cycles:,} cycles of spawn, call and stop of 2 procs", seconds, excess(before))


if __name__ == "__main__":
    main()
