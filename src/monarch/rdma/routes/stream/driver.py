"""The thread that moves the bytes of streams: those this process serves, and those it requests.

It has a reactor of its own, so that a stream of megabytes does not delay messages, nor messages a
stream. (For speed alone the reactor of the process would do: eight bytes took 60 us on either, and
64 MB took the same processor time.) The thread starts with the first connection, and is kept.

There is only one thread: it copies about as fast as the kernel does, and of two cores the other one
serves the peer. Several connections (`rdma_tcp_fallback_parallelism`) gain nothing within a host.
Between hosts they help where a single TCP connection does not fill the network.
"""

from __future__ import annotations

import threading

from monarch import _spi

__all__ = ["data_reactor"]

_reactor: _spi.Reactor | None = None
_lock = threading.Lock()


def data_reactor() -> _spi.Reactor:
    """Return the data reactor of this process, started on first use."""
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
