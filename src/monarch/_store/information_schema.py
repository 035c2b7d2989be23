"""The tables of ``information_schema``: the documented tables with their columns, for SQL. Pure.

Names, columns and types are those of DataFusion, for which existing queries are written. What a
database says about itself would be of no use: duckdb lists the tables of rows as well, and sqlite3
has no such schema.
"""

from __future__ import annotations

import re
from typing import Any

from monarch._store.tables import ARROW, DOCUMENTED

__all__ = ["INFORMATION", "SCHEMA", "contents", "redirected"]

_CATALOG, _PUBLIC, SCHEMA = "datafusion", "public", "information_schema"

_TABLE = (("table_catalog", "Utf8"), ("table_schema", "Utf8"), ("table_name", "Utf8"))
INFORMATION: dict[str, list[tuple[str, str]]] = {
    "tables": [*_TABLE, ("table_type", "Utf8")],
    "columns": [
        *_TABLE,
        ("column_name", "Utf8"),
        ("ordinal_position", "U64"),
        ("column_default", "Utf8"),
        ("is_nullable", "Utf8"),
        ("data_type", "Utf8"),
        ("character_maximum_length", "U64"),
        ("character_octet_length", "U64"),
        ("numeric_precision", "U64"),
        ("numeric_precision_radix", "U64"),
        ("numeric_scale", "U64"),
        ("datetime_precision", "U64"),
        ("interval_type", "Utf8"),
    ],
    "schemata": [
        ("catalog_name", "Utf8"),
        ("schema_name", "Utf8"),
        ("schema_owner", "Utf8"),
        ("default_character_set_catalog", "Utf8"),
        ("default_character_set_schema", "Utf8"),
        ("default_character_set_name", "Utf8"),
        ("sql_path", "Utf8"),
    ],
}
"""The tables of the schema, with the names and types of their columns."""


_NAMED = re.compile(
    r"('(?:[^']|'')*(?:'|\Z)|--[^\n]*|/\*(?s:.*?)(?:\*/|\Z))"  # a text or a comment, which stays
    r"|(?:\"?\bdatafusion\b\"?\s*\.\s*)?\"?\binformation_schema\b\"?",
    re.IGNORECASE,
)


def redirected(sql: str, schema: str) -> str:
    """Return `sql` with another schema in the place of ``information_schema``.

    >>> redirected("SELECT 'information_schema' FROM Information_Schema.tables", "own")
    "SELECT 'information_schema' FROM own.tables"
    """
    return _NAMED.sub(lambda found: found[1] or schema, sql)


def contents(table: str) -> dict[str, list[Any]]:
    """Return the columns of a table of the schema, by name.

    >>> contents("tables")["table_name"][:2]
    ['active_handlers', 'actor_executions']
    """
    names = [name for name, _ in INFORMATION[table]]
    columns = map(list, zip(*_ROWS[table], strict=True))
    return dict(zip(names, columns, strict=True))


def _of(table: str, name: str, place: int, type_: str) -> tuple[Any, ...]:
    octets = 2**31 - 1 if type_ == "Utf8" else None
    return (
        *(_CATALOG, _PUBLIC, table, name, place, None, "YES", ARROW[type_]),
        *(None, octets, None, None, None, None, None),
    )


_ROWS: dict[str, list[tuple[Any, ...]]] = {
    "tables": [(_CATALOG, _PUBLIC, table, "BASE TABLE") for table in sorted(DOCUMENTED)],
    "columns": [
        _of(table, name, place, type_)
        for table, columns in sorted(DOCUMENTED.items())
        for place, (name, type_) in enumerate(columns)
    ],
    "schemata": [(_CATALOG, schema, *[None] * 5) for schema in (SCHEMA, _PUBLIC)],
}
