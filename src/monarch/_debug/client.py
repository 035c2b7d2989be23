"""Requests of any process to the client's process, see `service`.

They are served on the reactor thread of the client, and are not messages of actors. So a rank that
stops for the first time loads neither pdb nor an event loop before it is listed.
"""

from __future__ import annotations

import json
from typing import Any

from monarch._debug.pauses import SERVICE
from monarch._debug.waiting import wait_for
from monarch._spi import ask, client_proc, tell

__all__ = ["ask_client", "tell_client"]


def ask_client(**request: Any) -> Any:
    """Send a request to the client's process, and return the answer. Blocks.

    Raises `Refused` with the reason of the client, or `Unreachable`.
    """
    body = wait_for(ask(client_proc().spec["client"], SERVICE, json.dumps(request).encode()))
    return json.loads(body)


def tell_client(**request: Any) -> None:
    """Send a request to the client's process that has no answer. Does not block."""
    tell(client_proc().spec["client"], SERVICE, json.dumps(request).encode())
