"""The process groups of one attempt of a rank: wake the collectives that are blocked, then destroy.

`torch.distributed` can abort NCCL, and nothing else: a collective of gloo whose peer has exited
fails at once if it waits for that very peer, and else waits for its timeout. What wakes it is the
end of its connections. So `ProcessGroups` shuts down the connections that belong to the attempt, in
this process only; the peers do the same with their ends.

A connection belongs to the attempt if it was made in it, and if it was accepted on a port that was
opened in it, leads to the store, or leads to a port of the range that the kernel chooses from:
gloo listens on such ports, and services that a script talks to (an object store, a logger) do not.

Tried with torch 2.13 and gloo. NCCL is aborted by torch's own function, as NVIDIA's in-process
restart does; this was not tried on GPUs.

Rejected: `abort` and `shutdown` of a gloo group (no effect), the destructor of the group (waits for
the collective), a timeout for each collective (a guess, too long or too short).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["ProcessGroups"]

_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_DEFAULT_RANGE = (32768, 60999)


class ProcessGroups:
    """The process groups that are made after this object."""

    def __init__(self) -> None:
        self._known = {inode for inode, _ in _connections()}
        self._aborted = False

    def wake(self) -> None:
        """Let blocked collectives fail, and attempts to form a group; for another thread."""
        if not self._aborted and _uses_nccl():
            self._aborted = True
            _c10d()._abort_process_group()
        listening: set[int] = set()
        connected: list[socket.socket] = []
        with contextlib.ExitStack() as stack:
            for inode, sock in _connections():
                if inode in self._known:
                    continue
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(sock.getsockname()[1])
                else:
                    connected.append(stack.enter_context(sock.dup()))
            for sock in connected:
                with contextlib.suppress(OSError):  # it is not connected yet, or no longer
                    if sock.getsockname()[1] in listening or _is_peer(sock.getpeername()[1]):
                        sock.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """Forget all process groups, so that ``init_process_group`` begins anew."""
        c10d = _c10d()
        if c10d is None:
            return
        world = c10d._world
        if not c10d.is_initialized() and world.pg_map:
            # An initialization was interrupted after it had registered its group.
            c10d._update_default_pg(next(iter(world.pg_map)))
        if c10d.is_initialized():
            c10d.destroy_process_group()
        # An initialization that failed has counted its group, and the number is a part of its keys.
        world.group_count = 0

    @staticmethod
    def are_formed() -> bool:
        """Whether there is a process group."""
        c10d = _c10d()
        return c10d is not None and bool(c10d.is_initialized())


def _c10d() -> Any:
    """Return torch's module of process groups, if the program has loaded it."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _uses_nccl() -> bool:
    c10d = _c10d()
    if c10d is None or not c10d.is_initialized():
        return False
    return any("nccl" in str(config) for config in c10d._world.pg_backend_config.values())


def _is_peer(port: int) -> bool:
    first, last = _port_range()
    return first <= port <= last or str(port) == os.environ.get("MASTER_PORT")


def _port_range() -> tuple[int, int]:
    try:
        with open(_RANGE) as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):  # not Linux, or hidden
        return _DEFAULT_RANGE
    return first, last


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield a number and a duplicate of each TCP socket; the duplicate is closed afterwards."""
    for name in os.listdir("/dev/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        status = os.fstat(fd)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as sock:
            inet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if inet and sock.type == socket.SOCK_STREAM:
                yield status.st_ino, sock
