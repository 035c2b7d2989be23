"""`HostState`: how a host of a job is, and where its output is, for people."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HostState"]


class HostState(NamedTuple):
    """A host of a running job."""

    mesh: str
    rank: int
    """The position in the mesh."""
    name: str
    """A name for people: a host name, a process number."""
    healthy: bool | None
    """Whether the host runs; None if only the host could say."""
    log: str
    """The path of its output on this machine; empty if the output is elsewhere."""
    elsewhere: str = ""
    """In words, where the output is that is not on this machine."""
