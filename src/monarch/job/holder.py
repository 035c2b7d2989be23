"""The holder of an `SSHJob`: the process that holds the inputs of all its hosts open.

It inherits the inputs, and ends when it is killed. As long as no other script can find the job, it
ends with the script, too, and removes the job's directory (`lifeline`). The workers end with it:
see `ssh`. It also keeps the logs of the hosts small, since it lives as long as they do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading

from monarch.job.host_log import keep_small

__all__ = ["main"]


def main() -> None:
    """Hold on, until SIGTERM or the end of the script: the main function of the holder."""
    _, line, stay, folder, *logs = sys.argv
    keep = threading.Thread(target=keep_small, args=(logs, threading.Event()), daemon=True)
    keep.start()
    try:
        said = os.read(int(line), 1)
    except ConnectionResetError:  # the script exited without reading all bytes
        said = b""
    if said == stay.encode():
        signal.pause()
    shutil.rmtree(folder, ignore_errors=True)
