"""One-sided memory transfers: read and write the memory of other processes.

The owner of the memory runs no user code for a transfer.

>>> from monarch.rdma import RDMABuffer
>>> weights = bytearray(b"weights!")
>>> buffer = RDMABuffer(weights)  # send this to any actor
>>> into = bytearray(8)
>>> buffer.read_into(into, timeout=5).get()  # the bytes have arrived
>>> into
bytearray(b'weights!')
>>> buffer.drop().get()
"""

from monarch.rdma.action import RDMAAction
from monarch.rdma.buffer import RDMABuffer
from monarch.rdma.errors import (
    RdmaBufferDropped,
    RdmaError,
    RdmaOwnerLost,
    RdmaPermissionError,
    RdmaTimeout,
    RdmaUnavailable,
)
from monarch.rdma.explanation import Explanation, Way, explain
from monarch.rdma.hardware import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)

__all__ = [
    "Explanation",
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "RdmaBufferDropped",
    "RdmaError",
    "RdmaOwnerLost",
    "RdmaPermissionError",
    "RdmaTimeout",
    "RdmaUnavailable",
    "Way",
    "explain",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
