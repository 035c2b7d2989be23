"""`JobState`: the host meshes of a job, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch._spi import let_go
from monarch.actor import HostMesh

if TYPE_CHECKING:
    from monarch._store.client import QueryEngineClient

__all__ = ["JobState", "leave"]

_log = logging.getLogger("monarch.job")
_LET_GO = 10.0  # seconds for this script's actors on the hosts to stop


class JobState:
    """The result of `JobTrait.state`: each host mesh is an attribute.

    >>> from monarch.actor import this_host
    >>> state = JobState({"trainers": this_host()})
    >>> state.trainers
    <HostMesh {}>

    An unknown name raises AttributeError with the known names. A mesh that has the name of one of
    the attributes below is reachable through `_hosts` only.
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)
        self.query_engine = None
        self.query_engine_client: QueryEngineClient | None = None
        """Answers SQL, with `JobTrait.enable_telemetry`; else None."""
        self.telemetry_url: str | None = None
        """Where it is answered: ``POST {telemetry_url}/api/query``. Contains the key: a secret."""
        self.dashboard_url: str | None = None
        """Where the dashboard is, or None. Contains the key: a secret."""
        self.admin_url: str | None = None
        """Where the admin API is: ``GET {admin_url}/v1/root``. Contains the key: a secret."""

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
    """Stop all actors and processes of this script on these hosts before the hosts are killed.

    So this script does not see their exit as a failure. It does not matter through which job or
    mesh they were spawned. Blocks, for at most 10 seconds.
    """
    leaving = let_go(workers)

    def run() -> None:
        try:
            leaving.get(timeout=_LET_GO)
        except TimeoutError:
            _log.warning("actors did not stop within %g s; they are killed", _LET_GO)

    if not leaving.done():  # on another thread: on that of an event loop `get` would warn
        thread = threading.Thread(target=run, name="monarch-job-kill")
        thread.start()
        thread.join()
