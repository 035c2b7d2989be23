"""A side stream: bytes from proc to proc beside the links, for features that move many of them.

It is made like a link (`Proc.open_stream`): a socket pair, one end of which the agent hands to the
peer, with the purpose. On one host that is a connection, with nothing in between and nothing to
authenticate. Between hosts the agents carry the bytes (`stream_tunnel`): slowly, and always, since
they do so on the connection that they have. It ends when a process ends, or its host is lost, and
never before: what it carries, and its end, are as certain as a link's.

Two procs on different hosts that want more meet at a door (`invitation`). Who is called learns how:
`Caller.via`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Caller", "Via"]


class Via(NamedTuple):
    """How the agents of two hosts are connected, seen from the one that was called."""

    here: str
    """The address of this host to which the connection leads; empty if it has no IP address."""
    tls: bool


class Caller(NamedTuple):
    """Who opened a side stream."""

    uid: int
    via: Via | None
    """None for a proc of the same host."""
