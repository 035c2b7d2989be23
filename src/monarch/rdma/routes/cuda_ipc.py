"""Memory of a device, between processes of one host: the initiator maps the owner's memory.

The owner exports memory when an initiator first asks for it, and revokes it, by a `lease`. Once the
memory is mapped, the initiator alone copies bytes: from device to device, or to and from main
memory. Memory that cannot be exported or mapped goes through main memory, on another route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from monarch import _spi
from monarch.rdma import devices, registry
from monarch.rdma.device import NotShared
from monarch.rdma.devices import device_of
from monarch.rdma.errors import RdmaBufferDropped
from monarch.rdma.executor import spread
from monarch.rdma.handle import Handle
from monarch.rdma.identity import own_host
from monarch.rdma.memory import CPU, Memory
from monarch.rdma.routes import Unavailable, forget
from monarch.rdma.routes.copying import CopyRoute, Piece
from monarch.rdma.routes.lease import Lease, Lender, Lessee, Peer
from monarch.rdma.table import Contended
from monarch.rdma.transfer import READ, Op, Transfer

__all__ = ["CudaIpc"]


class CudaIpc:
    """The `Kind` for devices that two processes of a host share."""

    name: ClassVar[str] = "cuda-ipc"
    needs: ClassVar[str] = "memory of a device"

    def offer(self, memory: Memory) -> bytes | None:
        """Return a mark that the memory is of a device.

        Whether it can be exported is found out when an initiator asks for a lease.
        """
        return None if memory.device == CPU or _spi.is_simulated() else b"\1"

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """Revoke the leases: a drop waits for copies that other processes have under way."""
        return _lender.withdrawn(handle)

    def open(self, handle: Handle, device: str) -> _IpcRoute:
        """Return a route to memory of a device, if the owner is on this host."""
        if handle.device == CPU:
            raise Unavailable("it is for memory of devices")
        if registry.owned_here(handle):
            raise Unavailable("the memory is of this process")
        if handle.host.boot != own_host().boot:
            raise Unavailable("the owner is on another host")
        return _IpcRoute(handle)


def _lend(memory: Memory) -> bytes:
    try:
        return device_of(memory).share(memory)
    except NotShared as error:
        raise Unavailable(error.reason, error.remedy) from None


def _accept(_: Peer, handle: Handle, key: bytes) -> Memory:
    """Map the memory of the owner; it becomes the `value` of the lease."""
    kind = Memory(0, 0, False, None, handle.device)
    try:
        return device_of(kind).open(key)
    except NotShared as error:
        raise Unavailable(error.reason, error.remedy) from None


def _run(task: Callable[[], None]) -> None:
    spread(task, 1)


_lender = Lender(CudaIpc.name, _run, _lend, lambda _: None)
_lessee = Lessee(CudaIpc.name, _run, _accept, Peer)


class _IpcRoute(CopyRoute):
    kind = CudaIpc.name
    about = "a copy from the owner's memory, which is mapped here"

    def __init__(self, handle: Handle) -> None:
        self._peer = _lessee.peer(handle)

    def run(self, ops: list[Op]) -> None:
        """Copy at once, if everything is mapped; else raise Contended."""
        for op in ops:
            lease = self._peer.leases.get(op.handle.number)
            if lease is None or lease.value is None:
                raise Contended  # `start` waits for the lease
        super().run(ops)

    def start(self, transfer: Transfer) -> None:
        """Copy once everything is mapped."""
        handles = {op.handle.number: op.handle for op in transfer.ops}
        self._proceed(transfer, _lessee.leases(self._peer, list(handles.values())))

    def _proceed(self, transfer: Transfer, leases: list[Lease]) -> None:
        for lease in leases:
            if lease.when_settled(lambda: self._proceed(transfer, leases)):
                return
            if isinstance(lease.error, Unavailable):
                transfer.reroute(lease.error)
                return
            if lease.error is not None:
                transfer.fail(lease.error)
                return
        super().start(transfer)

    def copy(self, kind: int, pieces: list[Piece]) -> None:
        """See `CopyRoute`."""
        for op, at, count in pieces:
            if self._peer.gone:
                forget(op.handle)
                raise registry.lost_error(op.handle)
            lease = self._peer.leases.get(op.handle.number)
            if lease is None or not lease.enter():
                raise RdmaBufferDropped(registry.dropped_text(op.handle.number))
            try:
                there, offset = lease.value, op.offset + at
                if kind == READ:
                    devices.copy(op.local, at, there, offset, count)
                else:
                    devices.copy(there, offset, op.local, at, count)
            finally:
                lease.leave()
