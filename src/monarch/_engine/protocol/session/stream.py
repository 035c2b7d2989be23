"""A channel over a byte stream: cuts received bytes into packets, and gathers packets to send.

A `PacketStream` lives as long as its connection. An incomplete packet is dropped with it, and the
channel's replay compensates for that. Big payloads are read into their final memory: while one is
in progress `target` is where the next bytes belong, and only the bytes that a read of unknown
content received along with the header are copied there. After such a payload another one is likely,
so the next read should be small (`wanted`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._engine.base.errors import ProtocolError
from monarch._engine.wire.packet import HEADER_SIZE, Buffer, Header, read_header

if TYPE_CHECKING:
    from monarch._engine.protocol.session.channel import Channel, Effect

__all__ = ["PacketStream"]

_SMALL = 4096  # a rest of a packet up to this size is not read by itself
_MUCH = 1 << 30


class PacketStream:
    """The bytes of one connection, in both directions.

    Args:
        channel: the session that the connection serves; the driver itself reports to the channel
            that the connection is open, or lost.
        peer: the name of the other side in error texts.

    >>> from monarch._engine.protocol.session.channel import Channel
    >>> a, b = Channel(1, dials=True, now=0.0), Channel(2, dials=False, now=0.0)
    >>> a.opened(0.0); b.opened(0.0)
    >>> data = b"".join(PacketStream(a, "host b").gather(0.0, limit=1 << 20))
    >>> there = PacketStream(b, "host a")
    >>> there.feed(memoryview(data)[:9], 0.0), there.feed(memoryview(data)[9:], 0.0)
    ([], [Connected(again=False)])
    """

    __slots__ = (
        "_channel",
        "_filled",
        "_header",
        "_payload",
        "_peer",
        "_tail",
        "_target",
        "dry",
        "wanted",
    )

    def __init__(self, channel: Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer
        self.dry = True
        """Whether the last `gather` left no packet to send."""
        self.wanted = _MUCH
        """How many bytes to read for the next `feed`."""
        self._tail = b""  # the start of an incomplete packet
        # A packet whose payload is read by itself: its header, where the payload goes, how many
        # bytes of it have arrived, and the argument for the channel (None: the payload is in its
        # place).
        self._header: Header | None = None
        self._target = memoryview(b"")
        self._filled = 0
        self._payload: tuple[Buffer] | None = None

    def gather(self, now: float, limit: int) -> list[Buffer]:
        """Return buffers to write next, of about `limit` bytes: the last packet may exceed it.

        Use a small limit: urgent packets can no longer overtake those that were gathered.
        """
        buffers: list[Buffer] = []
        while limit > 0:
            packet = self._channel.next_packet(now)
            if packet is None:
                self.dry = True
                return buffers
            buffers += packet
            limit -= sum(map(len, packet))
        self.dry = False
        return buffers

    def target(self) -> memoryview | None:
        """Return where the next bytes of a big payload belong; None if `feed` is to be used."""
        return None if self._header is None else self._target[self._filled :]

    def filled(self, count: int, now: float) -> list[Effect]:
        """Report that `count` bytes were written into `target`."""
        header = self._header
        assert header is not None, "filled() without a target"
        self._filled += count
        if self._filled < header[2]:
            return []
        self._header = None
        self._target = memoryview(b"")
        self.wanted = _SMALL
        payload, self._payload = self._payload, None
        return self._channel.receive(header, payload, now)

    def feed(self, data: memoryview, now: float) -> list[Effect]:
        """Accept bytes that were not read into `target`; `data` may be reused after the call."""
        if self._tail:
            data = memoryview(self._tail + data)
            self._tail = b""
        effects: list[Effect] = []
        self.wanted = _MUCH
        at = 0
        end = len(data)
        while end - at >= HEADER_SIZE:
            try:
                header = read_header(data, at, self._peer)
                start = at + HEADER_SIZE
                stop = start + header[2]
                if stop > end:
                    if stop - end <= _SMALL:
                        break
                    self._begin(header, data[start:])
                    return effects
            except ProtocolError as error:
                return effects + self._channel.end(str(error))
            effects += self._channel.receive(header, (data[start:stop],), now)
            at = stop
        if at < end:
            self._tail = bytes(data[at:])
        return effects

    def _begin(self, header: Header, got: memoryview) -> None:
        target = self._channel.place(header)
        self._payload = None
        if target is None:  # a duplicate or an error, which the channel detects
            unplaced = bytearray(header[2])
            self._payload = (unplaced,)
            target = memoryview(unplaced)
        target[: len(got)] = got
        self._header, self._target, self._filled = header, target, len(got)
