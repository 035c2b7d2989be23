"""Batch mode: start the workers of the allocation, run the client's command beside them, end both.

This runs on the first node, in place of the batch script's own ``srun``. The client's processes get
the path of the job's secret, and only the workers' ``srun`` gets the secret itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from monarch.job.batch import BATCH_VARIABLE
from monarch.job.node import SECRET_VARIABLE, kept_secret, take_secret

__all__ = ["main"]

_GRACE = 20.0  # seconds for the workers to end


def main() -> None:
    """Run ``argv[2]``, the client's command, beside ``argv[1]``, the command of the workers."""
    workers, client = sys.argv[1:3]
    try:
        secret = take_secret()
    except KeyError:
        sys.exit(f"monarch: the variable {SECRET_VARIABLE} did not reach the batch script")
    with kept_secret(secret):
        sys.exit(_run(workers, client, secret))


def _run(workers: str, client: str, secret: str) -> int:
    started: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        for process in started:
            _signal(process, signal.SIGTERM)
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    environ = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    started.append(
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec {workers}"],
            env={**environ, SECRET_VARIABLE: secret},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    started.append(
        subprocess.Popen(
            ["/bin/sh", "-c", client],
            env={**environ, BATCH_VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    status = started[1].wait()
    _signal(started[0], signal.SIGTERM)
    try:
        started[0].wait(_GRACE)
    except subprocess.TimeoutExpired:
        _signal(started[0], signal.SIGKILL)
        started[0].wait()
    return 128 - status if status < 0 else status


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
