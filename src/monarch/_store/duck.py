"""Tables in duckdb.

Rows come in as columns of numpy: numbers as they are, and of all other columns the places of their
values in a list. (An array of Python objects is looked at value by value; where pandas is missing,
duckdb 1 tries to import it for each.) The tables of rows are in the schema ``rows``, the documented
tables are in ``datafusion.public``, the names that existing queries use. A query runs in a
transaction that can only read, on a connection of its own; files and settings are out of its reach.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import math
import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import duckdb
import numpy as np

from monarch._store.answers import gathered
from monarch._store.database import Rows
from monarch._store.information_schema import INFORMATION, contents, redirected
from monarch._store.query import Answer, QueryError
from monarch._store.statement import column_name, not_one, refused, unknown_table, without_explain
from monarch._store.tables import ARROW, COLUMNS, PLAIN, VIEWS, filled

__all__ = ["DuckDatabase"]

_SQL_TYPES = {
    "U64": "UBIGINT",
    "U32": "UINTEGER",
    "I64": "BIGINT",
    "I32": "INTEGER",
    "F64": "DOUBLE",
    "Utf8": "VARCHAR",
    "Boolean": "BOOLEAN",
}
_ARROW_TYPES = {_SQL_TYPES[type_]: name for type_, name in ARROW.items()}
_OWN = "datafusion.information"  # the schema for `information_schema`, a name duckdb keeps
_GRACE = 0.5  # seconds in which an interrupted query ends, if it can
_LATE = 2  # queries that cannot be interrupted, at a time
_NUMBERS = {"U64": np.uint64, "I64": np.int64}
_NO_QUERIES = ("call", "pragma")
_JSON = (type(None), bool, int, float, str)
_MACROS = (
    "to_timestamp_micros(x) AS make_timestamp(x)",
    "to_timestamp_millis(x) AS make_timestamp(x * 1000)",
    "to_timestamp_seconds(x) AS make_timestamp(x * 1000000)",
    "date_bin(width, x) AS time_bucket(width, x)",
    "approx_percentile_cont(x, share) AS approx_quantile(x, share)",
    "approx_median(x) AS approx_quantile(x, 0.5)",
    "approx_distinct(x) AS approx_count_distinct(x)",
    "regexp_like(x, pattern) AS regexp_matches(x, pattern)",
    "character_length(x) AS length(x)",
    "btrim(x) AS trim(x)",
    "array_length(x) AS len(x)",
    "nvl(x, y) AS coalesce(x, y)",
    "to_char(x, pattern) AS strftime(x, pattern)",
    "date_format(x, pattern) AS strftime(x, pattern)",
    "from_unixtime(x) AS timezone('UTC', to_timestamp(x))",
    "to_unixtime(x) AS CAST(epoch(x) AS BIGINT)",
    "arrow_typeof(x) AS CASE typeof(x) "
    + " ".join(f"WHEN '{own}' THEN '{name}'" for own, name in _ARROW_TYPES.items())
    + " ELSE typeof(x) END",
    "regexp_match(x, form) AS CASE WHEN regexp_matches(x, form) THEN [regexp_extract(x, form)] END",
)
"""Functions of the documented dialect under the names of this one."""


class DuckDatabase:
    """See `monarch._store.database.Database`.

    Args:
        memory: the most bytes that the database may use.
    """

    name = "duckdb"

    def __init__(self, memory: int) -> None:
        self._made: dict[str, list[int]] = {table: [] for table in COLUMNS}
        self._late: list[Future[Answer]] = []  # that run though their time is over
        config: dict[str, Any] = {
            "memory_limit": f"{max(memory, 64 << 20) >> 20}MiB",
            "temp_directory": "",
            "threads": "2",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
        }
        self._connection = duckdb.connect(":memory:", config=config)
        run = self._connection.execute
        run("ATTACH ':memory:' AS datafusion")
        run("CREATE SCHEMA datafusion.public")
        run("CREATE SCHEMA memory.rows")
        for table in COLUMNS:
            self._create(f"memory.rows.empty_{table}", COLUMNS[table])
            self._unite(table)
        self._create("memory.rows.running", COLUMNS["message"])
        for table, columns in PLAIN.items():
            self._create(f"datafusion.public.{table}", columns)
        run(f"CREATE SCHEMA {_OWN}")
        for table, columns in INFORMATION.items():
            self._create(f"{_OWN}.{table}", columns)
            self._insert(f"{_OWN}.{table}", columns, contents(table))
        run("USE datafusion.public")
        names = {table: f"memory.rows.{table}" for table in (*COLUMNS, "running")}
        for view, sql in VIEWS.items():
            run(f"CREATE VIEW {view} AS {filled(sql, names)}")
        for macro in _MACROS:
            run(f"CREATE MACRO {macro}")
        run("SET enable_external_access = false")
        run("SET lock_configuration = true")

    def _create(self, table: str, columns: Sequence[tuple[str, str]]) -> None:
        made = ", ".join(f'"{name}" {_SQL_TYPES[type_]}' for name, type_ in columns)
        self._connection.execute(f"CREATE TABLE {table} ({made})")

    def _unite(self, table: str) -> None:
        parts = [f"empty_{table}", *(f"{table}_{number}" for number in self._made[table])]
        union = " UNION ALL ".join(f"SELECT * FROM memory.rows.{part}" for part in parts)
        self._connection.execute(f"CREATE OR REPLACE VIEW memory.rows.{table} AS {union}")

    def insert(self, table: str, generation: int, columns: Rows) -> None:
        """Add rows to a generation of a table of rows."""
        if generation not in self._made[table]:
            self._create(f"memory.rows.{table}_{generation}", COLUMNS[table])
            self._made[table].append(generation)
            self._unite(table)
        self._insert(f"memory.rows.{table}_{generation}", COLUMNS[table], columns)

    def _insert(self, table: str, types: Sequence[tuple[str, str]], columns: Rows) -> None:
        batch: dict[str, Any] = {}
        values: list[list[Any]] = []
        made: list[str] = []
        for name, type_ in types:
            column, sql = columns[name], _SQL_TYPES[type_]
            if type_ in _NUMBERS and None not in column:
                batch[name] = np.array(column, dtype=_NUMBERS[type_])
                made.append(f'CAST("{name}" AS {sql})')
            else:
                known: dict[Any, int] = {}
                batch[name] = np.array([_place(known, value) for value in column], dtype=np.int64)
                values.append(list(known))
                made.append(f'CAST(? AS {sql}[])["{name}"]')
        self._connection.register("batch", batch)
        self._connection.execute(f"INSERT INTO {table} SELECT {', '.join(made)} FROM batch", values)
        self._connection.unregister("batch")

    def drop(self, table: str, generation: int) -> None:
        """Drop a generation of a table of rows."""
        self._made[table].remove(generation)
        self._unite(table)
        self._connection.execute(f"DROP TABLE memory.rows.{table}_{generation}")

    def replace(self, table: str, columns: Rows, where: tuple[str, Any] | None = None) -> None:
        """Replace rows of a plain table, or of ``running``."""
        types = COLUMNS["message"] if table == "running" else PLAIN[table]
        name = f"memory.rows.{table}" if table == "running" else f"datafusion.public.{table}"
        if where is None:
            self._connection.execute(f"DELETE FROM {name}")
        else:
            self._connection.execute(f'DELETE FROM {name} WHERE "{where[0]}" = ?', [where[1]])
        if len(columns[types[0][0]]):
            self._insert(name, types, columns)

    def close(self) -> None:
        """Free the memory."""
        self._connection.close()

    def query(self, sql: str, parameters: Sequence[Any], timeout: float, limit: int) -> Answer:
        """Answer one statement that reads; from any thread. Raises QueryError."""
        _check(sql)
        self._late = [each for each in self._late if not each.done()]
        if len(self._late) >= _LATE:
            raise QueryError(
                f"{_LATE} queries whose time was over still run, in functions of {self.name} that "
                "cannot be interrupted; ask again when they have ended"
            )
        cursor = self._connection.cursor()
        answer: Future[Answer] = Future()
        is_over = threading.Event()
        task = (answer, is_over, cursor, redirected(sql, _OWN), parameters, limit)
        threading.Thread(target=_settle, args=task, name="monarch-query", daemon=True).start()
        try:
            return answer.result(timeout)
        except futures.TimeoutError:
            text = f"the query took longer than {timeout:g} s and was ended"
        is_over.set()
        cursor.interrupt()
        try:
            answer.exception(_GRACE)
        except futures.TimeoutError:
            self._late.append(answer)
            text = (
                f"the query took longer than {timeout:g} s; it is in a function of {self.name} "
                "that cannot be interrupted, and ends after that"
            )
        raise QueryError(text)


def _settle(
    answer: Future[Answer],
    is_over: threading.Event,
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Sequence[Any],
    limit: int,
) -> None:
    """Execute a statement; the body of a thread."""
    try:
        about = _executed(cursor, sql, parameters)
        rows: list[tuple[Any, ...]] = []
        more = False
        if not is_over.is_set():  # rows that are not returned take time and memory as well
            rows, more = gathered(cursor.fetchmany, _plain, limit)
        names = [column_name(str(each[0])) for each in about]
        types = [_ARROW_TYPES.get(str(each[1]), str(each[1])) for each in about]
        answer.set_result(Answer(names, types, rows, more))
    except duckdb.Error as error:
        answer.set_exception(_error(error))
    except MemoryError:
        answer.set_exception(QueryError("the answer does not fit into memory; ask for fewer rows"))
    except BaseException as error:  # raised in the thread that waits
        answer.set_exception(error)
    finally:
        with contextlib.suppress(duckdb.Error):
            cursor.close()


def _executed(
    cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any]
) -> Sequence[Any]:
    """Execute a statement, and return the description of the columns."""
    cursor.execute("USE datafusion.public")
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    cursor.execute(sql, list(parameters))
    about = cursor.description or []
    if any("WITH TIME ZONE" in str(each[1]) for each in about):
        cursor.execute(_in_utc(sql, about), list(parameters))
    return about


def _place(known: dict[Any, int], value: Any) -> int:
    """Return the place of a value in the list of those that occur, from 1 on; 0: there is none."""
    return 0 if value is None else known.setdefault(value, len(known) + 1)


def _in_utc(sql: str, about: Sequence[Any]) -> str:
    """Return `sql` with times that have no zone: those with one need a package, pytz."""
    columns = [
        f"timezone('UTC', #{place})" if "TIMESTAMP WITH" in str(each[1]) else f"#{place}"
        for place, each in enumerate(about, 1)
    ]
    return f"SELECT {', '.join(columns)} FROM ({sql.strip().rstrip(';')}\n)"


def _check(sql: str) -> None:
    """Raise QueryError unless `sql` is one statement that reads."""
    inner: str | None = sql
    while inner is not None:
        try:
            statements = duckdb.extract_statements(inner)
        except duckdb.Error as error:
            raise _error(error) from None
        if len(statements) != 1:
            raise not_one(statements)
        kind = statements[0].type
        word = inner.split(None, 1)[0].lower()
        if word in _NO_QUERIES:  # to duckdb some of these are queries
            raise refused(word.upper())
        if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise refused(kind.name)
        inner = without_explain(inner) if kind == duckdb.StatementType.EXPLAIN else None


def _error(error: duckdb.Error) -> QueryError:
    text = str(error)
    if isinstance(error, duckdb.ParserException):
        return QueryError(f"SQL error: ParserError: {text.removeprefix('Parser Error: ')}")
    if "Table with name" in text:
        return unknown_table(text.partition("Table with name ")[2].partition(" ")[0])
    return QueryError(f"SQL error: {text}")


def _plain(value: Any) -> Any:
    """Return a value of a result as JSON has it."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType] - any
    if kind in (list, tuple):
        return list(map(_plain, value))
    if kind is float and not math.isfinite(value):
        return None
    if kind is dict:
        return dict(zip(map(str, value), map(_plain, value.values()), strict=True))
    return value if kind in _JSON else str(value)
