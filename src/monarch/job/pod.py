"""Names on which a worker in a pod of Kubernetes and its clients agree. Pure.

A client proves which address it dialed, so that no other worker can take this one's place (see
docs/security.md). Behind a forwarded port that address is one of the client's machine. Both sides
compute it from the name of the pod (`forwarded_host`), so neither has to ask the other.
"""

from __future__ import annotations

import hashlib

__all__ = ["BIND_VARIABLE", "NAMES", "PORT", "PORT_VARIABLE", "forwarded_host"]

PORT = 26600
"""The port of a worker, unless the pod names another."""

PORT_VARIABLE = "MONARCH_PORT"
"""The variable with the port of the worker."""

BIND_VARIABLE = "MONARCH_BIND_ADDRESS"
"""The variable with the IP address where the worker listens; all addresses of the pod otherwise."""

NAMES = ("MONARCH_POD_NAMESPACE", "MONARCH_POD_NAME")
"""The variables with the namespace and the name of the pod."""


def forwarded_host(namespace: str, pod: str) -> str:
    """Return the loopback address where clients forward a port to this pod.

    Every address of 127.0.0.0/8 is loopback on Linux, so two pods get two of them, and both may
    have the same port.

    >>> forwarded_host("ml", "trainers-0")
    '127.65.123.110'
    """
    digest = hashlib.sha256(f"{namespace}/{pod}".encode()).digest()
    # Not 127.0.x.x, where other programs listen, and neither 0 nor 255 at the end.
    return f"127.{1 + digest[0] % 255}.{digest[1]}.{1 + digest[2] % 254}"
