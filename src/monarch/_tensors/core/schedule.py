"""The order in which a pipeline of stages takes its micro-batches forward and backward.

Each stage has an order of its own. "gpipe": all forward, then all backward. "1f1b": forward and
backward in turn, as soon as as many micro-batches are under way as there are stages after it, so a
stage keeps the activations of those only (Narayanan et al., 2019). The orders are merged into one
for the script that issues them: in turns, each stage takes its next step when what it needs has
been issued.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["SCHEDULES", "Action", "schedule"]

SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "dora-dfs": "1f1b"}
"""The order by each name of a schedule; "dora-dfs" is the name that the reference has."""


class Action(NamedTuple):
    """One step of one stage with one micro-batch, forward or backward."""

    stage: int
    is_backward: bool
    micro_batch: int


def schedule(name: str, stages: int, micro_batches: int) -> list[Action]:
    """Return all steps, in an order in which each comes after those that it needs.

    Raises ValueError for an unknown name.

    >>> [("FB"[step.is_backward], *step[::2]) for step in schedule("1f1b", 2, 2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('F', 0, 0), ('F', 1, 0), ('F', 0, 1), ('B', 1, 0), ('B', 0, 0), ('F', 1, 1), ('B', 1, 1),
     ('B', 0, 1)]
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}")
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
    order = [Action(stage, False, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Action(stage, True, number))
        if ahead + number < micro_batches:
            order.append(Action(stage, False, ahead + number))
    return order


def _needed(action: Action, stages: int) -> set[Action]:
    """Return the steps whose results an action takes."""
    stage, is_backward, number = action
    if not is_backward:
        return {Action(stage - 1, False, number)} if stage else set()
    if stage + 1 < stages:
        return {Action(stage + 1, True, number)}
    return {Action(stage, False, number)}
