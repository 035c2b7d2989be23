"""The order of a pipeline's steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.core.schedule import SCHEDULES, Action, schedule

sizes = st.integers(1, 6)


@given(st.sampled_from(sorted(SCHEDULES)), sizes, sizes)
def test_each_step_comes_once_and_after_what_it_needs(name: str, stages: int, parts: int) -> None:
    steps = schedule(name, stages, parts)
    place = {step: number for number, step in enumerate(steps)}
    assert len(place) == len(steps) == 2 * stages * parts
    for stage in range(stages):
        for part in range(parts):
            forward, backward = Action(stage, False, part), Action(stage, True, part)
            assert place[forward] < place[backward]
            if stage + 1 < stages:
                assert place[forward] < place[Action(stage + 1, False, part)]
                assert place[Action(stage + 1, True, part)] < place[backward]


@given(sizes, sizes)
def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_from_it(
    stages: int, parts: int
) -> None:
    under_way = [0] * stages
    for step in schedule("1f1b", stages, parts):
        under_way[step.stage] += -1 if step.is_backward else 1
        assert under_way[step.stage] <= stages - step.stage


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="use one of gpipe, 1f1b, dora-dfs"):
        schedule("best", 1, 1)
