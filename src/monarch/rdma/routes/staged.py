"""Staging: local memory of a device, on a route that reaches main memory elsewhere.

Each slice is copied twice, through a block of main memory. (Memory of a device at the other end is
never staged here. It is served by a kind of route that asks the owner, and the owner stages it.)
"""

from __future__ import annotations

from monarch.rdma.devices import device_of
from monarch.rdma.memory import Memory, memory_of
from monarch.rdma.routes.copying import CopyRoute, Piece
from monarch.rdma.transfer import READ, Op

__all__ = ["Staged"]


class Staged(CopyRoute):
    """The route `route`, with local memory of a device."""

    def __init__(self, route: CopyRoute) -> None:
        self._route = route
        self.kind = route.kind
        self.about = f"{route.about}, by way of main memory"

    def copy(self, kind: int, pieces: list[Piece]) -> None:
        """See `CopyRoute`."""
        device = device_of(pieces[0][0].local)
        block = device.main(sum(count for _, _, count in pieces))
        held = memory_of(block)
        within: list[Piece] = []
        parts: list[memoryview] = []
        start = 0
        for op, at, count in pieces:
            place = Memory(held.address + start, count, True, block)
            within.append((Op(kind, op.handle, op.offset + at, place, count), 0, count))
            parts.append(block[start : start + count])
            start += count
        if kind == READ:
            self._route.copy(kind, within)
            for (op, at, _), part in zip(pieces, parts, strict=True):
                device.store(op.local, at, part)
        else:
            for (op, at, _), part in zip(pieces, parts, strict=True):
                device.load(op.local, at, part)
            self._route.copy(kind, within)
