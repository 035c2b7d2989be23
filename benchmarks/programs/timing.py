"""How every benchmark program measures, and what it prints.

A program is one fresh process. It warms up, repeats an action for a span of time, and prints one
line of JSON: median, best, 99th percentile and number of samples of each figure. Every figure is a
cost (seconds per operation, or bytes): less is always better and a ratio always means the same.
Rates are only computed for display.

An action is repeated for a span of time and not a number of times. So a slow engine takes no longer
to measure than a fast one, and a fast one still gets enough samples for a 99th percentile.
`BENCH_SECONDS` sets the span.
"""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import NoReturn

SECONDS = float(os.environ.get("BENCH_SECONDS", "1.0"))
WARM_UP = SECONDS / 4
AT_LEAST = 3


def rounds(span: float = SECONDS, at_least: int = 1, at_most: int = 1_000_000) -> Iterator[int]:
    """Yield 0, 1, 2, ... until `span` seconds have passed."""
    end = perf_counter() + span
    for number in range(at_most):
        if number >= at_least and perf_counter() >= end:
            return
        yield number


def samples(
    action: Callable[[], object], *, per_action: int = 1, span: float = SECONDS
) -> list[float]:
    """Return seconds per operation of `action`, which does `per_action` of them; warm up first."""
    for _ in rounds(span / 4):
        action()
    taken = []
    for _ in rounds(span, at_least=AT_LEAST):
        started = perf_counter()
        action()
        taken.append((perf_counter() - started) / per_action)
    return taken


async def samples_of_await(action: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the seconds of each `await action()` in the running loop, after a warm-up."""
    for _ in rounds(WARM_UP):
        await action()
    taken = []
    for _ in rounds(SECONDS, at_least=AT_LEAST):
        started = perf_counter()
        await action()
        taken.append(perf_counter() - started)
    return taken


def emit(**figures: Sequence[float] | float) -> None:
    """Print the line of results that the runner reads."""
    print(json.dumps({"figures": {name: _summary(it) for name, it in figures.items()}}), flush=True)


def unavailable(reason: str) -> NoReturn:
    """End the program, since this machine lacks what it measures, which is no failure."""
    print(json.dumps({"figures": {}, "unavailable": reason}), flush=True)
    sys.exit()


def argument() -> str:
    """Return the program's one argument."""
    return sys.argv[1]


def _summary(figure: Sequence[float] | float) -> dict[str, float]:
    ordered = sorted([figure] if isinstance(figure, float | int) else figure)
    count = len(ordered)
    return {
        "median": ordered[count // 2],
        "best": ordered[0],
        "p99": ordered[min(count - 1, count * 99 // 100)],
        "count": count,
    }
