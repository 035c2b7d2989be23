"""`tests/soak/goodput.py`: steps that count, steps that were repeated, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.soak.goodput import Log, Part, keep, load_parts, table


def step(at: float, number: int) -> dict[str, Any]:
    return {"event": "step", "at": at, "step": number}


def test_a_step_counts_once_and_within_the_time() -> None:
    events = [step(0.5, 1), step(1.5, 2), step(2.5, 3)]
    events += [step(5.0, 2), step(5.5, 3), step(6.0, 4), step(9.0, 5), step(11.5, 6)]
    test = {"event": "test", "at": 6.0, "step": 4, "accuracy": 0.9, "weights": 7}
    part = Part.of("torchrun", 5.0, [*events, test, {**test, "weights": 8}], 1.0, 10.0, [2.7, 8.0])
    assert (part.useful, part.repeated, part.kills) == (4, 2, 2)  # steps 2, 3, 4, 5
    assert part.pauses == pytest.approx([3.3, 1.0])
    assert part.tests == {4: (0.9, 7)}
    assert part.speed == pytest.approx(0.4)


def test_a_kill_after_which_no_step_was_made_has_no_pause() -> None:
    part = Part.of("torchrun", 5.0, [step(1.0, 1)], 0.0, 10.0, [2.0])
    assert (part.useful, part.pauses) == (1, [])


def test_the_table_has_finished_parts_only() -> None:
    calm = Part("torchrun", 0.0, 10.0, useful=1000, tests={200: (0.5, 1), 400: (0.75, 2)})
    killed = Part("torchrun", 5.0, 20.0, 1000, 60, 2, [1.0, 3.0], {200: (0.5, 1)})
    failed = Part("torchft", 5.0, 20.0, fault="did not start")
    assert table([calm, killed, failed], 5.0)[2:] == [
        "| torchrun | 100.0 | 50.0 | 50% | 2 | 2.00 s | 30.0 | 0.5000 / 0.5000 at 200, same bits |"
    ]
    killed.tests[400] = (0.75, 3)
    assert table([calm, killed], 5.0)[2].endswith("| 0.7500 / 0.7500 at 400 |")


def test_finished_parts_are_kept_with_their_options(tmp_path: Path) -> None:
    part = Part("torchrun", 5.0, 20.0, 1000, 60, 2, [1.0, 3.0], {200: (0.5, 1)})
    assert load_parts(tmp_path / "results.json", {"every": 5.0}) == {}
    keep(tmp_path / "results.json", {"every": 5.0}, {"0 torchrun": part})
    assert load_parts(tmp_path / "results.json", {"every": 5.0}) == {"0 torchrun": part}
    with pytest.raises(SystemExit, match="--fresh begins again"):
        load_parts(tmp_path / "results.json", {"every": 6.0})


def test_a_line_that_is_half_written_is_read_later(tmp_path: Path) -> None:
    log = Log(tmp_path / "events")
    log.read()
    log.path.write_text('{"event": "began", "rank": 1, "pid": 5}\n{"event": "st')
    log.read()
    assert (log.pids, log.step) == ({1: 5}, 0)
    with log.path.open("a") as file:
        file.write('ep", "step": 3}\n')
    log.read()
    assert log.step == 3
