"""Messages between the agents of two hosts, on the control lane of their channel, in order.

This module has the fields of each type, and is the only place where such messages are decoded; see
`wire.json_message`. The names of hosts are those by which the client attached them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict

from monarch._engine.wire import json_message

__all__ = [
    "Addresses",
    "AgentMessage",
    "Ask",
    "Attach",
    "Ended",
    "Found",
    "Job",
    "JobChange",
    "Leave",
    "Left",
    "Lives",
    "Lost",
    "Moved",
    "Notice",
    "Open",
    "Resumed",
    "Spawn",
    "Unheard",
    "Where",
    "decode",
]


class Open(TypedDict("_For", {"for": str}, total=False)):
    """Open the other end of a tunnel, from `near` (there) to `far` (here), on this lane.

    `first`: it is the link to the parent of a proc that the next `Spawn` is about. A tunnel for a
    stream names its purpose (``for``).
    """

    op: Literal["open"]
    lane: int
    near: int
    far: int
    first: bool


class _Spawn(TypedDict):
    op: Literal["spawn"]
    parent: int
    spec: dict[str, Any]
    procs: Sequence[dict[str, Any]]


class Spawn(_Spawn, total=False):
    """Launch procs for a guest, the process `parent`.

    An order that came down the tree, or its copy (`spawn_orders`), also opens the tunnels of the
    links: it has the lane of each, and its number.
    """

    lanes: Sequence[int]
    number: int


class Ask(TypedDict("_From", {"from": int}, total=False)):
    """Pass on a control message of a guest to its agent, one that comes without descriptors."""

    op: Literal["ask"]
    request: dict[str, Any]


class Notice(TypedDict):
    """Pass on a notice of a membership for the guest `to`."""

    op: Literal["notice"]
    to: int
    notice: dict[str, Any]


class Left(TypedDict):
    """A guest has exited."""

    op: Literal["left"]
    uid: int


class Ended(TypedDict):
    """To home: these procs of the sender's host have exited."""

    op: Literal["ended"]
    uids: Sequence[int]


class Where(TypedDict):
    """Answer on which host this proc lives."""

    op: Literal["where"]
    uid: int


class _Lives(TypedDict):
    op: Literal["lives"]
    uids: Sequence[int]
    hosts: Sequence[str | None]


class Lives(_Lives, total=False):
    """The answer, or unasked: these procs live there, or (None) on an unknown host.

    `lost`: that session was lost, with this verdict.
    """

    lost: list[Any]


class Lost(TypedDict):
    """From home: the session with `host` was lost, with this verdict."""

    op: Literal["lost"]
    host: str
    end: list[Any]


class Found(TypedDict):
    """From home: there is a new session with `host`."""

    op: Literal["found"]
    host: str


class Attach(TypedDict):
    """To home: begin a new session with `host`."""

    op: Literal["attach"]
    host: str


class Moved(TypedDict):
    """The proc `uid`, which was lost with its host, was replaced by `to` on `host`."""

    op: Literal["moved"]
    uid: int
    to: int
    host: str


class Leave(TypedDict):
    """From home: exit, and with `shutdown` end the worker, too."""

    op: Literal["leave"]
    shutdown: bool


class Addresses(TypedDict):
    """From home: what hosts need to connect to one another.

    `agents`: by host, the session of home by which its agent is named, see `agent_choice`.
    """

    op: Literal["addresses"]
    hosts: dict[str, str]
    agents: dict[str, int]
    secrets: dict[str, str]
    trusting: bool


class JobChange(TypedDict, total=False):
    """Changes of a job: the grace period, entries for the next driver, by the uid of each."""

    grace: float
    keep: Sequence[Sequence[Any]]
    drop: Sequence[int]


class Job(JobChange):
    """From home: the state of a job that may outlive its driver."""

    op: Literal["job"]
    job: str
    reign: int


class Resumed(TypedDict):
    """To another home: what lives here of the job that it takes over."""

    op: Literal["resumed"]
    procs: Sequence[Sequence[int]]
    keep: Sequence[Sequence[Any]]
    hosts: Mapping[str, str]


class Unheard(TypedDict):
    """From home: the driver has exited, and another may replace it."""

    op: Literal["unheard"]


AgentMessage: TypeAlias = (
    Open
    | Spawn
    | Ask
    | Notice
    | Left
    | Ended
    | Where
    | Lives
    | Lost
    | Found
    | Attach
    | Moved
    | Leave
    | Addresses
    | Job
    | Resumed
    | Unheard
)

_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "addresses": Addresses,
        "ask": Ask,
        "attach": Attach,
        "ended": Ended,
        "found": Found,
        "job": Job,
        "leave": Leave,
        "left": Left,
        "lives": Lives,
        "lost": Lost,
        "moved": Moved,
        "notice": Notice,
        "open": Open,
        "resumed": Resumed,
        "spawn": Spawn,
        "unheard": Unheard,
        "where": Where,
    }
)


def decode(data: bytes | bytearray | memoryview) -> AgentMessage:
    """Decode a message of another agent. Raises ValueError if it is unknown or incomplete."""
    message: AgentMessage = json_message.decode(data, _TYPES)
    return message
