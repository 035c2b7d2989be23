"""Errors of calls whose results were never retrieved are reported on stderr, a line per kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from monarch.actor import Actor, endpoint, this_host, Channel
from monarch.config import configure

class Trainer(Actor):
    @endpoint
    def train(self, text="loss is NaN"):
        raise ValueError(text)

    @endpoint
    def ok(self):
        return 1

    @endpoint(explicit_response_port=True)
    def later(self, port):
        port.exception(KeyError("later"))

trainers = this_host().spawn_procs({"gpus": 2}).spawn("t", Trainer)
one = trainers.slice(gpus=1)
"""

AWAITS = """
import asyncio
async def main():
    try:
        await one.train.call_one()
    except Exception:
        pass
asyncio.run(main())
"""

LINE = "monarch: t.{}() failed and its result was never retrieved: {} (rank {}"


def stderr_of(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(PROGRAM + source)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stderr.splitlines()


def test_an_error_is_reported_when_its_future_is_collected(tmp_path: Path) -> None:
    lines = stderr_of(
        tmp_path,
        """
import sys, threading
reported = threading.Event()
write = sys.stderr.write
def seen(text):
    write(text)
    reported.set()
sys.stderr.write = seen
one.train.call_one()
assert reported.wait(60)
write("the program goes on\\n")
""",
    )
    first, second = lines
    assert first.startswith(LINE.format("train", "ValueError: loss is NaN", 1))
    assert "report_unobserved_errors" in first
    assert second == "the program goes on"


def test_what_is_left_is_reported_at_the_end_and_the_same_counted(tmp_path: Path) -> None:
    lines = stderr_of(
        tmp_path,
        """
kept = [one.train.call_one() for _ in range(3)]
streamed = list(one.later.stream())
trainers.ok.call().get()
one.ok.call_one().get()
""",
    )
    assert len(lines) == 3
    assert lines[0].startswith(LINE.format("train", "ValueError: loss is NaN", 1)) or lines[
        0
    ].startswith("monarch: t.later() failed")
    assert sum("t.later()" in line and "KeyError: 'later'" in line for line in lines) == 1
    repeated = "monarch: t.train() failed 2 times more and its result was never retrieved: "
    assert f"{repeated}ValueError: loss is NaN" in lines


def test_a_mesh_reports_one_error(tmp_path: Path) -> None:
    (line,) = stderr_of(tmp_path, "trainers.train.call()\ntrainers.ok.call().get()")
    assert "t.train() failed and its result was never retrieved: ValueError" in line


@pytest.mark.parametrize(
    "look",
    [
        "try: one.train.call_one().get()\nexcept Exception: pass",
        "assert one.train.call_one().exception()",
        AWAITS,
        "configure(report_unobserved_errors=False)\none.train.call_one()",
        "one.ok.call_one()",
        "trainers.stop()\ntrainers.ok.call()",
    ],
    ids=["get", "exception", "await", "switched off", "a value", "an actor that was stopped"],
)
def test_nothing_is_reported(tmp_path: Path, look: str) -> None:
    assert stderr_of(tmp_path, f"{look}\n") == []
