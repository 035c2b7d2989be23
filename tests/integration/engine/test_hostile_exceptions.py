"""Every call ends, even if its exception misbehaves when it is formatted, pickled or raised."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    Restart,
    SupervisionError,
    Supervisor,
    endpoint,
    this_host,
)
from tests.hostile import HOSTILE, WORST, Answers, hostile

from .conftest import WAIT

Fresh = Callable[..., Any]
LONGEST_REPORT = 200_000


class Sync(Actor):
    def __init__(self, construct: str = "", cleanup: str = "", restart: str = "") -> None:
        self.cleaned, self.restarted = cleanup, restart
        if construct:
            raise hostile(construct)

    @endpoint
    def well(self) -> int:
        return 1

    @endpoint
    def fail(self, how: str) -> None:
        raise hostile(how)

    @endpoint
    def answer(self, how: str) -> Any:
        return vars(Answers)[how]()

    @endpoint
    def exit(self) -> None:
        raise SystemExit("on request")

    def __cleanup__(self, error: Exception | None) -> None:
        if self.cleaned:
            raise hostile(self.cleaned)

    def __restart__(self, restart: Restart) -> None:
        if self.restarted:
            raise hostile(self.restarted)


class Async(Actor):
    def __init__(self, construct: str = "", cleanup: str = "", restart: str = "") -> None:
        Sync.__init__(self, construct, cleanup, restart)  # type: ignore[arg-type]

    @endpoint
    async def well(self) -> int:
        return 1

    @endpoint
    async def fail(self, how: str) -> None:
        raise hostile(how)

    @endpoint
    async def answer(self, how: str) -> Any:
        return vars(Answers)[how]()

    @endpoint
    async def exit(self) -> None:
        raise SystemExit("on request")

    async def __cleanup__(self, error: Exception | None) -> None:
        if self.cleaned:
            raise hostile(self.cleaned)

    async def __restart__(self, restart: Restart) -> None:
        if self.restarted:
            raise hostile(self.restarted)


KINDS = pytest.mark.parametrize("kind", [Sync, Async])


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    found = this_host().spawn_procs()
    yield found
    found.stop().get(timeout=WAIT)


@KINDS
@pytest.mark.parametrize("how", HOSTILE)
def test_an_exception_of_an_endpoint_is_an_answer(procs: Any, kind: Any, how: str) -> None:
    """A call queued behind the failing one is answered too, since the actor survives."""
    mesh = procs.spawn("actor", kind)
    failing, well = mesh.fail.call_one(how), mesh.well.call_one()
    with pytest.raises(ActorError) as caught:
        failing.get(timeout=WAIT)
    assert "Actor call actor.fail failed." in str(caught.value)
    assert len(str(caught.value)) < LONGEST_REPORT
    assert well.get(timeout=WAIT) == 1
    mesh.stop().get(timeout=WAIT)


@KINDS
@pytest.mark.parametrize("how", WORST)
def test_a_constructor(procs: Any, kind: Any, how: str, faults: queue.Queue[Any]) -> None:
    mesh = procs.spawn("actor", kind, how)
    for _ in range(2):
        with pytest.raises(SupervisionError):
            mesh.well.call_one().get(timeout=WAIT)
    assert faults.get(timeout=WAIT).actor.endswith("actor>")


@KINDS
@pytest.mark.parametrize("how", WORST)
def test_a_broadcast_which_ends_the_actor(
    procs: Any, kind: Any, how: str, faults: queue.Queue[Any]
) -> None:
    mesh = procs.spawn("actor", kind)
    mesh.fail.broadcast(how)
    with pytest.raises(SupervisionError):
        mesh.well.call_one().get(timeout=WAIT)
    failure = faults.get(timeout=WAIT)
    assert failure.actor.endswith("actor>")
    assert len(failure.report()) < LONGEST_REPORT


@KINDS
@pytest.mark.parametrize("how", WORST)
def test_a_cleanup(procs: Any, kind: Any, how: str) -> None:
    mesh = procs.spawn("actor", kind, cleanup=how)
    assert mesh.well.call_one().get(timeout=WAIT) == 1
    mesh.stop().get(timeout=WAIT)


@KINDS
@pytest.mark.parametrize("how", WORST)
def test_a_restart(procs: Any, kind: Any, how: str, faults: queue.Queue[Any]) -> None:
    """If `__restart__` fails each time, the supervisor gives the rank up and reports it."""
    supervisor = Supervisor(max_restarts=1, backoff=0.0)
    mesh = supervisor.spawn(procs, "actor", kind, restart=how)
    with pytest.raises(SupervisionError):
        mesh.exit.call_one().get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        supervisor.healthy.get(timeout=WAIT)
    assert "actor" in faults.get(timeout=WAIT).actor
    with pytest.raises(SupervisionError):
        mesh.well.call_one().get(timeout=WAIT)


class Parent(Actor):
    def __init__(self, how: str) -> None:
        self.how = how

    @endpoint
    def begin(self, child: type) -> None:
        from monarch.actor import this_proc

        this_proc().spawn("child", child).exit.broadcast()

    def __supervise__(self, failure: MeshFailure) -> bool:
        raise hostile(self.how)


class AsyncParent(Actor):
    def __init__(self, how: str) -> None:
        self.how = how

    @endpoint
    async def begin(self, child: type) -> None:
        from monarch.actor import this_proc

        this_proc().spawn("child", child).exit.broadcast()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        raise hostile(self.how)


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
@pytest.mark.parametrize("how", WORST)
def test_a_supervise(procs: Any, kind: Any, how: str, faults: queue.Queue[Any]) -> None:
    parent = procs.spawn("parent", kind, how)
    parent.begin.broadcast(Sync)
    failure = faults.get(timeout=WAIT)
    assert failure.actor.endswith("parent>")
    assert "on request" in failure.child.error
    with pytest.raises(SupervisionError):
        parent.begin.call_one(Sync).get(timeout=WAIT)


@pytest.mark.failures
@KINDS
@pytest.mark.parametrize("how", [name for name in vars(Answers) if name.startswith("Reduce")])
def test_an_answer_that_cannot_be_sent(procs: Any, kind: Any, how: str) -> None:
    mesh = procs.spawn("actor", kind)
    with pytest.raises((ActorError, SupervisionError)):
        mesh.answer.call_one(how).get(timeout=WAIT)


class Leaves:
    """An object whose unpickling calls `sys.exit`."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class Leaver(Actor):
    @endpoint
    def leave(self) -> Leaves:
        return Leaves()


