"""Through NIXL: network cards move the bytes (InfiniBand, RoCE, EFA), also of GPUs.

An extra, ``pip install 'pymonarch[rdma]'``, and used where it pays: if both hosts have a card with
verbs. Without one the library would use TCP, which our own sockets do better, and unlike it with
authentication. The setting ``rdma_routes`` forces it, even so.

`library` is what we call, `progress` the thread that asks how transfers go, `route` what initiators
do; how owners lend memory and take it back is in `routes.lease`.

Known limits: what goes over the card is not encrypted. A transfer whose time is over ends when the
slice that is under way (32 MB) has arrived. If a host was given up and is there again, a slice that
it sent before may still arrive. The library keeps the keys of registrations that ended, some
hundred bytes each, as long as it knows their owner.
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

_VERSION = b"1"  # of the leases


class Nixl:
    """The kind."""

    name: ClassVar[str] = NixlRoute.kind

    def offer(self, memory: Memory) -> bytes | None:
        """Offered is that a peer may ask; nothing is loaded, started or registered before."""
        return _VERSION if not _why_not() else None

    def open(self, handle: Handle, device: str) -> NixlRoute:
        """A route, if both sides want it."""
        why_not = _why_not()
        if why_not:
            raise Unavailable(*why_not)
        if handle.offers.get(self.name) != _VERSION:
            raise Unavailable(
                "the owner does not offer it: it has no NIXL, or no card with verbs",
                f"there: {REMEDY}",
            )
        return NixlRoute(handle)

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """A drop waits for what others have under way."""
        return lender.withdrawn(handle)


def _why_not() -> tuple[str, str] | None:
    """The reason not to use it in this process, and the remedy."""
    if _spi.is_simulated():
        return "it is not simulated", ""
    if installed() is None:
        return "NIXL is not installed", REMEDY
    if not is_ibverbs_available() and Nixl.name not in _spi.settings.rdma_routes:
        return "this host has no network card with verbs", ""
    return None
