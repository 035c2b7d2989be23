"""`RDMABuffer`: a handle on memory, and on parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from monarch.actor import Future
from monarch.rdma import hardware, holders, registry, routes
from monarch.rdma.errors import RdmaPermissionError
from monarch.rdma.handle import Handle
from monarch.rdma.memory import memory_of
from monarch.rdma.submission import submit, timeout_of
from monarch.rdma.transfer import READ, WRITE, Op

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RDMABuffer", "reading", "writing"]


class RDMABuffer:
    """A small handle on memory of this process, which can be sent to any other process.

    A process that holds the handle reads and writes the memory while the owner does other work; the
    owner's user code takes no part. (Some routes use a thread of the owner: see `explain`.) A
    transfer sees the content of the memory at the moment of the transfer. The registration keeps
    the memory alive until `drop`, until the actor that made the buffer exits (for a script: until
    the script exits), or as `release` specifies. Making a buffer is quick: nothing is copied.

    Args:
        data: contiguous memory of any shape: a torch tensor, a numpy array, bytearray, bytes, mmap,
            a memoryview, ... It cannot be resized while it is registered.
        read_only: whether other processes may only read. Memory that is itself read-only (`bytes`)
            is always registered as read-only.
        release: "drop", or "last-handle" to release also when no process holds a handle. Pickling
            a handle keeps the memory for another `grace` seconds, since a copy may be in transit. A
            receiver that takes longer to unpickle may find the memory dropped. A process that exits
            holds no handle.
        grace: seconds, for "last-handle" only.

    Raises ValueError for memory that is empty or not contiguous, RuntimeError if the settings
    leave no way to transfer.
    """

    __slots__ = ("__weakref__", "_handle", "_length", "_offset")

    def __init__(
        self,
        data: Any,
        *,
        read_only: bool = False,
        release: Literal["drop", "last-handle"] = "drop",
        grace: float = 60.0,
    ) -> None:
        if release not in {"drop", "last-handle"}:
            raise ValueError(f'release must be "drop" or "last-handle", not {release!r}')
        hardware.check_backend()
        memory = memory_of(data)
        if not memory.nbytes:
            raise ValueError("Cannot create RDMABuffer with size 0.")
        registration = registry.own_registry().add(
            memory,
            writable=memory.writable and not read_only,
            grace=float(grace) if release == "last-handle" else None,
            offers=routes.offers_for(memory),
        )
        self._handle = registration.handle
        if release == "last-handle":
            holders.hold(self, self._handle)
        self._offset = 0
        self._length = memory.nbytes

    # -- attributes ------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the size in bytes of the buffer, or of the part that this object stands for."""
        return self._length

    def __len__(self) -> int:
        return self._length

    @property
    def read_only(self) -> bool:
        """Whether transfers can only read it."""
        return not self._handle.writable

    @property
    def device(self) -> str:
        """The device of the memory, as its owner names it: "cpu", "cuda:0", ..."""
        return self._handle.device

    @property
    def owner(self) -> str:
        """The address of the process that owns the memory. Opaque."""
        return f"rdma<{self._handle.number}>@ipc://@monarch-{self._handle.uid:x}"

    @property
    def backend(self) -> str:
        """`get_rdma_backend` of this process. `explain` returns the route to this very buffer."""
        return hardware.get_rdma_backend()

    def __repr__(self) -> str:
        handle = self._handle
        part = ""
        if self._length != handle.size:
            part = f"[{self._offset}:{self._offset + self._length}]"
        rest = "" if handle.device == "cpu" else f" on {handle.device}"
        rest += ", read-only" if not handle.writable else ""
        return f"<RDMABuffer {handle.number}{part}, {self._length} bytes of {handle.owner}{rest}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RDMABuffer):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self._handle.identity, self._handle.number, self._offset, self._length)

    # -- parts -----------------------------------------------------------------------------------

    def slice(self, offset: int, length: int) -> RDMABuffer:
        """Return `length` bytes from `offset` on as a buffer of its own.

        The part shares the registration: dropping either drops both. Raises ValueError if the part
        is empty or not within this buffer.
        """
        if length <= 0:
            raise ValueError("Cannot create RDMABuffer with size 0.")
        if offset < 0 or offset + length > self._length:
            raise ValueError(
                f"access at offset {offset} with length {length} exceeds region size {self._length}"
            )
        return _part(self._handle, self._offset + offset, length)

    def __getitem__(self, key: Any) -> RDMABuffer:
        """Return bytes a to b for `buffer[a:b]`, by the rules of Python's slices. See `slice`."""
        if not isinstance(key, slice):
            raise TypeError(
                "a part of an RDMABuffer is buffer[a:b]; to see bytes, read_into memory"
            )
        start, stop, step = key.indices(self._length)
        if step != 1:
            raise ValueError("a part of an RDMABuffer is contiguous: buffer[a:b], without a step")
        return self.slice(start, stop - start)

    __iter__ = None

    # -- transfers -------------------------------------------------------------------------------

    def read_into(self, dst: Any, *, timeout: float = 60) -> Future[None]:
        """Copy the whole buffer into the first bytes of `dst`; leave the rest of `dst` alone.

        Begins at once and does not block. The future resolves when the bytes have arrived; a small
        transfer within the host is usually complete when this call returns. The future raises
        RdmaError: for example RdmaTimeout after `timeout` seconds, RdmaBufferDropped, or
        RdmaOwnerLost. Bytes that another process writes during the transfer may be seen or not.

        Raises ValueError if `dst` is too small, not contiguous or read-only.
        """
        seconds = timeout_of(timeout)
        return submit([reading(self, dst)], seconds)

    def write_from(self, src: Any, *, timeout: float = 60) -> Future[None]:
        """Copy the whole of `src` to the start of the buffer; leave the rest of the buffer alone.

        Begins at once and does not block, as `read_into`. When the future resolves, the bytes are
        in the owner's memory. Raises ValueError if `src` is too large or not contiguous,
        RdmaPermissionError if the buffer is read-only.
        """
        seconds = timeout_of(timeout)
        op = writing(self, src)
        return submit([op] if op.nbytes else [], seconds)

    def drop(self) -> Future[None]:
        """End the registration; any process that holds a handle may do so.

        All parts of the buffer end with it. No slice of a transfer begins afterwards. When the
        future resolves, no transfer is under way, and only the owner uses the memory. Dropping a
        buffer that was already dropped, or whose owner has exited, is not an error.
        """
        return registry.drop(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Call `drop` and block until the future resolves."""
        self.drop().get()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._handle.grace is not None:
            holders.sent(self._handle)
        return _part, (self._handle, self._offset, self._length)


RDMABuffer.__module__ = "monarch.rdma"


def _part(handle: Handle, offset: int, length: int) -> RDMABuffer:
    if not 0 <= offset < offset + length <= handle.size:
        raise ValueError(
            f"access at offset {offset} with length {length} exceeds region size {handle.size}"
        )
    self: RDMABuffer = object.__new__(RDMABuffer)
    self._handle = handle
    self._offset = offset
    self._length = length
    if handle.grace is not None:
        holders.hold(self, handle)
    return self


def reading(buffer: RDMABuffer, dst: Any) -> Op:
    """Return the operation that reads all of `buffer` into `dst`. Raises as `read_into` does."""
    memory = memory_of(dst)
    length = buffer._length
    if memory.nbytes < length:
        raise ValueError(
            f"destination local memory size ({memory.nbytes}) must be >= "
            f"remote buffer size ({length})"
        )
    if not memory.writable:
        raise ValueError("destination local memory is read-only, and is never written")
    return Op(READ, buffer._handle, buffer._offset, memory, length)


def writing(buffer: RDMABuffer, src: Any) -> Op:
    """Return the operation that writes all of `src` to `buffer`. Raises as `write_from` does."""
    memory = memory_of(src)
    if memory.nbytes > buffer._length:
        raise ValueError(
            f"source local memory size ({memory.nbytes}) must be <= "
            f"remote buffer size ({buffer._length})"
        )
    if not buffer._handle.writable:
        raise RdmaPermissionError(registry.read_only_text(buffer._handle))
    return Op(WRITE, buffer._handle, buffer._offset, memory, memory.nbytes)
