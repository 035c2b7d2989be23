"""Copies within one process.

Each copy looks up the registration, so a drop takes effect at once. During a copy a reader keeps
the memory alive, and a writer holds the registration's lock for one slice (see `registry`).
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from monarch.rdma import registry
from monarch.rdma.devices import copy
from monarch.rdma.errors import RdmaBufferDropped, RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory
from monarch.rdma.routes import Unavailable
from monarch.rdma.routes.copying import CopyRoute, Piece, atomic_result
from monarch.rdma.transfer import READ, Op

__all__ = ["Local", "LocalRoute"]

_move = ctypes.memmove  # releases the interpreter lock


class Local:
    """The `Kind` for memory of this process."""

    name: ClassVar[str] = "local"
    needs: ClassVar[str] = "memory of this process"

    def offer(self, memory: Memory) -> bytes | None:
        """Return an empty offer: a route within the process needs no data in the handle."""
        return b""

    def withdrawn(self, handle: Handle) -> None:
        """Do nothing: each copy looks up the registration."""

    def open(self, handle: Handle, device: str) -> LocalRoute:
        """Return a route, if the memory belongs to this process."""
        if not registry.owned_here(handle):
            raise Unavailable("the memory is another process's")
        return LocalRoute()


class LocalRoute(CopyRoute):
    """The route to memory of this process."""

    kind = Local.name
    about = "a memory copy within this process"

    def copy(self, kind: int, pieces: list[Piece]) -> None:
        """See `CopyRoute`."""
        find = registry.own_registry().find
        for op, at, count in pieces:
            found = find(op.handle.number, op.handle.token)
            memory = found.memory  # keeps the memory alive, also after a drop
            if memory.stale:
                raise RdmaError(registry.moved_text(op.handle))
            if kind == READ:
                copy(op.local, at, memory, op.offset + at, count)
            else:
                with found.writing():
                    copy(memory, op.offset + at, op.local, at, count)
            if found.ended:
                raise RdmaBufferDropped(registry.dropped_text(op.handle.number))

    def atomic(self, op: Op) -> None:
        """See `CopyRoute`."""
        own = registry.own_registry()
        found = own.find(op.handle.number, op.handle.token)
        with found.writing(), own.alone(found):
            place = found.memory.address + op.offset
            old = ctypes.string_at(place, 8)
            new = atomic_result(op, old)
            if new is not None:
                _move(place, new, 8)
        _move(op.local.address, old, 8)
