"""Attaching to hosts that run worker loops: what the `HostMesh` of `attach_to_workers` shares.

The client's host agent dials the workers; here is who waits for it, which processes were spawned
through the mesh and its slices, and how the hosts are let go.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.mesh.future import RAISED, VALUE, Future
from monarch._engine.runtime.client import client_proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from monarch._engine.mesh.proc_mesh import ProcMesh

__all__ = ["Attachment", "occupy"]


class Attachment:
    """Hosts of a client, by name; made by who attached to them.

    Args:
        hosts: from the names to the addresses of their workers.
        secret_file: of the job they belong to; None: they know the secret of this process.
        gateway: the address of the worker through which they are reached, if not directly.
        reign: of this client, if the hosts may hold what an earlier one had (see `reattach`).
        called: from the names to what the program called them.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        secret_file: str | None = None,
        gateway: str | None = None,
        reign: int = 0,
        called: Mapping[str, str] | None = None,
    ) -> None:
        from monarch._engine.runtime.secret import settings_of  # few programs attach

        self._hosts = dict(hosts)
        self._called = dict(called or {})
        self._errors: dict[str, str] = {}
        self._missing = set(hosts)
        self._waiting: list[Future[Any]] = []
        self._leaving: Future[None] | None = None
        self.procs: list[ProcMesh] = []
        proc = client_proc()
        proc.notices.setdefault("attached", _on_attached)
        _users.update(list(hosts))
        for host in hosts:
            _attaching.setdefault(host, []).append(self)
        secrets = {} if secret_file is None else dict.fromkeys(hosts, secret_file)
        trusting = settings.allow_unauthenticated
        trusting &= settings.origin("allow_unauthenticated") == "configure"
        proc.tell_agent(
            {
                "op": "attach",
                "hosts": self._hosts,
                "gateway": gateway,
                "reign": reign,
                "trusting": trusting,
                "secrets": secrets,
                "config": settings.snapshot(),
                "environ": settings_of(os.environ),
            }
        )

    def ready(self) -> Future[Any]:
        """Resolves to True when there is a connection to each worker, or raises RuntimeError."""
        future: Future[Any] = Future._new()
        self._waiting.append(future)
        self._tell()
        return future

    def check(self) -> None:
        """Raise RuntimeError if the hosts were let go."""
        if self._leaving is not None:
            raise RuntimeError("`HostMesh` has already been stopped")

    def leave(self, *, shutdown: bool) -> Future[None]:
        """Stop what was spawned; then let the hosts go, or end their worker loops."""
        if self._leaving is None:
            self._leaving = _Leaving.of(self, shutdown)
        return self._leaving

    def answered(self, host: str, error: str | None) -> None:
        """There is a connection to `host`, or there will be none."""
        self._missing.discard(host)
        if error is not None:
            self._errors[host] = error
        self._tell()

    def _tell(self) -> None:
        if self._missing:
            return
        while self._waiting:
            future = self._waiting.pop()
            if not self._errors:
                future._resolve(VALUE, True)
                continue
            lines = [
                f"  - {self._called.get(host, host)}: {error}"
                for host, error in sorted(self._errors.items())
            ]
            text = f"attach failed: no connection to {len(lines)} host(s):\n" + "\n".join(lines)
            future._resolve(RAISED, RuntimeError(text))


_attaching: dict[str, list[Attachment]] = {}
_users: Counter[str] = Counter()  # attachments that use a host


def occupy(hosts: Iterable[str]) -> None:
    """Something is there that was not spawned through an attachment: who stops one lets it be."""
    _users.update(list(hosts))


def _on_attached(message: dict[str, Any]) -> None:
    for attachment in _attaching.pop(message["host"], ()):
        attachment.answered(message["host"], message["error"])


class _Leaving(Future[None]):
    """Resolves when all that was spawned has ended and the hosts were told."""

    __slots__ = ()

    @classmethod
    def of(cls, attachment: Attachment, shutdown: bool) -> Future[None]:
        self: _Leaving = cls._new()
        missing = len(attachment.procs) + 1
        proc = client_proc()

        def one_less() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                _users.subtract(list(attachment._hosts))
                hosts = [host for host in attachment._hosts if shutdown or not _users[host]]
                proc.tell_agent({"op": "detach", "hosts": hosts, "shutdown": shutdown})
                self._resolve(VALUE, None)

        for procs in attachment.procs:
            stopped = procs.stop("selective drain")
            stopped._notify(lambda: proc.reactor.call_soon(one_less))
        proc.reactor.call_soon(one_less)
        return self
