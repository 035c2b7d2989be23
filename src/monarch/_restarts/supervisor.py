"""`Supervisor`: meshes whose failed ranks are restarted.

`policy` decides what to restart, and when. The actor or script that makes a supervisor
owns its meshes as usual, but receives a failure only when the supervisor gives up. Until then the
record of a supervised mesh (`OwnedMesh`) names the supervisor as its owner, so the supervisor
receives the failures.

A rank is replaced in place. Its mesh, all slices, and copies in other processes keep referring to
the same rank. Messages in flight to the old incarnation fail with the reason of its exit, and never
reach the new one: `epoch_barrier` sees to that for an actor, and if the process is
replaced as well they are lost with its sockets. The new incarnation is constructed from the class
and the arguments given to `spawn`, which were pickled at that time and kept.

When a whole host is lost, its ranks wait until another worker serves the host (`lost_hosts`); then
they are replaced as if the host had only lost its processes. If there is no worker for the host and
the mesh may be smaller, the ranks are vacant, and the search is repeated.

All decisions are made on the reactor thread, in the order in which events arrive, so no locks are
needed. Exits are grouped by process before they are reported to the core: an exit of a process ends
all actors in it, and counts as one fault.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from monarch._restarts.lost_hosts import LostHosts, SpareHosts, Spares, read_spares
from monarch._restarts.policy import Child, Effect, Restarts, Start, Strategy, Terminate
from monarch._spi import (
    FAILED,
    FAILURE,
    HOME,
    INFRASTRUCTURE,
    NOT_CREATED,
    QUERY,
    RAISED,
    STOP,
    STOPPED,
    USER,
    VALUE,
    ActorMesh,
    Alarm,
    Blueprint,
    Failure,
    Future,
    Gather,
    OwnedMesh,
    Verdict,
    check_constructor,
    client_proc,
    environment,
    format_remote,
    headline,
    rebuild_error,
    save_handle,
    spawn_actors,
)
from monarch.actor import Actor, MeshFailure, ProcMesh, SupervisionError, context

if TYPE_CHECKING:
    from monarch._spi import FrameLink, Timer

__all__ = ["Restarted", "Supervisor"]

P = ParamSpec("P")
TActor = TypeVar("TActor", bound=Actor)

_SEARCH_AGAIN = 1.0  # seconds before a second search for a host, doubled for each further one
_LONGEST_PAUSE = 15.0  # seconds between two searches


class Restarted(NamedTuple):
    """One replacement of one rank.

    Attributes:
        mesh_name: the name given to `Supervisor.spawn`.
        rank: the rank in the mesh as it was spawned.
        incarnation: how often this rank has been restarted, this time included.
        reason: the report of the failure of the previous incarnation. For a rank that was replaced
            along with another, the reason with which it was stopped.
        seconds: time from the failure until the new incarnation was constructed and restored.
        host: the address of the worker on whose host it runs; empty for this machine.
    """

    mesh_name: str
    rank: int
    incarnation: int
    reason: str
    seconds: float
    host: str = ""


class _Supervised:
    """A supervisor's record of one of its meshes."""

    __slots__ = (
        "blueprint",
        "ends",
        "incarnations",
        "index",
        "mesh",
        "owned",
        "restarting",
        "since",
        "stopped",
    )

    def __init__(self, index: int, mesh: ActorMesh, blueprint: Blueprint, owned: OwnedMesh) -> None:
        self.index = index
        self.mesh = mesh
        self.blueprint = blueprint
        self.owned = owned
        self.incarnations = [0] * len(owned.links)
        self.ends = [0] * len(owned.links)
        self.since: dict[int, tuple[float, str]] = {}  # rank that is down -> since when, and why
        self.stopped = False  # the owner stops the mesh
        # Held while a rank is restarted, and while `stopped` is set. So each request to create an
        # actor precedes the request to stop it on the same link. A signal handler may stop a mesh
        # on the thread that restarts it.
        self.restarting = threading.RLock()


