"""`Store`: takes batches of rows, keeps as many as its limit allows, and answers queries.

Batches wait in a queue until a thread has put them into the database; a query waits for those that
came before it. Each table of rows consists of generations. When all rows together have more bytes
than the limit, or a generation is older than the retention, the oldest generation is dropped. So a
table may lose a sixteenth of its rows at once, and nothing is ever deleted row by row.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch._store.database import Database
from monarch._store.query import Answer, QueryError
from monarch._store.statement import canned
from monarch._store.tables import COLUMNS, LASTING
from monarch._telemetry.kinds import Batch

__all__ = ["Store"]

_SHARE = 16  # generations that the limit allows for
_PENDING = 64 << 20  # bytes of batches that wait for the database
_TICK = 0.25  # seconds between two inserts, while no query waits
_OVERHEAD = 1.5  # of a row in the database against the one that was received
_WAIT = 30.0  # seconds that a query waits for the rows before it
_AT_ONCE = 4  # queries
_LONGEST = 600.0  # seconds of a query
_FAULTS = 40  # inserts that fail one after the other, until the store gives up


class _Generation(NamedTuple):
    table: str
    number: int
    began: float
    ended: float
    size: int


class Store:
    """See the module. All methods may be called from any thread.

    Args:
        limit: the most bytes that rows may take.
        retention: how many seconds messages, spans, events and metrics are kept; 0: as long as
            there is room.
        database: "duckdb" or "sqlite3"; by default duckdb if it is installed, with numpy.
    """

    def __init__(self, limit: int, retention: float, database: str | None = None) -> None:
        self.limit = limit
        self.retention = retention
        self.lost = 0
        self.fault = ""
        """The last error of the database, which costs the rows that came in together."""
        self._database = make_database(database, limit)
        self._pending: deque[Batch] = deque()
        self._pending_size = 0
        self._changed = threading.Condition()
        self._put = 0  # batches so far
        self._done = 0  # of them stored, or dropped
        self._writing = threading.Lock()
        self._running: dict[int, tuple[Any, ...]] = {}
        self._running_shown = True
        self._known: dict[str, set[int]] = {"mesh": set(), "actor": set()}
        self._numbers = itertools.count(1)
        self._open: dict[str, _Generation] = {}
        self._closed: deque[_Generation] = deque()
        self._rows = dict.fromkeys(COLUMNS, 0)
        self._refreshers: dict[str, Callable[[], None]] = {}
        self._urgent = False
        self._ended = False
        self._faults = 0
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> str:
        """The name of the database: "duckdb" or "sqlite3"."""
        return str(getattr(self._database, "name", ""))

    def put(self, batch: Batch) -> None:
        """Take a batch. Never waits: above a limit of bytes, the oldest one is dropped."""
        with self._changed:
            self._pending.append(batch)
            self._pending_size += batch.size
            self._put += 1
            self.lost += batch.lost
            while self._pending_size > _PENDING:
                oldest = self._pending.popleft()
                self._pending_size -= oldest.size
                self._done += 1
                self.lost += oldest.rows
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and free the memory."""
        with self._changed:
            self._ended = self._urgent = True
            self._changed.notify_all()
        self._thread.join()
        self._database.close()

    def before_query_of(self, tables: Sequence[str], refresh: Callable[[], None]) -> None:
        """Call `refresh()` before each query whose text names one of `tables`."""
        self._refreshers.update(dict.fromkeys(tables, refresh))

    def replace(
        self, table: str, columns: dict[str, Sequence[Any]], where: tuple[str, Any] | None = None
    ) -> None:
        """Replace the rows of a documented table that is kept as it is, or some of them."""
        with self._writing:
            self._database.replace(table, columns, where)

    def query(
        self,
        sql: str,
        timeout: float = 10.0,
        limit: int = 100_000,
        parameters: tuple[Any, ...] = (),
    ) -> Answer:
        """Answer one statement that reads; see `Queries`."""
        if not 0 < timeout <= _LONGEST:  # not for a number that is none, either
            raise QueryError(f"the timeout is more than 0 and at most {_LONGEST:g} s")
        answer = canned(sql)
        if answer is not None:
            return answer
        if not self._free.acquire(timeout=timeout):
            raise QueryError(f"{_AT_ONCE} other queries took longer than {timeout:g} s")
        try:
            lower = sql.lower()
            for refresh in {self._refreshers[name] for name in self._refreshers if name in lower}:
                refresh()
            self._catch_up(min(timeout, _WAIT))
            return self._database.query(sql, parameters, timeout, limit)
        except QueryError:
            raise
        except MemoryError:
            raise QueryError("the query needs more memory than the store has") from None
        except Exception as error:  # a value that Python does not have, say
            raise QueryError(f"SQL error: {type(error).__name__}: {error}") from None
        finally:
            self._free.release()

    def statistics(self) -> dict[str, Any]:
        """Return how many rows there are, how many bytes they take about, and what was dropped."""
        with self._changed:
            size = sum(each.size for each in (*self._closed, *self._open.values()))
            return {
                "database": self.engine,
                "rows": dict(self._rows),
                "bytes": size,
                "limit_bytes": self.limit,
                "waiting_batches": len(self._pending),
                "lost_rows": self.lost,
                "fault": self.fault,
            }

    # -- rows --------------------------------------------------------------------------------------

    def _catch_up(self, timeout: float) -> None:
        with self._changed:
            until = self._put
            if self._done >= until and self._running_shown:
                return
            self._urgent = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._done >= until, timeout):
                raise QueryError("the store is busy with rows that come in; try again")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._urgent, 30.0)
                if not self._urgent:
                    self._changed.wait_for(lambda: self._urgent, _TICK)
                batches = list(self._pending)
                self._pending.clear()
                self._pending_size = 0
                self._urgent = False
                if self._ended:
                    return
            with self._writing:
                self._guarded("rows", lambda: self._store(batches))  # noqa: B023 - called now
                self._guarded("retention", self._forget)
                if self._faults > _FAULTS:
                    raise MemoryError(f"the store can keep nothing: {self.fault}")
            with self._changed:
                self._done += len(batches)
                self._changed.notify_all()

    def _store(self, batches: list[Batch]) -> None:
        by_kind: dict[str, list[Batch]] = {}
        for batch in batches:
            by_kind.setdefault(batch.kind, []).append(batch)
        for batch in by_kind.pop("running", ()):
            names = [name for name, _ in COLUMNS["message"]]
            for row in zip(*(batch.columns[name] for name in names), strict=True):
                self._running[row[0]] = row
                self._running_shown = False
        for kind, found in by_kind.items():
            columns, rows, size = self._joined(kind, found)
            if rows:
                self._insert(kind, columns, rows, size)
        if self._running and "message" in by_kind:
            for batch in by_kind["message"]:
                for number in batch.columns["id"]:
                    if self._running.pop(number, None) is not None:
                        self._running_shown = False
        if not self._running_shown:
            rows_ = list(self._running.values())
            names = [name for name, _ in COLUMNS["message"]]
            content = list(zip(*rows_, strict=True)) if rows_ else [()] * len(names)
            shown = dict(zip(names, content, strict=True))
            self._running_shown = self._guarded(
                "running", lambda: self._database.replace("running", shown)
            )

    def _insert(self, kind: str, columns: dict[str, Any], rows: int, size: int) -> None:
        generation = self._generation(kind, size)
        if self._guarded(kind, lambda: self._database.insert(kind, generation, columns)):
            self._rows[kind] += rows
            self._faults = 0
        else:
            self.lost += rows
            self._faults += 1

    def _guarded(self, what: str, change: Callable[[], None]) -> bool:
        """Change the database; keep the error, if it is out of memory or refuses a row."""
        try:
            change()
        except Exception as error:
            self.fault = f"{what}: {error}"
            return False
        return True

    def _joined(self, kind: str, found: list[Batch]) -> tuple[dict[str, Any], int, int]:
        """Return the columns of all batches, without meshes and actors that are known."""
        known = self._known.get(kind)
        columns: dict[str, list[Any]] = {name: [] for name, _ in COLUMNS[kind]}
        for batch in found:
            wanted: list[int] | None = None
            if known is not None:
                ids = batch.columns["id"]
                wanted = [place for place, one in enumerate(ids) if one not in known]
                known.update(ids)
            for name, joined in columns.items():
                if name == "process" and name not in batch.columns:
                    values: Sequence[Any] = [batch.process] * batch.rows
                else:
                    values = batch.columns[name]
                joined.extend(values if wanted is None else [values[place] for place in wanted])
        rows = len(columns[COLUMNS[kind][0][0]])
        total = sum(batch.rows for batch in found)
        size = sum(batch.size for batch in found) * rows // max(total, 1)
        return columns, rows, int(size * _OVERHEAD)

    # -- retention ---------------------------------------------------------------------------------

    def _generation(self, table: str, size: int) -> int:
        """Return the number of the generation for new rows of this size."""
        now = time.monotonic()
        found = self._open.get(table)
        full = found is not None and found.size + size > self.limit / _SHARE
        old = found is not None and self.retention and now - found.began > self.retention / _SHARE
        if found is None or full or (old and table not in LASTING):
            if found is not None:
                self._closed.append(found)
            found = _Generation(table, next(self._numbers), now, now, 0)
        self._open[table] = found._replace(size=found.size + size, ended=now)
        return found.number

    def _forget(self) -> None:
        """Drop the oldest generations, until the rest is within limit and retention."""
        now = time.monotonic()
        if self.retention:
            for table, found in list(self._open.items()):
                if table not in LASTING and now - found.began > self.retention / _SHARE:
                    self._closed.append(self._open.pop(table))
            for found in list(self._closed):
                if found.table not in LASTING and now - found.ended > self.retention:
                    self._drop(found)
        size = sum(each.size for each in (*self._closed, *self._open.values()))
        while size > self.limit and self._closed:
            lasting = [each for each in self._closed if each.table in LASTING]
            brief = [each for each in self._closed if each.table not in LASTING]
            oldest = (brief or lasting)[0]
            size -= oldest.size
            self._drop(oldest)

    def _drop(self, generation: _Generation) -> None:
        self._closed.remove(generation)
        self._database.drop(generation.table, generation.number)


def make_database(name: str | None, limit: int) -> Database:
    """Return a new database; see `Store`."""
    if name is None:
        found = all(importlib.util.find_spec(each) for each in ("duckdb", "numpy"))
        name = "duckdb" if found else "sqlite3"
    if name == "duckdb":
        from monarch._store.duck import DuckDatabase

        return DuckDatabase(2 * limit)
    from monarch._store.lite import LiteDatabase

    return LiteDatabase()
