"""The remote side of a `LoginJob`: a worker that is started through a login.

The first line of its input is its configuration, as JSON. One line of its output, after `MARK`, is
the answer: whether the worker listens. The rest of the output is its log. The worker ends at EOF on
its input: see `ssh`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from monarch._spi import SecretError
from monarch.job.host import serve_host
from monarch.job.node import kept_secret

__all__ = ["MARK", "main"]

MARK = "monarch-host: "
"""Precedes the answer: a login shell may print text of its own before it."""


def main() -> None:
    """Run a host until EOF on stdin."""
    line = sys.stdin.buffer.readline()
    if not line:  # EOF already
        return
    told = json.loads(line)
    answers = os.dup(1)
    os.dup2(2, 1)

    def answer(**said: Any) -> None:
        here = {"python": sys.version_info[:2], "path": sys.executable}
        os.write(answers, (MARK + json.dumps({**here, **said}) + "\n").encode())

    def listening(url: str) -> None:
        answer(port=int(url.rpartition(":")[2]))

    try:
        with kept_secret(told["secret"]):
            serve_host(told["address"], listening, lifeline=sys.stdin.fileno())
    except OSError as error:
        answer(error="address", text=error.strerror or str(error))
        sys.exit(1)
    except SecretError as error:  # for example unusable certificates
        answer(error="other", text=str(error))
        sys.exit(1)
