"""`Job` and `Chunk`: a transfer under way, and the parts of it that are requested one by one.

The initiator's memory is touched only here. After a chunk is abandoned its memory is not touched,
whatever still arrives for the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from monarch.rdma.errors import RdmaError
from monarch.rdma.routes.stream.landing import TRASH
from monarch.rdma.routes.stream.message import REQUEST
from monarch.rdma.transfer import WRITE, Op, Transfer
from monarch.rdma.views import landed, source, target

__all__ = ["CHUNK", "Chunk", "Job"]

CHUNK = 1 << 20
"""The number of bytes in most requests; the least value of `rdma_max_chunk_size_mb`."""

_SMALL = 4 << 10  # most bytes of a write that are copied behind their request


class Job:
    """A transfer under way, cut into chunks."""

    __slots__ = ("_pieces", "error", "left", "next", "over", "transfer", "turn")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._pieces = _pieces(transfer.ops)
        self.next = next(self._pieces, None)
        self.left = 0  # requests that are unanswered
        self.turn = 0  # bytes that were requested in this turn
        self.error: RdmaError | None = None
        self.over = False

    def take(self) -> Chunk | None:
        """Return the next chunk to request; None if none is left."""
        piece = self.next
        if piece is None:
            return None
        self.next = next(self._pieces, None)
        self.left += 1
        self.turn += piece[2]
        return Chunk(self, *piece)

    def fail(self, error: RdmaError) -> None:
        """Record `error`, and request no further chunk."""
        self.error = self.error or error
        self.next = None

    def finish(self) -> None:
        """End the transfer: all requests are answered."""
        if self.error is not None:
            self.transfer.fail(self.error)
        else:
            self.transfer.done()


def _pieces(ops: list[Op]) -> Iterator[tuple[Op, int, int]]:
    for op in ops:
        for at in range(0, op.nbytes, CHUNK):
            yield op, at, min(CHUNK, op.nbytes - at)


class Chunk:
    """A request for a part of an operation, and the destination of its reply."""

    __slots__ = (
        "_at",
        "_offset",
        "_then",
        "count",
        "ident",
        "job",
        "left",
        "op",
        "view",
    )

    def __init__(self, job: Job, op: Op, offset: int, count: int) -> None:
        self.job = job
        self.ident = 0
        self.op = op
        self.count = count
        self.left = 0
        self.view: memoryview | None = None
        self._offset = offset
        self._at = 0
        self._then: Callable[[], None] | None = None

    def asked(self, ident: int) -> list[bytes | memoryview]:
        """Return the bytes that request the chunk."""
        op, count = self.op, self.count
        offset = op.offset + self._offset
        handle = op.handle
        request = REQUEST.pack(
            ident, op.kind, 0, handle.number, handle.token, offset, count, *op.operands
        )
        if op.kind != WRITE:
            self.view = target(op.local, self._offset, count)
            return [request]
        self.view = view = source(op.local, self._offset, count)
        return [request + view] if count <= _SMALL else [request, view]

    def expect(self, then: Callable[[], None] | None) -> Chunk:
        """Return the destination of the bytes about to arrive; `then` is called after them."""
        if self.op.kind == WRITE:
            raise ValueError("bytes in answer to a write")
        self.left = self.count
        self._at = 0
        self._then = then
        return self

    def abandon(self) -> None:
        """Let the chunk never touch its memory again."""
        self.view = None

    def put(self, data: memoryview) -> None:
        """See `Landing`."""
        view, count = self.view, len(data)
        if view is not None:
            view[self._at : self._at + count] = data
        self._at += count
        self.left -= count

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        """See `Landing`."""
        view = self.view
        count = receive(TRASH[: self.left] if view is None else view[self._at :])
        self._at += count
        self.left -= count
        return count

    def done(self) -> None:
        """See `Landing`."""
        if self.view is not None:
            try:
                landed(self.op.local, self._offset, self.view)
            except RdmaError as error:  # the device does not accept the bytes
                self.job.fail(error)
        if self._then is not None:
            self._then()
