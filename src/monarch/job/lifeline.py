"""Lifelines: hosts of a job end with the script, as long as no other could find them.

A script can be interrupted or killed before its job is in a file, or have asked for no file. So
what keeps a host has a socket to the script, and the system closes the script's end, whatever
becomes of that. Once the job can be found a byte in that socket says so, and it is closed.

The sockets are here by the directory of the job, and not in the job itself: a program may drop
that, and go on to use the hosts.
"""

from __future__ import annotations

import contextlib
import socket

from monarch._spi import when_forked

__all__ = ["STAY", "add", "cut", "outlived", "release"]

STAY = b"s"
_lines: dict[str, list[socket.socket]] = {}


def add(folder: str) -> tuple[socket.socket, socket.socket]:
    """A new one for the job of this directory: the script's end, and that for what keeps a host."""
    ours, theirs = socket.socketpair()
    _lines.setdefault(folder, []).append(ours)
    return ours, theirs


def release(folder: str) -> None:
    """The hosts of this job outlive the script from now on."""
    for line in _lines.get(folder, ()):
        with contextlib.suppress(BrokenPipeError):  # it has ended
            line.send(STAY)
    cut(folder)


def cut(folder: str) -> None:
    """Close the lifelines of this job: what is at their ends ends, unless they were released."""
    for line in _lines.pop(folder, ()):
        line.close()


def outlived(line: socket.socket) -> bool:
    """Wait, at the other end, until the script has ended (True), or has said that we may stay."""
    try:
        return line.recv(1) != STAY
    except ConnectionResetError:  # it ended with something unread
        return True


def _forked() -> None:
    for folder in list(_lines):
        cut(folder)


when_forked(_forked)
