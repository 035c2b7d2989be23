"""Taking over what another script left: `reattach`.

The new script takes the *place* of the old one: its process has the same uid in the runtime, so all
books (who owns what, who is whose child) stay as they are. What kept the old one and the new one
apart is the number of its reign (protocol.succession).

What went wrong meanwhile nobody has collected: whoever saw an end remembers it. So the new owner
asks every rank of every mesh that it takes over, as it would ask whether it was created, and gets
what ended it, from the actor's process or, if that is gone, from the agent. Until all have answered
an interim owner stands in the books, who notes what he is told; so no failure is missed or told
twice, whether it comes as an answer or as news.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import FAILED
from monarch._engine.mesh import keepsake as keepsakes
from monarch._engine.mesh.actor_mesh import ActorMesh
from monarch._engine.mesh.attachment import Attachment, occupy
from monarch._engine.mesh.context import Instance, process_context
from monarch._engine.mesh.future import VALUE, Future
from monarch._engine.mesh.host_mesh import before_spawn
from monarch._engine.mesh.proc_mesh import ProcMesh, announce
from monarch._engine.mesh.roll_call import RollCall
from monarch._engine.mesh.transport import addresses_of, gateway
from monarch._engine.protocol.federation import HOME
from monarch._engine.runtime.client import current_proc, succeed
from monarch._engine.runtime.ends import OwnedMesh, Verdict
from monarch._engine.runtime.proc import Proc
from monarch._engine.wire.frame import FAILURE, QUERY

__all__ = ["Reattached", "reattach"]


class Reattached:
    """What another script left, and this one has now; `reattach` returns it."""

    def __init__(self, job_id: str, meshes: list[ProcMesh | ActorMesh]) -> None:
        self.job_id = job_id
        """The name of the job."""
        self.procs: dict[str, ProcMesh] = _by_name(
            [(mesh._proc_name, mesh) for mesh in meshes if isinstance(mesh, ProcMesh)]
        )
        """The meshes of processes by their names (`spawn_procs(name=...)`).

        Of several that have one name the second is ``name-2``, in the order in which they came.
        """
        self.actors: dict[str, Any] = _by_name(
            [(mesh._mesh_name, mesh) for mesh in meshes if isinstance(mesh, ActorMesh)]
        )
        """The meshes of actors by the names they were spawned with; see `procs`."""
        self._failures: Future[list[MeshFailure]] = _Interim.of(list(self.actors.values()))

    @property
    def failures(self) -> Future[list[MeshFailure]]:
        """What has ended of these meshes, and why; one for each actor, oldest first.

        (By the clocks of their hosts.) Resolves when every rank has been asked. These failures are
        told here, and not to `unhandled_fault_hook`; those that come after are told to it.
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
    """Take over the meshes of a script that ended, while its ``driver_grace`` lasts.

    Args:
        job_id: what the script was told by the configuration key ``job_id``, or by `job_id()`.
        workers: addresses of hosts that the script had attached to. Where it is not to be found
            on this machine, what it had on its hosts is: it was lost with its own machine, say.
        secret_file: of the job, if it is not the one that this process would use anyway.
        timeout: seconds for finding it.

    The processes have gone on; what was under way from or to the old script is lost. The meshes
    are this script's now, as if it had spawned them, and are kept for another one when it ends. To
    end everything, call `shutdown_context()`. Restart policies of the old script are not taken
    over: give a `Supervisor` to an actor if it is to outlive the script.

    To be called on the machine of the old script, as the same user (with `workers`: anywhere), and
    before anything else that makes this process a client. Raises LookupError when there is no such
    job, RuntimeError when it has a driver that lives, when the secret is another, a worker is not
    reached and when this process is a client already, TimeoutError, and SecretError without a
    usable secret. Blocks meanwhile.

    >>> reattach("yesterday")
    Traceback (most recent call last):
        ...
    RuntimeError: reattach() must come before any other call that spawns or calls: ...
    """
    from monarch._engine.runtime.job_door import knock  # few scripts do
    from monarch._engine.runtime.secret import find_secret

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
        succeed(welcome["uid"], welcome["reign"], (sock, welcome["agent"]))
    except BaseException:
        sock.close()
        raise
    keepsakes.taken_over(job_id)
    return _take_all(job_id, welcome["keepsakes"])


def _come_home(
    job_id: str, workers: Sequence[str], secret_file: str | None, timeout: float
) -> Reattached:
    """Take over what is on the hosts of a script whose own is gone."""
    from monarch._engine.runtime.gateway import Gateway
    from monarch._engine.runtime.greeting import Route, direct_way
    from monarch._engine.runtime.job_claim import claim
    from monarch._engine.runtime.secret import find_secret

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
        Attachment(coming, secret_file, through, found.reign).ready().get(timeout)
        there.update(coming)
        coming = {name: address for name, address in known.items() if name not in there}
    taken = _take_all(job_id, list(kept.values()))
    keepsakes.keep_job(job_id, found.grace, secret_file)
    return taken


def _take_all(job_id: str, kept: list[str]) -> Reattached:
    root = process_context().actor_instance
    meshes = [_take(root, keepsakes.recall(keepsake)) for keepsake in kept]
    _share_procs(meshes)
    for prepare in before_spawn:  # also what the procs rely on
        prepare()
    return Reattached(job_id, meshes)


def _take(root: Instance, mesh: ProcMesh | ActorMesh) -> ProcMesh | ActorMesh:
    """Make the script the owner of a mesh."""
    mesh._owner = root
    uid = mesh._base if isinstance(mesh, ProcMesh) else mesh._uid
    root._own(uid, mesh)
    proc = current_proc()
    assert proc is not None
    proc.kept.add(uid)
    if isinstance(mesh, ProcMesh):
        if mesh._hosts is not None:
            occupy(set(mesh._hosts._hosts) - {HOME})
        mesh._links_of(mesh._dense_shape())  # so that it can be asked to stop
        announce(mesh)
    return mesh


def _share_procs(meshes: list[ProcMesh | ActorMesh]) -> None:
    """Actors were remembered with their procs, each with its own: make them the same again."""
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
    """The owner of meshes whose ranks are being asked; resolves to what is wrong with them."""

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
        proc.reactor.call_soon(self._ask)  # where all news arrives, too
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


class _Present(RollCall[None]):
    """Asks each rank of a mesh whether it is there; what ended it is booked."""

    __slots__ = ("_done", "_uid")

    _done: Callable[[], None]
    _uid: int

    @classmethod
    def ask(cls, uid: int, links: list[Any], proc: Proc, done: Callable[[], None]) -> None:
        self: _Present = cls._new()
        self._uid = uid
        self._done = done
        port = self._open(proc, links)
        if not links:
            self._end(VALUE, None)
            done()
        for rank, link in enumerate(links):
            if not proc.say(link, QUERY, uid, port, rank):
                proc.rank_unreachable(uid, rank, link)
                verdict = proc.verdicts.get(link.uid)
                if verdict is not None:
                    self.peer_lost(link, verdict)

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if flags & FAILURE:
            self._proc.mesh_failed(self._uid, rank, Failure.from_bytes(bytes(body)))
        self._answered(rank)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._answered(rank)  # the loss of the link is booked by who found it

    def _answered(self, rank: int) -> None:
        if self._book(rank, True) and not self._missing:
            self._resolve(VALUE, None)
            self._proc.reactor.call_soon(self._done)  # when the loss has been booked as well
