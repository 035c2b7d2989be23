"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

__all__ = ["free_port"]

# Below the ports that systems hand out, so that no connection takes one before its server does. The
# processes of a run have process numbers that are close to each other, and begin 97 ports apart.
_ports = itertools.cycle(range(10_000, 32_000))
_next = itertools.islice(_ports, os.getpid() * 97 % 22_000, None)


def free_port() -> int:
    """Return a port on which nothing listens, on no address; no process gets it twice soon."""
    for port in itertools.islice(_next, 22_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")
