"""Deadlock detection: a cycle of actors that wait for each other fails one of these waits.

No other wait is reported as a deadlock.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    DeadlockError,
    Future,
    Port,
    concurrent_endpoint,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    this_proc,
)

from .conftest import WAIT

Fresh = Callable[..., Any]
Path = list[tuple[Any, str, str]]
"""Whom to call in turn, by which endpoint, and how to wait for it."""


def call(path: Path) -> tuple[Any, str]:
    """Send the first message of `path`; its receiver continues with the rest."""
    (mesh, name, how), *rest = path
    method = getattr(mesh, name)
    if how in ("all", "await all"):
        return method.call(rest), how
    if how in ("stream", "await stream"):
        return method.stream(rest), how
    return method.call_one(rest), how


def get(path: Path) -> Any:
    if not path:
        return "the end"
    sent, how = call(path)
    if how == "all":
        return sent.get().values()
    if how == "stream":
        return [future.get() for future in sent]
    return sent.get(timeout=0.7 if how == "limited" else None)


async def cancelled_later(future: Future[Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(0.7, task.cancel)
    try:
        return await future
    except asyncio.CancelledError:
        raise TimeoutError from None
    finally:
        timer.cancel()


async def wait(path: Path) -> Any:
    if not path:
        return "the end"
    sent, how = call(path)
    if how == "await all":
        return (await sent).values()
    if how == "await stream":
        return [await future for future in sent]
    if how == "wait_for":
        return await asyncio.wait_for(sent, 0.7)
    if how == "timeout":
        async with asyncio.timeout(0.7):  # type: ignore[attr-defined, unused-ignore]
            return await sent
    if how == "cancel":
        return await cancelled_later(sent)
    if how == "get":
        with pytest.warns(UserWarning, match="running|active"):
            return sent.get()
    return await sent


class Sync(Actor):
    @endpoint
    def go(self, path: Path) -> Any:
        return get(path)

    @endpoint
    def hold(self, opened: Port[Port[str]]) -> str:
        port, receiver = Channel[str].open()
        opened.send(port)
        return receiver.recv().get()

    @endpoint
    def catch(self, path: Path) -> DeadlockError | None:
        try:
            get(path)
        except DeadlockError as error:
            return error
        return None

    @endpoint
    def shared(self, me: Any) -> str:
        """Wait for a future in the actor and in a thread; only the actor's wait deadlocks."""
        sent = me.go.call_one([])
        self.got = got = []
        self.thread = threading.Thread(target=lambda: got.append(sent.get()))
        self.thread.start()
        try:
            sent.get()
        except DeadlockError:
            return "deadlock"
        return "none"

    @endpoint
    def thread_got(self) -> Any:
        self.thread.join(WAIT)
        return self.got


class Async(Actor):
    @endpoint
    async def go(self, path: Path) -> Any:
        return await wait(path)

    @concurrent_endpoint
    async def aside(self, path: Path) -> Any:
        return await wait(path)

    @endpoint
    async def hold(self, opened: Port[Port[str]]) -> str:
        port, receiver = Channel[str].open()
        opened.send(port)
        return await receiver.recv()

    @concurrent_endpoint
    async def hold_aside(self, opened: Port[Port[str]]) -> str:
        port, receiver = Channel[str].open()
        opened.send(port)
        return await receiver.recv()

    @endpoint
    async def go_at_2(self, path: Path) -> Any:
        return await wait(path if current_rank().rank == 2 else [])

    @endpoint
    async def wait_for_hold_aside(self, other: Any, opened: Port[Port[str]]) -> str:
        held: str = await other.hold_aside.call_one(opened)
        return held

    @endpoint
    async def shared(self, me: Any) -> str:
        """Wait for a future in the actor and in a task; only the actor's wait deadlocks."""
        sent = me.go.call_one([])

        async def observe() -> Any:
            return await sent

        self.task = asyncio.create_task(observe())
        try:
            await sent
        except DeadlockError:
            return "deadlock"
        return "none"

    @endpoint
    async def task_got(self) -> Any:
        return [await self.task]


