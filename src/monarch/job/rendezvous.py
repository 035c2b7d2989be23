"""The rendezvous of a job: each worker that a launcher started reports here where it listens.

A job that starts its workers by another program (``mpirun``, ``srun``, Ray) does not know on which
hosts they run, and at which free ports they listen. So the driver listens, and each worker connects
and reports its rank, its host and its address.

* Both sides go through the engine's handshake with the job's secret, and the report is the purpose
  of the connection: one JSON object of at most 4 kB, authenticated, which arrives within the time
  limit of a handshake. So no byte of a stranger is parsed, and nothing is unpickled. A peer without
  the secret is refused, and the job waits on.
* After the report the connection stays open, without data, as the worker's lifeline: a worker ends
  at its EOF. The process that holds the driver's end decides how long the
  workers live: see `keeper`.
* The driver stops listening once all workers have reported.

Rejected: a report through a file of a shared file system, since many clusters have none, and the
caches of those that exist show a new file after many seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from monarch._spi import (
    PATIENCE,
    Arrival,
    ChannelAddr,
    Entrance,
    Greeting,
    HandshakeError,
    Reactor,
    direct_way,
    introduce,
    key_name,
    listener_names,
    meant,
)

__all__ = ["Meeting", "Report", "Reported", "lifeline_options", "missing", "parse_report", "report"]

_PURPOSE = "monarch-node"
_MOST_STRANGERS = 64  # handshakes in progress, beside those of the workers
_MOST_REFUSALS = 8  # that are kept for an error
_PAUSE = 0.5  # seconds between two attempts to reach the driver


class Report(NamedTuple):
    """The report of a worker."""

    rank: int
    size: int
    host: str
    pid: int
    address: str
    """Where the worker listens."""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} of {self.host})"


class Reported(NamedTuple):
    """A report, and the connection that is the worker's lifeline."""

    report: Report
    line: socket.socket


def parse_report(purpose: Mapping[str, Any], count: int) -> Report:
    """Return the report in the purpose of a connection to a job of `count` hosts.

    Raises ValueError.
    """
    said: object = purpose.get(_PURPOSE)
    if not isinstance(said, dict):
        raise ValueError("a connection that is no report of a worker")  # noqa: TRY004 - foreign data
    fields = cast("dict[str, Any]", said)
    values = [fields.get(name) for name in Report._fields]
    if [type(value) for value in values] != [int, int, str, int, str]:
        raise ValueError("a report of a worker without its rank, host and address")
    found = Report(*cast("list[Any]", values))
    if found.size != count:
        raise ValueError(
            f"{found} was started as one of {found.size}, and the job describes {count} hosts: "
            "give the launcher the same number"
        )
    if not 0 <= found.rank < count:
        raise ValueError(f"{found} is none of the ranks 0 to {count - 1}")
    return found


