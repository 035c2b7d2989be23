"""`RDMAAction`: many operations in one submit."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from monarch import _spi
from monarch.actor import Future
from monarch.rdma import registry
from monarch.rdma.buffer import RDMABuffer, reading, writing
from monarch.rdma.errors import RdmaError, RdmaPermissionError
from monarch.rdma.memory import CPU, memory_of
from monarch.rdma.submission import submit, timeout_of
from monarch.rdma.transfer import ADD, SWAP, Op

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RDMAAction"]

_WORD = 8


class RDMAAction:
    """A list of operations that each `submit` carries out together.

    The operations run in no particular order: two that touch the same bytes race. The action keeps
    all memory that its operations name alive as long as the action exists.

    >>> memory, into = bytearray(b"abcd"), bytearray(2)
    >>> with RDMABuffer(memory) as buffer:
    ...     action = RDMAAction().read_remote(into, buffer[:2]).write_remote(buffer[2:], b"xy")
    ...     action.submit(timeout=5).get()
    >>> into, memory
    (bytearray(b'ab'), bytearray(b'abxy'))
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._lock = threading.Lock()
        self._under_way = 0
        self._waiting: deque[tuple[float, _spi.Promise[None]]] = deque()

    def read_remote(self, dst_local: Any, src_buffer: RDMABuffer) -> Self:
        """Add an operation: copy all of `src_buffer` into the first bytes of `dst_local`.

        Raises ValueError as `RDMABuffer.read_into` does, and RuntimeError during a submit.
        """
        return self._add(reading(_buffer(src_buffer), dst_local))

    def write_remote(self, dst_buffer: RDMABuffer, src_local: Any) -> Self:
        """Add an operation: copy all of `src_local` to the start of `dst_buffer`.

        Raises as `RDMABuffer.write_from` does, and RuntimeError during a submit.
        """
        return self._add(writing(_buffer(dst_buffer), src_local))

    def fetch_add(self, src: RDMABuffer, dst: Any, add: int) -> Self:
        """Add an atomic operation: copy the number at `src` to `dst`, and add `add` to it.

        The number is eight bytes at an address divisible by eight, unsigned, in the byte order of
        this machine; the sum is modulo 2**64. Atomic means atomic with respect to other atomic
        operations through buffers. Raises ValueError for memory that is too small, not aligned, not
        main memory or, at `dst`, read-only, RdmaPermissionError for a read-only buffer, and
        RuntimeError during a submit.

        >>> import array
        >>> counter, before = array.array("Q", [40]), array.array("Q", [0])
        >>> with RDMABuffer(counter) as buffer:
        ...     RDMAAction().fetch_add(buffer, before, 2).submit().get()
        >>> before[0], counter[0]
        (40, 42)
        """
        return self._atomic(ADD, src, dst, (_word("add", add), 0))

    def compare_and_swap(self, src: RDMABuffer, dst: Any, compare: int, swap: int) -> Self:
        """Add an atomic operation: copy the number at `src` to `dst`; if it is `compare`, set it.

        The new number is `swap`. The swap was done if `dst` holds `compare` afterwards. Numbers and
        errors are those of `fetch_add`.
        """
        return self._atomic(SWAP, src, dst, (_word("compare", compare), _word("swap", swap)))

    def submit(self, *, timeout: float = 60) -> Future[None]:
        """Carry out all operations. Begins at once and does not block.

        The future resolves when all operations are complete, or raises RdmaError for those that
        failed. An action may be submitted any number of times. Submits of one action run one after
        the other; the `timeout` of each, in seconds, counts from its own beginning.
        """
        seconds = timeout_of(timeout)
        with self._lock:
            if self._under_way:
                promise = _spi.Promise[None].pending()
                self._waiting.append((seconds, promise))
                return promise
            self._under_way = 1
        future = submit(self._ops, seconds)
        future._notify(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                self._under_way = 0
                return
            seconds, promise = self._waiting.popleft()
        future = submit(self._ops, seconds)

        def settle() -> None:
            self._next()  # before the caller learns of the end, and may change the action
            try:
                future.get(0)
            except RdmaError as error:
                promise.fail(error)
            else:
                promise.resolve(None)

        future._notify(settle)

    def _atomic(self, kind: int, src: RDMABuffer, dst: Any, operands: tuple[int, int]) -> Self:
        handle = _buffer(src)._handle
        memory = memory_of(dst)
        if src._length < _WORD or memory.nbytes < _WORD:
            raise ValueError(
                f"an atomic operation is on {_WORD} bytes: the buffer has {src._length}, the "
                f"destination local memory {memory.nbytes}"
            )
        if (handle.address + src._offset) % _WORD:
            raise ValueError(f"an atomic operation needs an address divisible by {_WORD}")
        for what, device in (("destination", memory.device), ("buffer", handle.device)):
            if device != CPU:
                raise ValueError(f"atomic operations are for main memory; {what}: on {device}")
        if not memory.writable:
            raise ValueError("destination local memory is read-only, and is never written")
        if not handle.writable:
            raise RdmaPermissionError(registry.read_only_text(handle))
        return self._add(Op(kind, handle, src._offset, memory, _WORD, operands))

    def _add(self, op: Op) -> Self:
        with self._lock:
            if self._under_way:
                raise RuntimeError(
                    "RdmaAction is currently being submitted; "
                    "await the in-flight submit before mutating it"
                )
            if op.nbytes:
                self._ops.append(op)
        return self

    def __repr__(self) -> str:
        return f"<RDMAAction, {len(self._ops)} operations>"


RDMAAction.__module__ = "monarch.rdma"


def _buffer(buffer: Any) -> RDMABuffer:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"an RDMABuffer is wanted for the remote side, not {type(buffer).__name__}")
    return buffer


def _word(name: str, value: int) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{name}: an int is wanted, not {type(value).__name__}")
    if not -(1 << 63) <= value < 1 << 64:
        raise OverflowError(f"{name} must fit in 64 bits, and {value} does not")
    return value & (1 << 64) - 1
