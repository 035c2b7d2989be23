"""A process of a mesh that exits owes its user what has been printed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys
from monarch._engine.runtime.agent import bootstrap

class Proc:
    def start(self):
        pass

bootstrap._Prepared.callbacks = atexit._ncallbacks()
bootstrap._Prepared.modules = frozenset(sys.modules)
for stream in (sys.stdout, sys.stderr):  # whatever the environment says
    stream.reconfigure(line_buffering=False, write_through=False)
print("said", end="")
print("complained", end="", file=sys.stderr)
bootstrap._finalise(Proc())
"""


def test_what_was_printed_last_is_not_lost_at_the_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == ("said", "complained")
