"""The name of this host for other hosts, where a worker listens at all addresses.

For an address such as ``tcp://*:4444``. The first of these that exists is used:

1. the host's name, if it resolves to an address of this machine that is no loopback address. On
   many systems it does not: ``/etc/hosts`` has 127.0.1.1 for it, or a container its former address;
2. the address of the interface that the default route leads through;
3. loopback, with a warning: no other machine can dial that.

Only the resolver sends packets for this. A user who knows better gives an address to dial along
with the one to listen at: ``tcp://public:4444@tcp://*:4444``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator

__all__ = ["EVERYWHERE", "own_name"]

EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104 - looked for, not listened at
"""The wildcard addresses, at which a socket listens on all addresses of the host."""

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # RFC 5737, RFC 3849: owned by no host
_log = logging.getLogger("monarch.worker")


def own_name() -> str:
    """Return a name or an IP address of this host for others to dial."""
    name = socket.gethostname()
    if any(map(_is_ours, _addresses_of(name))):
        return name
    for elsewhere in _ELSEWHERE:
        address = _way_to(elsewhere)
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    _log.warning(
        "this host has no name and no route by which others could reach it, so only this machine "
        "can: otherwise state the address that others dial, as in tcp://<host>:<port>@tcp://*:<port>"
    )
    return "127.0.0.1"


def _addresses_of(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it does not resolve
        for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            yield str(where[0])


def _is_ours(address: str) -> bool:
    """Whether this machine has the address, and others can dial it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified:
        return False
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def _way_to(address: str) -> str:
    """Return the local address that this host would connect from; empty without a route."""
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        return str(sock.getsockname()[0])
    return ""


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
