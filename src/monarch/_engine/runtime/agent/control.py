"""Control messages: the requests and reports that reach a host agent over its control links.

A control message is a JSON object in a CONTROL frame, see `wire.json_message`. This module has the
fields of each type, and is the only place where such messages are decoded. A wrong value raises an
error where it is used, and the sender's link is closed.

Some messages come with descriptors; the types say which.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypedDict

from monarch._engine.wire import json_message
from monarch._engine.wire.frame import CONTROL, pack

__all__ = [
    "Attach",
    "Autopsy",
    "CastOver",
    "Census",
    "Connection",
    "Continued",
    "DataConnection",
    "Detach",
    "Exit",
    "Exited",
    "Forget",
    "Heartbeat",
    "Here",
    "Introduce",
    "Join",
    "Keep",
    "Kill",
    "LogFlush",
    "LogPrinted",
    "Logging",
    "Preload",
    "Ready",
    "Remember",
    "Spawn",
    "Started",
    "Stopped",
    "WayTo",
    "encode",
    "report",
    "request",
]


class _Spawn(TypedDict):
    spec: dict[str, Any]
    procs: list[dict[str, Any]]


class Spawn(_Spawn, total=False):
    """Start procs; with the ends of their links to the sender.

    On more hosts than `fanout` they are started down the tree. If there are `more` procs of the
    same spawn to come (a message takes few descriptors), the agent waits for these.
    """

    fanout: int
    more: bool


class Introduce(TypedDict("_For", {"for": str}, total=False)):
    """Pass an end to a proc: of a link, or of a side stream for a purpose."""

    to: int


class Join(TypedDict):
    """Admit a process that the sender has started by itself; with the agent's end of its link."""

    uid: int


class Autopsy(TypedDict):
    """Answer why this proc exited, when the cause is known."""

    uid: int


class Kill(TypedDict):
    """Kill procs now."""

    uids: list[int]


class Preload(TypedDict):
    """Import modules in the launcher, ahead of the first spawn."""

    preload: list[str]
    path: list[str]
    env: dict[str, str]


class Ready(TypedDict):
    """The sender, an executed command, has become a proc."""


class Heartbeat(TypedDict):
    """Answer with the same message, after the answers to all earlier requests."""

    number: int


class CastOver(TypedDict):
    """No more answers to this cast are wanted."""

    number: int


class Logging(TypedDict):
    """Stream the output of procs to the client, or not, and set their log level."""

    uids: list[int]
    ranks: list[int]
    hosts: list[str]
    streaming: bool
    group: int
    window: int | None
    level: int
    port: int


class Census(TypedDict):
    """Answer with ``census``, the processes of each host; see `monarch._diagnosis.census`."""

    id: int


class LogFlush(TypedDict):
    """Pass on the output so far; answered with ``log_flushed``."""

    id: int


class LogDrawn(TypedDict):
    """The client draws states on the terminal of this host, or has ceased to."""

    drawn: bool


class LogPrinted(TypedDict):
    """The client has printed this much of the output that an agent streamed to it."""

    agent: str
    size: int


class WayTo(TypedDict):
    """Answer with the address at which to invite a proc of another host (runtime.direct.link)."""

    to: int


class DataConnection(TypedDict):
    """A peer reached the listener of a proc, or was refused; see runtime.direct.ticket."""

    peer: str
    certificate: str
    refused: str


class Attach(TypedDict):
    """Attach hosts, by name, whose workers listen at these addresses."""

    hosts: dict[str, str]
    gateways: list[str]
    reign: int
    trusting: bool
    timeout: float | None
    secrets: dict[str, str]
    config: dict[str, Any]
    environ: dict[str, str]


class Rebind(TypedDict):
    """Serve a lost host by the worker at this address; answered with ``rebound``."""

    host: str
    address: str
    timeout: float
    once: bool


class Detach(TypedDict):
    """Leave hosts, and with `shutdown` end their workers; answered with ``detached``."""

    hosts: list[str]
    shutdown: bool
    number: int


class _Connection(TypedDict):
    peer: str
    session: str
    tls: bool
    bare: bool


class Connection(_Connection, TypedDict("_From", {"from": str}), total=False):
    """Take over an authenticated connection, whose descriptor comes with the message."""

    claim: bool
    reign: int
    number: int
    origin: int


class _Keep(TypedDict):
    grace: float


class Keep(_Keep, total=False):
    """Let the job outlive its driver; the first message brings the rendezvous socket."""

    job: str
    reign: int
    secret: str | None
    environ: dict[str, str]
    path: str
    pid: int


class Remember(TypedDict):
    """Store an entry for the next driver."""

    uid: int
    keepsake: str


class Forget(TypedDict):
    """Remove the entry."""

    uid: int


class Here(TypedDict):
    """The next driver is ready."""


class Started(TypedDict):
    """A launcher has started procs, by uid and pid; with a pidfd, if any, and a box of each."""

    procs: list[tuple[int, int]]


class _Exit(TypedDict):
    uid: int


class Exit(_Exit, total=False):
    """An exit: the wait status, or the error for which the process could not be started."""

    status: int
    error: str


class Exited(TypedDict):
    """Processes have exited."""

    procs: list[Exit]


class Stopped(TypedDict):
    """A signal has stopped a process."""

    uid: int
    signal: int


class Continued(TypedDict):
    """A stopped process continues."""

    uid: int


_REQUESTS: Mapping[str, Any] = MappingProxyType(
    {
        "attach": Attach,
        "autopsy": Autopsy,
        "cast_over": CastOver,
        "census": Census,
        "connection": Connection,
        "data_connection": DataConnection,
        "detach": Detach,
        "forget": Forget,
        "heartbeat": Heartbeat,
        "here": Here,
        "introduce": Introduce,
        "join": Join,
        "keep": Keep,
        "kill": Kill,
        "log_drawn": LogDrawn,
        "log_flush": LogFlush,
        "log_printed": LogPrinted,
        "logging": Logging,
        "preload": Preload,
        "ready": Ready,
        "rebind": Rebind,
        "remember": Remember,
        "spawn": Spawn,
        "way": WayTo,
    }
)
_REPORTS: Mapping[str, Any] = MappingProxyType(
    {"continued": Continued, "exited": Exited, "started": Started, "stopped": Stopped}
)


def request(body: bytes | bytearray | memoryview) -> tuple[str, Any]:
    """Decode a request of a process or of the worker; return its op and the message.

    Raises ValueError for an unknown or incomplete message.
    """
    message = json_message.decode(body, _REQUESTS)
    return message["op"], message


def report(body: bytes | bytearray | memoryview) -> tuple[str, Any]:
    """Decode a report of a launcher, as `request`."""
    message = json_message.decode(body, _REPORTS)
    return message["op"], message


def encode(message: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """Return the frame of a control message that comes with so many descriptors."""
    return pack(CONTROL, 0, 0, 0, b"", json_message.encode(message), nfd=descriptors)
