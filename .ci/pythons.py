"""Run tests on the other supported Pythons that are installed, each in an environment of its own.

One after the other, in .venv-3.10, .venv-3.12 and so on, without torch: it has a gigabyte, and what
needs it is run by `make test`. On each of them run the tests that say how a program behaves, and
those that import every module; on the oldest and the newest Python also the unit tests and those of
the engine, with its starts, failures and exits; on the newest also those of the protocol, and the
part of those in the simulator that depends on Python most. A version that is not installed here is
named, and is no failure. `VERSIONS=3.12` chooses.

An interpreter is looked for where pyenv keeps its versions (PYENV_ROOT, or ~/.pyenv), then on PATH.
Any Python can run this; it needs nothing beside it.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
MAIN = ROOT / ".venv" / "bin" / "python"
SET_UP = ROOT / ".ci" / "set_up.py"
EXTRAS = "test-core"
BEHAVIOUR = ("tests/integration/conformance", "tests/integration/test_mistakes.py")
ON_EACH = (
    "tests/unit/test_imports.py",
    "tests/unit/test_doctests.py",
    "tests/unit/runtime/io/test_stacks.py",
    *BEHAVIOUR,
)
ON_THE_ENDS = ("tests/unit", "tests/integration/engine", *BEHAVIOUR)
ON_THE_NEWEST = (
    "tests/protocol",
    "tests/sim/test_both_drivers.py",
    "tests/sim/test_promises.py",
    "tests/sim/test_seeds.py",
    "tests/sim/test_simulate.py",
)
SELECTED = "not slow and not torch"
RETRIED = "failed, and was tried again"  # in what tests/conftest.py prints


def main():
    asked = os.environ.get("VERSIONS", "").split()
    main_version = version_of(MAIN)
    versions = asked or [version for version in SUPPORTED if version != main_version]
    found = {version: find(version) for version in versions}
    failed = []
    for version, python in found.items():
        if python is not None and not run(version, python):
            failed.append(version)
    missing = [version for version in versions if found[version] is None]
    if missing:
        print(
            "Not installed here, so not tried: Python {0} (looked in {1} and on PATH)".format(
                ", ".join(missing), pyenv_versions()
            )
        )
    if failed:
        sys.exit("error: tests failed on Python {0}; see above".format(", ".join(failed)))


def run(version, python):
    """Whether the tests pass there; what they print is shown only if they do not."""
    folder = ".venv-" + version
    set_up(folder, python)
    tests = ON_THE_ENDS if version in (SUPPORTED[0], SUPPORTED[-1]) else ON_EACH
    if version == SUPPORTED[-1]:
        tests += ON_THE_NEWEST
    command = [str(ROOT / folder / "bin" / "python"), "-m", "pytest", "-q", "-m", SELECTED, *tests]
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ["(no output)"]
    if done.returncode or RETRIED in done.stdout:
        print(done.stdout)
    print(
        "Python {0} ({1}): {2}, {3:.0f} s".format(
            version, python, lines[-1].strip("= ").partition(" in ")[0], time.monotonic() - started
        ),
        flush=True,
    )
    return done.returncode == 0


def set_up(folder, python):
    """Make the environment, unless nothing that it is made from is newer than it."""
    stamp = ROOT / folder / ".ready"
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt", SET_UP)
    if stamp.exists() and all(path.stat().st_mtime <= stamp.stat().st_mtime for path in sources):
        return
    done = subprocess.run([str(python), str(SET_UP), EXTRAS, folder], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    stamp.touch()


def find(version):
    """An interpreter of that version that runs, or None."""
    candidates = sorted(pyenv_versions().glob(version + ".*/bin/python"), key=patch, reverse=True)
    on_path = shutil.which("python" + version)
    for candidate in [*candidates, *filter(None, [on_path])]:
        if version_of(candidate) == version:
            return candidate
    return None


def pyenv_versions():
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


def patch(python):
    """3.12.10 comes after 3.12.9."""
    digits = python.parent.parent.name.rpartition(".")[2]
    return int(digits) if digits.isdigit() else -1


def version_of(python):
    """`3.12`; None if that is no Python that can make environments."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    main()
