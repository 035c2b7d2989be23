"""A network cable that one can damage: Ethernet between TAP devices, passed on by a process.

Not every kernel has netem. So each host has one end of a TAP device for a network card, and the
process made here holds all the other ends: a switch, which on the way from and to each host delays
frames, loses, doubles and reorders them (`Conditions`), by chance that follows from a seed. The
kernel's TCP above it is the real one.

Needs root and /dev/net/tun. The process ends with its standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import NamedTuple

__all__ = ["Conditions", "Emulator", "open_tap"]

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_FRAME = 65536
_AT_ONCE = 64  # frames of one card before the others have their turn


class Conditions(NamedTuple):
    """What befalls frames that go one way. Seconds and probabilities."""

    delay: float = 0.0
    jitter: float = 0.0
    """So much more or less, each frame for itself: they overtake each other."""
    loss: float = 0.0
    double: float = 0.0


def open_tap(name: str) -> int:
    """The descriptor of a new TAP device, which lives as long as it is open. Raises OSError."""
    fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        os.set_blocking(fd, False)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Emulator:
    """The process between the devices `taps`, whose descriptors it takes over."""

    def __init__(self, taps: list[int], seed: int) -> None:
        command = [sys.executable, __file__, str(seed), *map(str, taps)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=taps, text=True)
        for tap in taps:
            os.close(tap)

    def set(self, port: int, inbound: Conditions, outbound: Conditions) -> None:
        """What befalls from now on what goes to, and what comes from, the device of that number."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps([port, inbound, outbound]) + "\n")
        stdin.flush()

    def close(self) -> None:
        """End the process, and the devices with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _Switch:
    """In the process: see the module."""

    def __init__(self, taps: list[int], seed: int) -> None:
        self._taps = taps
        self._random = random.Random(seed)
        self._inbound = [Conditions() for _ in taps]
        self._outbound = [Conditions() for _ in taps]
        self._where: dict[bytes, int] = {}  # hardware address -> device
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        stdin = 0
        os.set_blocking(stdin, False)
        poll = select.epoll()
        ports = {fd: port for port, fd in enumerate(self._taps)}
        for fd in (stdin, *ports):
            poll.register(fd, select.EPOLLIN)
        said = b""
        while True:
            wait = -1.0
            if self._waiting:
                wait = max(0.0, self._waiting[0][0] - time.monotonic())
            for fd, _ in poll.poll(wait):
                if fd != stdin:
                    self._read(ports[fd])
                    continue
                data = os.read(stdin, 65536)
                if not data:
                    return
                *lines, said = (said + data).split(b"\n")
                for line in lines:
                    port, inbound, outbound = json.loads(line)
                    self._inbound[port] = Conditions(*inbound)
                    self._outbound[port] = Conditions(*outbound)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, port, frame = heapq.heappop(self._waiting)
                self._write(port, frame)

    def _read(self, port: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(self._taps[port], _FRAME)
            except BlockingIOError:
                return
            to, sender = frame[:6], frame[6:12]
            self._where[sender] = port
            there = self._where.get(to)
            others = (other for other in range(len(self._taps)) if other != port)
            for other in others if there is None else (there,):
                self._carry(port, other, frame)

    def _carry(self, sender: int, receiver: int, frame: bytes) -> None:
        delay, copies = 0.0, 1
        chance = self._random.random
        for way in (self._outbound[sender], self._inbound[receiver]):
            if way.loss and chance() < way.loss:
                return
            if way.double and chance() < way.double:
                copies += 1
            if way.delay or way.jitter:
                delay += max(0.0, way.delay + (2 * chance() - 1) * way.jitter)
        for _ in range(copies):
            if delay:
                when = time.monotonic() + delay
                heapq.heappush(self._waiting, (when, next(self._order), receiver, frame))
            else:
                self._write(receiver, frame)

    def _write(self, port: int, frame: bytes) -> None:
        try:
            os.write(self._taps[port], frame)
        except OSError:
            # The card is down, or takes nothing now: a switch drops what it cannot pass on.
            return


if __name__ == "__main__":
    _Switch([int(fd) for fd in sys.argv[2:]], int(sys.argv[1])).run()
