"""Tests on the other supported Pythons that are installed, each in an environment of its own.

The environments are .venv-3.10, .venv-3.12 and so on, without torch: it has a gigabyte, and what
needs it is run on the Python of .venv. Each of them runs the tests that say how a program behaves,
and those that import every module; the oldest also the unit tests of what depends on Python most;
the newest also all unit tests, those of the engine, with its starts, failures and exits, those of
the protocol, and a part of those in the simulator. With ALL=1 each runs all of these.
VERSIONS="3.12 3.13" chooses. A version that is not installed here is skipped.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import pythons

BEHAVIOUR = ("tests/integration/conformance", "tests/integration/test_mistakes.py")
ON_EACH = (
    "tests/unit/test_imports.py",
    "tests/unit/test_doctests.py",
    "tests/unit/runtime/io/test_stacks.py",
    *BEHAVIOUR,
)
ON_THE_OLDEST = ("tests/unit/test_config.py", "tests/unit/wire", "tests/unit/shapes", *ON_EACH)
ON_THE_NEWEST = (
    "tests/unit",
    "tests/integration/engine",
    "tests/protocol",
    "tests/sim/test_both_drivers.py",
    "tests/sim/test_promises.py",
    "tests/sim/test_seeds.py",
    "tests/sim/test_simulate.py",
    *BEHAVIOUR,
)
ALL = os.environ.get("ALL", "") not in ("", "0")
OWN = "{}.{}".format(*sys.version_info)
ASKED = os.environ.get("VERSIONS", "").split()


def selection(version: str) -> tuple[str, ...]:
    if ALL or version == pythons.SUPPORTED[-1]:
        return ON_THE_NEWEST
    return ON_THE_OLDEST if version == pythons.SUPPORTED[0] else ON_EACH


@pytest.mark.timeout(3000)
@pytest.mark.flaky(reruns=0)  # the tests in it have second tries of their own
@pytest.mark.parametrize(
    "version", ASKED or [version for version in reversed(pythons.SUPPORTED) if version != OWN]
)
def test_python(version: str, record_property: Callable[[str, object], None]) -> None:
    faulthandler.cancel_dump_traceback_later()  # it would end this run; the tests have their own
    found = pythons.find(version)
    if found is None:
        pytest.skip(f"Python {version} is not installed here, nor in {pythons.pyenv_versions()}")
    python = pythons.set_up(version, found, "test-core")
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not torch"]
    command += ["-o", f"cache_dir=.pytest_cache/python-{version}", *selection(version)]

    done = subprocess.run(command, cwd=pythons.ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    closing = done.stdout.strip().splitlines()[-1].strip("= ")
    record_property("says", f"Python {version} ({found}): {closing}")
