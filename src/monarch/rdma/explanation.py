"""`explain`: which route a transfer takes to a buffer, and why the others are not taken."""

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
    """One kind of route: whether it is taken, and why or why not."""

    kind: str
    state: str
    """"taken", "no" or "not needed" (a better one was found first)."""
    reason: str
    remedy: str
    """A change that would open this route; empty if there is none, or none is known."""


class Explanation:
    """The routes to a buffer. `str` returns a text for people.

    Attributes:
        buffer: the buffer, in words.
        route: the kind of route that is taken; None if no route reaches the buffer.
        ways: all kinds, the best first.
        remarks: other reasons why transfers are slow or impossible.
    """

    def __init__(self, buffer: str, ways: list[Way], remarks: list[str]) -> None:
        self.buffer = buffer
        self.ways = ways
        self.remarks = remarks

    @property
    def route(self) -> str | None:
        """The kind of route that is taken; None if there is none."""
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
    """Return which route this process takes to `buffer` from its own memory on `device`, and why.

    The route is opened as a transfer would open it, if it is not open yet; nothing is transferred.
    No route leads to a buffer whose owner has exited.
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
    """Whether the kernel reports that less than half of the memory around it is in huge pages."""
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
        return False  # smaps of another user's process cannot be read
    return False
