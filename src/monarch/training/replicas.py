"""`Replicas`: the side of the script. It spawns the ranks, and calls replaced ones again.

The script's process holds the coordinator, so training ends with the script. Its actors are
supervised: a rank whose process or host is lost is replaced in place, its call is repeated, and its
manager gets the state from the others. While there is no host for a rank, the groups that are
complete go on.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from monarch import _spi
from monarch.actor import (
    Actor,
    ActorError,
    Future,
    ProcMesh,
    Restarted,
    SupervisionError,
    Supervisor,
)
from monarch.training import disk
from monarch.training.coordinator import Authority, Coordinator, Event
from monarch.training.errors import TrainingError
from monarch.training.membership import Membership

if TYPE_CHECKING:
    from monarch._restarts.lost_hosts import Spares

__all__ = ["Replicas"]

P = ParamSpec("P")
TActor = TypeVar("TActor", bound=Actor)

_ROUND = 1.0  # seconds between two looks whether training goes on without a rank
_LONGEST_DELAY = 1.0  # seconds


class _TooLate(Exception):
    """Training is complete without a rank that was lost."""


class Replicas:
    """A data-parallel training whose replicas may die.

    Args:
        groups: the number of replica groups. Each holds one copy of the model.
        width: the number of ranks in each group. With more than one the ranks share a copy among
            themselves, in a way that is up to the program; gradients are averaged between the ranks
            of the same position of all groups.
        min_groups: the number of groups below which training waits for replacements.
        shares: the number of parts of a batch. 0: one for each group that takes part. A fixed
            number makes the result independent of the membership, bit for bit, since groups that
            are left compute the shares of those that are missing.
        timeout: the longest wait for another rank, in seconds. A rank that others have waited for
            so long is killed and replaced. A step, the import of torch and a copy of the state must
            take less.
        copy_every: steps between two copies of each rank's state in the memory of a neighbour. 0:
            no copies, which suffices as long as one group survives. A copy is made beside the
            training, and must be complete when the next one is due, which is waited for. So the
            loss of a host costs at most ``2 * copy_every - 1`` committed steps: one with 1.
        folder: where checkpoints are, a path that all hosts share. If it has one, training goes on
            from there.
        save_every: steps between two checkpoints on disk, which are written in the background.
        max_restarts: see `monarch.actor.Supervisor`.
        within: see `monarch.actor.Supervisor`. A rank that fails again and again is replaced after
            a second at most, since its group stands still meanwhile.
        spares: where the ranks of a lost host go, see `monarch.actor.Supervisor`. Without a host
            for them the other groups go on, if they are at least `min_groups`.

    Raises ValueError for numbers that do not fit.
    """

    def __init__(
        self,
        groups: int,
        *,
        width: int = 1,
        min_groups: int = 1,
        shares: int = 0,
        timeout: float = 60.0,
        copy_every: int = 0,
        folder: str | os.PathLike[str] = "",
        save_every: int = 0,
        max_restarts: int = 100,
        within: float = 600.0,
        spares: Spares | Sequence[Spares] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        if save_every and not folder:
            raise ValueError("save_every needs a folder for the checkpoints")
        path = os.path.abspath(folder) if folder else ""
        core = Membership(
            groups,
            width,
            min_groups=min_groups,
            shares=shares,
            copy_every=copy_every,
            save_every=save_every,
        )
        newest = disk.find_newest(path, width) if path else None
        if newest is not None:
            core.found(newest[0])
        found = newest[1] if newest is not None else ""
        self._core = core
        self._authority = Authority(core, timeout=timeout, folder=path, found=found)
        self._supervisor = Supervisor(
            max_restarts=max_restarts,
            within=within,
            max_backoff=_LONGEST_DELAY,
            on_restart=self._restarted,
            spares=spares,
            min_size=min_groups * width,
        )
        self._changed = threading.Condition()
        self._issue: dict[str, Callable[[int], Future[Any]]] = {}
        self._calls: dict[tuple[str, int], Future[Any]] = {}

    @property
    def coordinator(self) -> Coordinator:
        """The argument of `Manager`. It can be sent to actors."""
        return self._authority.handle

    @property
    def committed(self) -> int:
        """The number of steps that are committed."""
        return self._core.committed

    @property
    def events(self) -> list[Event]:
        """Rounds, commits and losses so far, oldest first."""
        return list(self._authority.events)

    @property
    def restarts(self) -> list[Restarted]:
        """The ranks that were replaced so far, oldest first."""
        return self._supervisor.restarts

    def spawn(
        self,
        procs: ProcMesh,
        name: str,
        Class: Callable[P, TActor],  # noqa: N803 - as in `Supervisor.spawn`
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TActor:
        """Spawn one actor for each rank, supervised; return the mesh at once.

        The ranks of the mesh are those of the training, group after group. Raises ValueError if
        the mesh has another size.
        """
        size = self._core.groups * self._core.width
        if procs.size() != size:
            raise ValueError(
                f"{self._core.groups} replica groups of {self._core.width} need {size} procs, and "
                f"the mesh has {procs.size()}"
            )
        return self._supervisor.spawn(procs, name, Class, *args, **kwargs)

    def run(self, actors: Actor, method: str, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call an endpoint on every rank, again on those that are replaced; return the results.

        Blocks until all ranks have returned. The result has those of all ranks, by rank; only a
        rank that was lost after the others had returned is missing.

        Raises `ActorError` if the endpoint raises on a rank (training of the others ends as well),
        and `SupervisionError` if ranks were lost too often.
        """
        mesh: Any = actors
        name = mesh._mesh_name
        flat = mesh.flatten("rank")
        self._core_call(self._core.resume)

        def issue(rank: int) -> Future[Any]:
            future: Future[Any] = getattr(flat.slice(rank=rank), method).call_one(*args, **kwargs)
            return future

        size = mesh.size()
        with self._changed:
            if name in self._issue:
                raise RuntimeError(f"{name} is running already")
            self._issue[name] = issue
            self._calls |= {(name, rank): issue(rank) for rank in range(size)}
        try:
            return self._collect(name, size)
        except BaseException as error:  # the other ranks would wait for those that have ended
            why = f"Replicas.run() has ended on an error: {type(error).__name__}"
            self._core_call(functools.partial(self._authority.stop, why))
            raise
        finally:
            with self._changed:
                del self._issue[name]
                for rank in range(size):
                    del self._calls[name, rank]

    def _collect(self, name: str, size: int) -> dict[int, Any]:
        results: dict[int, Any] = {}
        errors: list[ActorError] = []
        for rank in range(size):
            try:
                results[rank] = self._result(name, rank)
            except _TooLate:
                continue
            except ActorError as error:
                late = isinstance(error.exception, TrainingError)
                if late and self._core.closed:
                    continue  # lost after the others had returned
                errors.append(error)
        if not errors:
            return results
        first = [each for each in errors if not isinstance(each.exception, TrainingError)]
        raise (first or errors)[0]

    def _result(self, name: str, rank: int) -> Any:
        while True:
            with self._changed:
                future = self._calls[name, rank]
            try:
                return future.get()
            except SupervisionError:
                if not self._is_called_again(name, rank, future):
                    raise

    def _is_called_again(self, name: str, rank: int, future: Future[Any]) -> bool:
        """Wait until a rank that was lost is replaced, and its call repeated.

        Return False if training fails meanwhile, or if for `timeout` no rank takes part. Raises
        _TooLate if it is complete without the rank, SupervisionError if the supervisor has given
        up.
        """
        is_new = functools.partial(self._is_new, name, rank, future)
        idle = 0.0
        while idle < self._authority.handle.timeout:
            self._supervisor.healthy.get()
            with self._changed:
                if self._changed.wait_for(is_new, _ROUND):
                    return True
            if self._core.closed:
                raise _TooLate
            if self._core.failed:
                return False
            idle = 0.0 if self._core.active else idle + _ROUND
        return False

    def _is_new(self, name: str, rank: int, future: Future[Any]) -> bool:
        return self._calls[name, rank] is not future

    def _restarted(self, event: Restarted) -> None:
        with self._changed:
            issue = self._issue.get(event.mesh_name)
            if issue is not None:
                self._calls[event.mesh_name, event.rank] = issue(event.rank)
                self._changed.notify_all()

    @staticmethod
    def _core_call(function: Callable[[], object]) -> None:
        """Run a function on the reactor thread, which owns the core; wait until it has run."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        _spi.reactor_call()(run)
        done.wait()


Replicas.__module__ = "monarch.training"
