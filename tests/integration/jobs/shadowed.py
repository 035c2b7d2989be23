"""A module before the installed one of its name, for tests of the import path on hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, endpoint

WAIT = 60.0

PROGRAM = """
from monarch.actor import Actor, endpoint, this_host
from monarch.job import ProcessJob

class Imports(Actor):
    @endpoint
    def six(self):
        import six
        return six.__file__

def find(hosts):
    return hosts.spawn_procs().spawn("imports", Imports).six.call().get().values()

import six
job = ProcessJob({"h": 1})
try:
    print(six.__file__, *find(this_host()), *find(job.state(cached_path=None).h))
finally:
    job.kill()
"""
"""Prints the file of a module: of the script, of a process here, and of one on a job's host."""


class Imports(Actor):
    @endpoint
    def six(self) -> str | None:
        import six

        return six.__file__


def imports_what_the_script_does(hosts: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that processes on the hosts import a module from where the script would."""
    pytest.importorskip("six")  # is installed, so the search of site-packages would find it
    (folder / "six.py").touch()
    monkeypatch.syspath_prepend(folder)
    found = hosts.spawn_procs().spawn("imports", Imports).six.call().get(timeout=WAIT)
    assert set(found.values()) == {str(folder / "six.py")}
