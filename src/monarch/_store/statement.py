"""The statements that are answered: one at a time, which reads. Pure.

The databases check it again: duckdb by its own parser and a read-only transaction, sqlite3 by an
authorizer. Here are only the statements that neither has in the form of the documentation (SHOW
TABLES, DESCRIBE), and the names of columns in results.

Here is also what no database bounds: how long a statement is and how deeply it is nested, since
parsing and planning take memory and time that no limit of theirs counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from monarch._store.query import Answer, QueryError
from monarch._store.tables import ARROW, DOCUMENTED

__all__ = ["canned", "column_name", "without_explain"]

_SHOW = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)
_DESCRIBE = re.compile(
    r"\s*(?:describe|desc|show\s+columns\s+(?:from|in))\s+(?:table\s+)?"
    r'(?:"?datafusion"?\.)?(?:"?public"?\.)?"?(\w+)"?\s*;?\s*',
    re.IGNORECASE,
)
_EXPLAIN = re.compile(r"\s*explain(?:\s+(?:analyze|verbose|query\s+plan))*\s+", re.IGNORECASE)
_LONGEST = 100_000  # characters
_MOST = {
    "brackets": (re.compile(r"[(\[{]"), 500),
    "parts": (re.compile(r"\b(?:select|union|intersect|except|join)\b", re.IGNORECASE), 200),
}


def canned(sql: str) -> Answer | None:
    """Return the answer of a statement about the tables themselves; None for any other.

    >>> canned("DESCRIBE snapshots").rows[0]
    ('snapshot_id', 'Utf8', 'YES')
    """
    if len(sql) > _LONGEST:
        raise QueryError(f"the statement has {len(sql):,} characters; the limit is {_LONGEST:,}")
    for what, (pattern, most) in _MOST.items():  # wherever they stand, in texts also
        count = len(pattern.findall(sql))
        if count > most:
            raise QueryError(f"the statement has {count:,} {what}; the limit is {most:,}")
    if not sql.strip():
        raise QueryError("the statement is empty")
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise QueryError(f"the statement is no Unicode text: {error}") from None
    if _SHOW.fullmatch(sql):
        columns = ["table_catalog", "table_schema", "table_name", "table_type"]
        rows = [("datafusion", "public", name, "BASE TABLE") for name in sorted(DOCUMENTED)]
        return Answer(columns, ["Utf8"] * 4, list(rows))
    described = _DESCRIBE.fullmatch(sql)
    if described is None:
        return None
    name = described[1].lower()
    if name not in DOCUMENTED:
        raise unknown_table(name)
    rows3 = [(column, ARROW[type_], "YES") for column, type_ in DOCUMENTED[name]]
    return Answer(["column_name", "data_type", "is_nullable"], ["Utf8"] * 3, list(rows3))


def unknown_table(name: str) -> QueryError:
    """Return the error about a table that does not exist."""
    return QueryError(
        f"Error during planning: table 'datafusion.public.{name}' not found; the tables are "
        f"{', '.join(sorted(DOCUMENTED))}"
    )


def without_explain(sql: str) -> str | None:
    """Return the statement that is explained, or None if `sql` is no EXPLAIN.

    >>> without_explain("explain analyze SELECT 1")
    'SELECT 1'
    """
    found = _EXPLAIN.match(sql)
    return None if found is None else sql[found.end() :]


_NAMES = {"count_star()": "count(*)"}


def column_name(name: str) -> str:
    """Return the name of a column of a result, as documented: ``count(*)``."""
    return _NAMES.get(name, name)


def refused(kind: str) -> QueryError:
    """Return the error about a statement that does not only read."""
    return QueryError(
        f"a statement of kind {kind} is refused: telemetry can only be read, by one SELECT, "
        "EXPLAIN, SHOW TABLES or DESCRIBE"
    )


def not_one(kinds: Sequence[object]) -> QueryError:
    """Return the error about another number of statements than one."""
    return QueryError(f"one statement is expected, not {len(kinds)}")
