"""Transfers with NIXL: network cards move the bytes (InfiniBand, RoCE, EFA), also those of GPUs.

NIXL is an extra, ``pip install 'pymonarch[rdma]'``. It is used where it pays: if both hosts have a
card with verbs. Without a card NIXL would use TCP; our own sockets are better at that, and
authenticated. The setting ``rdma_routes`` forces NIXL nevertheless.

`library` has the calls to NIXL, `progress` the thread that polls transfers, `route` the initiator's
side. The owner's side, which lends memory and takes it back, is in `routes.lease`.

Known limits: bytes on the card are not encrypted. A transfer whose time is over ends only when the
slice under way (32 MB) has arrived. If a host was given up and comes back, a slice that it sent
before may still arrive. The library keeps the keys of registrations that ended, about a hundred
bytes each, as long as it knows their owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from monarch import _spi
from monarch.rdma.handle import Handle
from monarch.rdma.hardware import is_ibverbs_available
from monarch.rdma.memory import Memory
from monarch.rdma.routes import Unavailable
from monarch.rdma.routes.nixl.library import REMEDY, installed
from monarch.rdma.routes.nixl.route import NixlRoute, lender

__all__ = ["Nixl"]

_VERSION = b"1"  # of the protocol of leases


class Nixl:
    """The `Kind` for hosts with a network card and the NIXL library."""

    name: ClassVar[str] = NixlRoute.kind
    needs: ClassVar[str] = f"NIXL ({REMEDY}) and a network card with verbs, on both hosts"

    def offer(self, memory: Memory) -> bytes | None:
        """Return a mark that a peer may ask for a lease.

        NIXL is not loaded, started or used for registrations before a peer asks.
        """
        return _VERSION if not _why_not() else None

    def open(self, handle: Handle, device: str) -> NixlRoute:
        """Return a route, if both sides can use NIXL and choose to."""
        why_not = _why_not()
        if why_not:
            raise Unavailable(*why_not)
        if handle.offers[self.name] != _VERSION:
            raise Unavailable(
                "the owner speaks another version of it", "install the same release of both"
            )
        return NixlRoute(handle)

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """Revoke the leases: a drop waits for transfers that other processes have under way."""
        return lender.withdrawn(handle)


def _why_not() -> tuple[str, str] | None:
    """Return the reason not to use NIXL in this process, and the remedy; None to use it."""
    if _spi.is_simulated():
        return "it is not simulated", ""
    if installed() is None:
        return "NIXL is not installed", REMEDY
    if not is_ibverbs_available() and Nixl.name not in _spi.settings.rdma_routes:
        return "this host has no network card with verbs", ""
    return None
