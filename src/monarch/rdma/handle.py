"""`Handle`: the description of a registration by which other processes reach the memory.

A handle is independent of routes: it names the owner, the registration and the bytes, but not how
bytes are moved. Its `offers` name the kinds of routes that the owner allows. A route that needs
more from the owner adds it there, at registration. A handle is pickled as plain values, with a
format version first.
"""

from __future__ import annotations

from typing import Any

from monarch.rdma.identity import Host

__all__ = ["Handle"]

_VERSION = 1


class Handle:
    """One registration, as any process sees it. Immutable.

    Attributes:
        number: of the registration, in its process; never reused.
        identity: 16 random bytes that the owning process drew; every process has different ones,
            and so has the process that replaces it after a restart.
        uid: the owner's id in the cluster.
        host, pid, start: the owner's identity in its kernel (see `identity`).
        table_fd, slot: the descriptor of the owner's table and the slot in it (see `table`); -1 if
            there is no table.
        token: 16 random bytes that the owner drew for this registration.
        address, size: of the memory, in the owner.
        writable: whether others may write to it.
        device: "cpu", "cuda:0", ...
        grace: None for a registration that only `drop` releases. Otherwise the memory is released
            when no process holds a handle, and a process that pickles one keeps its hold for this
            many seconds (see `holders`).
        offers: what routes added, by route name: the kinds of routes that the owner allows.
        offered: the names of these kinds, as one text.
    """

    __slots__ = (
        "address",
        "device",
        "grace",
        "host",
        "identity",
        "number",
        "offered",
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
        self.offered = ",".join(offers)

    @property
    def owner(self) -> str:
        """The owner's name in messages to users."""
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
