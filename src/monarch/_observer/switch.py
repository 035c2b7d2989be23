"""Telemetry is switched on: the process gets a recorder, and a thread that delivers its rows.

The script starts the observer. The other processes of the job open side
streams to the script, which passes their ends on to the observer and reads nothing itself.
"""

from __future__ import annotations

import atexit
import socket
from typing import TYPE_CHECKING

from monarch._spi import Caller, is_simulated, open_stream, serve_streams, when_forked
from monarch._store.query import before_query
from monarch._telemetry import sources
from monarch._telemetry.delivery import Delivery

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["PURPOSE", "delivery", "record"]

PURPOSE = "telemetry"

delivery: Delivery | None = None
"""The delivery of this process, once it records."""


def record(proc: Proc) -> None:
    """Record from now on what this process does, if it does not already."""
    global delivery
    if delivery is not None or is_simulated():
        return
    recorder = sources.begin(proc)
    if proc.client:
        from monarch._observer.handle import observe  # the script's part; loads more

        observer = observe(telemetry=True)

        def adopt(sock: socket.socket, _caller: Caller) -> None:
            with sock:
                observer.adopt(sock)

        serve_streams(PURPOSE, adopt)
        connect = observer.connect
        before_query.append(_catch_up)
    else:
        client = int(proc.spec["client"])

        def connect() -> socket.socket:
            return open_stream(client, PURPOSE)

    delivery = Delivery(recorder, connect)
    recorder.deliver()
    sources.metrics_to_rows(recorder)
    when_forked(_forget)
    atexit.register(_stop)
    delivery.start()


def _catch_up() -> None:
    """Deliver what the script has recorded, before its own query."""
    if delivery is not None:
        delivery.catch_up()


def _stop() -> None:
    """Deliver what was recorded so far, with the last metrics."""
    if delivery is not None:
        delivery.flush()  # counts messages, for the metrics
        sources.last()
        delivery.stop()


def _forget() -> None:
    """Record nothing in a forked child, whose rows would be the parent's."""
    global delivery
    if delivery is not None:
        atexit.unregister(_stop)
    delivery = None
