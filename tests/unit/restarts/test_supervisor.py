"""A supervisor, answers that arrive late, and a stop that comes during a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, STOPPED
from monarch._restarts import supervisor as supervisors
from monarch._restarts.supervisor import Supervisor, _Asking, _Ending
from tests.unit.runtime.interleavings import Lock, Run, explore


class Everything:
    """A supervisor, its process and that process's reactor in one; it records all notices."""

    def __init__(self) -> None:
        self.booked: list[tuple[int, str, str]] = []
        self.killed: list[int] = []
        self.cancelled = 0
        self.ports: set[int] = set()
        self._proc = self.reactor = self
        self.uid = 1

    def open_port(self, _sink: Any) -> int:
        self.ports.add(7)
        return 7

    def close_port(self, port: int) -> None:
        self.ports.discard(port)

    def call_later(self, _delay: float, callback: Any) -> Any:
        self.late = callback
        return self

    call_at = call_later

    def cancel(self) -> None:
        self.cancelled += 1

    def say(self, *_message: Any) -> bool:
        return True

    def kill_procs(self, uids: list[int]) -> None:
        self.killed += uids

    def _book(self, _known: Any, rank: int, verdict: Any) -> None:
        self.booked.append((rank, verdict.kind, verdict.error))


class Known:
    def __init__(self) -> None:
        self.incarnations = [0, 0]
        self.owned = self
        self.uid = 5


class Way:
    uid = 2


def ending() -> tuple[Everything, Known, _Ending]:
    supervisor, known = Everything(), Known()
    waiting = _Ending(supervisor, known, 1, Way())  # type: ignore[arg-type]
    waiting.ask("it is over", 10.0)
    assert supervisor.ports == {7}
    return supervisor, known, waiting


def test_the_end_of_a_rank_is_booked_when_it_acknowledges() -> None:
    supervisor, _, waiting = ending()
    waiting.deliver(1, 0, None, None)
    assert supervisor.booked == [(1, STOPPED, "it is over")]
    assert (supervisor.ports, supervisor.cancelled) == (set(), 1)


def test_the_end_of_an_old_incarnation_is_not_that_of_the_new_one() -> None:
    """The old incarnation failed before it was asked to stop, and was replaced meanwhile."""
    supervisor, known, waiting = ending()
    known.incarnations[1] += 1
    waiting.deliver(1, 0, None, None)
    assert supervisor.booked == []
    assert (supervisor.ports, supervisor.cancelled) == (set(), 1)


@pytest.mark.parametrize("uid", [1, 2])
def test_one_that_does_not_end_is_killed_unless_it_is_this_process(uid: int) -> None:
    supervisor, _, waiting = ending()
    waiting._link.uid = uid
    supervisor.late()
    assert supervisor.killed == ([] if uid == 1 else [2])
    assert len(supervisor.booked) == (1 if uid == 1 else 0)


def test_whatever_the_order_of_threads_no_rank_is_created_after_the_stop_of_its_mesh() -> None:
    """The reactor restarts a rank, while the owner stops the mesh on a thread of its own."""

    def make(schedule: tuple[tuple[int, int], ...]) -> Run:
        run = Run({supervisors.__file__}, schedule)
        sent: list[str] = []
        known: Any = SimpleNamespace(
            index=0,
            stopped=False,
            restarting=Lock(run),
            mesh=SimpleNamespace(_proc_mesh=SimpleNamespace(_stopped=False, _recipe=None)),
        )
        supervisor: Any = object.__new__(Supervisor)
        supervisor._hosts = None
        supervisor._meshes, supervisor._by_uid = {0: known}, {5: known}
        supervisor._owner = SimpleNamespace(_disown=lambda uid: None)
        reactor = SimpleNamespace(call_soon=lambda *_: None)
        supervisor._proc = SimpleNamespace(reactor=reactor)
        supervisor._restart = lambda *_: sent.append("create")

        def stop() -> None:
            supervisor._disown(5)
            sent.append("stop")

        run.add("reactor", lambda: supervisor._start(((0, 0),)))
        run.add("owner", stop)
        go = run.go

        def checked() -> None:
            go()
            assert sent in (["create", "stop"], ["stop"])

        run.go = checked  # type: ignore[method-assign]
        return run

    assert explore(make, most=2) > 50


@pytest.mark.parametrize(
    ("ended", "ends_by_then", "is_stopped", "is_news"),
    [
        (FAILED, 1, False, True),
        (FAILED, 2, False, False),  # its exit was reported meanwhile
        (FAILED, 1, True, False),
        (None, 1, False, False),
    ],
)
def test_a_wait_for_healthy_ranks_waits_for_the_report_of_an_exit_that_it_has_found(
    ended: str | None, ends_by_then: int, is_stopped: bool, is_news: bool
) -> None:
    known: Any = SimpleNamespace(index=3, ends=[ends_by_then])
    told: list[int] = []
    supervisor: Any = SimpleNamespace(
        _meshes={} if is_stopped else {3: known},
        _unreported=set(),
        _waiting=[],
        _tell_waiting=lambda: told.append(1),
    )
    everything: Any = Everything()
    asking = _Asking._new()
    asking._supervisor = supervisor
    asking._asked = [(known, 0, 1)]
    asking._open(everything, [everything])
    for _ in range(2):  # only the first answer counts
        asking._answer(0, ended)
    assert supervisor._unreported == ({(3, 0)} if is_news else set())
    assert (supervisor._waiting, told) == ([asking], [1])
