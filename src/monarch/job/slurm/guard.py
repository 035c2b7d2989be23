"""A guard ends the Slurm job with the script, as long as no other script can find the job.

It is a process of its own: a script that is killed cannot cancel anything. The guard waits at its
end of the job's lifeline (see `monarch.job.lifeline`), and cancels the job if the script exits
without releasing it.
"""

from __future__ import annotations

import subprocess
import sys

from monarch._spi import SAFE_PATH, WITHOUT_CWD
from monarch.job import lifeline
from monarch.job.folder import lock_of
from monarch.job.os_process import watch

__all__ = ["start_guard"]

_GUARD = f"""
{WITHOUT_CWD}
import os, shutil, subprocess, sys
fd, stay, folder, job = sys.argv[1:]
try:
    said = os.read(int(fd), 1)
except ConnectionResetError:
    said = b""
if said != stay.encode():
    try:
        subprocess.run(["scancel", job], stdin=subprocess.DEVNULL, timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
"""


def start_guard(folder: str, number: int) -> None:
    """Start the guard of a job, which has this directory."""
    _, line = lifeline.add(folder)
    fds = [line.fileno(), *lock_of(folder)]
    told = [str(line.fileno()), lifeline.STAY.decode(), folder, str(number)]
    with line:
        guard = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-S", "-E", "-c", _GUARD, *told],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    watch(guard)
