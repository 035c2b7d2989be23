"""A guard tears the cluster down with the script, as long as no other script can find the job.

It is a process of its own: a script that is killed cannot tear anything down. The guard waits at
its end of the job's lifeline (see `monarch.job.lifeline`) from before the launch. If the script
exits without releasing the job, the guard cancels the request, whose name is in the job's directory
by then, and tears the cluster down. Should that fail, the directory stays, with the reason in
``guard.log``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

from monarch._spi import python_command
from monarch.job import lifeline
from monarch.job.folder import lock_of, noted
from monarch.job.os_process import watch
from monarch.job.skypilot.sky import Sky

__all__ = ["LOG", "REQUEST", "main", "start_guard"]

LOG = "guard.log"
"""The name of the guard's output in the job's directory."""

REQUEST = "request"
"""The name of the note with the request to launch the cluster."""

_MAIN = (
    "import sys; from monarch.job.skypilot.guard import main; "
    "main(int(sys.argv[1]), sys.argv[2], sys.argv[3])"
)


def start_guard(folder: str, cluster: str) -> None:
    """Start the guard of a cluster that is launched next."""
    _, line = lifeline.add(folder)
    with line, open(os.path.join(folder, LOG), "ab") as log:
        guard = subprocess.Popen(
            [*python_command(sys.executable, _MAIN), str(line.fileno()), folder, cluster],
            pass_fds=[line.fileno(), *lock_of(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    watch(guard)


def main(fd: int, folder: str, cluster: str) -> None:
    """Wait, and end the cluster if the script is lost: the main function of the guard."""
    if not lifeline.outlived(socket.socket(fileno=fd)):
        return
    sky = Sky()
    request = noted(folder, REQUEST)
    if request:
        sky.cancel(request)
    sky.down(cluster)
    shutil.rmtree(folder, ignore_errors=True)
