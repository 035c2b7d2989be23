"""Scripts that record: each runs in a process of its own, since recording stays on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

WAIT = 120.0
"""Seconds after which a wait is a hang."""

Run = Callable[..., str]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test's own for the files of observers."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"monarch-{os.getuid()}" / "observers"


@pytest.fixture
def run(tmp_path: Path, places: Path) -> Run:
    """Return a function that runs a script which records, and returns what it prints."""

    def start(text: str, *, telemetry: bool = True, **environ: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        if telemetry:
            environ["MONARCH_TELEMETRY"] = "1"
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return start