def root_cause(future: Future[Any]) -> BaseException | None:
    """Return the error at the start of the chain of failed calls, or None if the call succeeded."""
    try:
        future.get(timeout=WAIT)
    except ActorError as error:
        cause: BaseException = error
        while isinstance(cause, ActorError):
            cause = cause.exception
        return cause
    return None


def deadlock(future: Future[Any]) -> DeadlockError:
    cause = root_cause(future)
    assert isinstance(cause, DeadlockError), traceback.format_exception(cause) if cause else cause
    return cause


def names(error: DeadlockError) -> set[str]:
    return {who.rpartition(" ")[2].rstrip(">") for who, _, _ in error.cycle}


def spawn(procs: Any, *classes: type, spread: bool = True) -> list[Any]:
    """Spawn one actor of each class, named a, b, ...; each in its own proc if `spread`."""
    return [
        procs.slice(gpus=at if spread else 0).spawn(chr(ord("a") + at), cls)
        for at, cls in enumerate(classes)
    ]


def after_a_deadlock(procs: Any) -> None:
    """Create a deadlock and return when it is detected; by then older waits have been examined."""
    circle = [procs.slice(gpus=at).spawn(f"circle{at}", Sync) for at in range(2)]
    deadlock(circle[0].go.call_one([(circle[1], "go", "get"), (circle[0], "go", "get")]))


HOWS = {Sync: "get", Async: "await"}


@pytest.mark.parametrize("spread", [True, False], ids=["across procs", "in one proc"])
@pytest.mark.parametrize(
    "classes",
    [
        (Sync,),
        (Async,),
        (Sync, Sync),
        (Async, Async),
        (Sync, Async),
        (Sync, Sync, Sync),
        (Async, Async, Async),
        (Async, Sync, Async),
    ],
    ids=lambda classes: "-".join(cls.__name__ for cls in classes),
)
def test_a_circle_of_any_actors_is_an_error_in_one_of_them(
    fresh: Fresh, classes: tuple[type, ...], spread: bool
) -> None:
    actors = spawn(fresh(len(classes)), *classes, spread=spread)
    # With three actors, a waits for b, b for c, and c for a.
    path = [
        (actor, "go", HOWS[before])
        for before, actor in zip(classes, [*actors[1:], actors[0]], strict=True)
    ]

    error = deadlock(actors[0].go.call_one(path))

    assert names(error) == set("abc"[: len(classes)])
    assert len(error.cycle) == len(classes)
    for who, called, place in error.cycle:
        assert who.startswith("<root>.<")
        assert called in {"a.go()", "b.go()", "c.go()"}
        assert place.startswith(f"{__file__}:")
        assert place.endswith((", in get", ", in wait"))
    # The deadlock failed one message only, so each actor still answers.
    assert [actor.go.call_one([]).get(timeout=WAIT) for actor in actors] == ["the end"] * len(
        classes
    )


def test_the_error_says_what_to_do_and_travels(fresh: Fresh) -> None:
    (actor,) = spawn(fresh(1), Sync)

    error = actor.catch.call_one([(actor, "go", "get")]).get(timeout=WAIT)

    assert isinstance(error, DeadlockError)
    assert isinstance(error, RuntimeError)
    assert "waits for itself" in str(error)
    assert "a.go() at " in str(error)
    assert "concurrent_endpoint" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("how", ["all", "stream"])
@pytest.mark.parametrize("cls", [Sync, Async])
def test_a_call_to_a_mesh_that_contains_the_caller(fresh: Fresh, cls: type, how: str) -> None:
    mesh = fresh(3).spawn("a", cls)
    how = how if cls is Sync else f"await {how}"

    error = deadlock(mesh.slice(gpus=1).go.call_one([(mesh, "go", how)]))

    assert len(error.cycle) == 1
    assert "'gpus': 1/3" in error.cycle[0][0]


@pytest.mark.parametrize("how", ["all", "stream"])
def test_one_rank_of_a_mesh_call_calls_back(fresh: Fresh, how: str) -> None:
    procs = fresh(3)
    caller = procs.slice(gpus=0).spawn("caller", Sync)
    mesh = procs.spawn("mesh", Async)

    error = deadlock(caller.go.call_one([(mesh, "go_at_2", how), (caller, "go", "await")]))

    assert len(error.cycle) == 2
    assert any("mesh{'gpus': 2/3}" in who for who, _, _ in error.cycle)


