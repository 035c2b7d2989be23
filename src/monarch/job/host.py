"""The main function of every host of a job: the worker, and what it keeps for its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch import _spi
from monarch.spmd.fork_server.keeper import keeping

__all__ = ["serve_host"]


def serve_host(
    address: str,
    ready: Callable[[str], None],
    lifeline: int | None = None,
    names: Sequence[str] = (),
) -> None:
    """Serve this host, as the engine's `serve_host` does, and keep it warm between launches."""
    with keeping():
        _spi.serve_host(address, ready, lifeline, names)
