"""The audit log of a host: who came, what was started for whom, who was turned away.

One record per event, in the worker's process, by the logger ``monarch.audit`` at level INFO: a line
of JSON. What agents do is told to the worker, which writes it down. Nothing is recorded unless
somebody listens::

    logging.basicConfig(format="%(message)s")
    logging.getLogger("monarch.audit").setLevel(logging.INFO)

Each record has ``time`` (seconds since the epoch), ``event`` and, by event:

========== =========================================================================================
listening  ``address``, ``tls``, ``open_to_all`` (``allow_unauthenticated``)
attached   ``peer`` (its address), ``client`` (the job), ``host`` (it comes from; empty: the
           client's), ``authenticated``, ``certificate`` (the name in it; empty without TLS)
relayed    ``peer``, ``client``, ``to`` (the address it was connected to), ``authenticated``,
           ``certificate``
refused    ``peer``, ``reason``, ``count`` (how many so far)
spawned    ``client``, ``procs`` (each with ``uid`` and ``pid``)
stopped    ``client``, ``uid``, ``pid``, ``reason``
connected  ``client``, ``uid``, ``peer``, ``certificate``: a data connection to a proc, which it had
           invited
altered    ``client``, ``host`` (empty: the client's): a connection from there was given up, since
           what came was altered on the way
detached   ``client``: its agent has ended, and everything of it with it
========== =========================================================================================

Names and meanings of fields stay; others may be added. Clients and procs are told as hexadecimal
text. No record holds a secret, an argument or a result.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from monarch._engine.runtime import driver as drivers

__all__ = ["record"]

_log = logging.getLogger("monarch.audit")


def record(event: str, **fields: Any) -> None:
    """Write an event down, if somebody listens."""
    if _log.isEnabledFor(logging.INFO):
        said = {"time": round(drivers.current.wall_time(), 3), "event": event, **fields}
        _log.info("%s", json.dumps(said))
