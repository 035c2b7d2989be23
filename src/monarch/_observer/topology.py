"""The tables of the topology: made of the script's diagnosis when a query names one of them."""

from __future__ import annotations

import json
import secrets
import threading
import time
import uuid

from monarch._admin.nodes import Counts
from monarch._admin.picture import Actor, Picture, picture
from monarch._admin.snapshots import snapshot
from monarch._diagnosis.door import ask_script
from monarch._store.query import QueryError
from monarch._store.store import Store
from monarch._store.tables import PLAIN

__all__ = ["Topology"]

_FRESH = 0.5  # seconds for which the tables stay as they are
_PATIENCE = 15.0  # seconds for a diagnosis
_TABLES = [table for table in PLAIN if not table.startswith("pyspy_")]
_COUNTS = """
    SELECT a.full_name, count(m.id) AS messages, min(a.timestamp_us) AS created
    FROM actors a LEFT JOIN messages m ON m.to_actor_id = a.id GROUP BY a.full_name"""


class Topology:
    """Keeps the latest snapshot of a script's job in its store.

    Args:
        store: the store.
        pid: the script.
        started: when it started, in seconds since 1970, and the user.
        retained: how many actors that have ended a process keeps.
    """

    def __init__(self, store: Store, pid: int, started: tuple[float, str], retained: int) -> None:
        self._store = store
        self._pid = pid
        self._started = started
        self._retained = retained
        self._lock = threading.Lock()
        self._last: Picture | None = None
        self._made = 0.0
        store.before_query_of(_TABLES, self.refresh)

    def refresh(self) -> None:
        """Renew the tables, unless they are fresh. Raises QueryError if the script is silent."""
        with self._lock:
            if time.monotonic() - self._made < _FRESH:
                return
            try:
                found = json.loads(ask_script(self._pid, _PATIENCE))
            except (OSError, ValueError) as error:
                raise QueryError(f"the script (pid {self._pid}) does not answer: {error}") from None
            self._last = picture(found, time.time_ns() / 1e9, self._last)
            known = {
                name: Counts(messages, None, created, None)
                for name, messages, created in self._store.query(_COUNTS).rows
            }

            def counts(actor: Actor) -> Counts | None:
                return known.get(actor.reference)

            number = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
            tables = snapshot(self._last, number, self._started, self._retained, counts)
            for table, rows in tables.items():
                names = [name for name, _ in PLAIN[table]]
                columns = zip(*rows, strict=True) if rows else [()] * len(names)
                self._store.replace(table, dict(zip(names, columns, strict=True)))
            self._made = time.monotonic()
