"""Attachments to hosts that run worker loops: the state that a `HostMesh` and its slices share.

The client's host agent dials the workers and holds the connections. An attachment, which
`attach_to_workers` makes, records whether the workers are reached and which processes were spawned
through the mesh, and releases the hosts in the end: the agent closes the connection to a host once
no attachment of this process uses the host.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.mesh.call.context import process_context
from monarch._engine.mesh.meshes.proc_mesh import meshes_on
from monarch._engine.mesh.results.future import RAISED, VALUE, Future, _check_timeout
from monarch._engine.mesh.results.progress import tell_while
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.proc import Proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from monarch._engine.base.verdict import Verdict
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh

__all__ = ["Attachment", "as_written", "check", "let_go", "occupy", "rebind"]

_SHUT_DOWN = "HostMesh has already been shut down"  # programs match this
_STOPPED = "`HostMesh` has already been stopped"


class Attachment:
    """The client's use of some hosts; see the module.

    Args:
        hosts: names of hosts -> addresses of their workers.
        secret_file: the file with the secret of the job that the hosts belong to; None for the
            secret of this process.
        gateways: the addresses of workers through which the hosts are reached, in the order of
            their use; none: directly.
        reign: the number of this driver, if the hosts may hold meshes of an earlier one (see
            `reattach`).
        called: names of hosts -> addresses as the program wrote them.
        timeout: seconds for a first connection to each host; None: as configured.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        secret_file: str | None = None,
        gateways: Sequence[str] = (),
        reign: int = 0,
        called: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        from monarch._engine.runtime.admission.secret import settings_of  # few programs attach

        self._hosts = dict(hosts)
        self._uses: set[str] = set(hosts)  # hosts for which this is counted in `_users`
        self._called = dict(called or {})
        self._errors: dict[str, str] = {}
        self._problems: dict[str, str] = {}  # missing host -> error of the latest try
        self._missing = set(hosts)
        self._waiting: list[Future[Any]] = []
        self._known: Future[None] = Future._new()  # resolved when no host is missing
        self._leaving: Future[None] | None = None
        self._how = ""  # the text of errors after `leave`
        self.procs: list[ProcMesh] = []
        proc = client_proc()
        proc.notices.setdefault("attached", _on_attached)
        proc.when_agent_fails(_on_agent_failed)
        proc.notices.setdefault("attaching", _on_attaching)
        proc.notices.setdefault("detached", _on_detached)
        _users.update(list(hosts))
        _attachments.add(self)
        _names.update({text: host for host, text in self._called.items()})
        for host in hosts:
            _attaching.setdefault(host, []).append(self)
            _left.pop(host, None)
        secrets = {} if secret_file is None else dict.fromkeys(hosts, secret_file)
        trusting = settings.allow_unauthenticated
        trusting &= settings.origin("allow_unauthenticated") == "configure"
        proc.tell_agent(
            {
                "op": "attach",
                "hosts": self._hosts,
                "gateways": list(gateways),
                "reign": reign,
                "trusting": trusting,
                "timeout": timeout,
                "secrets": secrets,
                "config": settings.snapshot(),
                "environ": settings_of(os.environ),
            }
        )

        tell_while(self._known, self._missed)

    def _missed(self) -> str:
        """Return a text that names a host that has not been reached, and the reason."""
        missing = sorted(self._missing)
        if not missing:
            return ""
        first = self._called.get(missing[0], missing[0])
        others = f" and {len(missing) - 1} other hosts" if missing[1:] else ""
        return f"waiting for {first}{others}: {self._problems.get(missing[0], 'no answer yet')}"

    def ready(self) -> Future[Any]:
        """Return a future that is True once all workers are connected, or raises RuntimeError."""
        if self._leaving is not None:
            return Future._failed(_over(self._hosts, self._how))
        future: Future[Any] = Future._new()
        self._waiting.append(future)
        self._tell()
        return future

    def check(self) -> None:
        """Raise RuntimeError if this attachment has released its hosts."""
        if self._leaving is not None:
            raise _over(self._hosts, self._how)

    def leave(self, *, shutdown: bool, timeout: float | None = None) -> Future[None]:
        """Stop the meshes spawned here, then release the hosts or shut down their worker loops.

        Does not block; the future resolves as that of `HostMesh.stop` or `HostMesh.shutdown`.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if self._leaving is None:
            how = _SHUT_DOWN if shutdown else _STOPPED
            _users.subtract(self._uses)
            self._uses.clear()
            self._left(how, _Leaving.of(self._hosts, self.procs, how, shutdown, timeout))
        assert self._leaving is not None
        return self._leaving

    def _left(self, how: str, leaving: Future[None]) -> None:
        self._how = how
        self._leaving = leaving
        self._known._resolve(VALUE, None)

    def answered(self, host: str, error: str | None) -> None:
        """Record that `host` is connected; or, with an `error`, that connecting was given up."""
        self._missing.discard(host)
        if error is not None:
            self._errors[host] = error
        self._tell()

    def met(self, host: str, problem: str) -> None:
        """Record that a try to connect to `host` has failed; further tries follow."""
        self._problems[host] = problem

    def _tell(self) -> None:
        if self._missing:
            return
        self._known._resolve(VALUE, None)
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


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
_names: dict[str, str] = {}  # address as the program wrote it -> name of the host
_attaching: dict[str, list[Attachment]] = {}
_users: Counter[str] = Counter()  # host -> number of attachments that use it
_left: dict[str, str] = {}  # released host -> text of errors
_number = itertools.count(1)
_leaving: dict[int, Future[None]] = {}  # number of a request to the agent -> its future
_rebinding: dict[str, list[Future[str]]] = {}  # host that another worker is to serve


def check(hosts: Iterable[str]) -> None:
    """Raise RuntimeError if this process has released one of these hosts, through any mesh."""
    for host in hosts:
        if host in _left:
            raise _over([host], _left[host])


def _over(hosts: Iterable[str], how: str) -> RuntimeError:
    return RuntimeError(f"{how} ({', '.join(hosts)}); attach to the workers again to spawn there")


def let_go(workers: Iterable[str]) -> Future[None]:
    """Stop everything that this program has on these hosts, and release them.

    For a job that is about to end the hosts; it does not matter how many meshes are attached.
    `workers` are addresses as the program wrote them. Does not block.
    """
    hosts = {_names[worker] for worker in workers if worker in _names}
    hosts &= _users.keys()
    if not hosts:
        return Future._of(None)
    for host in hosts:
        del _users[host]
    all_there: list[Attachment] = []
    for attachment in list(_attachments):
        attachment._uses -= hosts
        if attachment._leaving is None and attachment._hosts.keys() <= hosts:
            all_there.append(attachment)
    procs = [mesh for attachment in all_there for mesh in attachment.procs]
    leaving = _Leaving.of(hosts, procs, _STOPPED, False, None)
    for attachment in all_there:
        attachment._left(_STOPPED, leaving)
    return leaving


def as_written(host: str) -> str:
    """Return the address of a host as this program wrote it; the name, if another one did."""
    return next((text for text, name in _names.items() if name == host), host)


def rebind(proc: Proc, host: str, address: str, timeout: float, *, once: bool) -> Future[str]:
    """Have the worker at `address` serve `host`, which was lost; return a future at once.

    Args:
        proc: the client. (A timer of it may call this while a simulation runs in the process.)
        host: as the job names it.
        address: of the worker.
        timeout: seconds.
        once: dial only once.

    All that names the host means the other worker then: meshes, handles of lost processes, and
    their copies everywhere. The future is the address of the worker that serves the host: another
    one than asked for, if another process asks at the same time. It raises RuntimeError if the
    worker is not reached in time, or if it serves another lost host. The same worker may serve the
    host again. If the address is that of another host of the job, that host is released.
    """
    future: Future[str] = Future._new()
    proc.notices.setdefault("rebound", _on_rebound)
    proc.when_agent_fails(_on_agent_failed)
    _rebinding.setdefault(host, []).append(future)
    request = {"op": "rebind", "host": host, "address": address, "timeout": timeout, "once": once}
    proc.tell_agent(request)
    late = {"host": host, "error": f"the client's host agent did not answer within {timeout:g} s"}
    # The client's host, which makes the connection, may be lost.
    timer = proc.reactor.call_later(timeout + 2 * settings.host_timeout, lambda: _on_rebound(late))
    future._notify(timer.cancel)
    return future


def _on_rebound(message: dict[str, Any]) -> None:
    host, error = message["host"], message["error"]
    address = message.get("address", "")
    if error is None:
        _left.pop(host, None)
        if address != host and _users.pop(address, 0):  # it was a host of its own until now
            for attachment in list(_attachments):
                attachment._uses.discard(address)
            _left[address] = f"This host's worker has taken the place of {host}"
    for future in _rebinding.pop(host, ()):
        future._resolve(*((VALUE, address) if error is None else (RAISED, RuntimeError(error))))


def occupy(hosts: Iterable[str]) -> None:
    """Keep these hosts when an attachment is stopped.

    They run processes that no attachment has spawned.
    """
    _users.update(list(hosts))


def _on_attached(message: dict[str, Any]) -> None:
    for attachment in _attaching.pop(message["host"], ()):
        attachment.answered(message["host"], message["error"])


def _on_attaching(message: dict[str, Any]) -> None:
    for attachment in _attaching.get(message["host"], ()):
        attachment.met(message["host"], message["error"])


def _on_agent_failed(verdict: Verdict) -> None:
    for host in list(_attaching):
        _on_attached({"host": host, "error": verdict.error})
    for host in list(_rebinding):
        _on_rebound({"host": host, "error": verdict.error})
    for number in list(_leaving):
        if client_proc().agent is None:  # the hosts are released: their connections have closed
            _on_detached({"number": number})
        else:
            text = f"the hosts may not have been released: {verdict.error}"
            _leaving.pop(number)._resolve(RAISED, RuntimeError(text))


def _on_detached(message: dict[str, Any]) -> None:
    leaving = _leaving.pop(message["number"], None)
    if leaving is not None:  # else the agent was given up meanwhile
        leaving._resolve(VALUE, None)


class _Leaving(Future[None]):
    """Resolves when all meshes have stopped and each host has received the order to release them.

    A host that is known to be lost counts as well.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        procs: Iterable[ProcMesh],
        how: str,
        shutdown: bool,
        timeout: float | None,
    ) -> Future[None]:
        self: _Leaving = cls._new()
        proc = client_proc()
        root = process_context().actor_instance
        hosts = [host for host in names if shutdown or not _users[host]]
        _left.update(dict.fromkeys(hosts, how))
        # All processes of this client on a released host end, including those that were spawned
        # through other handles. Stop their meshes in good order as well.
        meshes = list(dict.fromkeys([*procs, *meshes_on(hosts, root)]))
        missing = len(meshes) + 1

        def one_less() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                # A host may have been attached again while the meshes stopped.
                going = [host for host in hosts if shutdown or not _users[host]]
                if not going or proc.agent is None:
                    self._resolve(VALUE, None)
                    return
                number = next(_number)
                _leaving[number] = self
                order = {"op": "detach", "hosts": going, "shutdown": shutdown}
                proc.tell_agent({**order, "number": number})

        for mesh in meshes:
            stopped = mesh.stop("selective drain", timeout=timeout)
            stopped._notify(lambda: proc.reactor.call_soon(one_less))
        proc.reactor.call_soon(one_less)
        return self
