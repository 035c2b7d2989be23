"""`Handle`: what one process says of its registration, so that others can reach the memory.

Neutral: it names the owner, the registration and the bytes, and knows nothing of how they are
moved. A route that needs more from the owner puts it into `offers`, under its own name, when the
memory is registered. Handles travel in pickles as plain values, a version first.
"""

from __future__ import annotations

from typing import Any

from monarch.rdma.identity import Host

__all__ = ["Handle"]

_VERSION = 1


class Handle:
    """One registration, as seen from anywhere. Immutable.

    Attributes:
        number: of the registration, in its process; never used again.
        identity: 16 random bytes that the owning process drew; another process has others, and so
            has the one that replaces it.
        uid: the owner in the cluster.
        host, pid, start: the owner in its kernel (see `identity`).
        table_fd, slot: where the owner's table is, and the place in it (see `table`); -1: nowhere.
        token: 16 random bytes that the owner drew for this registration.
        address, size: of the memory, in the owner.
        writable: whether others may write to it.
        device: "cpu", "cuda:0", ...
        grace: None, or the memory is released when the last handle has been gone for that many
            seconds (see `holders`).
        offers: what routes added, by their names.
    """

    __slots__ = (
        "address",
        "device",
        "grace",
        "host",
        "identity",
        "number",
        "offers",
        "pid",
        "size",
        "slot",
        "start",
        "table_fd",
        "token",
        "uid",
        "writable",
    )

    def __init__(
        self,
        number: int,
        identity: bytes,
        uid: int,
        host: Host,
        pid: int,
        start: int,
        table_fd: int,
        slot: int,
        token: bytes,
        address: int,
        size: int,
        writable: bool,
        device: str,
        grace: float | None,
        offers: dict[str, bytes],
    ) -> None:
        self.number = number
        self.identity = identity
        self.uid = uid
        self.host = host
        self.pid = pid
        self.start = start
        self.table_fd = table_fd
        self.slot = slot
        self.token = token
        self.address = address
        self.size = size
        self.writable = writable
        self.device = device
        self.grace = grace
        self.offers = offers

    @property
    def owner(self) -> str:
        """The owner for people."""
        return f"process {self.pid} ({self.uid:x})"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.number,
            self.identity,
            self.uid,
            tuple(self.host),
            self.pid,
            self.start,
            self.table_fd,
            self.slot,
            self.token,
            self.address,
            self.size,
            self.writable,
            self.device,
            self.grace,
            self.offers,
        )
        return _restore, (_VERSION, *fields)


def _restore(version: int, *fields: Any) -> Handle:
    if version != _VERSION:
        raise ValueError(
            f"an RDMABuffer of format {version}; this release knows {_VERSION}: "
            "use the same release in all processes"
        )
    number, identity, uid, host, *rest = fields
    return Handle(number, identity, uid, Host(*host), *rest)
