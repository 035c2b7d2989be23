"""`CopyRoute`: a route on which threads of this process copy, slice by slice.

A timeout, a drop or the exit of the owner takes effect between two slices. So a slice takes only a
millisecond or two. Small operations share a slice, since the system call dominates their cost. Long
transfers are spread over threads; each thread repeatedly takes the next slice that is left.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

from monarch import _spi
from monarch.rdma.errors import RdmaError
from monarch.rdma.executor import CORES, spread
from monarch.rdma.routes import Unavailable
from monarch.rdma.table import Contended
from monarch.rdma.transfer import ADD, READ, WRITE, Op, Transfer

__all__ = ["CopyRoute", "Piece", "atomic_result", "slices"]

Piece = tuple[Op, int, int]
"""A part of an operation: the operation, the offset in it, and the number of bytes."""

INLINE = 1 << 20
SLICE = 8 << 20
_SPREAD = 8 << 20  # bytes per thread beyond the first; with less, another thread gains nothing
_MOST_THREADS = 4
_TOGETHER = 256  # operations of one slice; the kernel accepts up to 1024
_SPIN = 0.0002  # seconds that the caller's thread waits for another atomic operation

_U64 = struct.Struct("=Q")


class CopyRoute:
    """A `Route` that copies; a subclass implements `copy` and `atomic`."""

    kind = ""
    about = ""
    inline = INLINE

    def copy(self, kind: int, pieces: list[Piece]) -> None:
        """Copy the pieces, which are all READ or all WRITE. Raises RdmaError, or Unavailable."""
        raise NotImplementedError

    def atomic(self, op: Op) -> None:
        """Carry out an ADD or SWAP. Raises Contended if another one is under way."""
        raise NotImplementedError

    def run(self, ops: list[Op]) -> None:
        """Carry out all operations in the calling thread."""
        if len(ops) == 1 and ops[0].kind <= WRITE:  # the common case, without slices
            op = ops[0]
            self.copy(op.kind, [(op, 0, op.nbytes)])
            return
        for kind, pieces in slices(ops):
            if kind <= WRITE:
                self.copy(kind, pieces)
            else:
                self.atomically(pieces[0][0], time.monotonic() + _SPIN, os.sched_yield)

    def start(self, transfer: Transfer) -> None:
        """Carry out all operations on other threads."""
        total = sum(op.nbytes for op in transfer.ops)
        threads = min(_MOST_THREADS, CORES, 1 + total // _SPREAD)
        spread(_Job(self, transfer).work, threads)

    def atomically(self, op: Op, deadline: float, pause: Callable[[], object]) -> None:
        """Carry out an ADD or SWAP; try again while another one is under way.

        `pause` is called between two tries. Raises Contended after `deadline`.
        """
        while True:
            try:
                self.atomic(op)
            except Contended:
                if time.monotonic() >= deadline:
                    raise
                pause()
            else:
                return


class _Job:
    """One transfer, carried out by any number of threads."""

    def __init__(self, route: CopyRoute, transfer: Transfer) -> None:
        self._route = route
        self._transfer = transfer
        self._slices = list(slices(transfer.ops))
        self._next = itertools.count()
        self._lock = threading.Lock()
        self._at_work = 0
        self._begun = False
        self._over = False
        self._error: RdmaError | Unavailable | None = None
        self._late = False

    def work(self) -> None:
        with self._lock:
            if self._over or (not self._begun and not self._transfer.begin()):
                self._over = True
                return
            self._begun = True
            self._at_work += 1
        slices = self._slices
        while not self._over:
            at = next(self._next)
            if at >= len(slices):
                break
            if self._transfer.late:
                self._late = self._over = True
                break
            try:
                self._carry_out(*slices[at])
            except (RdmaError, Unavailable) as error:
                self._error = self._error or error
                self._over = True
            except BaseException as error:  # after a bug here the transfer must end all the same
                self._error = RdmaError(f"internal error: {error!r}")
                self._over = True
        with self._lock:
            self._at_work -= 1
            self._over = True
            if self._at_work:
                return
        self._finish()

    def _carry_out(self, kind: int, pieces: list[Piece]) -> None:
        if kind <= WRITE:
            self._route.copy(kind, pieces)
            return
        try:
            self._route.atomically(
                pieces[0][0],
                self._transfer.deadline,
                lambda: threading.Event().wait(_SPIN),
            )
        except Contended:
            self._late = self._over = True

    def _finish(self) -> None:
        self._slices = []
        if isinstance(self._error, Unavailable):
            self._transfer.reroute(self._error)
        elif self._error is not None:
            self._transfer.fail(self._error)
        elif self._late:
            self._transfer.fail_late()
        else:
            self._transfer.done()


def slices(ops: list[Op], limit: int = SLICE) -> Iterator[tuple[int, list[Piece]]]:
    """Yield the operations as slices: cut, and gathered, to at most `limit` bytes each."""
    limit = min(limit, max(1, _spi.settings.rdma_max_chunk_size_mb) << 20)
    kind = READ
    pieces: list[Piece] = []
    room = limit
    for op in ops:
        if op.kind >= ADD:
            yield op.kind, [(op, 0, op.nbytes)]
            continue
        if pieces and (op.kind != kind or len(pieces) == _TOGETHER):
            yield kind, pieces
            pieces, room = [], limit
        kind = op.kind
        at = 0
        while at < op.nbytes:
            count = min(room, op.nbytes - at)
            pieces.append((op, at, count))
            at += count
            room -= count
            if not room:
                yield kind, pieces
                pieces, room = [], limit
    if pieces:
        yield kind, pieces


def atomic_result(op: Op, old: bytes) -> bytes | None:
    """Return the new content of a word whose content is `old`; None to leave it unchanged."""
    (value,) = _U64.unpack(old)
    first, second = op.operands
    if op.kind == ADD:
        return _U64.pack((value + first) & (1 << 64) - 1)
    return _U64.pack(second) if value == first else None
