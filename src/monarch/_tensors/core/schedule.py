"""The order in which a pipeline of stages takes its micro-batches forward and backward.

- "gpipe": all forward, then all backward.
- "1f1b": forward and backward in turn, as soon as as many micro-batches are under way as there are
  stages after it, so a stage keeps the activations of those only (Narayanan et al., 2019).
- "zero-bubble": a backward has two parts. The gradient of the stage's input comes first, as the
  stage before waits for it; the gradients of the weights fill the time in which a stage would wait.
  A stage keeps at most as many micro-batches as there are stages, as the first stage of "1f1b"
  does (Qi et al., "Zero Bubble Pipeline Parallelism", 2024: their schedule ZB-H1).

The orders of the stages are merged into one, for the script that issues them. For the first two,
each stage takes its next step in turns, when what it needs has been issued. The third is made by a
clock: forward, input gradient and weight gradients take one tick each, and in every tick each stage
takes the most urgent step that it can: an input gradient, else a forward, else weight gradients.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["BACKWARD", "FORWARD", "INPUT", "SCHEDULES", "WEIGHTS", "Action", "schedule"]

FORWARD = "F"
BACKWARD = "B"
"""Both parts of a backward."""
INPUT = "I"
"""The part of a backward that gives the gradient of the input."""
WEIGHTS = "W"
"""The part of a backward that gives the gradients of the weights."""

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "zero-bubble": "zero-bubble",
    "dora-dfs": "zero-bubble",
}
"""The order by each name of a schedule; "dora-dfs" is the name that the reference has."""


class Action(NamedTuple):
    """One step of one stage with one micro-batch.

    `kind` is `FORWARD`, `BACKWARD`, or one of its parts, `INPUT` or `WEIGHTS`.
    """

    stage: int
    kind: str
    micro_batch: int


def schedule(name: str, stages: int, micro_batches: int) -> list[Action]:
    """Return all steps, in an order in which each comes after those that it needs.

    Raises ValueError for an unknown name.

    >>> "".join(f" {step.kind}{step.stage}.{step.micro_batch}" for step in schedule("1f1b", 2, 2))
    ' F0.0 F1.0 F0.1 B1.0 B0.0 F1.1 B1.1 B0.1'
    >>> "".join(f" {step.kind}{step.stage}.{step.micro_batch}"
    ...         for step in schedule("zero-bubble", 2, 2))
    ' F0.0 F0.1 F1.0 I1.0 I0.0 F1.1 W0.0 I1.1 I0.1 W1.0 W0.1 W1.1'
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    if SCHEDULES[name] == "zero-bubble":
        return _clocked(stages, micro_batches)
    orders = []
    for stage in range(stages):
        ahead = micro_batches
        if SCHEDULES[name] == "1f1b":
            ahead = min(micro_batches, stages - stage)
        orders.append(deque(_order(stage, ahead, micro_batches)))
    done: set[Action] = set()
    issued: list[Action] = []
    while len(issued) < 2 * stages * micro_batches:
        for order in orders:
            if order and _needed(order[0], stages) <= done:
                action = order.popleft()
                done.add(action)
                issued.append(action)
    return issued


def _order(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    order = [Action(stage, FORWARD, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Action(stage, BACKWARD, number))
        if ahead + number < micro_batches:
            order.append(Action(stage, FORWARD, ahead + number))
    return order


def _clocked(stages: int, micro_batches: int) -> list[Action]:
    """Return the steps in the order of the ticks, by a rule that each stage follows in each tick.

    The kinds of one stage are each in the order of the micro-batches, so counters are the state.
    """
    counts = [dict.fromkeys((INPUT, FORWARD, WEIGHTS), 0) for _ in range(stages)]
    issued: list[Action] = []
    done: set[Action] = set()
    while len(issued) < 3 * stages * micro_batches:
        now: list[Action] = []
        for stage, count in enumerate(counts):
            for kind in count:  # the most urgent first
                action = Action(stage, kind, count[kind])
                is_full = kind == FORWARD and count[FORWARD] - count[WEIGHTS] >= stages
                if action.micro_batch == micro_batches or is_full:
                    continue
                if _needed(action, stages) <= done:
                    count[kind] += 1
                    now.append(action)
                    break
        done.update(now)
        issued += now
    return issued


def _needed(action: Action, stages: int) -> set[Action]:
    """Return the steps whose results an action takes."""
    stage, kind, number = action
    if kind == FORWARD:
        return {Action(stage - 1, FORWARD, number)} if stage else set()
    if kind == WEIGHTS:
        return {Action(stage, INPUT, number)}
    if stage + 1 < stages:
        return {Action(stage + 1, kind, number)}
    return {Action(stage, FORWARD, number)}
