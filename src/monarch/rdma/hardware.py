"""The hardware of this host for remote memory access, under the names of the interface."""

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
    "rdma_supported",
]


class RDMATcpFallbackWarning(Warning):
    """Bytes are sent over a socket because no better route exists. Issued once per process."""


class RDMAReadTransferWarning(Warning):
    """Never issued; it exists for programs that filter it."""


class RDMAWriteTransferWarning(Warning):
    """Never issued; it exists for programs that filter it."""


for _public in (RDMATcpFallbackWarning, RDMAReadTransferWarning, RDMAWriteTransferWarning):
    _public.__module__ = "monarch.rdma"

_DEVICES = "/sys/class/infiniband"


def ibverbs_devices(path: str = _DEVICES) -> list[str]:
    """Return the names of this host's network cards with verbs (InfiniBand, RoCE, EFA)."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def is_ibverbs_available() -> bool:
    """Whether this host has a network card with verbs whose use is not disabled.

    The setting ``rdma_disable_ibverbs`` disables it. Transfers work either way: see `explain`.

    >>> is_ibverbs_available() in (True, False)
    True
    """
    return not _spi.settings.rdma_disable_ibverbs and bool(ibverbs_devices())


def get_rdma_backend() -> str:
    """Return how this process transfers between hosts: "ibverbs", "tcp" or "none".

    "none" means that there is no card and the setting ``rdma_allow_tcp_fallback`` is off; then this
    process can make no buffer. Within a host the kernel copies, with or without a card.

    >>> get_rdma_backend() in ("ibverbs", "tcp", "none")
    True
    """
    if is_ibverbs_available():
        return "ibverbs"
    return "tcp" if _spi.settings.rdma_allow_tcp_fallback else "none"


def rdma_supported() -> bool:
    """Whether this process can make buffers: whether `get_rdma_backend` is not "none"."""
    return get_rdma_backend() != "none"


def is_rdma_available() -> bool:
    """Return `is_ibverbs_available()`. Deprecated: buffers also work without such hardware."""
    warnings.warn(
        "is_rdma_available() is deprecated: use is_ibverbs_available() for the hardware, or "
        "get_rdma_backend(); RDMABuffer works without either",
        DeprecationWarning,
        stacklevel=2,
    )
    return is_ibverbs_available()


def check_backend() -> None:
    """Raise RuntimeError if the settings do not allow buffers in this process."""
    if get_rdma_backend() == "none":
        raise RuntimeError(
            "Tried to create an RDMABuffer, but RDMA is not available on this platform: there "
            "is no ibverbs device, and sockets are not allowed; "
            "configure(rdma_allow_tcp_fallback=True) allows them"
        )
