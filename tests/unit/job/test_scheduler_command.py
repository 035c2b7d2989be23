"""Commands of schedulers: each failure is one line with the command, its message and a remedy."""

from __future__ import annotations

import sys

import pytest

from monarch.job.scheduler_command import SchedulerError, run_command


def test_output_and_input() -> None:
    code = "import os, sys; print(sys.stdin.read() + os.environ['X'])"
    assert run_command([sys.executable, "-c", code], input="a", environ={"X": "b"}) == "ab\n"


def test_a_command_that_is_not_installed() -> None:
    with pytest.raises(SchedulerError, match=r"`sbitch -x` cannot be run.*; install Slurm"):
        run_command(["sbitch", "-x"], missing="install Slurm")


def test_a_command_that_hangs() -> None:
    with pytest.raises(SchedulerError, match=r"did not end within 0.2 s; ask the operator"):
        run_command(["sh", "-c", "sleep 1000; :"], limit=0.2, remedy="ask the operator")


def test_a_command_that_fails() -> None:
    code = "import sys; sys.exit('no\\n\\n such partition')"
    with pytest.raises(SchedulerError) as error:
        run_command(
            [sys.executable, "-c", code],
            environ={"SECRET": "hidden"},
            remedy="name another",
            wrapped="Failed to submit: {}",
        )
    text = str(error.value)
    assert text.startswith("Failed to submit: `")
    assert text.endswith("ended with status 1 and said: no | such partition; name another")
    assert "hidden" not in text
    assert "\n" not in text


def test_a_command_that_may_not_be_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "squeue"
    path.write_text("")
    with pytest.raises(SchedulerError, match="Permission denied"):
        run_command([str(path)])
