"""The first words of a port forwarder, which goes on writing."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes")
from monarch.job.kubernetes.port_forward import _first_line


@pytest.mark.parametrize(
    ("pieces", "line"),
    [([b"ok\nmore"], b"ok"), ([b"o", b"k \n"], b"ok"), ([], None), ([b"o"], None)],
)
def test_a_line_is_read_as_soon_as_it_is_complete(pieces: list[bytes], line: bytes | None) -> None:
    reads, writes = os.pipe()
    try:
        for piece in pieces:
            os.write(writes, piece)
        assert _first_line(reads, 60.0 if line else 0.0) == line
    finally:
        os.close(reads)
        os.close(writes)


def test_a_forwarder_that_ends_without_a_line_has_said_that_much() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"no route")
    os.close(writes)
    assert _first_line(reads, 60.0) == b"no route"
    os.close(reads)
