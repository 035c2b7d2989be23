"""`python tests/soak/fuzz.py [N=1000000] [SEED=1]`: N inputs that no honest peer would send.

The inputs go to all code that reads bytes of unauthenticated peers, or text typed by users: both
sides of the handshake, the handshake over a real socket, the packet stream of a session, addresses.
Some inputs are noise. Most are honest messages with bits flipped, with bytes cut, repeated,
inserted or moved, or with a pickle inserted, so that many pass the first checks. Each input must be
refused or ignored, in the way that is documented for it. No input may be unpickled, and memory must
not grow.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from report import count, end

from monarch._engine.base.address import BindSpec, ChannelAddr
from monarch._engine.base.worker_address import parse_worker_address
from monarch._engine.protocol.session.channel import Channel, Terms
from monarch._engine.protocol.session.handshake import Dialer, HandshakeError, Listener, key_name
from monarch._engine.protocol.session.records import purpose_tag
from monarch._engine.protocol.session.stream import PacketStream
from monarch._engine.runtime.admission.handshake_io import Greeting
from monarch._engine.runtime.io.reactor import READ, Timer
from monarch._engine.wire.packet import ACK, BYE, DATA, FLOW, HEADER, HELLO, PING

WARM_UP = 20_000
GROWTH = 16  # MiB
KEY = bytes(range(32))
KEYS = {key_name(KEY): KEY}
PYTHON = (3, 11)


class Canary:
    """An object that must never be unpickled: it reports if it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _sing, ()


def _sing() -> None:
    faults.append("something was unpickled")


PICKLE = pickle.dumps(Canary())
faults: list[str] = []
rng = random.Random()


