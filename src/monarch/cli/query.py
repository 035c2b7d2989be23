"""``monarch query``: SQL about a running script."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from monarch.cli.script_pid import add_option, without_pid

__all__ = ["add_query"]

_LEAST = 20  # characters of a line that a column of a table has in any case
_EXAMPLES = """\
examples:
  monarch query "SHOW TABLES"
  monarch query "DESCRIBE actors"
  monarch query "SELECT endpoint, count(*) AS n FROM messages GROUP BY 1 ORDER BY n DESC"
  monarch query 4242 "SHOW TABLES"   the script with this pid
  monarch query --format jsonl -f slow.sql

The script records when it is started with MONARCH_TELEMETRY=1, or calls enable_telemetry() of its
job. The tables are described in docs/observability.md.
"""


def add_query(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch query``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[PID] SQL",
        help="the script, if several record telemetry, and a statement; - or none: from stdin",
    )
    parser.add_argument("-f", "--file", help="read the statement from this file")
    parser.add_argument("--format", choices=("table", "json", "jsonl"), default="table")
    parser.add_argument("--timeout", default="30s", help="of the query, such as 10s or 2m (30s)")
    add_option(parser)
    parser.set_defaults(run=_query)


def _query(options: argparse.Namespace) -> int:
    from monarch._spi import parse_duration
    from monarch._store.client import QueryEngineClient
    from monarch.cli.observed import observed

    options.sql, options.pid = _words(options.words, options.pid)
    timeout = parse_duration(options.timeout) / 1e9
    if timeout <= 0:
        raise ValueError(f"--timeout is a time such as 30s, not {options.timeout}")
    sql = _statement(options)
    client = QueryEngineClient(observed(options.pid).telemetry_url)
    try:
        answer = client.query(sql, timeout)
    except urllib.error.HTTPError as error:
        raise RuntimeError(_reason(str(error.reason))) from None
    rows: list[dict[str, Any]] = answer["rows"]
    if options.format == "json":
        print(json.dumps(rows, indent=2))
    elif options.format == "jsonl":
        for row in rows:
            print(json.dumps(row))
    else:
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in _table(answer["columns"], rows, room):
            print(line)
    if answer["truncated"]:
        print(f"monarch query: only the first {len(rows)} rows are shown", file=sys.stderr)
    return 0


def _words(words: Sequence[str], pid: int | None) -> tuple[str | None, int | None]:
    """Return the statement and the pid of the command line."""
    left, pid = without_pid(words, pid)
    if len(left) > 1:
        raise ValueError(f"one statement is wanted, in quotes, not {len(left)} words: {left[1]}")
    return (left[0] if left else None), pid


def _statement(options: argparse.Namespace) -> str:
    if options.file and options.sql:
        raise ValueError("give a statement or --file, not both")
    if options.file:
        with open(options.file, encoding="utf-8") as file:
            return file.read()
    if options.sql in (None, "-"):
        if sys.stdin.isatty():
            print("Type a statement, and end it with Ctrl-D:", file=sys.stderr)
        return sys.stdin.read()
    return str(options.sql)


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body


def _table(
    columns: Sequence[str], rows: Sequence[dict[str, Any]], room: int | None
) -> Iterator[str]:
    """Yield the lines; `room`: the width of the terminal, in which long cells are wrapped."""
    cells = [[_cell(row[name]) for name in columns] for row in rows]
    widths = [
        max([1, len(name), *(len(line[place]) for line in cells)])
        for place, name in enumerate(columns)
    ]
    if room is not None:
        widths = _fitted(widths, room - 2 * (len(widths) - 1))
    numbers = [
        bool(rows) and all(isinstance(row[name], (int, float)) or row[name] is None for row in rows)
        for name in columns
    ]
    yield from _lines(columns, widths, numbers)
    yield "  ".join("-" * width for width in widths)
    for line in cells:
        yield from _lines(line, widths, numbers)
    yield f"({len(rows)} row{'' if len(rows) == 1 else 's'})"


def _lines(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a row: a cell that is longer than its column goes on in the next ones.

    >>> list(_lines(["train", "NULL"], [3, 6], [False, True]))
    ['tra    NULL', 'in']
    """
    wrapped = [
        [cell[at : at + width] for at in range(0, len(cell), width)] or [""]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for line in zip_longest(*wrapped, fillvalue=""):
        parts = [
            part.rjust(width) if number else part.ljust(width)
            for part, width, number in zip(line, widths, numbers, strict=True)
        ]
        yield "  ".join(parts).rstrip()


def _cell(value: Any) -> str:
    text = "NULL" if value is None else str(value)
    return text.replace("\n", "\\n")


def _fitted(widths: list[int], room: int) -> list[int]:
    """Return the widths with the largest made smaller, until all fit or none is long.

    >>> _fitted([5, 100, 70], 100)
    [5, 47, 48]
    """
    made = [min(width, max(room, _LEAST)) for width in widths]
    while sum(made) > room and max(made) > _LEAST:
        made[made.index(max(made))] -= 1
    return made
