"""Lifelines: hosts of a job end with the script, as long as no other script can find them.

A script can be interrupted or killed before its job is saved in a file, or ask for no file. So each
process that keeps a host has a socket to the script, its *lifeline*. The system closes the script's
end when the script exits, however it exits. Once the job can be found, the script sends a byte that
releases the host (`STAY`), and closes the socket.

The sockets are kept here, by the directory of the job, and not in the job object: a program may
drop that object and still use the hosts.
"""

from __future__ import annotations

import contextlib
import socket

from monarch._spi import when_forked

__all__ = ["STAY", "add", "cut", "is_held", "outlived", "release"]

STAY = b"s"
_lines: dict[str, list[socket.socket]] = {}


def add(folder: str) -> tuple[socket.socket, socket.socket]:
    """Create a lifeline for the job of this directory.

    Return the script's end, and the end for the process that keeps a host.
    """
    ours, theirs = socket.socketpair()
    _lines.setdefault(folder, []).append(ours)
    return ours, theirs


def release(folder: str) -> None:
    """Let the hosts of this job outlive the script from now on."""
    for line in _lines.get(folder, ()):
        with contextlib.suppress(BrokenPipeError):  # the host has exited
            line.send(STAY)
    cut(folder)


def is_held(folder: str) -> bool:
    """Whether this script holds lifelines of this job: its hosts end with the script."""
    return folder in _lines


def cut(folder: str) -> None:
    """Close the lifelines of this job: the hosts end, unless they were released before."""
    for line in _lines.pop(folder, ()):
        line.close()


def outlived(line: socket.socket) -> bool:
    """Wait, at the host's end. Return True if the script exited, False if it released the host."""
    try:
        return line.recv(1) != STAY
    except ConnectionResetError:  # the script exited without reading all bytes
        return True


def _forked() -> None:
    for folder in list(_lines):
        cut(folder)


when_forked(_forked)
