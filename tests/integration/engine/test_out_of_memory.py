"""Reports of the kernel's out-of-memory killer, which acts in a control group of the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from monarch._engine.launch.control_groups import groups_of

from .conftest import WAIT, until

LIMIT = 256 << 20

PROGRAM = """
import os, signal, sys

def join(group):
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))

join(sys.argv[1])

import monarch.actor
from monarch.actor import Actor, endpoint, this_host

monarch.actor.unhandled_fault_hook = lambda failure: None

class Worker(Actor):
    @endpoint
    def pid(self): return os.getpid()

    @endpoint
    def grow(self):
        held = []
        while True:
            held.append(b"x" * (1 << 20))

workers = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
os.kill(workers.slice(gpus=0).pid.call_one().get(), signal.SIGKILL)
print(workers.slice(gpus=0).pid.call_one().exception(timeout=60).failure.error)
print(workers.slice(gpus=1).grow.call_one().exception(timeout=60).failure.error)
os.kill(workers.slice(gpus=2).pid.call_one().get(), signal.SIGKILL)
print(workers.slice(gpus=2).pid.call_one().exception(timeout=60).failure.error)
"""


def gone(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.fixture
def group() -> Iterator[str]:
    """Yield the path of a control group limited to `LIMIT` bytes.

    Its parent is the group of this process or an ancestor of that; skip if none can be made.
    """
    above = groups_of(
        "memory", Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    for parent in above:
        made = Path(parent, f"monarch-test-{os.getpid()}")
        try:
            made.mkdir()
        except OSError:
            continue
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (made / name).exists():
                (made / name).write_text(str(LIMIT))
                yield str(made)
                until(partial(gone, made))  # the program's agent may still be exiting
                return
        made.rmdir()
    pytest.skip("no control group for memory can be made here")


@pytest.mark.failures
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_process_that_takes_too_much_memory(tmp_path: Path, group: str) -> None:
    """Only the report of the process that ran out of memory names the out-of-memory killer."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(path), group],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * WAIT,
    )
    killed = "the process this actor was running on failed: Killed(sig=9), SIGKILL"
    assert done.stdout.splitlines() == [
        killed,
        f"{killed}, by the kernel's out-of-memory killer (cgroup limit 256 MiB)",
        killed,
    ], done.stderr
