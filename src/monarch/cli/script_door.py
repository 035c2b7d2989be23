"""The door of a running script, for the commands that debug it."""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any, Protocol

from monarch.cli.why import diagnosis_of, unreachable

__all__ = ["Door", "ScriptDoor", "stopped_ones"]

_PATIENCE = 8.0  # seconds
_BRIEF = 2.0
_STARTING = 70.0  # seconds for debugpy to be loaded
_CHECKED = 100  # processes in a request, which is short


class Door(Protocol):
    """The way to the debugger of a script, see `monarch._debug.door`."""

    def console(self) -> socket.socket:
        """Return a connection to the debugger. Raises RuntimeError, with the reason."""
        ...

    def diagnosis(self) -> dict[str, Any]:
        """Return the diagnosis of the script, as data."""
        ...

    def check(self, uids: list[int]) -> list[dict[str, Any]]:
        """Return for each process where it runs, and why no editor can attach, if so."""
        ...

    def editor(self, uid: int) -> socket.socket:
        """Return a stream to the debugpy of a process. Raises RuntimeError, with the reason."""
        ...

    def lifeline(self) -> int | None:
        """Return a descriptor that is readable once the script has ended, where there is one."""
        ...


class ScriptDoor:
    """The door of a script of this machine; implements `Door`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def console(self) -> socket.socket:
        """Return a connection to the debugger."""
        sock = self._ask("console")
        # Lines that are sent before the first answer would be read as a part of the request.
        select.select([sock], [], [], _PATIENCE)
        return sock

    def diagnosis(self) -> dict[str, Any]:
        """Return the diagnosis of the script."""
        return diagnosis_of(self._pid)

    def check(self, uids: list[int]) -> list[dict[str, Any]]:
        """Return where processes run, and why no editor can attach."""
        found: list[dict[str, Any]] = []
        for at in range(0, len(uids), _CHECKED):
            with self._ask("check", uids=uids[at : at + _CHECKED]) as answer:
                found += json.loads(_read_all(answer))
        return found

    def editor(self, uid: int) -> socket.socket:
        """Return a stream to the debugpy of a process."""
        with self._ask("editor", timeout=_STARTING, uid=uid) as answer:
            data, fds, _, _ = socket.recv_fds(answer, 1 << 16, 1)
        if not fds:
            raise RuntimeError(data.decode(errors="replace") or "the script has closed its door")
        return socket.socket(fileno=fds[0])

    def lifeline(self) -> int | None:
        """Return a descriptor that is readable once the script has ended."""
        with unreachable(self._pid):
            return os.pidfd_open(self._pid)

    def is_stopped(self) -> bool:
        """Whether a rank of the script is at a breakpoint; False if the script does not say so."""
        try:
            with self._ask("stopped", timeout=_BRIEF) as answer:
                return _read_all(answer) == b"true"
        except (OSError, RuntimeError):  # it has ended, or hangs
            return False

    def _ask(self, what: str, timeout: float = _PATIENCE, **more: Any) -> socket.socket:
        from monarch._diagnosis.door import knock

        with unreachable(self._pid):
            sock = knock(self._pid, {"ask": "debug", "for": what, **more}, timeout)
        sock.settimeout(timeout)
        return sock


def stopped_ones(pids: list[int]) -> list[int]:
    """Return those of several scripts that have a rank at a breakpoint, if any; or else all."""
    stopped = [pid for pid in pids if ScriptDoor(pid).is_stopped()] if len(pids) > 1 else []
    return stopped or pids


def _read_all(sock: socket.socket) -> bytes:
    """Return what comes until the end of a connection."""
    data = bytearray()
    while chunk := sock.recv(1 << 16):
        data += chunk
    return bytes(data)
