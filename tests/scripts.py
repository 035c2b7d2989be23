"""Programs of a page, run as a reader runs them: each a script of its own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from monarch._engine.base.settings import KEYS
from tests import warm

__all__ = ["clean_environ", "run_script"]

_SETTINGS = {key.variable for key in KEYS.values()}
"""Variables that change what programs print; an earlier test may have left one."""


def run_script(script: Path, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in its folder with this interpreter, and return how it ended."""
    uses_torch = re.search(r"^import torch$|^from torch", script.read_text(), re.MULTILINE)
    run = warm.run if uses_torch else warm.fresh
    return run(script, cwd=script.parent, env=clean_environ() | variables, timeout=timeout)


def clean_environ() -> dict[str, str]:
    """Return the environment without the variables of settings."""
    return {name: value for name, value in os.environ.items() if name not in _SETTINGS}
