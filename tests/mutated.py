"""A test that is run with changed code, which all processes of that test import.

The changed package is a copy in a temporary folder that comes first in ``PYTHONPATH``, so no file
of the repository is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.processes import files_of_processes
from tests.scripts import clean_environ

__all__ = ["Change", "copy_of_the_package", "run_in", "run_test"]

ROOT = Path(__file__).resolve().parents[1]
MARK = "MONARCH_MUTATED"
"""Set to another value for each run; its processes are found by that."""
START = """\
import sys, monarch, pytest
if not monarch.__file__.startswith(sys.argv[1]):
    sys.exit(f"the tests would import {monarch.__file__}, which is not the changed package")
sys.exit(pytest.main(sys.argv[2:]))
"""


class Change(NamedTuple):
    """A change of one file of the package: `text`, which is there once, becomes `replacement`."""

    file: str
    text: str
    replacement: str


@contextlib.contextmanager
def copy_of_the_package(changes: Sequence[Change]) -> Iterator[Path]:
    """Copy the package, and make these changes; the value is the folder that has the copy.

    The changed modules append their paths to the file ``loaded`` of that folder when they are
    imported. Raises ValueError for a text that is not there once: the code has moved.
    """
    # A short path: some tests make sockets below it.
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        folder = Path(name)
        # Byte code that another process is writing has such a name, and may be removed soon.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / "src" / "monarch", folder / "monarch", ignore=unfinished)
        for change in changes:
            path = folder / "monarch" / change.file
            code = path.read_text()
            if (count := code.count(change.text)) != 1:
                raise ValueError(
                    f"the text of a mutation is in src/monarch/{change.file} {count} times, not "
                    f"once. Name the code that keeps the promise now:\n{change.text}"
                )
            code = code.replace(change.text, change.replacement)
            loaded = f"with open({str(folder / 'loaded')!r}, 'a') as _: print(__file__, file=_)"
            path.write_text(f"{code}\n{loaded}\n")
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        yield folder


def run_in(
    folder: Path, arguments: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run Python on the package in `folder`; kill all processes that are left, and return its end.

    Return the exit code -9 if it took longer than `timeout` seconds.
    """
    mark = uuid.uuid4().hex
    # The options of the run around this one do not count: no second tries, no workers.
    environ = {name: value for name, value in clean_environ().items() if name[:7] != "PYTEST_"}
    environ |= {MARK: mark, "PYTHONPATH": str(folder)}
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            kill_marked(f"{MARK}={mark}")
            code = process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read())


def kill_marked(variable: str) -> None:
    """Kill all processes that have this variable in their environment."""
    for path in files_of_processes("environ"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if variable.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def run_test(
    test: str, changes: Sequence[Change], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a test with these changes. Raises AssertionError if no process imported one of them."""
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    with copy_of_the_package(changes) as folder:
        options += [f"--timeout={timeout:g}", f"--basetemp={folder / 'tests'}"]
        # Half a minute more: for imports, and for fixtures that wait for what is broken.
        ended = run_in(folder, ["-c", START, str(folder), *options, test], timeout + 30)
        loaded = folder / "loaded"
        imported = set(loaded.read_text().split()) if loaded.exists() else set[str]()
        wanted = {str(folder / "monarch" / change.file) for change in changes}
        assert imported >= wanted, f"not imported: {wanted - imported}\n{ended.stdout}"
        return ended
