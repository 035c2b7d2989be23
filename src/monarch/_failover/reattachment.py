"""`reattach`: take over the meshes of a script that has ended.

The new script replaces the old one in the runtime: its process has the same uid, so all records of
owners, parents and children stay valid. Each driver of a job has a number, its *reign*, from which
its ports are numbered. So messages to the old script never reach the new one (`state`).

Failures that happen between two scripts are not collected in one place: the process that saw an
exit remembers it. So the new owner queries every rank of every mesh that it takes over, as for
`initialized`. The reason of an exit comes from the actor's process or, if that has exited too, from
the agent. Until all ranks have answered, the meshes belong to an interim owner that collects
failures. So each failure is reported once, whether it arrives as an answer or as a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch._failover import handles
from monarch._spi import (
    FAILED,
    FAILURE,
    HOME,
    QUERY,
    VALUE,
    ActorMesh,
    Attachment,
    Failure,
    FrameLink,
    Future,
    Gather,
    Instance,
    OwnedMesh,
    Proc,
    Verdict,
    addresses_of,
    announce,
    before_spawn,
    current_proc,
    find_secret,
    gateway,
    gateways,
    occupy,
    process_context,
    succeed,
)
from monarch.actor import MeshFailure, ProcMesh

__all__ = ["Reattached", "reattach"]


class Reattached:
    """The meshes that this script took over from another; `reattach` returns it."""

    def __init__(self, job_id: str, meshes: list[ProcMesh | ActorMesh]) -> None:
        self.job_id = job_id
        """The name of the job."""
        self.procs: dict[str, ProcMesh] = _by_name(
            [(mesh._proc_name, mesh) for mesh in meshes if isinstance(mesh, ProcMesh)]
        )
        """The meshes of processes by their names (`spawn_procs(name=...)`).

        If several meshes have one name, the second one, in the order of arrival, is ``name-2``.
        """
        self.actors: dict[str, Any] = _by_name(
            [(mesh._mesh_name, mesh) for mesh in meshes if isinstance(mesh, ActorMesh)]
        )
        """The meshes of actors by the names that they were spawned with; see `procs`."""
        self._failures: Future[list[MeshFailure]] = _Interim.of(list(self.actors.values()))

    @property
    def failures(self) -> Future[list[MeshFailure]]:
        """A future of the failures of these meshes: one for each failed actor, oldest first.

        The order is that of the clocks of their hosts. The future resolves when every rank has
        answered. Failures up to then are reported here only; later ones go to
        `unhandled_fault_hook`.
        """
        return self._failures

    def __repr__(self) -> str:
        procs, actors = ", ".join(self.procs), ", ".join(self.actors)
        return f"<Reattached {self.job_id!r}: procs {procs or '-'}; actors {actors or '-'}>"


Reattached.__module__ = "monarch.actor"


def reattach(
    job_id: str,
    *,
    workers: Sequence[str] = (),
    secret_file: str | None = None,
    timeout: float = 10.0,
) -> Reattached:
    """Take over the meshes of a script that has ended, within its ``driver_grace``.

    Args:
        job_id: the name of the script's job: the configuration key ``job_id``, or the result of
            `job_id()` in the script.
        workers: addresses of hosts that the script had attached to. If the job is not found on
            this machine (the script's own machine was lost, say), the script's meshes on these
            hosts are taken over.
        secret_file: the file with the job's secret, if it is not the one that this process uses
            anyway.
        timeout: seconds to find the job.

    The processes have kept running; messages in flight from or to the old script are lost. From now
    on this script owns the meshes as if it had spawned them, and they are kept for yet another
    script when it ends. To end everything, call `shutdown_context()`. Restart policies of the old
    script are not taken over: a `Supervisor` that is to outlive its script must belong to an actor.

    Call it on the machine of the old script as the same user, or with `workers` anywhere; and
    before anything else that makes this process a client. Blocks until done.

    Raises LookupError if there is no such job; TimeoutError; SecretError without a usable secret;
    RuntimeError if the job has a running driver or another secret, if a worker is not reached, or
    if this process is a client already.

    >>> reattach("yesterday")
    Traceback (most recent call last):
        ...
    RuntimeError: reattach() must come before any other call that spawns or calls: ...
    """
    from monarch._failover.rendezvous import knock

    if current_proc() is not None:
        raise RuntimeError(
            "reattach() must come before any other call that spawns or calls: this process has "
            "begun a job of its own, or is part of one"
        )
    key = find_secret(secret_file)
    try:
        sock, welcome = knock(job_id, key, timeout)
    except LookupError:
        if not workers:
            raise
        return _come_home(job_id, workers, secret_file, timeout)
    try:
        proc = succeed(welcome["uid"], welcome["reign"], (sock, welcome["agent"]))
    except BaseException:
        sock.close()
        raise
    proc.job = job_id
    return _take_all(job_id, welcome["keepsakes"])


def _come_home(
    job_id: str, workers: Sequence[str], secret_file: str | None, timeout: float
) -> Reattached:
    """Take over the meshes on the attached hosts of a script whose own host is lost."""
    from monarch._failover.claim import claim
    from monarch._spi import Gateway, Route, direct_way

    addresses = addresses_of(workers)
    way: Route = direct_way
    through = gateway()
    if through is not None:
        (entry,) = addresses_of([through])
        way = Gateway(entry, find_secret(), 0).open
    found = claim(job_id, addresses, find_secret(secret_file), timeout, way)
    proc = succeed(found.uid, found.reign, None)
    kept: dict[int, str] = {}
    known: dict[str, str] = {}
    coming = {str(address): str(address) for address in addresses}

    def inherited(message: dict[str, Any]) -> None:
        kept.update(message["keep"])
        known.update(message["hosts"])

    proc.notices["inherited"] = inherited
    there: set[str] = set()
    while coming:
        Attachment(coming, secret_file, gateways(), found.reign).ready().get(timeout)
        there.update(coming)
        coming = {name: address for name, address in known.items() if name not in there}
    taken = _take_all(job_id, list(kept.values()))
    handles.keep_job(job_id, found.grace, secret_file)
    return taken


def _take_all(job_id: str, kept: list[str]) -> Reattached:
    root = process_context().actor_instance
    meshes = [_take(root, handles.recall(keepsake)) for keepsake in kept]
    _share_procs(meshes)
    for prepare in before_spawn:  # procs rely on it, those taken over as well
        prepare()
    return Reattached(job_id, meshes)


def _take(root: Instance, mesh: ProcMesh | ActorMesh) -> ProcMesh | ActorMesh:
    """Make this script's root the owner of a mesh."""
    mesh._owner = root
    uid = mesh._base if isinstance(mesh, ProcMesh) else mesh._uid
    root._own(uid, mesh)
    proc = current_proc()
    assert proc is not None
    proc.kept.add(uid)
    if isinstance(mesh, ProcMesh):
        if mesh._hosts is not None:
            occupy(set(mesh._hosts._hosts) - {HOME})
        mesh._links_of(mesh._dense_shape())  # `stop` kills procs to which there is no link
        announce(mesh)
    return mesh


def _share_procs(meshes: list[ProcMesh | ActorMesh]) -> None:
    """Make actor meshes refer to one handle of their procs: each was saved with its own copy."""
    known = {mesh._base: mesh for mesh in meshes if isinstance(mesh, ProcMesh)}
    for mesh in meshes:
        if isinstance(mesh, ActorMesh):
            procs = known.get(mesh._proc_mesh._base)
            if procs is not None and procs._shape == mesh._proc_mesh._shape:
                mesh._proc_mesh = procs


def _by_name(named: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mesh in named:
        number, key = 1, name
        while key in found:
            number += 1
            key = f"{name}-{number}"
        found[key] = mesh
    return found


class _Interim(Future[list[MeshFailure]]):
    """The owner of meshes while their ranks are queried; resolves to the failures found."""

    __slots__ = ("_found", "_meshes", "_missing", "_proc", "_root")

    _found: list[Failure]
    _meshes: list[ActorMesh]
    _missing: int
    _proc: Proc
    _root: Instance

    @classmethod
    def of(cls, meshes: list[ActorMesh]) -> Future[list[MeshFailure]]:
        self: _Interim = cls._new()
        proc = current_proc()
        assert proc is not None
        self._proc = proc
        self._root = process_context().actor_instance
        self._meshes = meshes
        self._found = []
        self._missing = len(meshes) + 1
        proc.reactor.call_soon(self._ask)  # on the thread where failures arrive as well
        return self

    def _ask(self) -> None:
        proc = self._proc
        for mesh in self._meshes:
            links = mesh._resolve_links()
            display, label = mesh._display, mesh._name.get()
            owned = OwnedMesh(mesh._uid, self, label, display, links, mesh.rank_text)
            proc.owned[mesh._uid] = owned
            _Present.ask(mesh._uid, links, proc, self._one_less)
        self._one_less()

    def _one_less(self) -> None:
        self._missing -= 1
        if not self._missing:
            for owned in self._proc.owned.values():
                if owned.owner is self:
                    owned.owner = self._root
            self._found.sort(key=lambda failure: failure.root.verdict.when)
            self._resolve(VALUE, [MeshFailure(failure) for failure in self._found])

    # -- as an owner (see ends.Owner) ------------------------------------------------------------

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        if failure.kind == FAILED:
            self._found.append(failure)

    def _disown(self, uid: int) -> None:
        self._root._disown(uid)


class _Present(Gather[None]):
    """Queries each rank of a mesh, and records the failures of those that have exited."""

    __slots__ = ("_done", "_uid")

    _done: Callable[[], None]
    _uid: int

    @classmethod
    def ask(cls, uid: int, links: list[FrameLink], proc: Proc, done: Callable[[], None]) -> None:
        self: _Present = cls._new()
        self._uid = uid
        self._done = done
        self._open(proc, links)
        if not links:
            self._end(VALUE, None)
            done()
        self._ask(links, None, QUERY, uid, b"")

    def _refused(self, rank: int, link: FrameLink) -> None:
        self._proc.rank_unreachable(self._uid, rank, link)
        super()._refused(rank, link)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        if flags & FAILURE:
            self._proc.mesh_failed(self._uid, rank, Failure.from_bytes(bytes(body)))
        self._answered(rank)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._answered(rank)  # the code that detected the lost link records the failure

    def _answered(self, rank: int) -> None:
        if self._book(rank, True) and not self._missing:
            self._resolve(VALUE, None)
            self._proc.reactor.call_soon(self._done)  # after a loss has been recorded, too
