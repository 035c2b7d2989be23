"""The audit log of a host: connections accepted and refused, processes started and stopped.

The worker's process writes one record per event, with the logger ``monarch.audit`` at level INFO.
A record is a line of JSON. Agents report their events to the worker. Events are recorded only
if the logger is enabled for INFO::

    logging.basicConfig(format="%(message)s")
    logging.getLogger("monarch.audit").setLevel(logging.INFO)

Each record has ``time`` (seconds since 1970, UTC), ``event`` and, depending on the event:

========== =========================================================================================
listening  ``address``, ``tls``, ``open_to_all`` (``allow_unauthenticated``)
attached   ``peer`` (its address), ``client`` (the job), ``host`` (where the connection comes from;
           empty: the client's), ``authenticated``, ``certificate`` (the name in it; empty without
           TLS)
relayed    ``peer``, ``client``, ``to`` (the address it was connected to), ``authenticated``,
           ``certificate``
refused    ``peer``, ``reason``, ``count`` (how many so far)
spawned    ``client``, ``procs`` (each with ``uid`` and ``pid``)
stopped    ``client``, ``uid``, ``pid``, ``reason``
connected  ``client``, ``uid``, ``peer``, ``certificate``: a data connection to a proc, which had
           invited the peer
altered    ``client``, ``host`` (empty: the client's): a connection from there was closed, since
           bytes were altered in transit
detached   ``client``: its agent has exited, and with it everything that belonged to it
========== =========================================================================================

Names and meanings of fields stay; others may be added. Clients and procs are identified by
hexadecimal text. No record holds a secret, an argument or a result.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from monarch._engine.runtime.io import environment as environments

__all__ = ["record"]

_log = logging.getLogger("monarch.audit")


def record(event: str, **fields: Any) -> None:
    """Write a record of an event, if the logger is enabled for it."""
    if _log.isEnabledFor(logging.INFO):
        said = {"time": round(environments.current.wall_time(), 3), "event": event, **fields}
        _log.info("%s", json.dumps(said))
