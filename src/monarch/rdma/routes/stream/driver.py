"""The thread that moves the bytes of this process, for what it owns and for what it asks for.

A reactor of its own, so that neither a stream of megabytes waits for messages nor they for it. (As
for speed the reactor of the process would do as well: eight bytes took 60 us on either, 64 MB the
same processor time.) Started with the first connection, and kept.

One thread: it copies about as fast as the kernel does, and on two cores the other one is the
peer's. More connections than one, which `rdma_tcp_fallback_parallelism` asks for, gain nothing
within a host; between hosts they help where a single TCP connection does not fill the network.
"""

from __future__ import annotations

import threading

from monarch import _spi

__all__ = ["data_reactor"]

_reactor: _spi.Reactor | None = None
_lock = threading.Lock()


def data_reactor() -> _spi.Reactor:
    """The one of this process."""
    global _reactor
    with _lock:
        if _reactor is None:
            _reactor = _spi.Reactor()
            _reactor.start("monarch-rdma-stream")
        return _reactor


def _forget() -> None:
    global _reactor, _lock
    reactor, _reactor = _reactor, None
    _lock = threading.Lock()
    if reactor is not None:
        reactor.close()


_spi.when_forked(_forget)
