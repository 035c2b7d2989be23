"""What can go wrong with a transfer, one class for each kind of answer a caller may have.

    RdmaError
      RdmaTimeout          (also TimeoutError)     the transfer took longer than it was allowed to
      RdmaBufferDropped                            the registration is over: dropped, or released
      RdmaOwnerLost                                the process whose memory it is, is gone
      RdmaPermissionError  (also PermissionError)  read-only memory, or a handle that was forged
      RdmaUnavailable                              no route leads there; the text has the remedies

Mistakes that are seen at the call (sizes, layouts, types) are ValueError and TypeError, as
everywhere. A transfer that fails says so through its future.
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
    """A transfer, or the drop of a buffer, failed. The text says why and what to do."""


class RdmaTimeout(RdmaError, TimeoutError):
    """It took longer than `timeout`. Part of the bytes may have been transferred.

    Nothing is written to local memory any more. (Over a socket, what was on its way to the owner
    may still arrive there.)
    """


class RdmaBufferDropped(RdmaError):
    """The owner's memory is no longer registered: `drop` was called, or its actor has ended."""


class RdmaOwnerLost(RdmaError):
    """The process that owns the memory is gone, or was replaced by a restart."""


class RdmaPermissionError(RdmaError, PermissionError):
    """The registration is read-only, or the handle was not given out by the owner."""


class RdmaUnavailable(RdmaError):
    """There is no way from this process to that memory. See `monarch.rdma.explain`."""


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
    """What the future of a submit raises for failures by route: of their class, if they agree."""
    kinds = {type(error) for _, error in failures}
    kind = kinds.pop() if len(kinds) == 1 else RdmaError
    lines = [f"({route}) {error}" if route else str(error) for route, error in failures]
    head = f"RdmaAction.submit failed: RDMA submit failed on {len(lines)} backend(s):"
    return kind("\n".join([head, *lines]))
