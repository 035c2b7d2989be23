"""Which host a dialer means, and whether it reached that host: see `protocol.session.handshake`.

A dialer sends two facts: the address that it was to dial, and where its connection led, as its own
system reports. The listener compares the second with what its own system reports:

* TCP: the IP address and port of the listening side. Every machine has the same loopback address,
  so the machine is added to it: the kernel's identity since its start, and the network namespace.
* A Unix socket: the file, by device and inode, which are the same by whatever path, and the
  machine; an abstract name has the network namespace instead.

If the two agree, the dialer has reached the host that it meant. If not, something stands in
between: perhaps rightly (a forwarded port, address translation, a service address). Then the
address that was dialed has to be one of the names that the worker was given
(`MONARCH_WORKER_NAMES`, ``monarch worker --name``, or the first half of
``tcp://public:4444@tcp://*:4444``). No name is looked up for that.

With TLS the certificate identifies the host by the name that was dialed, and nothing is compared.

Across a Unix socket both sides can ask the kernel for the other's user. Only the same user and root
are accepted, unless ``MONARCH_SECRET_FILE`` names the file of the secret: that may be meant to be
shared with another user.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import HandshakeError
from monarch._engine.transport.unix_peer import peer_of

__all__ = [
    "INVITATION",
    "Verdict",
    "as_invited",
    "check_user",
    "far_end",
    "listener_names",
    "listening_end",
    "meant",
    "path_end",
    "tls_names",
    "unix_path",
]

INVITATION = "who invited this side, with this key"
"""The identity that a dialer names when it follows a ticket, whose key only one listener knows."""

Verdict = Callable[[str], str]
"""Returns what this listener is called if a dialer means another one; else an empty string."""

_TLS = ("tls://", "metatls://")


# -- the dialer's side -----------------------------------------------------------------------------


def meant(address: ChannelAddr, end: str) -> str:
    """Return what a dialer of `address` sends if its connection led to `end` (see `far_end`)."""
    return f"{_plain(address)}\n{end}"


def far_end(sock: socket.socket, address: ChannelAddr) -> str:
    """Return the *end*: a text for where this connection to `address` leads, as seen from here."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return path_end(unix_path(address))
    return _ip_end(sock.getpeername())


def unix_path(address: ChannelAddr) -> str:
    """Return the name of a Unix socket in the system's form."""
    name = address.name
    return "\0" + name[1:] if name.startswith("@") else name


def _plain(address: ChannelAddr) -> str:
    return address._replace(bind=None, fd=None).url


# -- the listener's side ---------------------------------------------------------------------------


def listener_names(
    sock: socket.socket, names: Sequence[str] = (), end: str | None = None
) -> Verdict:
    """Return the verdict for an accepted connection; `names` are other names of the listener.

    `end`: for a Unix socket, the `listening_end` of the listener at its start, since another socket
    may have taken over the path.
    """

    def verdict(said: str) -> str:
        dialed, _, led = said.partition("\n")
        if dialed in names:
            return ""
        here = _near_end(sock) if end is None else end
        if here and led == here:
            return ""
        if dialed.startswith(_TLS):
            return "one without TLS"
        at = here.partition(" of ")[0] or "an unknown place"
        return f"at {at}, also called {', '.join(names)}" if names else f"at {at}"

    return verdict


def tls_names(said: str) -> str:
    """Return the verdict of a listener with TLS, whose certificate identifies it."""
    dialed, _, _ = said.partition("\n")
    return "" if dialed.startswith(_TLS) else "one with TLS"


def as_invited(said: str) -> str:
    """Return the verdict of a listener for peers that it has invited."""
    return "" if said == INVITATION else "no worker"


def listening_end(listener: socket.socket) -> str | None:
    """Return the end of a new listening socket; None for TCP, where each connection has its own."""
    return _near_end(listener) if listener.family == getattr(socket, "AF_UNIX", None) else None


def _near_end(sock: socket.socket) -> str:
    if sock.family == getattr(socket, "AF_UNIX", None):
        return path_end(os.fsdecode(sock.getsockname()))
    return _ip_end(sock.getsockname())


# -- ends ------------------------------------------------------------------------------------------


def _ip_end(where: tuple[str, int]) -> str:
    address = ipaddress.ip_address(where[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    host = f"[{address}]" if address.version == 6 else f"{address}"
    end = f"{host}:{where[1]}"
    return f"{end} of {_machine()}/{_network()}" if address.is_loopback else end


def path_end(name: str) -> str:
    """Return the end that a Unix socket of this name has; empty if there is no such file."""
    if not name:
        return ""
    if name.startswith("\0"):
        return f"@{name[1:]} of {_machine()}/{_network()}"
    with contextlib.suppress(OSError):
        found = os.stat(name)
        return f"socket {found.st_dev:x}:{found.st_ino:x} of {_machine()}"
    return ""


@functools.cache
def _machine() -> str:
    """Return an identity of this kernel since its start."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _network() -> str:
    """Return the network namespace, each of which has its own loopback interface."""
    with contextlib.suppress(OSError):
        return f"{os.stat('/proc/self/ns/net').st_ino:x}"
    return ""


# -- users -----------------------------------------------------------------------------------------


def check_user(sock: socket.socket) -> None:
    """Raise HandshakeError for a Unix socket whose other end belongs to another user."""
    if sock.family != getattr(socket, "AF_UNIX", None) or sys.platform != "linux":
        return
    _, uid = peer_of(sock)
    if uid in (os.getuid(), 0) or _shared_on_purpose():
        return
    raise HandshakeError(
        f"the other side belongs to another user (uid {uid}, this side is {os.getuid()}): to work "
        "together, both name the file of their secret with MONARCH_SECRET_FILE"
    )


def _shared_on_purpose() -> bool:
    """Whether the user has named the file of the secret."""
    named = os.environ.get("MONARCH_SECRET_FILE")
    return bool(named) and not os.environ.get("MONARCH_JOB_SECRET_FILE")
