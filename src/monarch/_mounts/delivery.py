"""The blocks that a host has, and how it gets the others.

Hosts form a binary tree. A host asks the one above it for a block, the first host asks the origin.
So each block leaves the origin once, whatever the number of hosts, and each host sends it at most
twice. A host that has lost the one above asks the origin itself.

Three threads fetch, so a block is on its way down while the next one is read. They take first the
blocks that a reader waits for, then those that a sequential reader will need, then the small files.
Only one of the threads fetches small files, or a reader would wait behind three of them.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from monarch._mounts.memory import fresh
from monarch._spi import start_thread
from monarch.rdma import RDMABuffer

__all__ = ["Block", "Delivery", "parent_of"]

_log = logging.getLogger("monarch.mounts")
_PATIENCE = 300.0  # seconds for one block

Waiter = Callable[["Block | None"], None]


class Block(NamedTuple):
    """A block: its content, and the rows that could not be read at the origin."""

    memory: mmap.mmap
    bad: dict[int, int]


def parent_of(rank: int) -> int | None:
    """Return the host that a host asks for blocks; None: the origin."""
    return (rank - 1) // 2 if rank else None


class Delivery:
    """The blocks of one host.

    Args:
        providers: actors with the endpoint `block`; the first one that answers is used.
    """

    def __init__(self, providers: list[Any]) -> None:
        self.blocks: dict[int, Block] = {}
        self._providers = providers
        self._changed = threading.Condition()
        self._wanted: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._small: deque[int] = deque()
        self._fetching: set[int] = set()
        self._waiting: dict[int, list[Waiter]] = {}
        self._closed = False
        urgent = [self._wanted, self._ahead]
        for queues in ([*urgent, self._small], urgent, urgent):
            start_thread("monarch-fetch", partial(self._run, queues))

    def need(self, number: int, waiter: Waiter) -> None:
        """Call `waiter` with the block, now or on another thread; with None if it is lost."""
        with self._changed:
            block = self.blocks.get(number)
            if block is None and not self._closed:
                self._waiting.setdefault(number, []).append(waiter)
                self._wanted.append(number)
                self._changed.notify_all()
                return
        waiter(block)

    def expect(self, number: int) -> None:
        """Fetch a block that will be needed soon."""
        if number not in self.blocks:
            with self._changed:
                self._ahead.append(number)
                self._changed.notify_all()

    def prefill(self, numbers: range) -> None:
        """Fetch blocks as long as there is no other demand."""
        with self._changed:
            self._small.extend(numbers)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, and whatever waits."""
        with self._changed:
            self._closed = True
            waiting = [waiter for each in self._waiting.values() for waiter in each]
            self._waiting.clear()
            self._changed.notify_all()
        for waiter in waiting:
            waiter(None)

    def _run(self, queues: list[deque[int]]) -> None:
        while (number := self._next(queues)) is not None:
            block = self._fetch(number)
            with self._changed:
                if block is not None:
                    self.blocks[number] = block
                self._fetching.discard(number)
                waiting = self._waiting.pop(number, [])
            for waiter in waiting:
                waiter(block)

    def _next(self, queues: list[deque[int]]) -> int | None:
        """Return the next block to fetch; wait until there is one. None: closed."""
        with self._changed:
            while not self._closed:
                for queue in queues:
                    while queue:
                        number = queue.popleft()
                        if number not in self.blocks and number not in self._fetching:
                            self._fetching.add(number)
                            return number
                self._changed.wait()
            return None

    def _fetch(self, number: int) -> Block | None:
        for provider in self._providers:
            try:
                buffer, bad = provider.block.call_one(number).get(timeout=_PATIENCE)
                memory = fresh(buffer.size())
                buffer.read_into(memory, timeout=_PATIENCE).get()
            except Exception as error:  # a provider was lost, or could not get the block itself
                if not self._closed:
                    _log.warning("block %d was not delivered: %s", number, error)
            else:
                return Block(memory, bad)
        return None


class Shelf:
    """The blocks of a host as buffers, for the hosts below it."""

    def __init__(self) -> None:
        self._buffers: dict[int, RDMABuffer] = {}

    def buffer(self, number: int, block: Block) -> RDMABuffer:
        """Return a handle on the memory of a block."""
        found = self._buffers.get(number)
        if found is None:
            found = self._buffers[number] = RDMABuffer(block.memory, read_only=True)
        return found
