"""The conformance kit for links, applied to real and to simulated ones."""

from __future__ import annotations

import os
import socket

from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io import environment as environments
from monarch._engine.transport.link import Link
from monarch.testing import simulate
from monarch.testing.conformance import FRAME_LIMIT, QUEUE_LIMIT, check_link
from monarch.testing.link import SimLink


class RealPair:
    """Two links over a socket pair; the test plays the reactor."""

    def __init__(self, opened):
        self.opened = opened
        left, right = socket.socketpair()
        self.left = Link(left, "the other", lambda link, on: None, FRAME_LIMIT, QUEUE_LIMIT)
        self.right = Link(right, "the other", lambda link, on: None, FRAME_LIMIT, QUEUE_LIMIT)
        self.scratch = memoryview(bytearray(1 << 18))

    def move(self):
        self.left.flush()
        self.right.flush()

    def receive(self, link):
        frames = []
        while link.lost is None and (new := link.receive(self.scratch)):
            frames += new
        return frames

    def descriptor(self):
        fd = os.open("/dev/null", os.O_RDONLY)
        self.opened.append(fd)
        return fd

    def same(self, sent, arrived):
        self.opened.append(arrived)
        return os.path.sameopenfile(sent, arrived)


class SimulatedPair:
    """Two links over a stream in memory; to be used on the main strand of a simulation."""

    def __init__(self):
        proc = client_proc()
        self.scheduler = proc.world.scheduler
        self.streams = environments.current.streams
        self.scratch = self.streams.scratch
        self.left, self.right = (
            SimLink(sock, "the other", lambda link, on: None, FRAME_LIMIT, QUEUE_LIMIT)
            for sock in self.streams.pair()
        )

    def move(self):
        self.left.flush()
        self.right.flush()
        self.scheduler.sleep(0.001)

    def receive(self, link):
        frames = []
        while link.lost is None and (new := link.receive(self.scratch)):
            frames += new
        return frames

    def descriptor(self):
        sock, _ = self.streams.pair()
        return sock.fileno()

    def same(self, sent, arrived):
        return self.streams.end(sent) is self.streams.end(arrived)


def test_real_links():
    opened = []
    try:
        check_link(lambda: RealPair(opened))
    finally:
        for fd in opened:
            os.close(fd)


def test_simulated_links():
    simulate(lambda: check_link(SimulatedPair))