def mutated(data: bytes) -> bytes:
    """Return `data` with one or more random alterations."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + rng.randrange(1, 40)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 4:
                changed[at:at] = changed[at : at + rng.randrange(1, 100)]
            case 5:
                changed[at : at + 8] = rng.choice((b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7))
            case _:
                changed[at:at] = PICKLE
    return bytes(changed)


def hostile(honest: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(300))
    return PICKLE if kind < 0.12 else mutated(honest)


def cuts(data: bytes) -> list[bytes]:
    """Return the same bytes, cut into pieces as a connection may deliver them."""
    if rng.random() < 0.5:
        return [data]
    at = rng.randrange(len(data) + 1)
    return [data[:at], data[at:]]


# -- the fuzzed code: each function returns the result, or raises an exception for a fault ---------


def misdirected(meant: str) -> str:
    return "" if meant == "you" else "it is another"


def handshake() -> str:
    dialer = Dialer(KEY, rng.randbytes(32), PYTHON, "you", trusting=rng.random() < 0.2)
    listener = Listener(
        KEYS.get, rng.randbytes(32), PYTHON, misdirected, open_to_all=rng.random() < 0.2
    )
    wrong = rng.randrange(4)
    said, to, other = dialer.hello, listener, dialer
    altered = False
    try:
        for turn in range(4):
            heard = hostile(said) if turn == wrong else said
            altered |= heard[: len(said)] != said
            answer = b""
            for piece in cuts(heard):
                answer += to.receive(piece[: to.wants])
            said, to, other = answer, other, to
    except HandshakeError:
        return "refused"
    # Bytes added behind the last one that is read are no alteration.
    assert dialer.peer is None or not altered
    return "waits" if dialer.peer is None else "unaltered"


class Door:
    """The part of a reactor that a greeting needs."""

    scratch = memoryview(bytearray(1 << 18))

    def __init__(self) -> None:
        self.ready: Callable[[int], None] | None = None

    def call_later(self, _delay: float, callback: Callable[[], None]) -> Timer:
        return Timer(0.0, callback)

    def register(self, _fd: int, callback: Callable[[int], None]) -> None:
        self.ready = callback

    def unregister(self, _fd: int) -> None:
        self.ready = None


def greeting() -> str:
    ours, theirs = socket.socketpair()
    ended: list[str] = []
    door: Any = Door()

    def accepted(arrival: Any) -> None:
        ended.append("accepted")
        arrival.sock.close()

    Greeting(door, theirs, KEYS.get, accepted, lambda why: ended.append("refused"), misdirected)

    def tell(data: bytes) -> None:
        for piece in cuts(data):
            with contextlib.suppress(BrokenPipeError):
                ours.sendall(piece)
            if door.ready is not None:
                door.ready(READ)

    dialer = Dialer(KEY, rng.randbytes(32), PYTHON, "you")
    purpose = b'{"client": 7, "from": "", "as": "here"}'
    purpose = len(purpose).to_bytes(2, "little") + purpose
    wrong = rng.randrange(3)
    tell(hostile(dialer.hello) if wrong == 0 else dialer.hello)
    if wrong and door.ready is not None:
        proof = dialer.receive(ours.recv(dialer.wants))
        tell(hostile(proof) if wrong == 1 else proof)
        if wrong == 2:
            dialer.receive(ours.recv(dialer.wants))
            tell(hostile(purpose + purpose_tag(dialer.session, purpose)))
    ours.close()
    if door.ready is not None:  # still registered: let it read EOF
        door.ready(READ)
    assert len(ended) == 1, ended
    assert wrong == 2 or ended == ["refused"], ended
    return ended[0]


# A member of the job may send messages of 10 GB, and the receiver allocates the announced size, so
# the limit is smaller here.
TERMS = Terms(message_limit=1 << 20)
KINDS = (HELLO, DATA, DATA, DATA, FLOW, ACK, PING, BYE)


def stream() -> str:
    channel = Channel(1, dials=False, now=0.0, terms=TERMS)
    channel.opened(0.0)
    reader = PacketStream(channel, "a stranger")
    data = HEADER.pack(HELLO, 1, 0, 5, 0, 0)
    numbers = (0, 0, 0, 1, 2, 100, 5000, 1 << 20, 1 << 31, (1 << 64) - 1)
    for seq in range(rng.randrange(6)):
        size = rng.choice((0, 1, 30, 5000))
        odd = rng.random() < 0.2
        ack, total = (rng.choice(numbers), rng.choice(numbers)) if odd else (0, size)
        data += HEADER.pack(rng.choice(KINDS), rng.choice((0, 1, 2)), size, seq, ack, total)
        data += bytes(size)
    data = hostile(data)
    at = 0
    while at < len(data) and channel.ended is None:
        target = reader.target()
        if target is None:
            size = min(rng.choice((1, 32, 100, 1 << 18)), len(data) - at)
            reader.feed(memoryview(data)[at : at + size], 0.0)
        else:
            size = min(len(target), len(data) - at)
            target[:size] = data[at : at + size]
            target.release()
            reader.filled(size, 0.0)
        at += size
        while channel.ended is None and reader.gather(0.0, 1 << 16):
            pass
    return "goes on" if channel.ended is None else "ended"


ADDRESSES = (
    "tcp://127.0.0.1:80",
    "tcp://[::1]:4",
    "tcp://*:5",
    "tls://host.example:1",
    "ipc://@abstract",
    "ipc:///tmp/x",
    "inproc://3",
    "tcp://a:1@tcp://b:1",
    "tcp://h:fd5",
    "alias:dial_to=tcp:a:1;bind_to=tcp:b:1",
    "service<2MuAHeDjLCEd>@tcp://host:4444",
    "metatls(IpV6)",
)
PARSERS: tuple[Callable[[str], Any], ...] = (ChannelAddr.parse, BindSpec, parse_worker_address)


def address() -> str:
    text = hostile(rng.choice(ADDRESSES).encode()).decode(
        rng.choice(("latin-1", "utf-8")), "replace"
    )
    try:
        found = rng.choice(PARSERS)(text)
    except (ValueError, NotImplementedError):
        return "refused"
    str(found), repr(found)
    return "read"


TARGETS = (handshake, greeting, stream, address)


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    inputs = count(1_000_000)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    start = time.perf_counter()
    ends: Counter[str] = Counter()
    before = 0.0
    for number in range(inputs):
        if number == min(WARM_UP, inputs // 2):
            before = resident()
        rng.seed(seed << 40 | number)  # so that each input can be repeated alone
        target = TARGETS[number % len(TARGETS)]
        try:
            ends[f"{target.__name__} {target()}"] += 1
        except BaseException as error:
            faults.append(f"input {number} to {target.__name__}: {type(error).__name__}: {error}")
            if len(faults) > 10 or isinstance(error, KeyboardInterrupt):
                break
    growth = resident() - before
    if growth > GROWTH:
        faults.append(f"{growth:.1f} MiB more memory")
    print(", ".join(f"{number:,} {what}" for what, number in sorted(ends.items())))
    end(f"{inputs:,} hostile inputs, seed {seed}", time.perf_counter() - start, faults)


if __name__ == "__main__":
    main()
