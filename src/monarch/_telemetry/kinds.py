"""Kinds of recorded rows: the columns of each, and how a batch of rows becomes bytes. Pure.

A process sends its rows in batches: columns of one kind. A batch is a header in JSON, and the
columns of numbers as they are in memory. Its first eight bytes are the sizes of both parts.

Types of columns:

    Q, q    numbers of 64 bits, without and with sign
    s       texts, each sent once in a batch; the column holds their positions
    j       numbers, texts and None, as JSON; for kinds with few rows
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["KINDS", "LARGEST", "Batch", "BatchReader", "encode", "json_text"]

KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    # A mesh, in the process that spawned it; parent 0: none. Shapes are JSON, as in the views.
    "mesh": (
        ("id", "Q"),
        ("time", "q"),
        ("class", "s"),
        ("given_name", "s"),
        ("full_name", "s"),
        ("shape", "s"),
        ("parent", "Q"),
        ("parent_view", "s"),
    ),
    "actor": (
        ("id", "Q"),
        ("time", "q"),
        ("mesh", "Q"),
        ("rank", "Q"),
        ("full_name", "s"),
        ("display_name", "s"),
        ("system", "q"),
    ),
    "state": (("id", "Q"), ("time", "q"), ("actor", "Q"), ("status", "s"), ("reason", "s")),
    # A message, when its endpoint has ended: its receiver; the process and port of its sender, and
    # the id of that process's own instance; and when it was put into the mailbox, taken up, done.
    # Times are 0 if not known, or not yet.
    "message": (
        ("id", "Q"),
        ("actor", "Q"),
        ("mesh", "Q"),
        ("peer", "Q"),
        ("sender", "Q"),
        ("port", "Q"),
        ("endpoint", "s"),
        ("queued", "q"),
        ("begun", "q"),
        ("ended", "q"),
        ("failed", "q"),
    ),
    # A message whose endpoint runs for long; the same columns.
    "running": (
        ("id", "Q"),
        ("actor", "Q"),
        ("mesh", "Q"),
        ("peer", "Q"),
        ("sender", "Q"),
        ("port", "Q"),
        ("endpoint", "s"),
        ("queued", "q"),
        ("begun", "q"),
        ("ended", "q"),
        ("failed", "q"),
    ),
    # A send operation of `proc`: to all ranks of a view of a mesh. `by_actor`: 0 if the sender is
    # the process's own instance, such as the script. `parent`: the span or message inside which
    # it was sent; 0: none.
    "send": (
        ("id", "Q"),
        ("time", "q"),
        ("proc", "Q"),
        ("actor", "Q"),
        ("mesh", "Q"),
        ("view", "s"),
        ("shape", "s"),
        ("port", "Q"),
        ("endpoint", "s"),
        ("by_actor", "q"),
        ("parent", "Q"),
    ),
    "spans": (
        ("id", "Q"),
        ("name", "s"),
        ("target", "s"),
        ("level", "s"),
        ("fields_json", "s"),
        ("begin_us", "q"),
        ("end_us", "q"),
        ("parent_id", "j"),
        ("thread_name", "s"),
        ("file", "j"),
        ("line", "j"),
    ),
    "events": (
        ("name", "s"),
        ("target", "s"),
        ("level", "s"),
        ("fields_json", "s"),
        ("timestamp_us", "q"),
        ("parent_span", "j"),
        ("thread_id", "s"),
        ("thread_name", "s"),
        ("module_path", "j"),
        ("file", "j"),
        ("line", "j"),
    ),
    "metric_gauges": (
        ("name", "s"),
        ("timestamp_us", "q"),
        ("start_timestamp_us", "j"),
        ("scope_name", "s"),
        ("unit", "s"),
        ("attributes_json", "s"),
        ("resource_attributes_json", "s"),
        ("value_f64", "j"),
        ("value_i64", "j"),
        ("value_u64", "j"),
    ),
    "metric_sums": (
        ("name", "s"),
        ("timestamp_us", "q"),
        ("start_timestamp_us", "q"),
        ("scope_name", "s"),
        ("unit", "s"),
        ("temporality", "s"),
        ("is_monotonic", "j"),
        ("attributes_json", "s"),
        ("resource_attributes_json", "s"),
        ("sum_f64", "j"),
        ("sum_i64", "j"),
        ("sum_u64", "j"),
    ),
    "metric_histograms": (
        ("name", "s"),
        ("timestamp_us", "q"),
        ("start_timestamp_us", "q"),
        ("scope_name", "s"),
        ("unit", "s"),
        ("temporality", "s"),
        ("attributes_json", "s"),
        ("resource_attributes_json", "s"),
        ("count", "j"),
        ("sum_f64", "j"),
        ("sum_i64", "j"),
        ("sum_u64", "j"),
        ("min_f64", "j"),
        ("min_i64", "j"),
        ("min_u64", "j"),
        ("max_f64", "j"),
        ("max_i64", "j"),
        ("max_u64", "j"),
        ("bounds_json", "s"),
        ("bucket_counts_json", "s"),
    ),
}
"""The columns of each kind, with their types."""

LARGEST = 64 << 20
"""The most bytes of a batch; a reader refuses more."""

_SIZES = struct.Struct("<II")


def json_text(value: Any) -> str:
    """Return a value as the columns ``*_json`` have it: without spaces, as existing queries expect.

    >>> json_text({"labels": ["gpus"], "sizes": [2]})
    '{"labels":["gpus"],"sizes":[2]}'
    """
    return json.dumps(value, separators=(",", ":"), default=str)


def encode(
    kind: str, columns: Sequence[Sequence[Any]], proc: int, process: str, lost: int
) -> bytes:
    """Return the bytes of a batch.

    Args:
        kind: one of `KINDS`.
        columns: those of the kind, in order, for at least one row.
        proc: the number of the process in the cluster.
        process: its name for people.
        lost: how many rows the process had to drop before these.
    """
    parts: list[bytes] = []
    texts: dict[str, Any] = {}
    for (name, type_), column in zip(KINDS[kind], columns, strict=True):
        if type_ == "j":
            texts[name] = column
        elif type_ == "s":
            found: dict[str, int] = {}
            places = array("I", [found.setdefault(text, len(found)) for text in column])
            texts[name] = list(found)
            parts.append(_little(places))
        else:
            parts.append(_little(array(type_, column)))
    header = {
        "kind": kind,
        "rows": len(columns[0]),
        "proc": proc,
        "process": process,
        "lost": lost,
        "texts": texts,
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_SIZES.pack(len(head), sum(map(len, parts))), head, *parts])


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


class Batch(NamedTuple):
    """Rows of one kind, as columns; the sender is process `proc`, named `process`."""

    kind: str
    rows: int
    proc: int
    process: str
    lost: int
    columns: dict[str, Sequence[Any]]
    size: int
    """The bytes that were received."""


class BatchReader:
    """The bytes of one stream in, complete batches out.

    >>> data = encode("state", [[1], [2], [3], ["Idle"], [""]], 7, "trainer", 0)
    >>> reader = BatchReader()
    >>> list(reader.feed(data[:20]))
    []
    >>> [batch] = reader.feed(data[20:])
    >>> batch.kind, batch.columns["status"]
    ('state', ['Idle'])
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterable[Batch]:
        """Take bytes; yield the batches that are complete. Raises ValueError for anything else."""
        self._data += data
        while len(self._data) >= _SIZES.size:
            head, body = _SIZES.unpack_from(self._data)
            end = _SIZES.size + head + body
            if head + body > LARGEST:
                raise ValueError(f"a batch of {head + body} bytes; the limit is {LARGEST}")
            if len(self._data) < end:
                return
            at = _SIZES.size + head
            yield _decode(bytes(self._data[_SIZES.size : at]), bytes(self._data[at:end]))
            del self._data[:end]


def _decode(head: bytes, body: bytes) -> Batch:
    header: dict[str, Any] = json.loads(head)
    kind, rows, texts = header["kind"], header["rows"], header["texts"]
    columns: dict[str, Sequence[Any]] = {}
    at = 0
    for name, type_ in KINDS[kind]:
        if type_ == "j":
            columns[name] = texts[name]
            continue
        column: array[Any] = array("I" if type_ == "s" else type_)
        size = rows * column.itemsize
        column.frombytes(body[at : at + size])
        at += size
        if sys.byteorder == "big":
            column.byteswap()
        if type_ == "s":
            known = texts[name]
            columns[name] = [known[place] for place in column]
        else:
            columns[name] = column
        if len(columns[name]) != rows:
            raise ValueError(f"a batch of {rows} rows has {len(columns[name])} in column {name}")
    size = len(head) + len(body) + _SIZES.size
    return Batch(kind, rows, header["proc"], header["process"], header["lost"], columns, size)
