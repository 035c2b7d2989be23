"""A short run of `tests/soak/chaos.py`: calls while processes and actors fail.

The program checks the outcome of each call.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "soak" / "chaos.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_every_call_is_accounted_for() -> None:
    """Each call has a valid outcome; a failure prints the history that shows the error.

    Run the program itself for longer runs and other seeds.
    """
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--seconds", "6", "--procs", "8", "--seed", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
