"""Batches of rows as bytes: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._telemetry.kinds import KINDS, LARGEST, BatchReader, encode

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Q": st.integers(0, 2**64 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "s": texts,
    "j": st.none() | texts | st.integers(0, 2**64 - 1) | st.booleans(),
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[tuple[Any, ...]]]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    row = st.tuples(*(VALUES[type_] for _, type_ in KINDS[kind]))
    return kind, draw(st.lists(row, min_size=1, max_size=5))


@given(st.lists(batches(), min_size=1, max_size=4), st.integers(1, 50))
def test_rows_come_out_as_they_went_in(
    made: list[tuple[str, list[tuple[Any, ...]]]], step: int
) -> None:
    data = b"".join(
        encode(kind, list(zip(*rows, strict=True)), 7, "trainer@host:1", 3) for kind, rows in made
    )
    reader = BatchReader()
    found = [
        batch for at in range(0, len(data), step) for batch in reader.feed(data[at : at + step])
    ]
    assert [batch.kind for batch in found] == [kind for kind, _ in made]
    for batch, (kind, rows) in zip(found, made, strict=True):
        assert (batch.proc, batch.process, batch.lost) == (7, "trainer@host:1", 3)
        columns = [batch.columns[name] for name, _ in KINDS[kind]]
        assert list(zip(*columns, strict=True)) == rows


def test_a_row_of_a_message_takes_less_than_100_bytes() -> None:
    row = 1 << 59, 1 << 62, 1 << 62, 1 << 62, 1 << 62, 12345, "train", *[1_700_000_000_000_000] * 3
    size = len(
        encode("message", [[item] * 1000 for item in (*row, 0)], 1 << 62, "trainer@host:1", 0)
    )
    assert size < 100 * 1000


@pytest.mark.parametrize(
    "data",
    [
        (LARGEST + 1).to_bytes(4, "little") + bytes(4),
        b"\x05\0\0\0\0\0\0\0nojso",
        b"\x02\0\0\0\0\0\0\0{}",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        list(BatchReader().feed(data))
