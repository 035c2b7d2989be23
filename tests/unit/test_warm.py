"""A script that is run by a fork ends and prints as one that is run by an interpreter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests import warm

pytestmark = pytest.mark.torch

SCRIPTS = {
    "prints": "import sys; print(sys.argv, sys.path, __name__, __file__, sys.stdin.read())",
    "raises": "import torch\ndef fail():\n    raise KeyError('x')\nfail()",
    "is not Python": "def f(:",
    "exits": "import sys; print('to stderr', file=sys.stderr); sys.exit(3)",
    "exits with a text": "raise SystemExit('no such option')",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "has exit handlers": "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    "has a thread": "import threading, time\nthreading.Timer(0.01, print, ['late']).start()",
    "has an environment": "import os; print(os.environ['ONE'], sorted(os.environ), os.getcwd())",
    "pickles": "import pickle\nclass A: ...\nprint(pickle.loads(pickle.dumps(A)).__module__)",
    "has a hook": "import sys; sys.excepthook = lambda *it: print('hook', it[1]); 1 / 0",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_as_with_an_interpreter_of_its_own(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    words, env = (
        [str(script), "--option", "two words"],
        {"ONE": "1", "LC_ALL": "C.UTF-8", "PYTHONPATH": "/one:/two"},
    )

    fresh = warm.fresh(*words, cwd=tmp_path, env=env)
    forked = warm.run(*words, cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr == fresh.stderr


def test_a_script_whose_time_is_over_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import threading; threading.Event().wait()")
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(script, cwd=tmp_path, timeout=0.1)
