"""A short run of `tests/soak/chaos.py`: calls while everything fails, and what came of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "soak" / "chaos.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_every_call_is_accounted_for() -> None:
    """A failure prints the history that shows it. For more seeds, and longer, run the program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--seconds", "6", "--procs", "8", "--seed", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
