"""Addresses of hosts, as programs for `torch.distributed` ask for them."""

from __future__ import annotations

import enum
import ipaddress
import os
import socket

__all__ = ["AddrType", "get_ipaddr", "get_sockaddr", "host_name", "machine"]


class AddrType(enum.Enum):
    """A kind of IP address: `Default` is IPv6 where the host has it, then IPv4."""

    Default = 1
    IPv4 = 2
    IPv6 = 3


_FAMILIES = {
    AddrType.Default: (socket.AF_INET6, socket.AF_INET),
    AddrType.IPv4: (socket.AF_INET,),
    AddrType.IPv6: (socket.AF_INET6,),
}


def get_ipaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Return an IP address of a host; link-local addresses are passed over.

    Blocks while the name is resolved. Raises RuntimeError if the host has no such address.

    >>> get_ipaddr("127.0.0.1", 80, AddrType.IPv4)
    '127.0.0.1'
    """
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"the host name {hostname!r} cannot be resolved: {error}") from error
    for family in _FAMILIES[addr_type]:
        for kind, _, _, _, address in found:
            text = str(address[0])
            if kind == family and not ipaddress.ip_address(text.partition("%")[0]).is_link_local:
                return text
    raise RuntimeError(
        f"the host {hostname!r} has no usable {addr_type.name} address, only: "
        + (", ".join(sorted({str(entry[4][0]) for entry in found})) or "none")
    )


def host_name() -> str:
    """Return the name of this host for others to dial."""
    name = socket.getfqdn()
    # The machine may resolve its own name to loopback.
    return socket.gethostname() if name.startswith("localhost") else name


def machine() -> str:
    """Return a name of this machine; a network namespace of its own is another machine."""
    path = "/proc/self/ns/net"
    return f"{socket.gethostname()} {os.stat(path).st_ino if os.path.exists(path) else 0}"


def get_sockaddr(hostname: str, port: int) -> str:
    """Return ``ip:port`` for a host name, with brackets around an IPv6 address.

    >>> get_sockaddr("127.0.0.1", 80)
    '127.0.0.1:80'
    """
    address = get_ipaddr(hostname, port)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
