"""gevent and eventlet in the place of threads are refused by name, before anything waits."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest

from monarch._engine.runtime.io.reactor import Reactor

PARTS = {"threading": "Lock", "select": "select", "subprocess": "Popen", "os": "fork"}


def stand_in(origin: str) -> Any:
    """Return a function that a module called `origin` has defined."""

    def patched() -> None:
        raise AssertionError("the engine used what it should have refused")

    patched.__module__ = origin
    return patched


def patch(monkeypatch: pytest.MonkeyPatch, part: str, library: str, origin: str) -> None:
    monkeypatch.setitem(sys.modules, library, types.ModuleType(library))
    monkeypatch.setattr(sys.modules[part], PARTS[part], stand_in(origin))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_part_that_greenlets_replace_is_refused(
    monkeypatch: pytest.MonkeyPatch, library: str, part: str
) -> None:
    patch(monkeypatch, part, library, f"{library}.{part}")
    with pytest.raises(RuntimeError, match=rf"^{library} has replaced {part} in .*os=F"):
        Reactor()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_a_debugger_wraps_is_used(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    patch(monkeypatch, part, "gevent", "debugger")
    Reactor().close()


def test_a_patched_script_gets_the_error_at_its_first_use() -> None:
    script = (
        "import sys, threading, types\n"
        "def lock(): raise AssertionError\n"
        "lock.__module__ = 'gevent.thread'\n"
        "sys.modules['gevent'] = types.ModuleType('gevent')\n"
        "from monarch.actor import this_host\n"
        "threading.Lock = lock\n"
        "this_host()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    assert "RuntimeError: gevent has replaced threading" in ended.stderr