def test_an_actor_that_blocks_its_event_loop_is_found_too(fresh: Fresh) -> None:
    a, b = spawn(fresh(2), Async, Async)

    error = deadlock(a.go.call_one([(b, "go", "get"), (a, "go", "await")]))

    assert names(error) == {"a", "b"}


class Builder(Actor):
    """An actor whose constructor calls the actor that waits for this constructor."""

    def __init__(self, owner: Any) -> None:
        owner.go.call_one([]).get()

    @endpoint
    def ready(self) -> str:
        return "ready"


class Owner(Actor):
    @endpoint
    def build(self, me: Any) -> Any:
        return this_proc().spawn("builder", Builder, me).ready.call_one().get()

    @endpoint
    def go(self, path: Path) -> str:
        return "the end"

    def __supervise__(self, failure: Any) -> bool:
        return True


def test_a_constructor_in_the_circle(fresh: Fresh) -> None:
    owner = fresh(1).spawn("owner", Owner)

    with pytest.raises(ActorError) as caught:
        owner.build.call_one(owner).get(timeout=WAIT)

    # The deadlock fails one of the two waits. If it is the builder's, the owner receives the
    # builder's failure.
    assert "DeadlockError" in str(caught.value)
    assert "in __init__" in str(caught.value)


def test_an_actor_of_the_client(fresh: Fresh) -> None:
    (worker,) = spawn(fresh(1), Sync)
    controller = get_or_spawn_controller("deadlocks", Sync).get(timeout=WAIT)

    error = deadlock(worker.go.call_one([(controller, "go", "get"), (worker, "go", "get")]))

    assert names(error) == {"a", "deadlocks"}


# -- waits that are no deadlock ------------------------------------------------------------------


LIMITED = ["limited", "wait_for", "cancel", *(["timeout"] if sys.version_info >= (3, 11) else [])]


@pytest.mark.parametrize("how", LIMITED)
def test_a_circle_with_a_time_limit_ends_by_it(fresh: Fresh, how: str) -> None:
    a, b = spawn(fresh(2), Sync if how == "limited" else Async, Sync)

    cause = root_cause(a.go.call_one([(b, "go", how), (a, "go", "get")]))

    assert isinstance(cause, (TimeoutError, asyncio.TimeoutError))


def test_an_actor_may_call_itself_from_an_endpoint_that_is_concurrent(fresh: Fresh) -> None:
    procs = fresh(2)
    (a,) = spawn(procs, Async)
    port, opened = Channel[Port[str]].open()
    # `aside` waits for `hold` of the same actor, which runs until this test releases it.
    held = a.aside.call_one([(a, "aside", "await"), (a, "go", "await")])
    holding = a.hold.call_one(port)
    release = opened.recv().get(timeout=WAIT)
    after_a_deadlock(procs)
    release.send("now")

    assert holding.get(timeout=WAIT) == "now"
    assert held.get(timeout=WAIT) == "the end"


@pytest.mark.parametrize("last", ["go", "aside"])
def test_a_circle_through_a_concurrent_endpoint_turns(fresh: Fresh, last: str) -> None:
    a, b = spawn(fresh(2), Async, Sync)

    # b calls a back while `aside` of a waits for b.
    future = a.aside.call_one([(b, "go", "await"), (a, last, "get")])

    assert future.get(timeout=WAIT) == "the end"


def test_a_concurrent_endpoint_that_has_begun_is_waited_for_in_peace(fresh: Fresh) -> None:
    procs = fresh(2)
    a, b = spawn(procs, Async, Async)
    port, opened = Channel[Port[str]].open()
    # a waits for `hold_aside` of b, and b waits for a. That is no deadlock: `hold_aside` has begun
    # and finishes without a.
    first = a.wait_for_hold_aside.call_one(b, port)
    release = opened.recv().get(timeout=WAIT)
    second = b.go.call_one([(a, "go", "await")])
    after_a_deadlock(procs)
    release.send("now")

    assert first.get(timeout=WAIT) == "now"
    assert second.get(timeout=WAIT) == "the end"


