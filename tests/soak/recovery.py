"""`python tests/soak/recovery.py [N=1000]`: N simulated hosts lose one every 10 minutes for a day.

A supervised mesh has a rank on each host, and spare hosts take the places of lost ones, of which
half are lost again. Every rank has to run and answer in the end. Prints how long the ranks took to
come back: from the loss of power, and from the report of the loss; and in the last line the time of
the run itself, of a processor and by the clock.

The day has 24 virtual hours. Heartbeats of N hosts for so long would be billions of steps, so hosts
count as lost after `host_timeout` = 5 minutes instead of 3 seconds, and the first of the two times
scales with that; ``--host-timeout 3 --every 10`` has the usual time, and all losses in 24 minutes.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import end

from monarch.config import configure
from monarch.testing import simulate
from tests.sim.recovery import losses, program


def histogram(title: str, seconds: list[float]) -> None:
    """Print how many of these times lie in each of at most 12 equal intervals."""
    if not seconds:
        return
    low, high = min(seconds), max(seconds)
    width = max((high - low) / 12, 1e-3)
    bins = [0] * (math.floor((high - low) / width) + 1)
    for one in seconds:
        bins[math.floor((one - low) / width)] += 1
    print(title)
    for number, size in enumerate(bins):
        if size:
            begin = low + number * width
            print(f"  {begin:9.3f} - {begin + width:9.3f} s  {size:4}  {'#' * min(size, 60)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", type=int, nargs="?", default=1000)
    parser.add_argument("--losses", type=int, default=143)
    parser.add_argument("--every", type=float, default=600.0)
    parser.add_argument("--host-timeout", type=float, default=300.0)
    options = parser.parse_args()
    configure(host_timeout=f"{options.host_timeout:g}s")
    plan = losses(options.hosts, options.losses, options.every)
    times: list[tuple[float, float]] = []
    script = functools.partial(
        _script, plan=plan, size=options.hosts, every=options.every, record=times
    )
    start, worked = time.perf_counter(), time.process_time()
    spares = options.losses + 1
    done = simulate(script, hosts=options.hosts + spares, faults=plan, time_limit=1e9)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    faults: list[str] = []
    answers, replaced, whole = done.value
    if (answers, replaced, whole) != (options.hosts, len(plan), True):
        faults.append(f"{answers} ranks answer, {replaced} were replaced, all run: {whole}")
    histogram(
        f"from the loss of power (host_timeout {options.host_timeout:g} s)", [t for t, _ in times]
    )
    histogram("from the report of the loss", [t for _, t in times])
    what = f"{options.hosts} simulated hosts, {len(plan)} lost, {replaced} ranks replaced"
    took = f"{done.elapsed:.1f} virtual seconds, {done.steps} steps, {worked:.1f} s of a processor"
    end(f"{what}, {took}", seconds, faults)


def _script(hosts: object, **rest: object) -> object:
    return program(hosts, **rest)


if __name__ == "__main__":
    main()
