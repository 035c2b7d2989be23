"""The checks of `make check`; in `.ci/run` they are jobs beside the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    "pyright",
    "mypy",
    "ruff check .",
    "ruff format --check .",
    "lint-imports --no-logo",
    "towncrier build --draft",
)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str) -> None:
    name, *arguments = check.split()
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