class Supervisor:
    """Restarts failed ranks of the meshes it spawns, as the supervisors of Erlang/OTP do.

    Args:
        strategy: what is replaced when a rank fails. ``"one_for_one"``: that rank.
            ``"one_for_all"``: all ranks of all meshes of this supervisor. ``"rest_for_one"``: that
            rank, the ranks after it in its mesh, and the meshes spawned after its mesh.
        max_restarts: the number of faults within any `within` seconds that lead to a restart. At
            one more, the supervisor ends its meshes and fails: its owner receives the failure, in
            `__supervise__` or the fault hook.
        within: seconds, see `max_restarts`.
        backoff: seconds before the second restart of a rank, doubled for each further one. The
            first restart is immediate.
        max_backoff: the longest such delay, in seconds. A rank that has run for so long, or for
            `within`, is restarted at once again.
        fresh_process: whether to replace the process as well when an actor failed and its process
            still runs. All other actors of that process end with it. A process that exited is
            replaced in any case.
        patience: seconds within which a rank that is replaced along with another must stop in good
            order. After that its process is killed.
        on_restart: called with a `Restarted` for each replacement, once the new incarnation runs.
            Must be a plain function. It runs between messages of the actor that owns the
            supervisor or, in a script, on a thread of its own. An exception counts as a failure of
            a mesh of the owner.
        spares: where the ranks of a lost host go: a `HostMesh` of spare hosts; a job, which starts
            a new host in the place of the lost one (`JobTrait.replace_host`); a function that takes
            the address of the lost host's worker and returns that of another one; or a list of
            these, in the order of their use. The spare hosts belong to the supervisor: a host that
            is used as a spare loses what else this program runs there. None: the ranks come back
            when the worker loop of their host answers again.
        min_size: the number of ranks with which a mesh may go on while there is no host for the
            others. Those are started as soon as there is one; with ``"one_for_all"`` and
            ``"rest_for_one"`` other ranks are replaced along with them, as after a failure. None:
            without a host for all ranks the supervisor tries again `max_restarts` times, and gives
            up.

    The ranks of a lost host are started on the host's own worker, if it answers at once, or else on
    a spare host. Mesh, slices, and handles in other processes refer to the ranks there, whoever
    spawned them. A worker that was replaced becomes a spare, once it answers. If the lost host was
    only cut off, its processes end by themselves; hosts that know of the loss take no message of
    theirs.

    While a rank is down, calls to it raise `SupervisionError` immediately. Calls to other ranks,
    and to slices without this rank, are not affected. A rank that exits deliberately (``stop``,
    exit code 0) is not restarted.

    >>> import os
    >>> from monarch.actor import Actor, Supervisor, SupervisionError, endpoint, this_host
    >>> class Worker(Actor):
    ...     @endpoint
    ...     def pid(self): return os.getpid()
    ...     @endpoint
    ...     def crash(self): os._exit(1)
    >>> procs = this_host().spawn_procs({"gpus": 2})
    >>> supervisor = Supervisor("one_for_one", max_restarts=3, within=60)
    >>> workers = supervisor.spawn(procs, "workers", Worker)
    >>> before = workers.pid.call().get().values()
    >>> try:
    ...     workers.slice(gpus=1).crash.call_one().get()
    ... except SupervisionError:
    ...     supervisor.healthy.get(timeout=30)
    >>> after = workers.pid.call().get().values()
    >>> [a == b for a, b in zip(before, after)]
    [True, False]
    >>> [(event.rank, event.incarnation) for event in supervisor.restarts]
    [(1, 1)]
    >>> procs.stop().get()
    """

    def __init__(
        self,
        strategy: Strategy = "one_for_one",
        *,
        max_restarts: int = 3,
        within: float = 60.0,
        backoff: float = 0.1,
        max_backoff: float = 10.0,
        fresh_process: bool = False,
        patience: float = 3.0,
        on_restart: Callable[[Restarted], object] | None = None,
        spares: Spares | Sequence[Spares] | None = None,
        min_size: int | None = None,
    ) -> None:
        import inspect

        if inspect.iscoroutinefunction(on_restart):
            raise TypeError("on_restart must be a plain function, which may start a task")
        if not (math.isfinite(patience) and patience >= 0):
            raise ValueError(f"patience must be a non-negative number of seconds, not {patience}")
        self._core = Restarts(
            strategy,
            max_restarts=max_restarts,
            within=within,
            backoff=backoff,
            max_backoff=max_backoff,
            min_size=min_size,
        )
        self._min_size = min_size
        self._limits = f"max_restarts={max_restarts} within {within:g} s"
        self._owner = context().actor_instance
        self._proc = client_proc()
        self._fresh_process = fresh_process
        self._patience = patience
        self._on_restart = on_restart
        self._spawned = 0
        self._meshes: dict[int, _Supervised] = {}  # by index, while any rank may be restarted
        self._by_uid: dict[int, _Supervised] = {}
        self._restarts: list[Restarted] = []
        self._ended: list[tuple[int, Child, Failure]] = []  # proc uid, child: not yet reported
        self._dying: dict[int, list[tuple[Child, Failure]]] = {}  # reported when the process exits
        self._causes: dict[Child, Failure] = {}
        self._alarm = Alarm(self._proc.reactor.call_at, self._tick)
        self._waiting: list[Future[None]] = []
        self._unreported: set[Child] = set()  # known to have ended; `child_ended` will be called
        self._fallen: Failure | None = None
        self._hosts: LostHosts | None = None
        if spares is not None or min_size is not None:
            self._hosts = LostHosts(self._proc, spares, self._host_found, self._no_host)
        self._lost: dict[str, float] = {}  # lost hosts, and the pause before the next search
        self._pauses: dict[str, Timer] = {}  # lost hosts for which the next search is due later
        self._held: dict[str, list[Child]] = {}  # to start when there is a worker for the host

    # -- for users -------------------------------------------------------------------------------

    def spawn(
        self,
        procs: ProcMesh,
        name: str,
        Class: Callable[P, TActor],  # noqa: N803 - the interface's name
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TActor:
        """Spawn actors like `ProcMesh.spawn`; this supervisor restarts their failed ranks.

        Return the mesh at once, without blocking. The order of calls is the order of
        ``"rest_for_one"``. Class and arguments are pickled now, and kept for restarts. Raises what
        `ProcMesh.spawn` raises, and RuntimeError if this supervisor has given up.
        """
        if self._fallen is not None:
            raise RuntimeError(f"the supervisor gave up: {self._fallen.report()}")
        if not isinstance(procs, ProcMesh):
            raise TypeError(
                "Supervisor.spawn takes the procs first, then the name and the class: "
                f"spawn(procs, 'name', Class, ...), not {procs!r} as the procs"
            )
        cls = check_constructor(Class, args, kwargs)
        charge = self._take_charge
        mesh: Any = spawn_actors(
            procs, name, cls, args, kwargs, owner=self._owner, take_charge=charge
        )
        save_handle(self._owner, mesh._uid, mesh)
        actors: TActor = mesh
        return actors

    def add_spares(self, spares: Spares | Sequence[Spares]) -> None:
        """Add spare hosts, after those given so far; the argument is that of the constructor.

        Returns at once. Ranks that wait for a host, or are vacant (`min_size`), are started there:
        immediately, or when an attempt to reach their own host has ended, which is dialed for at
        most three times `host_timeout`. A host that serves in the place of another one already is
        no spare. Raises TypeError for an object that is no spare, ValueError for the client's own
        host, and RuntimeError if this supervisor has given up.

        >>> from monarch.actor import Supervisor
        >>> Supervisor(min_size=1).add_spares("a host")
        Traceback (most recent call last):
        TypeError: spares must be a HostMesh, a job, or a function that ... not 'a host'
        """
        if self._fallen is not None:
            raise RuntimeError(f"the supervisor gave up: {self._fallen.report()}")
        added = read_spares(spares)
        self._proc.reactor.call_soon(self._add_spares, added)

    @staticmethod
    def of(mesh: Any) -> Supervisor | None:
        """Return the supervisor that restarts the ranks of this mesh; None if there is none here.

        `mesh` is what `spawn` returned, or a slice of it. A supervisor is known in the process that
        made it, until it has given up or the mesh is stopped. Does not block.

        >>> from monarch.actor import Actor, Supervisor, endpoint, this_host
        >>> class Worker(Actor):
        ...     @endpoint
        ...     def work(self): return 1
        >>> procs = this_host().spawn_procs()
        >>> supervisor = Supervisor()
        >>> Supervisor.of(supervisor.spawn(procs, "guarded", Worker)) is supervisor
        True
        >>> Supervisor.of(procs.spawn("bare", Worker)) is None
        True
        >>> procs.stop().get()
        """
        owned = client_proc().owned.get(getattr(mesh, "_uid", 0))
        owner: Any = None if owned is None else owned.owner
        return owner if isinstance(owner, Supervisor) else None

    @property
    def restarts(self) -> list[Restarted]:
        """The replacements so far, oldest first."""
        return list(self._restarts)

    def running(self, mesh: Any) -> list[int]:
        """Return the ranks of a supervised mesh that run now, constructed and restored.

        `mesh` is what `spawn` returned, or a slice of it; the ranks are those of the whole mesh.
        Empty if this supervisor does not supervise the mesh, or has given up.
        """
        known = self._by_uid.get(getattr(mesh, "_uid", 0))
        if known is None:
            return []
        ranks = range(len(known.owned.links))
        return [rank for rank in ranks if self._core.runs((known.index, rank))]

    @property
    def healthy(self) -> Future[None]:
        """A future that resolves once every rank runs: constructed, and restored if replaced.

        With `min_size`, ranks for which there is no host do not count; `running` has the others.
        The future raises `SupervisionError` if the supervisor has given up, or does so meanwhile.
        """
        future: _Asking = _Asking._new()
        future._supervisor = self
        self._proc.reactor.call_soon(future.ask)
        return future

    def __repr__(self) -> str:
        names = ", ".join(repr(known.mesh._mesh_name) for known in self._by_uid.values())
        return f"<Supervisor of {names or 'nothing'}>"

    # -- events ----------------------------------------------------------------------------------

    def _take_charge(self, mesh: ActorMesh, blueprint: Blueprint, owned: OwnedMesh) -> None:
        """Supervise a new mesh and create its actors.

        `spawn_actors` calls this when the mesh is recorded and nothing has been sent.
        """
        owned.owner = self
        owned.supervised = True
        owned.links = list(owned.links)  # a copy, since restarts change it
        known = _Supervised(self._spawned, mesh, blueprint, owned)
        self._spawned += 1
        self._meshes[known.index] = known
        self._by_uid[owned.uid] = known
        ranks = range(len(owned.links))

        def add() -> None:
            self._perform(self._core.add_children(known.index, ranks))

        self._proc.reactor.call_soon(add)
        for rank in ranks:
            self._make(known, rank, "")

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        """Handle the exit of a rank of a supervised mesh; called on any thread."""
        self._proc.reactor.call_soon(self._note, mesh, rank, failure)

    def _disown(self, uid: int) -> None:
        """Stop supervising a mesh, since its owner is about to stop it."""
        self._owner._disown(uid)
        stopped = self._by_uid.get(uid)
        if stopped is not None:
            with stopped.restarting:
                stopped.stopped = True

        def forget() -> None:
            known = self._by_uid.get(uid)
            if known is not None:
                self._drop(known)
                self._perform(self._core.remove(known.index, environment.current.now()))

        self._proc.reactor.call_soon(forget)

    # -- on the reactor thread -------------------------------------------------------------------

    def _drop(self, known: _Supervised) -> None:
        """Forget a mesh of which no rank is to be restarted."""
        del self._by_uid[known.owned.uid]
        self._unreported = {child for child in self._unreported if child[0] != known.index}
        if not self._core.giving_up:  # else `_give_up` may need the mesh: it may be the cause
            del self._meshes[known.index]
            for rank in range(len(known.owned.links)):
                self._causes.pop((known.index, rank), None)

    def _stopped(self, child: Child, now: float) -> None:
        """Handle a deliberate stop of a rank; forget the mesh with the last one."""
        self._perform(self._core.child_stopped(child, now))
        known = self._meshes.get(child[0])
        if known is None or known.owned.uid not in self._by_uid:
            return
        if len(known.owned.gone) < len(known.owned.links):
            return
        if not self._core.has_children(known.index):
            self._drop(known)
            self._proc.owned.pop(known.owned.uid, None)
            self._owner._disown(known.owned.uid)

    def _note(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        known = self._by_uid.get(mesh.uid)
        if known is None:
            return
        child = (known.index, rank)
        known.ends[rank] += 1
        self._unreported.discard(child)
        uid = mesh.links[rank].uid
        lives_on = failure.kind == FAILED and self._proc.verdicts.get(uid) is None
        if uid in self._dying:
            self._dying[uid].append((child, failure))
        elif self._fresh_process and lives_on and uid != self._proc.uid:
            self._dying[uid] = [(child, failure)]
            self._proc.kill_procs([uid])
            self._proc.when_gone(uid, lambda _verdict: self._buried(uid))
        else:
            if not self._ended:
                self._proc.reactor.call_soon(self._drain)
            self._ended.append((uid, child, failure))

    def _buried(self, uid: int) -> None:
        """Report the exits of a process that was killed here, once it has exited.

        The exits of its other ranks have been recorded by then.
        """

        def report() -> None:
            ends = self._dying.pop(uid)
            self._ended += [(uid, child, failure) for child, failure in ends]
            self._drain()

        self._proc.reactor.call_soon(report)

    def _drain(self) -> None:
        """Report the collected exits to the core; those of one process are one fault."""
        now = environment.current.now()
        ended, self._ended = self._ended, []
        groups: dict[object, list[Child]] = {}
        for uid, child, failure in ended:
            known = self._meshes.get(child[0])
            if known is None or self._is_held(child):
                continue
            if failure.kind == FAILED:
                self._causes[child] = failure
                known.since[child[1]] = (now, failure.report())
                # An infrastructure failure without a pid, such as a lost host, is one event that
                # ends many processes.
                verdict = failure.verdict
                of_many = verdict.cause == INFRASTRUCTURE and not verdict.pid
                groups.setdefault(verdict if of_many else uid, []).append(child)
                if of_many:
                    self._host_lost(known, child[1])
            else:
                self._stopped(child, now)
        for children in groups.values():
            self._perform(self._core.children_failed(children, now))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Terminate):
                for child in effect.children:
                    self._terminate(child)
            elif isinstance(effect, Start):
                self._start(effect.children)
            else:
                self._give_up(effect.cause)
        self._alarm.set(self._core.deadline)
        self._tell_waiting()

    def _tick(self) -> None:
        self._perform(self._core.tick(environment.current.now()))

    def _terminate(self, child: Child) -> None:
        """End a running rank, so that it can be replaced along with one that failed."""
        known = self._meshes[child[0]]
        rank = child[1]
        if self._is_held(child):  # it has not been started
            for held in self._held.values():
                held[:] = [other for other in held if other != child]
            self._proc.reactor.call_soon(self._forget, child)
            return
        link = known.owned.links[rank]
        reason = "replaced along with a rank that failed"
        known.since[rank] = (environment.current.now(), reason)
        if self._fresh_process and link.uid != self._proc.uid:
            self._proc.kill_procs([link.uid])  # `child_ended` is called when the process exits
            return
        _Ending(self, known, rank, link).ask(reason, self._patience)

    # -- lost hosts ------------------------------------------------------------------------------

    def _host_of(self, known: _Supervised, rank: int) -> str:
        """Return the host of a rank; empty if its process was spawned by another process."""
        procs = known.mesh._proc_mesh
        recipe = procs._recipe
        return "" if recipe is None else recipe.entries[procs._shape.ndslice[rank]]["host"]

    def _is_held(self, child: Child) -> bool:
        return any(child in held for held in self._held.values())

    def _host_lost(self, known: _Supervised, rank: int) -> None:
        """Search a worker for the host of a rank, which was lost with it."""
        host = self._host_of(known, rank)
        if self._hosts is None or host in ("", HOME, self._proc.spec.get("host", HOME)):
            return
        if host not in self._lost:
            self._lost[host] = _SEARCH_AGAIN
            self._hosts.search(host)

    def _add_spares(self, spares: SpareHosts) -> None:
        """Add spares, and search again for the hosts that had none."""
        if self._hosts is None:
            self._hosts = LostHosts(self._proc, None, self._host_found, self._no_host)
        self._hosts.add(spares)
        for host in list(self._pauses):
            self._lost[host] = _SEARCH_AGAIN
            self._search_again(host)

    def _host_found(self, host: str) -> None:
        """Start the ranks that waited for a worker of `host`, and those that had no place."""
        self._lost.pop(host, None)
        self._cancel_pause(host)
        now = environment.current.now()
        held = [child for child in self._held.pop(host, []) if child[0] in self._meshes]
        vacant = [child for child in self._children_on(host) if self._core.is_vacant(child)]
        self._start(tuple(held))
        self._perform(self._core.children_placed(vacant, now))

    def _children_on(self, host: str) -> list[Child]:
        return [
            (known.index, rank)
            for known in self._by_uid.values()
            for rank in range(len(known.owned.links))
            if self._host_of(known, rank) == host
        ]

    def _no_host(self, host: str, why: str) -> None:
        """Handle that no worker was found for `host`."""
        held = self._held.pop(host, [])
        if self._min_size is None:
            text = f"no worker can serve in the place of host {host}:\n{why}"
            for index, rank in held:
                known = self._meshes.get(index)
                if known is not None:
                    known.owned.gone.pop(rank, None)
                    self._book(known, rank, Verdict(FAILED, text, INFRASTRUCTURE))
            return
        self._perform(self._core.children_vacant(held, environment.current.now()))
        pause = self._lost[host]
        self._lost[host] = min(2 * pause, _LONGEST_PAUSE)
        self._cancel_pause(host)
        again = functools.partial(self._search_again, host)
        self._pauses[host] = self._proc.reactor.call_later(pause, again)

    def _cancel_pause(self, host: str) -> None:
        if (timer := self._pauses.pop(host, None)) is not None:
            timer.cancel()

    def _search_again(self, host: str) -> None:
        self._cancel_pause(host)
        if self._hosts is None or host not in self._lost:
            return
        if self._children_on(host):
            self._hosts.search(host)
        else:  # their meshes were stopped
            del self._lost[host]

    # -- starting --------------------------------------------------------------------------------

    def _start(self, children: tuple[Child, ...]) -> None:
        launches: list[Callable[[], None]] = []
        for index, rank in children:
            known = self._meshes[index]
            host = self._host_of(known, rank)
            if self._hosts is not None and host in self._lost:
                self._held.setdefault(host, []).append((index, rank))
                self._hosts.search(host)
                continue
            with known.restarting:
                if known.stopped or known.mesh._proc_mesh._stopped:
                    self._proc.reactor.call_soon(self._forget, (index, rank))
                    continue
                try:
                    self._restart(known, rank, launches)
                except (OSError, RuntimeError) as error:  # out of descriptors; other's proc
                    text = f"error creating proc: {error}"
                    self._book(known, rank, Verdict(FAILED, text, code=NOT_CREATED))
        for launch in launches:
            launch()

    def _forget(self, child: Child) -> None:
        self._stopped(child, environment.current.now())

    def _book(self, known: _Supervised, rank: int, verdict: Verdict) -> None:
        """Record the exit of a rank, if none is recorded: an exit is reported once."""
        failure = known.mesh.failure_of_rank(rank, verdict)
        self._proc.mesh_failed(known.owned.uid, rank, failure)

    def _restart(self, known: _Supervised, rank: int, launches: list[Callable[[], None]]) -> None:
        proc = self._proc
        procs = known.mesh._proc_mesh
        uid = proc.newest(procs._uids()[rank])
        if uid in proc.verdicts:
            link, launch = procs._replace(rank)
            launches.append(launch)
        else:
            link = proc.link_to(uid)
        known.owned.links[rank] = link
        known.owned.gone.pop(rank, None)
        known.incarnations[rank] += 1
        self._make(known, rank, known.since[rank][1])

    def _make(self, known: _Supervised, rank: int, reason: str) -> None:
        link = known.owned.links[rank]
        starting = _Starting(self, known, rank, link)
        if not known.blueprint.make(link, rank, starting.first(reason)):
            starting.close()
            self._proc.rank_unreachable(known.owned.uid, rank, link)

    def _started(self, known: _Supervised, rank: int) -> None:
        now = environment.current.now()
        if not self._core.is_alive((known.index, rank)):  # it is being terminated already
            return
        self._core.child_started((known.index, rank), now)
        incarnation = known.incarnations[rank]
        if incarnation and rank in known.since:
            since, reason = known.since.pop(rank)
            host = self._host_of(known, rank)
            where = self._hosts.address(host) if self._hosts is not None else host
            seconds = now - since
            event = Restarted(known.mesh._mesh_name, rank, incarnation, reason, seconds, where)
            self._restarts.append(event)
            self._announce(event)
        self._tell_waiting()

    def _announce(self, event: Restarted) -> None:
        callback = self._on_restart
        if callback is None:
            return
        owner = self._owner

        def call() -> None:
            try:
                with owner._acting():
                    callback(event)
            except BaseException as error:  # raised by code of the owner, who receives a failure
                text = f"on_restart raised: {headline(error)}"
                verdict = Verdict(FAILED, text, USER, trace=format_remote(error))
                owner.child_failed(Failure(str(owner), verdict))

        if owner._cell is None:
            environment.current.start_thread("monarch-restart", call)
        else:
            owner._cell.interrupt(call)

    def _tell_waiting(self) -> None:
        if self._fallen is not None:
            error = SupervisionError(f"the supervisor gave up: {self._fallen.report()}")
            error.failure = MeshFailure(self._fallen)
            for future in self._waiting:
                future._resolve(RAISED, error)
        elif self._core.settled and not (self._ended or self._dying or self._unreported):
            for future in self._waiting:
                future._resolve(VALUE, None)
        else:
            return
        self._waiting.clear()

    def _give_up(self, cause: Child) -> None:
        known = self._meshes[cause[0]]
        last = self._causes[cause]
        note = f"not restarted again: that would be more than {self._limits}"
        if self._core.is_vacant(cause):
            note = f"no host for it, and its mesh may not go on with fewer than {self._min_size}"
        verdict = last.verdict._replace(error=f"{last.error}\n({note})")
        self._fallen = fallen = Failure(
            last.actor, verdict, last.mesh_name, last.ranks, last.child, last.raised, last.others
        )
        for other in self._by_uid.values():
            self._proc.owned.pop(other.owned.uid, None)
            self._owner._disown(other.owned.uid)
        self._by_uid.clear()
        self._meshes.clear()
        self._owner.child_ended(known.owned, cause[1], fallen)


class _Asking(Gather[None]):
    """A `healthy` future: queries the state of every rank before it may resolve.

    The caller of `healthy` may know of an exit that is not recorded here yet: an actor that fails
    or stops first answers its callers, then runs its clean-up, and then reports to its owner.
    """

    __slots__ = ("_asked", "_supervisor")

    _asked: list[tuple[_Supervised, int, int]]  # mesh, rank, exits so far
    _supervisor: Supervisor

    def ask(self) -> None:
        supervisor = self._supervisor
        supervisor._drain()
        noted = {child for ends in supervisor._dying.values() for child, _ in ends}
        noted.update(*supervisor._held.values())
        self._asked = [
            (known, rank, known.ends[rank])
            for known in supervisor._by_uid.values()
            for rank in range(len(known.owned.links))
            if supervisor._core.is_alive((known.index, rank)) and (known.index, rank) not in noted
        ]
        self._open(supervisor._proc, [known.owned.links[rank] for known, rank, _ in self._asked])
        if not self._asked:
            self._close()
            self._wait()
        for number, link in enumerate(self._links):
            uid = self._asked[number][0].owned.uid
            if not self._proc.say(link, QUERY, uid, self._port, number):
                self._answer(number, FAILED)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        ended = Failure.from_bytes(body).kind if flags & FAILURE else None
        self._proc.reactor.call_soon(self._answer, rank, ended)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._answer(rank, verdict.kind)

    def _answer(self, number: int, ended: str | None) -> None:
        if self._book(number, True):
            known, rank, ends = self._asked[number]
            is_news = known.ends[rank] == ends and known.index in self._supervisor._meshes
            if ended is not None and is_news:
                self._supervisor._unreported.add((known.index, rank))
            if not self._missing:
                self._wait()

    def _wait(self) -> None:
        self._supervisor._waiting.append(self)
        self._supervisor._tell_waiting()


class _Starting:
    """A sink: waits until a new incarnation has answered its first message."""

    def __init__(
        self, supervisor: Supervisor, known: _Supervised, rank: int, link: FrameLink
    ) -> None:
        self._supervisor = supervisor
        self._known = known
        self._rank = rank
        self._link = link
        self._port = supervisor._proc.open_port(self)

    def first(self, reason: str) -> tuple[Any, ...]:
        return self._port, self._known.incarnations[self._rank], reason

    def close(self) -> None:
        self._supervisor._proc.close_port(self._port)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        proc = self._supervisor._proc
        self.close()
        if not flags:
            started = functools.partial(self._supervisor._started, self._known, rank)
            proc.reactor.call_soon(started)
            return
        if not flags & FAILURE:  # the bootstrap callable of its process raised
            verdict = Verdict(FAILED, str(rebuild_error(body)), USER)
            proc.reactor.call_soon(self._supervisor._book, self._known, rank, verdict)
        # Otherwise the actor failed. Its process reports the failure when its clean-up is done.

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        if link is self._link:
            self.close()  # `child_ended` reports the exit


class _Ending:
    """A sink: waits for a rank to acknowledge that it stopped."""

    def __init__(
        self, supervisor: Supervisor, known: _Supervised, rank: int, link: FrameLink
    ) -> None:
        self._supervisor = supervisor
        self._known = known
        self._rank = rank
        self._link = link
        self._incarnation = known.incarnations[rank]
        self._port = 0
        self._reason = ""
        self._timer: Timer | None = None

    def ask(self, reason: str, patience: float) -> None:
        self._reason = reason
        proc = self._supervisor._proc
        self._port = proc.open_port(self)
        self._timer = proc.reactor.call_later(patience, self._kill)
        uid = self._known.owned.uid
        if not proc.say(self._link, STOP, uid, self._port, self._rank, reason.encode()):
            self._close()  # already exited: `child_ended` reports it

    def _kill(self) -> None:
        supervisor = self._supervisor
        if self._link.uid == supervisor._proc.uid:  # never kill this process: abandon the actor
            self.deliver(self._rank, 0, None, self._link)
        else:
            supervisor._proc.kill_procs([self._link.uid])

    def _close(self) -> None:
        self._supervisor._proc.close_port(self._port)
        if self._timer is not None:
            self._timer.cancel()

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._close()
        # If the rank failed before it handled the stop, the failure is recorded already: a failure
        # is reported before a stop is acknowledged. The rank may even have been replaced meanwhile.
        if self._incarnation == self._known.incarnations[self._rank]:
            verdict = Verdict(STOPPED, self._reason)
            self._supervisor._book(self._known, self._rank, verdict)

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        if link is self._link:
            self._close()  # `child_ended` reports the exit
