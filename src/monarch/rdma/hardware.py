"""What this machine has for remote memory access, and how the interface calls it."""

from __future__ import annotations

import os
import warnings

from monarch import _spi

__all__ = [
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "check_backend",
    "get_rdma_backend",
    "ibverbs_devices",
    "is_ibverbs_available",
    "is_rdma_available",
]


class RDMATcpFallbackWarning(Warning):
    """Bytes cross a socket, for want of anything better. Issued once per process."""


class RDMAReadTransferWarning(Warning):
    """For programs that filter it; never issued."""


class RDMAWriteTransferWarning(Warning):
    """For programs that filter it; never issued."""


for _public in (RDMATcpFallbackWarning, RDMAReadTransferWarning, RDMAWriteTransferWarning):
    _public.__module__ = "monarch.rdma"

_DEVICES = "/sys/class/infiniband"


def ibverbs_devices(path: str = _DEVICES) -> list[str]:
    """The names of the network cards with verbs (InfiniBand, RoCE, EFA) of this host."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def is_ibverbs_available() -> bool:
    """Whether this host has a network card with verbs, and its use is not switched off.

    The setting ``rdma_disable_ibverbs`` does that. Transfers work either way: see `explain`.

    >>> is_ibverbs_available() in (True, False)
    True
    """
    return not _spi.settings.rdma_disable_ibverbs and bool(ibverbs_devices())


def get_rdma_backend() -> str:
    """What this process has for transfers between hosts: "ibverbs", "tcp" or "none".

    "none" means that there is no card and the setting ``rdma_allow_tcp_fallback`` is off. Within a
    host the kernel copies, whatever this says.

    >>> get_rdma_backend() in ("ibverbs", "tcp", "none")
    True
    """
    if is_ibverbs_available():
        return "ibverbs"
    return "tcp" if _spi.settings.rdma_allow_tcp_fallback else "none"


def is_rdma_available() -> bool:
    """Deprecated: the same as `is_ibverbs_available`. Buffers work without such hardware, too."""
    warnings.warn(
        "is_rdma_available() is deprecated: use is_ibverbs_available() for the hardware, or "
        "get_rdma_backend(); RDMABuffer works without either",
        DeprecationWarning,
        stacklevel=2,
    )
    return is_ibverbs_available()


def check_backend() -> None:
    """Raise RuntimeError if buffers must not be made in this process."""
    if get_rdma_backend() == "none":
        raise RuntimeError(
            "Tried to create an RDMABuffer, but RDMA is not available on this platform: there "
            "is no ibverbs device, and sockets are not allowed; "
            "configure(rdma_allow_tcp_fallback=True) allows them"
        )
