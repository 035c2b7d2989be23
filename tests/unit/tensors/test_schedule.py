"""The order of a pipeline's steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    SCHEDULES,
    WEIGHTS,
    Action,
    schedule,
)

sizes = st.integers(1, 6)
BACK = {"gpipe": BACKWARD, "1f1b": BACKWARD, "zero-bubble": INPUT}
TICKS = {FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHTS: 1}


def finished(name: str, stages: int, parts: int) -> int:
    """Return the tick at which a run ends, if each stage takes its steps in the order given."""
    back = BACK[SCHEDULES[name]]
    ends: dict[Action, int] = {}
    free = [0] * stages
    for step in schedule(name, stages, parts):
        needed = {
            FORWARD: Action(step.stage - 1, FORWARD, step.micro_batch),
            back: Action(step.stage + 1, back, step.micro_batch),
        }.get(step.kind)
        starts = max(free[step.stage], ends.get(needed, 0) if needed else 0)
        ends[step] = free[step.stage] = starts + TICKS[step.kind]
    return max(free)


@given(st.sampled_from(sorted(SCHEDULES)), sizes, sizes)
def test_each_step_comes_once_and_after_what_it_needs(name: str, stages: int, parts: int) -> None:
    steps = schedule(name, stages, parts)
    back = BACK[SCHEDULES[name]]
    place = {step: number for number, step in enumerate(steps)}
    kinds = 3 if back == INPUT else 2
    assert len(place) == len(steps) == kinds * stages * parts
    for stage in range(stages):
        for part in range(parts):
            forward, backward = Action(stage, FORWARD, part), Action(stage, back, part)
            assert place[forward] < place[backward]
            if back == INPUT:
                assert place[backward] < place[Action(stage, WEIGHTS, part)]
            if stage + 1 < stages:
                assert place[forward] < place[Action(stage + 1, FORWARD, part)]
                assert place[Action(stage + 1, back, part)] < place[backward]


@given(st.sampled_from(["1f1b", "zero-bubble"]), sizes, sizes)
def test_the_micro_batches_that_a_stage_keeps(name: str, stages: int, parts: int) -> None:
    """As many as there are stages from it; with divided backwards, as there are stages."""
    under_way = [0] * stages
    for step in schedule(name, stages, parts):
        under_way[step.stage] += {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}.get(step.kind, 0)
        assert under_way[step.stage] <= (stages - step.stage if name == "1f1b" else stages)


@given(st.integers(2, 8), st.integers(1, 20))
def test_a_divided_backward_leaves_less_time_unused(stages: int, parts: int) -> None:
    work = 3 * parts
    assert finished("1f1b", stages, parts) - work == 3 * (stages - 1)
    assert finished("zero-bubble", stages, parts) - work <= 2 * (stages - 1)


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="use one of gpipe, 1f1b, zero-bubble, dora-dfs"):
        schedule("best", 1, 1)
