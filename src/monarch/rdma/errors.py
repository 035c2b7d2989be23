"""The errors of transfers: one class for each reaction that a caller may have.

    RdmaError
      RdmaTimeout          (also TimeoutError)     the transfer did not finish within its timeout
      RdmaBufferDropped                            the registration ended: dropped, or released
      RdmaOwnerLost                                the process that owns the memory has exited
      RdmaPermissionError  (also PermissionError)  read-only memory, or a forged handle
      RdmaUnavailable                              no route reaches the memory; text has remedies

Mistakes that are detected at the call (sizes, layouts, types) raise ValueError and TypeError, as
everywhere. A failed transfer raises from its future.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "RdmaBufferDropped",
    "RdmaError",
    "RdmaOwnerLost",
    "RdmaPermissionError",
    "RdmaTimeout",
    "RdmaUnavailable",
    "joined",
]


class RdmaError(Exception):
    """A transfer, or the drop of a buffer, failed. The text has the reason and what to do."""


class RdmaTimeout(RdmaError, TimeoutError):
    """The transfer did not finish within `timeout`. Part of the bytes may have been transferred.

    Local memory is no longer written. (Over a socket, bytes that were already on their way to the
    owner may still arrive there.)
    """


class RdmaBufferDropped(RdmaError):
    """The owner's memory is no longer registered: `drop` was called, or its actor has exited."""


class RdmaOwnerLost(RdmaError):
    """The process that owns the memory has exited, or was replaced by a restart."""


class RdmaPermissionError(RdmaError, PermissionError):
    """The registration is read-only, or the handle was not given out by the owner."""


class RdmaUnavailable(RdmaError):
    """No route leads from this process to that memory. See `monarch.rdma.explain`."""


for _public in (
    RdmaError,
    RdmaTimeout,
    RdmaBufferDropped,
    RdmaOwnerLost,
    RdmaPermissionError,
    RdmaUnavailable,
):
    _public.__module__ = "monarch.rdma"


def joined(failures: Sequence[tuple[str, RdmaError]]) -> RdmaError:
    """Return one error for the failures of a submit, given as (route, error).

    Its class is that of the failures if they agree, else RdmaError.
    """
    kinds = {type(error) for _, error in failures}
    kind = kinds.pop() if len(kinds) == 1 else RdmaError
    lines = [f"({route}) {error}" if route else str(error) for route, error in failures]
    head = f"RdmaAction.submit failed: RDMA submit failed on {len(lines)} backend(s):"
    return kind("\n".join([head, *lines]))
