"""`explain`: which way a transfer takes, which it does not, and why."""

from __future__ import annotations

from typing import NamedTuple

from monarch.rdma import routes
from monarch.rdma.buffer import RDMABuffer
from monarch.rdma.errors import RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.identity import own_host
from monarch.rdma.memory import CPU
from monarch.rdma.routes import Route

__all__ = ["Explanation", "Way", "explain"]

TAKEN = "taken"
REFUSED = "no"
NOT_NEEDED = "not needed"

_LARGE = 32 << 20


class Way(NamedTuple):
    """One kind of route, and what became of it."""

    kind: str
    state: str
    """"taken", "no" or "not needed" (a better one was found first)."""
    reason: str
    remedy: str
    """What to do about it; empty if there is nothing to do, or nothing is known."""


class Explanation:
    """The ways to a buffer. `str` is for people.

    Attributes:
        buffer: which one, in words.
        route: the kind of route that is taken; None if none leads there.
        ways: all kinds, the best first.
        remarks: what else makes transfers slow or impossible.
    """

    def __init__(self, buffer: str, ways: list[Way], remarks: list[str]) -> None:
        self.buffer = buffer
        self.ways = ways
        self.remarks = remarks

    @property
    def route(self) -> str | None:
        """The kind that is taken."""
        return next((way.kind for way in self.ways if way.state == TAKEN), None)

    def __str__(self) -> str:
        width = max(len(way.kind) for way in self.ways)
        lines = [self.buffer]
        for kind, state, reason, remedy in self.ways:
            mark = ">" if state == TAKEN else " "
            lines.append(f"{mark} {kind:{width}}  {state}: {reason}".rstrip(": "))
            if remedy:
                lines.append(f"  {'':{width}}  remedy: {remedy}")
        return "\n".join([*lines, *(f"! {remark}" for remark in self.remarks)])

    def __repr__(self) -> str:
        return f"<Explanation of {self.buffer}: {self.route}>"


def explain(buffer: RDMABuffer, *, device: str = CPU) -> Explanation:
    """Which way this process takes to `buffer` from its own memory on `device`, and why.

    The way is opened, if it is not yet, as a transfer would; nothing is transferred. A buffer whose
    owner is gone has none.

    >>> from monarch.rdma import RDMABuffer
    >>> with RDMABuffer(bytearray(8)) as buffer:
    ...     print(explain(buffer))  # doctest: +ELLIPSIS
    <RDMABuffer ..., 8 bytes of process ...>
    > local       taken: a memory copy within this process
      process-vm  not needed...
    """
    handle = buffer._handle
    taken: Route | None = None
    remarks: list[str] = []
    try:
        taken = routes.route_to(handle, device)
    except RdmaError as error:
        remarks.append(str(error).partition("\n")[0].rstrip(":"))
    refusals = {refusal.kind: refusal for refusal in routes.refusals_of(handle, device)}
    ways: list[Way] = []
    for kind in routes.kinds():
        refusal = refusals.get(kind.name)
        if taken is not None and kind.name == taken.kind:
            ways.append(Way(kind.name, TAKEN, taken.about, ""))
        elif refusal is not None:
            ways.append(Way(kind.name, REFUSED, refusal.reason, refusal.remedy))
        else:
            ways.append(Way(kind.name, NOT_NEEDED if taken else REFUSED, "", ""))
    if taken is not None and handle.size >= _LARGE and _has_small_pages(handle):
        remarks.append(
            "its memory is in pages of 4 kB, which halves the speed of large copies, or worse; "
            "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment of the program gives large "
            "objects huge pages"
        )
    return Explanation(repr(buffer), ways, remarks)


def _has_small_pages(handle: Handle) -> bool:
    """Whether the kernel says that less than half of the memory around it is in huge pages."""
    if handle.host != own_host() or handle.device != CPU:
        return False
    inside, size = False, 0
    try:
        with open(f"/proc/{handle.pid}/smaps") as file:
            for line in file:
                name, _, rest = line.partition(" ")
                if not name.endswith(":"):
                    first, _, last = name.partition("-")
                    inside = int(first, 16) <= handle.address < int(last, 16)
                elif inside and name == "Rss:":
                    size = int(rest.split()[0])
                elif inside and name == "AnonHugePages:":
                    return size > 0 and 2 * int(rest.split()[0]) < size
    except OSError:
        return False  # not ours to know
    return False
