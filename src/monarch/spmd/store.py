"""The rendezvous of `torch.distributed`: a store that one process holds open.

A port that was found free, closed, and opened again later may be taken by another process in
between. So the process that names the port listens there from then on, with a `TCPStore` on a
socket that is bound already. ``init_process_group`` in that process finds the store by its port,
since torch shares stores of one process that are made with `multi_tenant`; the other processes
connect. In a mesh the first process holds the store. Under ``monarch run`` a process beside the
first rank does, and all ranks connect (`AGENT_STORE`), as they do to torchrun's agent.

Each rendezvous has a store of its own, since the keys of an earlier group would mislead a later
one. A store lives as long as the process: groups made from it may connect later (`new_group`).
Peers of a store are not authenticated: that is so for all of `torch.distributed`. So it listens on
loopback where that suffices.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

__all__ = ["AGENT_STORE", "hold_store", "listen", "open_store"]

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": no rank opens a store of its own

_LIMIT = timedelta(minutes=5)  # for requests of this process, which makes none

_held: list[Any] = []


def open_store(address: str) -> int:
    """Open a store that listens at this address ("": all addresses). Return its port.

    Raises ModuleNotFoundError without torch; OSError if the address is not of this machine.
    """
    listening = listen(address)
    port: int = listening.getsockname()[1]
    hold_store(listening)
    return port


def hold_store(listening: socket.socket) -> None:
    """Serve a store on a listening socket, which is taken over, as long as this process lives."""
    try:
        import torch.distributed
    except ImportError as error:
        raise ModuleNotFoundError(
            "a rendezvous of torch.distributed needs torch: pip install 'pymonarch[torch]'"
        ) from error
    port: int = listening.getsockname()[1]
    _held.append(
        torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - it is documented
            "localhost",
            port,
            None,
            True,
            _LIMIT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen at an address ("": all) and a port (0: a free one). Raises OSError."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