def missing(ranks: Iterable[int], count: int) -> str:
    """Return the ranks below `count` that are not among these, in words.

    >>> missing([0, 4], 8)
    '1-3, 5-7'
    """
    there = set(ranks)
    runs: list[list[int]] = []
    for rank in range(count):
        if rank in there:
            continue
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def lifeline_options(sock: socket.socket) -> None:
    """Let the system notice within about a minute that the other end was lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # some systems lack them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Meeting:
    """The driver's side: listens, and collects the reports of `count` workers.

    Args:
        listener: a listening TCP socket, owned by this object.
        key: the job's secret, see `find_secret`.
        count: how many workers report.

    `fileno` becomes readable when a report came or an error occurred, so a caller can wait for it
    beside other events. `close` ends the meeting and closes the connections that nothing `took`.
    """

    def __init__(self, listener: socket.socket, key: bytes, count: int) -> None:
        self.count = count
        self.reported: dict[int, Reported] = {}
        """By rank. Complete when it has `count` entries."""
        self.error = ""
        """Why the job cannot start; empty as long as it can."""
        self.refusals: list[str] = []
        """Peers that were refused, and why; for messages."""
        self._keys = {key_name(key): key}
        self._strangers: set[socket.socket] = set()  # in the middle of a handshake
        self._closed = False
        self._lock = threading.Lock()  # of `reported` and `_closed`
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._reactor = Reactor()
        self._entrance = Entrance(self._reactor, listener, self._came)
        self._thread = threading.Thread(
            target=self._reactor.run, name="monarch-rendezvous", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable after each change, until `heard`."""
        return self._wake_in

    def heard(self) -> None:
        """Note that the changes until now were looked at."""
        os.read(self._wake_in, 4096)

    @property
    def complete(self) -> bool:
        """Whether all workers have reported."""
        return len(self.reported) == self.count

    def lack(self) -> str:
        """Return which workers have not reported, and which peers were refused, in words."""
        ranks = missing(self.reported, self.count)
        text = f"{self.count - len(self.reported)} of {self.count} workers (rank {ranks})"
        if self.refusals:
            text += f"; refused were: {'; '.join(self.refusals)}"
        return text

    def close(self) -> None:
        """Stop listening. Close the connections that are still in `reported`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._reactor.call_soon(self._entrance.close)
        self._reactor.stop()
        self._thread.join()
        self._reactor.close()
        for sock in (*self._strangers, *(one.line for one in self.reported.values())):
            sock.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    # -- on the reactor thread -------------------------------------------------------------------

    def _came(self, sock: socket.socket, where: Any) -> None:
        peer = f"{where[0]}:{where[1]}"
        if len(self._strangers) >= _MOST_STRANGERS + self.count:
            sock.close()
            return
        self._strangers.add(sock)

        def accepted(arrival: Arrival) -> None:
            self._strangers.discard(sock)
            self._arrived(arrival)

        def refused(why: str) -> None:
            self._strangers.discard(sock)
            if len(self.refusals) < _MOST_REFUSALS:
                self.refusals.append(f"{peer}: {why}")

        names = listener_names(sock)
        Greeting(self._reactor, sock, self._keys.get, accepted, refused, names)

    def _arrived(self, arrival: Arrival) -> None:
        assert isinstance(arrival.sock, socket.socket)  # there is no TLS here
        line = arrival.sock
        try:
            report = parse_report(arrival.purpose, self.count)
            other = self.reported.get(report.rank)
            if other is not None:
                raise ValueError(
                    f"two workers are rank {report.rank}: process {other.report.pid} of "
                    f"{other.report.host} and process {report.pid} of {report.host}; the launcher "
                    "must number its processes"
                )
        except ValueError as error:
            line.close()
            self.error = self.error or str(error)
        else:
            line.setblocking(True)
            lifeline_options(line)
            with self._lock:
                self.reported[report.rank] = Reported(report, line)
        with contextlib.suppress(BlockingIOError):  # it is readable already
            os.write(self._wake_out, b"\0")


def report(address: str, key: bytes, said: Report, limit: float) -> socket.socket:
    """Report to the driver's rendezvous at `address`; return the worker's lifeline.

    Blocks until the driver answers, at most about `limit` seconds: with 0 a single attempt is made.
    Raises OSError if it cannot be reached, HandshakeError if one side refuses the other.
    """
    deadline = time.monotonic() + limit
    where = ChannelAddr.parse(address, resolve=_resolve)
    sock, end = _connected(where, deadline)
    try:
        sock.settimeout(PATIENCE)
        introduce(sock, key, {_PURPOSE: said._asdict()}, meant(where, end))
        sock.settimeout(None)
        lifeline_options(sock)
    except TimeoutError as error:
        sock.close()
        raise HandshakeError("what listens there does not answer: it is no driver") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _connected(where: ChannelAddr, deadline: float) -> tuple[socket.socket, str]:
    """Connect, again and again until the deadline: the driver may not listen yet."""
    while True:
        try:
            return direct_way(where, PATIENCE)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        threading.Event().wait(_PAUSE)


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
