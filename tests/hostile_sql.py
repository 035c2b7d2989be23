"""Hostile statements: grown by chance from those of the documentation.

`statements(seed)` never ends, and is the same for each seed. It mixes statements that change
something or reach for files, mutations of queries that are fine, deep nesting, odd text, and joins
and functions whose results explode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["CANARY", "statements"]

CANARY = "a canary that only a file contains"
"""The content of the file that statements reach for; it is in no answer."""

_QUERIES = (
    "SELECT endpoint, count(*) AS n FROM messages GROUP BY endpoint ORDER BY n DESC",
    "SELECT * FROM message_status_events WHERE status = 'failed' LIMIT 5",
    "SELECT a.full_name, s.reason FROM actor_status_events s JOIN actors a ON a.id = s.actor_id",
    "WITH m AS (SELECT * FROM messages) SELECT from_actor_id, to_actor_id FROM m WHERE id > 1",
    "SELECT name, target, timestamp_us FROM spans WHERE parent_id IS NULL ORDER BY 3",
    "EXPLAIN SELECT count(*) FROM sent_messages",
    "DESCRIBE messages",
    "SHOW TABLES",
)
_CHANGES = (
    "DROP TABLE {t}",
    "DROP VIEW {t}",
    "CREATE TABLE x{n} AS SELECT 1",
    "CREATE OR REPLACE VIEW {t} AS SELECT 1",
    "ALTER TABLE {t} RENAME TO y{n}",
    "DELETE FROM {t}",
    "UPDATE {t} SET id = {n}",
    "INSERT INTO {t} VALUES ({n})",
    "TRUNCATE {t}",
    "PRAGMA database_list",
    "PRAGMA writable_schema = 1",
    "SET memory_limit = '100GB'",
    "RESET ALL",
    "ATTACH '{f}' AS other{n}",
    "DETACH datafusion",
    "USE memory",
    "INSTALL httpfs",
    "LOAD '{f}'",
    "COPY {t} TO '{f}.out'",
    "COPY {t} FROM '{f}'",
    "EXPORT DATABASE '{f}.out'",
    "IMPORT DATABASE '{f}'",
    "VACUUM INTO '{f}.out'",
    "VACUUM",
    "CHECKPOINT",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "PREPARE p AS SELECT 1",
    "CALL enable_logging()",
    "SELECT 1; DELETE FROM {t}",
    "EXPLAIN ANALYZE DELETE FROM {t}",
    "WITH x AS (DELETE FROM {t} RETURNING 1) SELECT * FROM x",
)
_FILES = (
    "SELECT * FROM '{f}'",
    "SELECT * FROM read_csv('{f}')",
    "SELECT * FROM read_text('{f}')",
    "SELECT * FROM read_blob('{f}')",
    "SELECT * FROM read_json('{f}')",
    "SELECT * FROM parquet_scan('{f}')",
    "SELECT * FROM sniff_csv('{f}')",
    "SELECT * FROM glob('{f}*')",
    "SELECT readfile('{f}')",
    "SELECT writefile('{f}.out', 'x')",
    "SELECT load_extension('{f}')",
    "SELECT * FROM query('SELECT * FROM ''{f}''')",
    "SELECT * FROM sqlite_scan('{f}', 'x')",
    "SELECT * FROM enable_logging('QueryLog', storage := 'file', storage_path := '{f}.out')",
)
_EXPLOSIONS = (
    "SELECT count(*) FROM messages a, messages b, messages c, messages d, messages e, messages f",
    "SELECT * FROM span_events a, span_events b, span_events c ORDER BY a.id, b.id, c.id",
    "SELECT repeat('x', {big})",
    "SELECT repeat('x', 100000) FROM messages a, messages b",
    "SELECT range({big})",
    "SELECT lpad('x', {big}, 'y')",
    "SELECT hex(zeroblob({big}))",
    "SELECT group_concat(a.full_name) FROM actors a, messages b, messages c",
    "SELECT list(a.id) FROM messages a, messages b, messages c",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
    "WITH RECURSIVE n(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM n) SELECT max(x) FROM n",
)
_ODD = (
    "\0",
    "\ud800",
    "\u202e",
    "\ufeff",
    "\U0001f600",
    "é",
    "''",
    '"',
    "--",
    "/*",
    "*/",
    ";",
    "?",
)
_TABLES = ("messages", "actors", "snapshots", "spans", "memory.rows.message", "rows_message")


def statements(seed: int, file: str, *, explosions: float = 0.001) -> Iterator[str]:
    """Yield statements without end.

    Args:
        seed: of the choices.
        file: a path that statements reach for.
        explosions: the share of those whose results explode, each of which takes its whole time.
    """
    choose = random.Random(seed)
    while True:
        kind = choose.random()
        if kind < explosions:
            text = choose.choice(_EXPLOSIONS)
        elif kind < 0.25:
            text = choose.choice(_CHANGES)
        elif kind < 0.4:
            text = choose.choice(_FILES)
        elif kind < 0.45:
            yield _nested(choose)
            continue
        else:
            text = _mutated(choose)
        for name, value in (
            ("{t}", choose.choice(_TABLES)),
            ("{f}", file),
            ("{n}", str(choose.randrange(10))),
            ("{big}", str(10 ** choose.randrange(6, 10))),
        ):
            text = text.replace(name, value)
        yield _disguised(choose, text)


def _nested(choose: random.Random) -> str:
    depth = 10 ** choose.randrange(1, 5)
    before, within, after = choose.choice(
        (
            ("(", "1", ")"),
            ("[", "1", "]"),
            ("{'a': ", "1", "}"),
            ("NOT ", "1", ""),
            ("- ", "1", ""),
            ("(SELECT ", "1", ")"),
            ("CASE WHEN 1 THEN ", "1", " END"),
            ("1 + ", "1", ""),
            ("1, ", "1", ""),
            ("abs(", "1", ")"),
        )
    )
    return f"SELECT {before * depth}{within}{after * depth}"


def _mutated(choose: random.Random) -> str:
    """Return a query with some words repeated, left out, exchanged, or replaced."""
    words: list[str] = [*choose.choice(_QUERIES).split(" ")]
    others = choose.choice((*_QUERIES, *_CHANGES, *_FILES)).split(" ")
    for _ in range(choose.randrange(4)):
        place, change = choose.randrange(len(words)), choose.randrange(5)
        if change == 0:
            words[place : place + 1] = []
            words = words or [""]
        elif change == 1:
            words[place:place] = [choose.choice(others)]
        elif change == 2:
            words[place] = choose.choice(_ODD)
        elif change == 3:
            words[place] = str(choose.choice((0, -1, 2**63, 2**64, 1e999, "NULL", "1e", "0x")))
        else:
            words[place:] = others[choose.randrange(len(others)) :]
            words = words or [""]
    return " ".join(words)


def _disguised(choose: random.Random, text: str) -> str:
    """Return a statement in another case, or behind a comment, sometimes."""
    change = choose.randrange(12)
    if change == 0:
        return text.lower() if "'" not in text else text.replace("SELECT", "sElEcT")
    if change == 1:
        return f"/* {choose.choice(_QUERIES)} */ {text}"
    if change == 2:
        return f"-- {choose.choice(_QUERIES)}\n{text}"
    if change == 3:
        return f"({text})"
    if change == 4:
        return f"{text};{choose.choice(('', ';', ' SELECT 1', ' --'))}"
    if change == 5:
        return f"EXPLAIN {text}"
    return text
