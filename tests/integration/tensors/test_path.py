"""The path of an operation is short: it enters a limited number of Python functions.

The count is of the thread that issues operations. A function costs 0.1 to 0.5 us there, and more
than that in what it does, so their number is a measure of the cost that does not depend on the
machine's load.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import monarch
from monarch.actor import ProcMesh

pytestmark = pytest.mark.torch

CALLS = 200


def path(operation: Callable[[], object]) -> dict[str, float]:
    """Return how often an operation enters which functions, after a warm-up."""
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            counts[f"{code.co_filename.rpartition('monarch/')[2]}:{code.co_name}"] += 1

    for _ in range(CALLS):
        operation()
    sys.setprofile(note)
    try:
        for _ in range(CALLS):
            operation()
    finally:
        sys.setprofile(None)
    found = {name: count / CALLS for name, count in counts.most_common()}
    return {name: count for name, count in found.items() if count > 0.5}


def test_operations_enter_few_functions(procs: ProcMesh) -> None:
    @monarch.remote(propagate=torch.empty_like)
    def double(x: Any) -> Any:
        return x * 2

    with procs.activate():
        x = torch.rand(3, 4)
        weight, bias = torch.rand(4, 4), torch.rand(4)
        count = itertools.count(1)
        operations: dict[str, tuple[float, Callable[[], object]]] = {
            # Arithmetic without gradients does not pass torch's dispatcher.
            "add": (10, lambda: x.add(1)),
            # A number that differs each time, as in Adam, needs no plan of its own.
            "div": (10, lambda: x.div(1 / next(count))),
            # Three of these are torch's own, at each operation under a mode of its dispatcher.
            "add_": (14, lambda: x.add_(1)),
            # Torch takes it apart into a transpose and a product.
            "linear": (27, lambda: torch.nn.functional.linear(x, weight, bias)),
            "remote": (16, lambda: double(x)),
            "reduce": (13, lambda: monarch.reduce(x, "gpu")),
            # Of four processes; most are of the call of an actor, and of reading its answers.
            "fetch": (75, lambda: monarch.fetch_shard(x).result()),
        }
        for name, (most, operation) in operations.items():
            entered = path(operation)
            assert sum(entered.values()) > 5, "the profile has missed the path"
            assert sum(entered.values()) <= most, (name, entered)
