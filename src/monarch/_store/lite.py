"""Tables in sqlite3, which every Python has; for programs without duckdb.

Queries wait for each other and for rows that come in. Ids have 63 bits, so all fit.
"""

from __future__ import annotations

import math
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch._store.answers import gathered
from monarch._store.database import Rows
from monarch._store.information_schema import INFORMATION, SCHEMA, contents
from monarch._store.query import Answer, QueryError
from monarch._store.statement import refused, unknown_table
from monarch._store.tables import COLUMNS, PLAIN, VIEWS, filled

__all__ = ["LiteDatabase"]

_SQL_TYPES = {"Utf8": "TEXT", "F64": "REAL"}
_STEPS = 10_000  # instructions between two looks at the clock
_LONGEST = 16 << 20  # bytes of a value
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_BEGINS = ("select", "with", "values", "explain")


class LiteDatabase:
    """See `monarch._store.database.Database`."""

    name = "sqlite3"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, list[int]] = {table: [] for table in COLUMNS}
        self._asked = False  # whether the statement that is executed is a query
        self._connection = sqlite3.connect(
            ":memory:", check_same_thread=False, isolation_level=None
        )
        if sys.version_info >= (3, 11):
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        for table in COLUMNS:
            self._create(f"rows_empty_{table}", COLUMNS[table])
            self._unite(table)
        self._create("rows_running", COLUMNS["message"])
        for table, columns in PLAIN.items():
            self._create(table, columns)
        for view, sql in VIEWS.items():
            text = filled(sql, {table: f"rows_{table}" for table in (*COLUMNS, "running")})
            self._connection.execute(f"CREATE VIEW {view} AS {text}")

        self._connection.execute(f"ATTACH ':memory:' AS {SCHEMA}")
        for table, columns in INFORMATION.items():
            self._create(f"{SCHEMA}.{table}", columns)
            self._insert(f"{SCHEMA}.{table}", columns, contents(table))

        # It stays for good: before Python 3.11 none can be removed.
        self._connection.set_authorizer(self._authorize)

    def _authorize(self, action: int, *names: str | None) -> int:
        """Allow a query to read, and this class all."""
        if self._asked and (action not in _ALLOWED or "load_extension" in names):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def _create(self, table: str, columns: Sequence[tuple[str, str]]) -> None:
        made = ", ".join(f'"{name}" {_SQL_TYPES.get(type_, "INTEGER")}' for name, type_ in columns)
        self._connection.execute(f"CREATE TABLE {table} ({made})")

    def _unite(self, table: str) -> None:
        parts = [f"empty_{table}", *(f"{table}_{number}" for number in self._made[table])]
        union = " UNION ALL ".join(f"SELECT * FROM rows_{part}" for part in parts)
        self._connection.execute(f"DROP VIEW IF EXISTS rows_{table}")
        self._connection.execute(f"CREATE VIEW rows_{table} AS {union}")

    def insert(self, table: str, generation: int, columns: Rows) -> None:
        """Add rows to a generation of a table of rows."""
        with self._lock:
            if generation not in self._made[table]:
                self._create(f"rows_{table}_{generation}", COLUMNS[table])
                self._made[table].append(generation)
                self._unite(table)
                if table == "send":
                    name = f"rows_send_{generation}"
                    self._connection.execute(f"CREATE INDEX {name}_port ON {name} (proc, port)")
            self._insert(f"rows_{table}_{generation}", COLUMNS[table], columns)

    def _insert(self, table: str, types: Sequence[tuple[str, str]], columns: Rows) -> None:
        marks = ", ".join("?" for _ in types)
        rows = zip(*(columns[name] for name, _ in types), strict=True)
        self._connection.execute("BEGIN")
        try:
            self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        finally:
            self._connection.execute("COMMIT")

    def drop(self, table: str, generation: int) -> None:
        """Drop a generation of a table of rows."""
        with self._lock:
            self._made[table].remove(generation)
            self._unite(table)
            self._connection.execute(f"DROP TABLE rows_{table}_{generation}")

    def replace(self, table: str, columns: Rows, where: tuple[str, Any] | None = None) -> None:
        """Replace rows of a plain table, or of ``running``."""
        types = COLUMNS["message"] if table == "running" else PLAIN[table]
        name = "rows_running" if table == "running" else table
        with self._lock:
            if where is None:
                self._connection.execute(f"DELETE FROM {name}")
            else:
                sql = f'DELETE FROM {name} WHERE "{where[0]}" = ?'
                self._connection.execute(sql, [where[1]])
            self._insert(name, types, columns)

    def close(self) -> None:
        """Free the memory."""
        self._connection.close()

    def query(self, sql: str, parameters: Sequence[Any], timeout: float, limit: int) -> Answer:
        """Answer one statement that reads; from any thread. Raises QueryError."""
        word = sql.split(None, 1)[0].lower() if sql.split() else ""
        if word not in _BEGINS and not word.startswith("("):
            raise refused(word.upper()[:40])
        end = time.monotonic() + timeout
        late = False

        def look() -> int:
            nonlocal late
            late = time.monotonic() > end
            return int(late)

        if not self._lock.acquire(timeout=timeout):
            raise QueryError(f"the store was busy with other queries for {timeout:g} s")
        try:
            self._asked = True
            self._connection.set_progress_handler(look, _STEPS)
            try:
                cursor = self._connection.execute(sql, tuple(parameters))
                rows, more = gathered(cursor.fetchmany, _plain, limit)
                cursor.close()
                about = cursor.description or ()
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
                if late:
                    text = f"the query took longer than {timeout:g} s and was ended"
                    raise QueryError(text) from None
                raise _error(error) from None
            finally:
                self._connection.set_progress_handler(None, 0)
                self._asked = False
        finally:
            self._lock.release()
        names = [str(each[0]) for each in about]
        return Answer(names, [""] * len(names), rows, more)


def _error(error: Exception) -> QueryError:
    text = str(error)
    if text.startswith("no such table: "):
        return unknown_table(text.removeprefix("no such table: ").rpartition(".")[2])
    if "not authorized" in text or "prohibited" in text:
        return refused("that changes something")
    return QueryError(f"SQL error: {text}")


def _plain(value: Any) -> Any:
    """Return a value of a result as JSON has it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.hex() if isinstance(value, bytes) else value