@pytest.mark.parametrize("cls", [Sync, Async])
def test_a_chain_that_waits_for_long_work_is_left_alone(fresh: Fresh, cls: type) -> None:
    procs = fresh(2)
    a, b = spawn(procs, cls, cls)
    port, opened = Channel[Port[str]].open()
    holding = b.hold.call_one(port)
    release = opened.recv().get(timeout=WAIT)
    chain = a.go.call_one([(b, "go", HOWS[cls])])
    after_a_deadlock(procs)
    release.send("now")

    assert holding.get(timeout=WAIT) == "now"
    assert chain.get(timeout=WAIT) == "the end"


class Supervising(Actor):
    """An actor whose `__supervise__`, run as a task, awaits an endpoint of the same actor."""

    def __init__(self, told: Port[Any]) -> None:
        self.told = told

    @endpoint
    async def spawn(self, me: Any) -> None:
        self.me = me
        self.child = this_proc().spawn("child", Failing)
        self.child.fail.broadcast()

    @endpoint
    async def name(self) -> str:
        return "supervising"

    async def __supervise__(self, failure: Any) -> bool:
        self.told.send(await self.me.name.call_one())
        return True


class Failing(Actor):
    @endpoint
    def fail(self) -> None:
        raise ValueError


def test_an_async_supervisor_may_call_its_own_actor(fresh: Fresh) -> None:
    port, told = Channel[Any].open()
    actor = fresh(1).spawn("supervising", Supervising, port)
    actor.spawn.call_one(actor).get(timeout=WAIT)

    assert told.recv().get(timeout=WAIT) == "supervising"


@pytest.mark.parametrize(("cls", "look"), [(Sync, "thread_got"), (Async, "task_got")])
def test_only_the_wait_fails_and_not_the_call(fresh: Fresh, cls: type, look: str) -> None:
    (actor,) = spawn(fresh(1), cls)

    assert actor.shared.call_one(actor).get(timeout=WAIT) == "deadlock"
    assert getattr(actor, look).call_one().get(timeout=WAIT) == ["the end"]


class Turning(Actor):
    """Each of two calls the `turn` of the other, without end."""

    turns = 0

    @endpoint
    def turn(self, me: Any, other: Any) -> None:
        self.turns += 1
        other.turn.call_one(other, me).get()

    @endpoint
    def counted(self) -> int:
        return self.turns


class AsyncTurning(Turning):
    @endpoint
    async def turn(self, me: Any, other: Any) -> None:
        self.turns += 1
        await other.turn.call_one(other, me)

    @endpoint
    async def counted(self) -> int:
        return self.turns


@pytest.mark.parametrize("cls", [Turning, AsyncTurning])
def test_a_circle_does_not_begin_again_with_the_call_that_was_left(fresh: Fresh, cls: type) -> None:
    procs = fresh(2)
    a, b = spawn(procs, cls, cls)

    deadlock(a.turn.call_one(a, b))
    after_a_deadlock(procs)

    assert [mesh.counted.call_one().get(timeout=WAIT) for mesh in (a, b)] == [1, 1]


# -- what the detector keeps ---------------------------------------------------------------------


def test_the_watch_keeps_no_answer_alive(fresh: Fresh, proc: Any) -> None:
    procs = fresh(2)
    (b,) = spawn(procs, Sync)
    a = get_or_spawn_controller("waiting", Sync).get(timeout=WAIT)
    port, opened = Channel[Port[str]].open()
    holding = b.hold.call_one(port)
    release = opened.recv().get(timeout=WAIT)
    chain = a.go.call_one([(b, "go", "get")])
    after_a_deadlock(procs)
    books = [book for books in proc.wait_watch.search._deadlocks._books.values() for book in books]
    assert [book.wait.actor for book in books] == [a._uid]

    release.send("now")
    holding.get(timeout=WAIT)
    chain.get(timeout=WAIT)

    assert not books[0].wait.standing
    assert books[0].wait._answer() is None
