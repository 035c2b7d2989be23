"""A module before the installed one of its name, for tests of the import path on hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, endpoint

WAIT = 60.0


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
