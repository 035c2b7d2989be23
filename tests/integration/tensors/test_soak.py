"""The soak command of distributed tensors, in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

COMMAND = Path(__file__).resolve().parents[2] / "soak" / "tensors.py"


def test_memory_is_flat_and_a_fast_client_is_held_back() -> None:
    done = subprocess.run(
        [sys.executable, str(COMMAND), "20000"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("s, ok\n")
