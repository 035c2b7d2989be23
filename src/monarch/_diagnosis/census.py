"""The census: the processes of each host, with their states according to the kernel.

The host agents take it, so it includes processes that answer no request: those that are stopped,
and those whose interpreter is held by native code.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

from monarch._spi import client_proc

__all__ = ["Member", "take"]

_numbers = itertools.count(1)
_waiting: dict[int, _Census] = {}


class Member(NamedTuple):
    """A process: `state` is the letter of proc(5), empty where there is no such file system."""

    uid: int
    parent: int
    pid: int
    host: str
    machine: str
    state: str
    rss: int
    cpu: float


class _Census:
    """The answers to one request: one of each host."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.missing: set[str] | None = None  # hosts; None until home has answered
        self.here: set[str] = set()
        self.done = threading.Event()

    def add(self, notice: dict[str, Any]) -> None:
        host, machine = notice["host"], notice["machine"]
        self.here.add(host)
        if "others" in notice:
            self.missing = set(notice["others"])
        for uid, parent, pid, state, rss, cpu in notice["procs"]:
            self.members.append(Member(uid, parent, pid, host, machine, state, rss, cpu))
        if self.missing is not None and self.missing <= self.here:
            self.done.set()


def take(timeout: float) -> tuple[list[Member], set[str]]:
    """Return the processes of all hosts, and the hosts that have not answered in time (seconds)."""
    proc = client_proc()
    if proc.agent is None:
        return [], set()
    proc.notices["census"] = _on_census
    census = _Census()
    number = next(_numbers)
    _waiting[number] = census
    proc.tell_agent({"op": "census", "id": number})
    census.done.wait(timeout)
    _waiting.pop(number, None)
    return list(census.members), (census.missing or set()) - census.here


def _on_census(notice: dict[str, Any]) -> None:
    census = _waiting.get(notice["id"])
    if census is not None:
        census.add(notice)
