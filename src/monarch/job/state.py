"""`JobState`: the host meshes of a job, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from monarch._spi import let_go
from monarch.actor import HostMesh

__all__ = ["JobState", "leave"]

_log = logging.getLogger("monarch.job")
_LET_GO = 10.0  # seconds for actors that this script has there


class JobState:
    """What `JobTrait.state` returns: each host mesh is an attribute.

    >>> from monarch.actor import this_host
    >>> state = JobState({"trainers": this_host()})
    >>> state.trainers
    <HostMesh {}>

    An unknown name raises AttributeError with those there are. A mesh that is called like one of
    the attributes below is reached by `_hosts` only.
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)
        self.query_engine = None
        self.query_engine_client = None
        self.telemetry_url: str | None = None
        """None: there is no telemetry store in this release."""
        self.dashboard_url: str | None = None
        """None: there is no dashboard in this release."""
        self.admin_url: str | None = None
        """None: there is no admin server in this release."""

    def __getattr__(self, name: str) -> HostMesh:
        hosts: dict[str, Any] = self.__dict__.get("_hosts", {})
        try:
            mesh: HostMesh = hosts[name]
        except KeyError:
            names = ", ".join(sorted(hosts))
            raise AttributeError(
                f"'{name}' is not a valid host mesh name. Available names: {names}"
            ) from None
        return mesh

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState(hosts={self._hosts})"


JobState.__module__ = "monarch.job"


def leave(workers: Sequence[str]) -> None:
    """Stop what this script has on these hosts, so that their end is no failure to it.

    By whatever job or mesh it came there. Blocks, for a limited time.
    """
    leaving = let_go(workers)

    def run() -> None:
        try:
            leaving.get(timeout=_LET_GO)
        except TimeoutError:
            _log.warning("actors did not stop within %g s; they are killed", _LET_GO)

    if not leaving.done():  # aside: the caller may be on an event loop, and waits either way
        thread = threading.Thread(target=run, name="monarch-job-kill")
        thread.start()
        thread.join()
