"""Delivery: a thread of each process that sends the recorded rows to the observer, in batches.

A batch of each kind leaves every `INTERVAL`. While the observer does not read, this thread waits,
and the queues of the recorder fill and drop their oldest rows; nothing else in the process waits.
A connection that is lost is made anew. What describes meshes and actors is sent again then, since
the observer may be a new one that knows none of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from monarch._spi import start_thread
from monarch._telemetry.kinds import encode
from monarch._telemetry.recorder import Recorder

__all__ = ["INTERVAL", "Delivery"]

INTERVAL = 0.25  # seconds
_SENDING = 10.0  # seconds until an observer that does not read counts as lost
_LAST = 0.5  # seconds that the exit of a process waits for an observer that does not read
_AGAIN = (0.25, 8.0)  # seconds until the next connection is tried: at first, at most
_LASTING = frozenset(("mesh", "actor"))
_KEPT = 4096  # batches of lasting kinds


class Delivery:
    """See the module.

    Args:
        recorder: where the rows come from.
        connect: makes a connection to the observer; called by one thread at a time.
    """

    def __init__(self, recorder: Recorder, connect: Callable[[], socket.socket]) -> None:
        self._recorder = recorder
        self._connect = connect
        self._sock: socket.socket | None = None
        self._lasting: deque[bytes] = deque(maxlen=_KEPT)
        self._pause = _AGAIN[0]
        self._flush = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        start_thread("monarch-telemetry", self._run)

    def flush(self) -> None:
        """Deliver what waits, unless a delivery is under way for a while."""
        if self._flush.acquire(timeout=INTERVAL):
            try:
                if self._sock is not None:
                    self._sock.settimeout(_LAST)
                    self.deliver()
            finally:
                self._flush.release()

    def catch_up(self) -> None:
        """Deliver what waits now and not at the next interval, since a query is about to follow.

        Blocks for 20 seconds at most: only while the observer does not read.
        """
        if self._flush.acquire(timeout=_SENDING):
            try:
                self.deliver()
            finally:
                self._flush.release()

    def stop(self) -> None:
        """Deliver what waits, and end the thread."""
        self._ended.set()
        self.flush()

    def _run(self) -> None:
        wait = INTERVAL
        while not self._ended.wait(wait):
            with self._flush:
                wait = INTERVAL if self.deliver() else self._pause

    def deliver(self) -> bool:
        """Send what waits. Return whether the observer could be reached."""
        if self._sock is None and not self._open():
            return False
        for kind, columns in self._recorder.take():
            lost, self._recorder.lost = self._recorder.lost, 0
            data = encode(kind, columns, self._recorder.proc.uid, self._recorder.process, lost)
            if kind in _LASTING:
                self._lasting.append(data)
            if not self._send(data):
                self._recorder.lost += lost + len(columns[0])
                return False
        return True

    def _open(self) -> bool:
        try:
            self._sock = self._connect()
        except OSError:
            self._pause = min(_AGAIN[1], 2 * self._pause)
            return False
        self._sock.settimeout(_SENDING)
        return all(self._send(data) for data in list(self._lasting))

    def _send(self, data: bytes) -> bool:
        sock = self._sock
        if sock is None:
            return False
        try:
            sock.sendall(data)
        except OSError:
            self._sock = None
            self._pause = min(_AGAIN[1], 2 * self._pause)
            with contextlib.suppress(OSError):
                sock.close()
            return False
        self._pause = _AGAIN[0]
        return True
