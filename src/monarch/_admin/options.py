"""The options of the app: all that it needs besides the facts of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Options"]

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


@dataclass(frozen=True)
class Options:
    """The options of `make_app`.

    Attributes:
        token: the key that each request needs.
        script: the name of the script, for people.
        pid: its process.
        started_at: when it started, in seconds since 1970.
        user: whose job it is.
        url: where the app is served, without the token.
        names: the host names, in lower case, under which it may be reached.
        dashboard: the folder with the files of the dashboard; None: there is none.
        keep: stores columns in a table, as `Store.replace`; None without telemetry.
        pyspy: the path of py-spy; empty: it is looked for.
        pyspy_timeout: seconds for a dump.
        longest_profile: seconds.
        retained: how many actors that have ended a process keeps.
    """

    token: str = field(repr=False)
    script: str = "python"
    pid: int = 0
    started_at: float = 0.0
    user: str = ""
    url: str = ""
    names: frozenset[str] = LOOPBACK
    dashboard: str | None = None
    keep: Callable[[str, dict[str, Sequence[Any]], tuple[str, Any] | None], None] | None = field(
        default=None, repr=False
    )
    pyspy: str = ""
    pyspy_timeout: float = 10.0
    longest_profile: float = 300.0
    retained: int = 100
