"""Children that a program starts itself: each call of an inherited handle ends, with the reason."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, this_host

from .conftest import WAIT

OWN = "no part of the program whose handle it uses"
FORKED = "this process was forked, and the connections stayed with its parent process"
SECOND = "belongs to another program"


class Other(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def call_one(mesh: Any) -> Any:
    return mesh.slice(gpus=0).pid.call_one().get()


def call(mesh: Any) -> Any:
    return mesh.pid.call().get()


def choose(mesh: Any) -> Any:
    return mesh.pid.choose().get()


def stream(mesh: Any) -> Any:
    return [future.get() for future in mesh.pid.stream()]


def awaited(mesh: Any) -> Any:
    async def result() -> Any:
        return await mesh.pid.call()

    return asyncio.run(result())


def broadcast(mesh: Any) -> Any:
    return mesh.pid.broadcast()


def after_own_meshes(mesh: Any) -> Any:
    """The child is a program of its own then; its handles of the other do not work still."""
    own = this_host().spawn_procs().spawn("own", Other)
    assert own.pid.call_one().get(timeout=WAIT) != os.getpid()
    return mesh.pid.call().get()


USES = (call_one, call, choose, stream, awaited, broadcast)
Found = list[tuple[str, str, Any]]


def in_child(uses: Sequence[Callable[[Any], Any]], mesh: Any, answers: Any) -> None:
    found: Found = []
    for use in uses:
        try:
            found.append((use.__name__, "result", use(mesh)))
        except Exception as error:
            found.append((use.__name__, type(error).__name__, str(error)))
    answers.put(found)


def child(method: str, uses: Sequence[Callable[[Any], Any]], mesh: Any) -> Found:
    """Return what a child of this process gets."""
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=in_child, args=(uses, mesh, answers), daemon=True)
    process.start()
    process.join(WAIT)
    assert not process.is_alive(), "it hangs"
    found: Found = answers.get()
    return found


class Parent(Actor):
    @endpoint
    def child(self, method: str, mesh: Any) -> Found:
        return child(method, USES, mesh)


@pytest.fixture(scope="module", autouse=True)
def helpers() -> Iterator[None]:
    """End the processes that multiprocessing has started for this one."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_use_of_a_handle_ends(fresh: Any, method: str) -> None:
    procs = fresh(2)
    other = procs.spawn("other", Other)
    parent = procs.slice(gpus=0).spawn("parent", Parent)
    in_actor = parent.child.call_one(method, other).get(timeout=WAIT)
    in_script = child(method, USES, other)
    for name, kind, text in [*in_actor, *in_script]:
        assert kind == "SupervisionError", (name, text)
        assert (FORKED if method == "fork" else OWN) in text, name
    assert len(in_actor) == len(in_script) == len(USES)


def test_a_child_with_meshes_of_its_own(fresh: Any) -> None:
    other = fresh(2).spawn("other", Other)
    [(_, kind, text)] = child("spawn", [after_own_meshes], other)
    assert kind == "SupervisionError", text
    assert SECOND in text
