"""A side stream: a connection for bytes between two procs, for features that move many of them.

A side stream is made like a link (`Proc.open_stream`): the agent hands one end of a socket pair,
with the purpose, to the peer. On one host that is a direct connection, which needs no
authentication. Between hosts the agents carry the bytes (`stream_tunnel`). That is slow but always
possible, since the agents use the connection that they have. A side stream ends when a process
exits or its host is lost, and never before: delivery and EOF are as certain as on a link.

Two procs on different hosts that need more speed connect directly (`ticket`). The called proc
learns from `Caller.via` how the hosts are connected.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Caller", "Via"]


class Via(NamedTuple):
    """How the agents of two hosts are connected, seen from the host of the called proc."""

    here: str
    """The address of this host to which the connection leads; empty if it has no IP address."""
    tls: bool


class Caller(NamedTuple):
    """The proc that opened a side stream."""

    uid: int
    via: Via | None
    """The connection of the hosts; None for a proc of the same host."""