def test_a_result_does_not_end_its_caller(fresh: Fresh) -> None:
    leaver = fresh(1).spawn("leaver", Leaver)
    with pytest.raises(RuntimeError, match=r"result of leaver.leave\(\) .*SystemExit"):
        leaver.leave.call_one().get(timeout=WAIT)
    with pytest.raises(RuntimeError, match=r"result of leaver.leave\(\) .*SystemExit"):
        leaver.leave.call().get(timeout=WAIT).item(gpus=0)


@pytest.mark.parametrize("how", ["BecomesSystemExit", "RebuildExits", "RebuildInterrupts"])
def test_an_exception_that_is_sent_to_a_port(how: str) -> None:
    port, receiver = Channel[int].open()
    port.exception(hostile(how))
    with pytest.raises(ActorError):
        receiver.recv().get(timeout=WAIT)


class Big(Actor):
    """An actor whose process cannot grow by more than a given number of bytes."""

    @endpoint
    def limit(self, more: int) -> None:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    @endpoint
    def fail(self, size: int) -> None:
        raise ValueError("x" * size)

    @endpoint
    def well(self) -> int:
        return 1


def test_a_text_for_which_there_is_no_memory(fresh: Fresh) -> None:
    big = fresh(1).spawn("big", Big)
    big.limit.call_one(100 << 20).get(timeout=WAIT)
    with pytest.raises(ActorError, match="ValueError"):
        big.fail.call_one(40 << 20).get(timeout=WAIT)
    assert big.well.call_one().get(timeout=WAIT) == 1
