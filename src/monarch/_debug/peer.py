"""The user at the other end of a loopback connection, from the kernel's table of sockets.

A debugger runs any code as this user, so over loopback only the same user and root are served. A
TCP connection carries no credentials. But Linux lists all sockets of this network namespace in
``/proc/net/tcp`` and ``tcp6``, with the user of each. The connection's two addresses identify one
line of one of these files: the other end.

A line can be misleading in three ways, and `owner` returns None in each:

* A socket that its program has closed is shown as root's. Such a socket has no inode.
* The socket may be closed while the kernel writes the line, between the user and the inode. So two
  readings in a row must be equal: a closed socket stays closed.
* Another program's socket may have taken the addresses. Then the connection was reset. So the state
  of this side is checked last: while it is connected, no other connection has those addresses.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_known", "may_debug"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LOOKS = 3  # readings: a table that changes while it is read may lack a line
_ALIVE = (1, 8)  # TCP_ESTABLISHED, TCP_CLOSE_WAIT

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
End: TypeAlias = "tuple[Address, int]"


def is_known() -> bool:
    """Whether this system reports the users of sockets."""
    return sys.platform == "linux" and os.access(_TABLES[0], os.R_OK)


def may_debug(sock: socket.socket) -> str:
    """Return why the other end of this connection may not debug; an empty string if it may.

    Over loopback, the same user and root may debug. From other machines every peer may: the server
    listens for them only if the user has configured it.
    """
    try:
        peer = _end(sock.getpeername())
    except OSError:
        return "it has closed the connection"
    if not peer[0].is_loopback:
        return ""
    uid = owner(sock, peer)
    if uid is None:
        return "the system does not say to whom it belongs"
    if uid not in (os.getuid(), 0):
        return f"it belongs to another user (uid {uid}, this program's is {os.getuid()})"
    return ""


def owner(sock: socket.socket, peer: End) -> int | None:
    """Return the user of the other end of this connection; None if that is not certain."""
    ends = peer, _end(sock.getsockname())
    before = None
    for _ in range(_LOOKS):
        seen = _look(ends)
        if seen is not None and seen == before:
            return seen[0] if _lives(sock) else None
        before = seen
    return None


def _look(ends: tuple[End, End]) -> tuple[int, int] | None:
    """Return user and inode of the open socket between these ends, local one first."""
    (_, port), _ = ends
    for path in _TABLES:
        for line in _lines(path):
            if f":{port:04X} " not in line:
                continue
            fields = line.split()
            local, remote, uid, inode = fields[1], fields[2], int(fields[7]), int(fields[9])
            if inode and (_parse(local), _parse(remote)) == ends:
                return uid, inode
    return None


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="ascii") as table:
            next(table)
            yield from table
    except FileNotFoundError:  # a system without IPv6
        return


def _parse(text: str) -> End:
    """Return an end from the kernel's notation: the port, and 32-bit words in memory order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return _plain(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16)


def _end(name: tuple[str, int]) -> End:
    return _plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1]


def _plain(address: Address) -> Address:
    """Return the IPv4 address of an IPv4-mapped IPv6 address, and other addresses unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _lives(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ALIVE
