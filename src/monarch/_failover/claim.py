"""`claim`: find a job whose driver and the driver's host are lost, by asking its workers for it.

The next script of the job calls it. A worker passes the question to the agent of that job on its
host, which answers whether the job has a driver, and with which epoch the next one begins
(`keeper`).
"""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch._failover.keeper import ANSWER
from monarch._spi import (
    CLAIM,
    ChannelAddr,
    ClosedInHandshake,
    HandshakeError,
    Route,
    Wire,
    dial,
    direct_way,
    environment,
)

__all__ = ["Found", "claim"]

_PAUSE = 0.1  # seconds between two rounds, while the driver may still live


class Found(NamedTuple):
    """A job that can be taken over."""

    uid: int
    """The uid of the job's client."""
    reign: int
    """The epoch number of the next driver."""
    grace: float


def claim(
    job: str,
    workers: Sequence[ChannelAddr],
    key: bytes,
    timeout: float,
    way: Route = direct_way,
) -> Found:
    """Find a job: return the answer of the first of these workers that has it.

    Blocks for about `timeout` seconds at most. Raises LookupError if no worker has the job,
    RuntimeError if it has a driver, or may have one after `timeout`.
    """
    deadline = environment.current.now() + timeout
    while True:
        unsure, reasons = False, dict[str, str]()
        for worker in workers:
            left = max(0.1, deadline - environment.current.now())
            try:
                answer = _ask(worker, job, key, left, way)
            except (OSError, HandshakeError) as error:
                reasons[str(worker)] = str(error)
                continue
            if answer is None:
                reasons[str(worker)] = "it has no such job"
            elif "uid" in answer:
                return Found(answer["uid"], answer["reign"], answer["grace"])
            elif answer["sure"]:
                raise RuntimeError(f"cannot re-attach to job {job!r}: it has a driver")
            else:
                unsure = True
        if not unsure:
            told = "".join(f"\n  - {worker}: {reason}" for worker, reason in reasons.items())
            raise LookupError(f"there is no job {job!r} on these workers:{told}")
        if environment.current.now() >= deadline:
            raise RuntimeError(
                f"cannot re-attach to job {job!r}: its driver may be alive, since its hosts do "
                "not consider it lost yet"
            )
        select.select([], [], [], _PAUSE)


def _ask(
    worker: ChannelAddr,
    job: str,
    key: bytes,
    timeout: float,
    way: Route,
) -> dict[str, Any] | None:
    """Return the answer of one worker; None if it has no such job."""
    deadline = environment.current.now() + timeout
    try:
        sock = dial(worker, key, {CLAIM: job}, timeout, way=way)
    except ClosedInHandshake:  # no agent was there for the second handshake
        return None
    try:
        sock.setblocking(False)
        head = _read(sock, ANSWER.size, deadline)
        if not head:
            return None
        (size,) = ANSWER.unpack(head)
        answer: dict[str, Any] = json.loads(_read(sock, size, deadline))
        return answer
    finally:
        sock.close()


def _read(sock: Wire, size: int, deadline: float) -> bytes:
    """Return that many bytes; none if the connection is closed."""
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except BlockingIOError:
            left = deadline - environment.current.now()
            if left <= 0 or not select.select([sock.fileno()], [], [], left)[0]:
                raise TimeoutError("it did not answer in time") from None
            continue
        except ConnectionError:
            return b""
        if not more:
            return b""
        data += more
    return data
