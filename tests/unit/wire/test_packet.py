"""Packets on the network, byte for byte: other releases must read them."""

from __future__ import annotations

import pytest

from monarch._engine.base.errors import ProtocolError
from monarch._engine.wire import packet as wire
from monarch._engine.wire.packet import HEADER, HEADER_SIZE, MAX_PIECE, read_header

KNOWN = [
    (wire.HELLO, wire.VERSION, 0, 7, 3, 9, "016d0100 00000000 07 03 09"),
    (wire.DATA, 5, 4, 1, 0, 4, "026d0500 04000000 01 00 04"),
    (wire.FLOW, 5, 0, 2, 0, 1, "036d0500 00000000 02 00 01"),
    (wire.ACK, 0, 0, 0, 8, 0, "046d0000 00000000 00 08 00"),
    (wire.PING, 0, 2, 0, 0, 0, "056d0000 02000000 00 00 00"),
    (wire.BYE, 0, 3, 0, 0, 0, "066d0000 03000000 00 00 00"),
    (wire.BYE, 0, 3, 0, 0, 1, "066d0000 03000000 00 00 01"),
]


@pytest.mark.parametrize("known", KNOWN)
def test_known_headers(known: tuple[int | str, ...]) -> None:
    *fields, text = known
    kind_to_size, *numbers = str(text).rsplit(maxsplit=3)
    data = bytes.fromhex(kind_to_size) + b"".join(bytes.fromhex(n) + bytes(7) for n in numbers)
    assert HEADER.pack(*fields) == data
    assert len(data) == HEADER_SIZE == 32
    assert read_header(b"before" + data, 6, "a") == tuple(fields)


@pytest.mark.parametrize(
    ("kind", "most"),
    [(wire.DATA, 16 << 20)]
    + [(kind, 4096) for kind in (wire.HELLO, wire.FLOW, wire.ACK, wire.PING, wire.BYE)],
)
def test_no_payload_is_larger(kind: int, most: int) -> None:
    total = 1 << 40
    assert read_header(HEADER.pack(kind, 1, most, 0, 0, total), 0, "a")[2] == most
    with pytest.raises(ProtocolError, match=rf"from a: .*{most + 1} bytes of {total}"):
        read_header(HEADER.pack(kind, 1, most + 1, 0, 0, total), 0, "a")


def test_a_piece_is_no_larger_than_its_message() -> None:
    assert read_header(HEADER.pack(wire.DATA, 1, 5, 0, 0, 5), 0, "a")[2] == 5
    with pytest.raises(ProtocolError, match="5 bytes of 4"):
        read_header(HEADER.pack(wire.DATA, 1, 5, 0, 0, 4), 0, "a")


@pytest.mark.parametrize("kind", [0x6D00, 0x6D07, 0x6E01, 0x0001, 0x2D02])
def test_other_kinds_are_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="protocol error from a"):
        read_header(HEADER.pack(kind, 1, 0, 0, 0, 0), 0, "a")


def test_the_largest_piece_of_a_channel_fits() -> None:
    assert MAX_PIECE == 16 << 20
