"""The channel between two hosts: every message arrives once and in order, or is reported as lost.

Connections between hosts break and are replaced. A channel survives them: it numbers what it sends,
keeps it until it is acknowledged, and sends it again on the next connection; the receiver drops
duplicates. This is the sliding window of TCP (RFC 9293), one layer up, where it survives the
connection. The session numbers detect what RFC 9293 calls half-open connections.

**A channel is one session.** A session has a number, drawn at random by the driver and passed in,
and it ends once. The first packet of each connection names the sender's session and the session
that it believes its peer to have. The pair that was formed first continues, whatever happened to
the connection. Any other combination means that one of the two sides was made anew, because its
process was restarted or because it had given up the other. Then the session is over: unacknowledged
messages are reported as lost, none of them is ever sent to the successor, and the driver makes a
new channel with a new number. So a message is never delivered to an incarnation that it was not
sent to. ("Lost" means that it is unknown whether the message arrived. No protocol can know more
than that.)

One side dials and the other answers; the code that introduces the hosts decides which. When a new
connection arrives while the old one seems to be open, the new one counts: the dialer dials only
when it knows that the old one is closed.

=============  ===================  ======================  ===================  ================
               down                 greeting                up                   over
=============  ===================  ======================  ===================  ================
opened         greeting             greeting                greeting             over
HELLO matches  -                    up, replay              answered again       -
HELLO does not -                    over, or refused        over                 -
other packet   -                    dropped                 accepted             -
BYE, end       over                 over                    over                 -
lost           dial again, later    down, dial again        down, dial again     -
patience ends  over                 over                    -                    -
=============  ===================  ======================  ===================  ================

(A channel that has not met its peer yet refuses a HELLO meant for its predecessor: it answers with
its own HELLO and waits for another.)

**One sequence for all lanes.** `lanes` decides which message goes next when the link can take a
packet, not before. `next_packet` is called for one packet at a time, so that an urgent message
leaves next however much is queued. Then the packet gets its number. Rejected: a sequence for each
lane. Over one TCP connection it would not save a wait, and the receiver would have to keep a number
for each lane that ever existed. Heartbeats have no number and are never sent again.

**Acknowledgements** are cumulative. They are piggybacked on packets that leave anyway; otherwise
they wait for a quarter of a window, or for `ack_delay`. At most `window` bytes are in flight. Lane
0 is exempt, since the runtimes' control messages must not wait for user data. (Its own limit bounds
it.) A slow receiver pauses a lane; at most one window arrives after that.

**Time asleep does not count.** A machine that was suspended for longer than `patience` while a link
was down has not tried in vain. The channel notices this because the driver is late with its `tick`,
and then patience begins anew.

**A link is a stream.** Nothing is lost on it while it holds. So nothing is ever sent twice except
after a re-dial, and a gap in the numbers is a violation. Packets must belong to the link that was
opened last; the driver reads no other.

A peer that violates the protocol ends the session: both programs run, and one of them is wrong.

Big payloads are never copied here. Pieces are views of the sender's buffers, which must not change
until they are acknowledged. The receiver's driver asks where the bytes of a piece belong (`place`)
and reads them there. `allocate` is passed in, so a message may be received into shared memory.

The driver calls `tick` when `deadline` is reached, asks for packets whenever the link can take one,
and performs effects in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.session.lanes import CONTROL, OVERHEAD, Lanes, Message
from monarch._engine.wire.packet import (
    ACK,
    BYE,
    DATA,
    FLOW,
    HEADER,
    HELLO,
    PING,
    VERSION,
    Buffer,
    Header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Acknowledged",
    "Channel",
    "Connected",
    "Deliver",
    "Dial",
    "Effect",
    "Ended",
    "Heartbeat",
    "Room",
    "Terms",
]


_LATE = 1.0  # a tick this many seconds late means that the driver did not run
_SHARE = 0.1  # of patience is the longest delay between dials: some may fail before it ends


class Deliver(NamedTuple):
    """Effect: a message arrived, as `bytes` if in one piece, else in the buffer of `allocate`."""

    lane: int
    data: bytes | bytearray | memoryview


class Acknowledged(NamedTuple):
    """Effect: the messages with these tokens were delivered; their buffers may be reused."""

    tokens: list[object]


class Room(NamedTuple):
    """Effect: a lane that was full accepts messages again."""

    lane: int


class Heartbeat(NamedTuple):
    """Effect: the peer sent this payload with `Channel.heartbeat`."""

    payload: bytes


class Dial(NamedTuple):
    """Effect: open a link to the peer now, and report the result with `opened` or `lost`."""


class Connected(NamedTuple):
    """Effect: the session is up for the first time, or (`again`) on another link."""

    again: bool


class Ended(NamedTuple):
    """Effect: the session is over; close its link.

    `lost` has the tokens of unacknowledged messages; `farewell`: see `Channel.end`.
    """

    reason: str
    lost: list[object]
    farewell: bool = False


Effect: TypeAlias = Deliver | Acknowledged | Room | Heartbeat | Dial | Connected | Ended


class Terms(NamedTuple):
    """Limits and times of a channel. Sizes in bytes, times in seconds."""

    piece: int = 1 << 20
    """The most bytes in one packet. A small message may have to wait for one such packet."""

    window: int = 8 << 20
    """The most bytes that are sent and unacknowledged; at least bandwidth times round-trip time."""

    lane_limit: int = 64 << 20
    """A lane is full with more bytes than this, queued and unacknowledged ones together."""

    message_limit: int = 10 << 30
    """The largest message that is accepted from the peer."""

    ack_delay: float = 0.02
    """How long an acknowledgement may wait for a packet that carries it."""

    redial: float = 0.05
    """The delay before the second dial in a row, doubled for each further one."""

    max_redial: float = 2.0
    """The longest delay between dials, unless `_SHARE` of `patience` is shorter.

    After a link that lasted longer, or on which a numbered packet arrived or was acknowledged, the
    next dial is at once.
    """

    patience: float = 30.0
    """How long a session lasts without a link."""


_DEFAULT = Terms()

_DOWN, _GREETING, _UP, _OVER = range(4)


class _Sent:
    """A numbered packet that is not acknowledged yet."""

    __slots__ = ("kind", "lane", "last", "message", "payload", "size", "total")

    def __init__(
        self, kind: int, lane: int, total: int, message: Message | None, payload: Sequence[Buffer]
    ) -> None:
        self.kind = kind
        self.lane = lane
        self.total = total
        self.message = message
        self.payload = payload
        self.size = sum(map(len, payload))
        self.last = message is not None and not message.left


class _Partial:
    """A message of which some pieces have arrived."""

    __slots__ = ("buffer", "filled", "total", "view")

    def __init__(self, buffer: bytearray | memoryview, total: int) -> None:
        self.buffer = buffer
        self.view = memoryview(buffer)
        self.filled = 0
        self.total = total


def _plain_buffer(_lane: int, size: int) -> bytearray | memoryview:
    return bytearray(size)


class Channel:
    """One session with one peer. See the module.

    Args:
        session: its number, random, not 0; never the same for two sessions.
        dials: whether this side opens the links.
        now: the time.
        peer: the name of the other side in error texts.
        terms: limits and times.
        allocate: returns the buffer for a message of several pieces, given its lane and size; it
            may raise ProtocolError to refuse the message, which ends the session.

    >>> a, b = Channel(1, dials=True, now=0.0), Channel(2, dials=False, now=0.0)
    >>> a.tick(0.0)
    [Dial()]
    >>> a.opened(0.0); b.opened(0.0)
    >>> b.on_packet(a.next_packet(0.0), 0.0), a.on_packet(b.next_packet(0.0), 0.0)
    ([Connected(again=False)], [Connected(again=False)])
    >>> a.send(7, [b"hello"], token="greeting")
    True
    >>> b.on_packet(a.next_packet(0.0), 0.0)
    [Deliver(lane=7, data=b'hello')]
    >>> b.tick(b.deadline)
    []
    >>> a.on_packet(b.next_packet(0.1), 0.1)
    [Acknowledged(tokens=['greeting'])]
    """

    __slots__ = (
        "_ack_at",
        "_ack_due",
        "_acked",
        "_allocate",
        "_attempts",
        "_bye",
        "_cursor",
        "_dial_at",
        "_dials",
        "_flow",
        "_greeted_by",
        "_heartbeat",
        "_hello_due",
        "_in_flight",
        "_known",
        "_lanes",
        "_name",
        "_partial",
        "_patience_at",
        "_sent",
        "_session",
        "_state",
        "_taken",
        "_terms",
        "_unacked",
        "_unacked_bytes",
        "_up_since",
        "duplicates",
        "ended",
        "replayed",
    )

    def __init__(
        self,
        session: int,
        *,
        dials: bool,
        now: float,
        peer: str = "the peer",
        terms: Terms = _DEFAULT,
        allocate: Callable[[int, int], bytearray | memoryview] = _plain_buffer,
    ) -> None:
        self._session = session
        self._dials = dials
        self._name = peer
        self._terms = terms
        self._allocate = allocate
        self._state = _DOWN
        self._greeted_by = 0  # the peer's session; 0 before the first handshake
        self.ended: str | None = None
        """The reason why the session is over; None while it lasts."""
        self.replayed = 0
        """The number of packets that were sent again."""
        self.duplicates = 0
        """The number of packets that had been received before."""

        # Timers
        self._dial_at = now if dials else None
        self._patience_at: float | None = now + terms.patience
        self._up_since = now
        self._attempts = 1  # consecutive dials without a link that lasted, or brought progress
        self._known = 0, 0  # `_acked` and `_taken` when the link came up

        # Sending
        self._lanes = Lanes(terms.piece, terms.lane_limit)
        self._flow: dict[int, bool] = {}  # lanes that the peer is asked to pause or resume
        self._heartbeat: bytes | None = None
        self._hello_due = False
        self._bye: list[Buffer] | None = None
        self._unacked: dict[int, _Sent] = {}
        self._in_flight = 0  # bytes of the unacknowledged packets
        self._acked = 0  # the first number that is not acknowledged
        self._cursor = 0  # the next number to send over this link
        self._sent = 0  # the number of the next new packet

        # Receiving
        self._taken = 0  # the next number to accept
        self._partial: dict[int, _Partial] = {}
        self._unacked_bytes = 0  # accepted since the last acknowledgement
        self._ack_at: float | None = None
        self._ack_due = False

    # ----------------------------------------------------------------------------------------------
    # Interface to the layer above
    # ----------------------------------------------------------------------------------------------

    def send(self, lane: int, buffers: Sequence[Buffer], token: object = None) -> bool:
        """Queue one message, given in parts; return False when its lane is full now.

        Does not block. The message is accepted even into a full lane; wait for `Room` before the
        next one. The buffers must not change until the message is acknowledged, which
        `Acknowledged` reports if there is a token. Raises RuntimeError when the session is over.
        """
        if self.ended is not None:
            raise RuntimeError(f"the session with {self._name} is over: {self.ended}")
        return self._lanes.put(Message(lane, buffers, token))

    def pause(self, lane: int) -> None:
        """Ask the peer to hold messages of this lane; at most a window still arrives."""
        assert lane != CONTROL, "the control lane is always open"
        self._flow[lane] = True

    def resume(self, lane: int) -> None:
        """Ask the peer to send messages of this lane again."""
        self._flow[lane] = False

    def heartbeat(self, payload: bytes) -> None:
        """Send this payload once, ahead of everything else; drop it if the link is not up."""
        if self._state == _UP:
            self._heartbeat = payload

    def end(self, reason: str, *, farewell: bool = False) -> list[Effect]:
        """End the session; if there is a link, send the reason to the peer.

        A `farewell` says that this side has finished its work: nothing has failed. It counts for
        this session only, not for one that the peer had with a predecessor.
        """
        if self._state in (_GREETING, _UP):
            text = reason.encode()[:1000]
            header = HEADER.pack(BYE, CONTROL, len(text), self._session, 0, int(farewell))
            self._bye = [header, text]
        return self._over(reason, farewell=farewell)

    def answer(self) -> None:
        """Leave the dialing to the peer; allowed until the session is established.

        For two sides that have started to dial each other at the same time.
        """
        assert self._greeted_by == 0, "the session has begun"
        self._dials = False
        self._dial_at = None

    @property
    def met(self) -> bool:
        """Whether the session was ever established."""
        return self._greeted_by != 0

    @property
    def sessions(self) -> tuple[int, int]:
        """This side's session number and the peer's, which is 0 before the first handshake."""
        return self._session, self._greeted_by

    def be_patient(self, patience: float) -> None:
        """From the next loss on, survive this many seconds without a link."""
        self._terms = self._terms._replace(patience=patience)

    @property
    def up(self) -> bool:
        """Whether packets can go out now."""
        return self._state == _UP

    @property
    def idle(self) -> bool:
        """Whether everything that was queued has been sent and acknowledged."""
        return not self._unacked and not self._flow and next(iter(self._lanes), None) is None

    # ----------------------------------------------------------------------------------------------
    # Interface to the link below
    # ----------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` has something to do, or None."""
        due = self._ack_at
        for time in (self._dial_at, self._patience_at):
            if time is not None and (due is None or time < due):
                due = time
        return due

    def tick(self, now: float) -> list[Effect]:
        """Perform what is due by `now`."""
        due = self.deadline
        if self._patience_at is not None and due is not None and now > due + _LATE:
            self._patience_at = now + self._terms.patience
        if self._patience_at is not None and now >= self._patience_at:
            return self._over(f"no connection to {self._name} for {self._terms.patience:g} s")
        if self._ack_at is not None and now >= self._ack_at:
            self._ack_at = None
            self._ack_due = True
        if self._dial_at is not None and now >= self._dial_at:
            self._dial_at = None
            return [Dial()]
        return []

    def opened(self, now: float) -> None:
        """Report that a link to the peer is open.

        It replaces an earlier link, which is given up.
        """
        if self._state == _OVER:
            return
        self._disconnect(now)
        self._state = _GREETING
        self._dial_at = None
        self._hello_due = self._dials

    def lost(self, now: float, jitter: float) -> None:
        """Report that the link was lost or a dial failed.

        `jitter`, from 0 to 1, spreads the next dial.
        """
        if self._state == _OVER:
            return
        self._disconnect(now)
        if self._dials:
            terms = self._terms
            delay = 0.0
            if self._attempts:
                longest = min(terms.max_redial, _SHARE * terms.patience)
                most = min(longest, terms.redial * 2 ** min(self._attempts - 1, 30))
                delay = most * (0.5 + jitter / 2)
            self._attempts += 1
            self._dial_at = now + delay

    def _disconnect(self, now: float) -> None:
        if self._state == _UP:
            self._patience_at = now + self._terms.patience
            lasted = now - self._up_since >= self._terms.max_redial
            if lasted or self._known != (self._acked, self._taken):
                self._attempts = 0
        self._state = _DOWN
        self._hello_due = self._ack_due = False
        self._ack_at = self._heartbeat = None

    def next_packet(self, now: float) -> list[Buffer] | None:
        """Return the next packet to send, as a header and the parts of its payload; or None.

        Call it when the link can take a packet. A packet that was returned counts as sent.
        """
        if self._state != _UP:
            return self._greeting()
        if self._hello_due:
            return self._greeting()
        if self._heartbeat is not None:
            payload, self._heartbeat = self._heartbeat, None
            return [HEADER.pack(PING, CONTROL, len(payload), 0, 0, 0), payload]
        seq = self._cursor
        if seq < self._sent:
            sent = self._unacked[seq]
            self.replayed += 1
        else:
            new = self._new_packet()
            if new is None:
                if self._ack_due:
                    return [self._header(ACK, CONTROL, 0, 0, 0)]
                return None
            sent = self._unacked[seq] = new
            self._sent += 1
            self._in_flight += sent.size + OVERHEAD
        self._cursor = seq + 1
        return [self._header(sent.kind, sent.lane, sent.size, seq, sent.total), *sent.payload]

    def _new_packet(self) -> _Sent | None:
        if self._flow:
            lane, paused = self._flow.popitem()
            return _Sent(FLOW, lane, int(paused), None, ())
        piece = self._lanes.take(control=self._in_flight >= self._terms.window)
        if piece is None:
            return None
        message, payload = piece
        return _Sent(DATA, message.lane, message.total, message, payload)

    def _greeting(self) -> list[Buffer] | None:
        if self._bye is not None:
            bye, self._bye = self._bye, None
            return bye
        if not self._hello_due:
            return None
        self._hello_due = False
        return [self._header(HELLO, VERSION, 0, self._session, self._greeted_by)]

    def _header(self, kind: int, lane: int, size: int, seq: int, total: int) -> bytes:
        self._ack_due = False
        self._ack_at = None
        self._unacked_bytes = 0
        return HEADER.pack(kind, lane, size, seq, self._taken, total)

    # ----------------------------------------------------------------------------------------------
    # Packets that arrive
    # ----------------------------------------------------------------------------------------------

    def on_packet(self, packet: Sequence[Buffer], now: float) -> list[Effect]:
        """Accept a whole packet, in the form in which `next_packet` returns it."""
        return self.receive(HEADER.unpack(packet[0]), packet[1:], now)

    def place(self, header: Header) -> memoryview | None:
        """Return where the payload of this packet belongs, or None if `receive` must get it.

        After reading the payload into its place, call `receive` with None for the payload.
        """
        kind, lane, size, seq, _, total = header
        if kind != DATA or seq != self._taken or self._state != _UP:
            return None
        partial = self._partial.get(lane)
        if partial is None:
            if total > self._terms.message_limit:
                return None  # `receive` raises the error
            partial = self._partial[lane] = _Partial(self._allocate(lane, total), total)
        if partial.total != total or partial.filled + size > total:
            return None
        return partial.view[partial.filled : partial.filled + size]

    def receive(self, header: Header, payload: Sequence[Buffer] | None, now: float) -> list[Effect]:
        """Accept a packet whose header is valid by itself (`read_header`).

        The payload buffers may be reused after the call. None means that the payload was read into
        its `place`.
        """
        effects: list[Effect] = []
        if self._state in (_DOWN, _OVER):
            return effects
        kind, _, _, seq, ack, total = header
        try:
            if kind == HELLO:
                self._on_hello(header, now, effects)
            elif kind == BYE:
                reason = b"".join(payload or ()).decode(errors="replace")
                text = f"{self._name} ended the session: {reason}"
                # The farewell of a successor, which the peer says before any HELLO, is about
                # another session. This one is lost.
                # A release that says nothing about its session (0) means this one.
                farewell = bool(total) and (not seq or self._greeted_by in (0, seq))
                effects += self._over(text, farewell=farewell)
            elif self._state == _UP:
                if kind == PING:
                    effects.append(Heartbeat(b"".join(payload or ())))
                    return effects
                self._on_ack(ack, effects)
                if kind != ACK:
                    self._on_numbered(seq, header, payload, now, effects)
        except ProtocolError as error:
            effects += self.end(str(error))
        return effects

    def _on_hello(self, header: Header, now: float, effects: list[Effect]) -> None:
        _, version, _, session, ack, known = header
        if version != VERSION:
            raise self._violation(f"it speaks protocol version {version}, this side {VERSION}")
        met = self._greeted_by
        if self._dials:
            if met not in (0, session):
                effects += self._over(self._anew())
                return
            if known != self._session:
                raise self._violation("it answered a greeting that this side did not send")
        elif met == 0:
            self._hello_due = True
            if known:
                return  # meant for a predecessor; the answer corrects the peer
        elif met != session or known not in (0, self._session):
            effects += self._over(self._anew())
            return
        else:
            self._hello_due = True
        self._greeted_by = session
        if self._state != _UP:
            self._state = _UP
            self._up_since = now
            self._known = self._acked, self._taken
            self._patience_at = None
            self._cursor = self._acked
            effects.append(Connected(again=met != 0))
        self._on_ack(ack, effects)

    def _on_ack(self, ack: int, effects: list[Effect]) -> None:
        if ack <= self._acked:
            return
        if ack > self._sent:
            raise self._violation("it acknowledged packets that were never sent")
        tokens: list[object] = []
        for seq in range(self._acked, ack):
            sent = self._unacked.pop(seq)
            self._in_flight -= sent.size + OVERHEAD
            message = sent.message
            if message is None:
                continue
            size = sent.size
            if sent.last:
                size += OVERHEAD
                if message.token is not None:
                    tokens.append(message.token)
            if self._lanes.acknowledge(message, size):
                effects.append(Room(message.lane))
        if tokens:
            effects.append(Acknowledged(tokens))
        self._acked = ack
        self._cursor = max(self._cursor, ack)

    def _on_numbered(
        self,
        seq: int,
        header: Header,
        payload: Sequence[Buffer] | None,
        now: float,
        effects: list[Effect],
    ) -> None:
        size = header[2]
        if seq == self._taken:
            self._take_in(header, payload, effects)
        elif seq < self._taken:
            self.duplicates += 1
        else:
            raise self._violation(f"packet {seq} came when {self._taken} was due")
        self._unacked_bytes += size
        if self._unacked_bytes >= self._terms.window // 4:
            self._ack_due = True
        elif self._ack_at is None:
            self._ack_at = now + self._terms.ack_delay

    def _take_in(
        self, header: Header, payload: Sequence[Buffer] | None, effects: list[Effect]
    ) -> None:
        kind, lane, size, _, _, total = header
        self._taken += 1
        if kind == FLOW:
            if lane == CONTROL:
                raise self._violation("it asked to pause the control lane")
            (self._lanes.pause if total else self._lanes.resume)(lane)
            return
        partial = self._partial.get(lane)
        if partial is None:
            if total > self._terms.message_limit:
                raise self._violation(
                    f"a message of {total} bytes, more than the limit of "
                    f"{self._terms.message_limit}"
                )
            if size == total:
                assert payload is not None
                effects.append(Deliver(lane, b"".join(payload)))
                return
            partial = self._partial[lane] = _Partial(self._allocate(lane, total), total)
        start = partial.filled
        if partial.total != total or start + size > total or not size:
            raise self._violation("a piece that does not fit its message")
        partial.filled = start + size
        if payload is not None:
            for part in payload:
                partial.view[start : start + len(part)] = part
                start += len(part)
        if partial.filled == total:
            del self._partial[lane]
            partial.view.release()
            effects.append(Deliver(lane, partial.buffer))

    # ----------------------------------------------------------------------------------------------
    # End of the session
    # ----------------------------------------------------------------------------------------------

    def _violation(self, what: str) -> ProtocolError:
        return ProtocolError(f"protocol error from {self._name}: {what}")

    def _anew(self) -> str:
        return f"{self._name} began a new session: it was restarted, or it had ended this session"

    def _over(self, reason: str, *, farewell: bool = False) -> list[Effect]:
        if self._state == _OVER:
            return []
        self._state = _OVER
        self.ended = reason
        known = dict.fromkeys(sent.message for sent in self._unacked.values() if sent.message)
        known.update(dict.fromkeys(self._lanes))
        lost = [message.token for message in known if message.token is not None]
        self._dial_at = self._patience_at = self._ack_at = None
        self._hello_due = False
        self._lanes = Lanes(self._terms.piece, self._terms.lane_limit)
        for kept in (self._unacked, self._flow, self._partial):
            kept.clear()
        return [Ended(reason, lost, farewell)]
