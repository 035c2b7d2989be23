"""Transfers over a socket, for memory that no other kind of route reaches.

The owner's data thread copies between the socket and the registered memory (`server`), the
initiator's between the socket and its own memory (`peer`); `message` defines requests and replies.
The owner's user code takes no part, and may be busy; its interpreter must run for the moments
between two system calls.

Within a host the socket is one end of a socket pair, and the agent passes the other end to the
owner. Between hosts the agents carry the bytes until a direct connection is established. If there
can be none (a firewall, a translated address, a missing certificate), the agents carry all bytes. A
peer that the control links would refuse is refused here, too, and if the control links are
encrypted, so are these connections: see docs/security.md.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import ClassVar

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaError
from monarch.rdma.handle import Handle
from monarch.rdma.hardware import RDMATcpFallbackWarning
from monarch.rdma.memory import CPU, Memory
from monarch.rdma.routes import Unavailable, forget
from monarch.rdma.routes.stream.peer import Peer
from monarch.rdma.routes.stream.server import KIND, PURPOSE, Server
from monarch.rdma.transfer import Op, Transfer

__all__ = ["Stream"]

_REMEMBERED = 1024


class Stream:
    """The `Kind` for any memory that a socket can reach."""

    name: ClassVar[str] = KIND
    needs: ClassVar[str] = "sockets"

    def __init__(self) -> None:
        self._server = Server()
        self._serves = 0  # uid as which this process has registered its server
        self._peers: dict[bytes, Peer] = {}
        self._over: dict[bytes, str] = {}  # owners that are lost for good, and how
        self._lock = threading.Lock()
        self._warned = False
        _spi.when_forked(self._forget)

    def offer(self, memory: Memory) -> bytes | None:
        """Start to serve the memory; return a mark that it is served."""
        if _spi.is_simulated():
            return None
        uid = _spi.own_uid()
        if self._serves != uid:
            self._serves = uid
            _spi.serve_streams(PURPOSE, self._server.accept)
        return b"\1"

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """Revoke the memory: a drop waits only for the slice that is being copied."""
        return self._server.withdrawn(handle)

    def open(self, handle: Handle, device: str) -> _StreamRoute:
        """Return a route, if the settings allow sockets."""
        if _spi.is_simulated():
            raise Unavailable("there are no sockets in a simulation")
        if not _spi.settings.rdma_allow_tcp_fallback:
            raise Unavailable("sockets are not allowed", "configure(rdma_allow_tcp_fallback=True)")
        if _spi.successor_of(handle.uid) != handle.uid:
            raise registry.lost_error(handle)
        how = self._over.get(handle.identity)
        if how is not None:
            raise registry.lost_error(handle, how)
        with self._lock:
            peer = self._peers.get(handle.identity)
            if peer is None:
                peer = self._peers[handle.identity] = Peer(handle, self._ended)
        self._warn(handle)
        return _StreamRoute(peer, (handle.device, device) != (CPU, CPU))

    def _ended(self, peer: Peer, lost: str | None) -> None:
        """Forget a peer whose connections have closed; `lost` is how its owner was lost, if so."""
        with self._lock:
            del self._peers[peer.identity]
            if lost is not None:
                self._over[peer.identity] = lost
                while len(self._over) > _REMEMBERED:
                    del self._over[next(iter(self._over))]
        forget(peer.handle)

    def _warn(self, handle: Handle) -> None:
        if self._warned or self.name in _spi.settings.rdma_routes or registry.owned_here(handle):
            return
        self._warned = True
        warnings.warn(
            f"RDMA buffers of {handle.owner} are transferred over a socket, for want of anything "
            "better: monarch.rdma.explain(buffer) says why",
            RDMATcpFallbackWarning,
            stacklevel=2,
        )

    def _forget(self) -> None:
        peers, self._peers = self._peers, {}
        server, self._server = self._server, Server()
        self._serves = 0
        self._lock = threading.Lock()
        for peer in peers.values():
            peer.close_in_child()
        server.close_in_child()


class _StreamRoute:
    kind = Stream.name
    inline = -1  # every transfer waits for a reply

    def __init__(self, peer: Peer, staged: bool) -> None:
        self._peer = peer
        self._staged = ", by way of main memory" if staged else ""

    @property
    def about(self) -> str:
        """The path of the bytes at present, in words."""
        return self._peer.how + self._staged

    def run(self, ops: list[Op]) -> None:
        """Raise an internal error: a stream cannot transfer without waiting."""
        raise RdmaError(f"internal error: {len(ops)} operations to be done at once")

    def start(self, transfer: Transfer) -> None:
        """Begin the transfer."""
        self._peer.start(transfer)
