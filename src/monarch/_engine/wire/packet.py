"""Packets: the envelope of the data between two hosts, in which messages travel in pieces.

A packet is 32 bytes of header and a payload::

    kind u16 | lane u16 | size u32 | seq u64 | ack u64 | total u64

    size    bytes of payload that follow
    seq     the packet's number in its direction of the session, from 0 (DATA, FLOW)
    ack     how many numbered packets the sender has accepted, in order (all but PING and BYE)

    HELLO   the first packet of each link, in both directions. lane: the version of this format;
            seq: the sender's session; total: the session that it believes its peer to have,
            0 before they have met
    DATA    the next piece of the message in progress on `lane`; total: bytes of that message
    FLOW    the sender pauses (total 1) or resumes (total 0) messages on `lane`
    ACK     only `ack`
    PING    a heartbeat, opaque here: not numbered, never sent again
    BYE     the session is over. seq: the sender's session; total: 1 if the sender has finished its
            work (a farewell), 0 for a failure; the payload is the reason, for people

The upper byte of `kind` is a constant, so that a stream that lost its position fails instead of
being misread. A piece carries no offset: packets are accepted by number, so the pieces of a message
arrive in order and each lane has one message in progress.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from monarch._engine.base.errors import ProtocolError

__all__ = [
    "ACK",
    "BYE",
    "DATA",
    "FLOW",
    "HEADER",
    "HEADER_SIZE",
    "HELLO",
    "MAX_PIECE",
    "PING",
    "VERSION",
    "Buffer",
    "Header",
    "read_header",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A sequence of bytes. A memoryview must have items of one byte (`cast("B")`)."""

HEADER = struct.Struct("<HHIQQQ")
HEADER_SIZE = HEADER.size

Header: TypeAlias = tuple[int, int, int, int, int, int]
"""The fields kind, lane, size, seq, ack, total."""

VERSION = 1

MAX_PIECE = 16 << 20
"""The largest `size` that is accepted."""

_MARK = 0x6D00
HELLO = _MARK + 1
DATA = _MARK + 2
FLOW = _MARK + 3
ACK = _MARK + 4
PING = _MARK + 5
BYE = _MARK + 6

_SMALL = 4096  # enough for every packet but a piece of a message


def read_header(data: Buffer, at: int, peer: str) -> Header:
    """Return the header at `at`. Raises ProtocolError, which names `peer`, if it is not valid.

    >>> read_header(HEADER.pack(DATA, 7, 5, 0, 0, 5), 0, "host b")[1:3]
    (7, 5)
    """
    header: Header = HEADER.unpack_from(data, at)
    kind, _, size, _, _, total = header
    if kind == DATA and size <= MAX_PIECE and size <= total:
        return header
    if HELLO <= kind <= BYE and kind != DATA and size <= _SMALL:
        return header
    if kind & 0xFF00 != _MARK:
        what = "the stream does not contain packets of this protocol"
    elif not HELLO <= kind <= BYE:
        what = f"unknown packet kind {kind & 0xFF}"
    else:
        what = f"a packet of kind {kind & 0xFF} with {size} bytes of {total}"
    raise ProtocolError(f"protocol error from {peer}: {what}")
