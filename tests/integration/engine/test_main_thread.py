"""The first actor of a process has its main thread: signals work there, and a stop interrupts it.

Further actors have threads of their own. An endpoint that a stop no longer waits for is ended by an
exception, wherever it is, so that its `finally` blocks run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, Channel, SupervisionError, endpoint, this_proc
from monarch.config import configured

from .conftest import WAIT, Inside, until

Fresh = Callable[..., Any]


# -- signals ---------------------------------------------------------------------------------------


class Handles(Actor):
    """Handles SIGUSR1, as soon as it is constructed."""

    def __init__(self, port: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda number, _frame: port.send(number))

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def kill_and_compute(self) -> bool:
        """Return whether the handler has run in the middle of the endpoint."""
        found: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _frame: found.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        return found == [signal.SIGUSR1]


class HandlesInLoop(Actor):
    """The same with the functions of asyncio."""

    def __init__(self, port: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: port.send(signal.SIGUSR1))

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def kill_and_compute(self) -> bool:
        found = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, found.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        return await found.wait()


@pytest.mark.parametrize("kind", [Handles, HandlesInLoop])
def test_an_actor_handles_signals_in_an_endpoint_and_while_it_is_idle(
    fresh: Fresh, kind: Any
) -> None:
    port, received = Channel[int].open()
    actor = fresh().spawn("handles", kind, port)
    os.kill(actor.pid.call_one().get(timeout=WAIT), signal.SIGUSR1)
    assert received.recv().get(timeout=WAIT) == signal.SIGUSR1
    assert actor.kill_and_compute.call_one().get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("kind", [Handles, HandlesInLoop])
def test_the_error_of_a_second_actor_says_what_to_do(fresh: Fresh, faults: Any, kind: Any) -> None:
    procs = fresh()
    procs.spawn("first", Inside).pid.call_one().get(timeout=WAIT)
    port, _ = Channel[int].open()
    with pytest.raises(SupervisionError, match="spawn this actor first, or on a process"):
        procs.spawn("second", kind, port).pid.call_one().get(timeout=WAIT)


class Place(Actor):
    @endpoint
    def is_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class SpawnsBeside(Actor):
    @endpoint
    def is_main(self) -> tuple[bool, bool]:
        beside = this_proc().spawn("beside", Place).is_main.call_one().get(timeout=WAIT)
        return threading.current_thread() is threading.main_thread(), beside


def test_one_actor_at_a_time_has_the_main_thread(fresh: Fresh) -> None:
    procs = fresh()
    first, second = procs.spawn("first", Place), procs.spawn("second", Place)
    assert first.is_main.call_one().get(timeout=WAIT)
    assert not second.is_main.call_one().get(timeout=WAIT)
    first.stop().get(timeout=WAIT)

    def gets_it() -> bool:  # the thread leaves its former actor after the stop is acknowledged
        third = procs.spawn("third", SpawnsBeside)
        places = third.is_main.call_one().get(timeout=WAIT)
        third.stop().get(timeout=WAIT)
        return bool(places == (True, False))

    until(gets_it)


def test_a_bootstrap_callable_leaves_the_main_thread_to_the_first_actor(fresh: Fresh) -> None:
    """So do the actors that it spawns on its process."""
    procs = fresh(bootstrap=lambda: this_proc().spawn("own", Place) and None)
    procs.initialized.get(timeout=WAIT)
    place = procs.spawn("place", Place)
    assert place.is_main.call_one().get(timeout=WAIT)


class Raises(Actor):
    """Its handler raises, in the middle of no endpoint."""

    def __init__(self) -> None:
        def leave(_number: int, _frame: Any) -> None:
            raise RuntimeError("a handler raised this")

        signal.signal(signal.SIGUSR1, leave)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class RaisesInLoop(Raises):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("kind", [Raises, RaisesInLoop])
def test_a_handler_that_raises_while_its_actor_is_idle_ends_the_process(
    fresh: Fresh, faults: queue.Queue[Any], kind: Any
) -> None:
    """A message could be lost otherwise, and its caller would wait for ever."""
    procs = fresh()
    actor, beside = procs.spawn("raises", kind), procs.spawn("beside", Inside)
    beside.pid.call_one().get(timeout=WAIT)
    pid = actor.pid.call_one().get(timeout=WAIT)
    found: list[Any] = []
    while not found:  # the end of the call above may take the exception for one of its own
        os.kill(pid, signal.SIGUSR1)
        with contextlib.suppress(queue.Empty):
            found.append(faults.get(timeout=2))
    reports = found[0].report() + faults.get(timeout=WAIT).report()
    assert "RuntimeError: a handler raised this" in reports
    assert "non-zero code 1" in reports
    for mesh in (actor, beside):
        with pytest.raises(SupervisionError):
            mesh.pid.call_one().get(timeout=WAIT)


# -- stops -----------------------------------------------------------------------------------------


class Endless(Actor):
    """Its endpoints do not end; `path` notes what runs at their end, and at the actor's."""

    def __init__(self, path: str, other: Any = None) -> None:
        self.path, self.other = path, other

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")

    @contextlib.contextmanager
    def noting(self, port: Any) -> Any:
        port.send("begun")
        try:
            yield
        finally:
            time.sleep(0.2)  # longer than the signal takes to be repeated
            self.note("finally")

    @endpoint
    def wait(self, port: Any) -> None:
        with self.noting(port):
            threading.Event().wait()

    @endpoint
    def compute(self, port: Any) -> None:
        with self.noting(port):
            while True:
                pass

    @endpoint
    def ask(self, port: Any) -> None:
        with self.noting(port):
            self.other.wait.call_one(port).get()

    @endpoint
    def swallow(self, port: Any) -> None:
        while True:
            with contextlib.suppress(BaseException), self.noting(port):
                threading.Event().wait()

    @endpoint
    def block_signals(self, port: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with self.noting(port):
            threading.Event().wait()

    def __cleanup__(self, error: Exception | None) -> None:
        self.note(f"cleanup {error}")


class EndlessLoop(Endless):
    @endpoint
    async def wait(self, port: Any) -> None:
        with self.noting(port):
            await asyncio.Event().wait()

    @endpoint
    async def compute(self, port: Any) -> None:
        with self.noting(port):
            while True:
                pass

    @endpoint
    async def ask(self, port: Any) -> None: ...

    @endpoint
    async def swallow(self, port: Any) -> None: ...

    @endpoint
    async def block_signals(self, port: Any) -> None: ...

    async def __cleanup__(self, error: Exception | None) -> None:  # type: ignore[override]
        self.note(f"cleanup {error}")


def begin(fresh: Fresh, path: Path, kind: Any, doing: str) -> tuple[Any, Any, Any]:
    """Return procs, an actor on them that is in the endpoint `doing`, and the call."""
    procs = fresh()
    other = fresh().spawn("other", Endless, os.devnull) if doing == "ask" else None
    actor = procs.spawn("endless", kind, str(path), other)
    port, begun = Channel[str].open()
    call = getattr(actor, doing).call_one(port)
    for _ in range(2 if doing == "ask" else 1):
        assert begun.recv().get(timeout=WAIT) == "begun"
    return procs, actor, call


DOING = [
    *((Endless, doing) for doing in ("wait", "compute", "ask")),
    *((EndlessLoop, doing) for doing in ("wait", "compute")),
]


@pytest.mark.parametrize(("kind", "doing"), DOING)
def test_a_stop_of_actors_interrupts_an_endpoint(
    fresh: Fresh, tmp_path: Path, kind: Any, doing: str
) -> None:
    """Its caller gets the reason of the stop, and the process serves other actors."""
    path = tmp_path / "noted"
    procs, actor, call = begin(fresh, path, kind, doing)
    actor.stop("it is late", timeout=0).get(timeout=WAIT)
    assert path.read_text() == "finally\ncleanup None\n"
    with pytest.raises(SupervisionError, match="it is late"):
        call.get(timeout=WAIT)
    assert procs.spawn("next", Inside).pid.call_one().get(timeout=WAIT)


@pytest.mark.parametrize(("kind", "doing"), DOING)
def test_a_stop_of_processes_interrupts_an_endpoint(
    fresh: Fresh, tmp_path: Path, kind: Any, doing: str
) -> None:
    path = tmp_path / "noted"
    with configured(stop_actor_timeout="100ms", cleanup_timeout="1m", stop_grace_period="2m"):
        procs, _, call = begin(fresh, path, kind, doing)
        procs.stop("it is late").get(timeout=WAIT)
    assert path.read_text() == "finally\ncleanup None\n"
    with pytest.raises(SupervisionError, match="it is late"):
        call.get(timeout=WAIT)


def test_an_earlier_call_ends_before_the_stop(fresh: Fresh, tmp_path: Path) -> None:
    """A stop without a timeout waits for endpoints, as before."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = fresh().spawn("reader", Reads)
    call = reader.read.call_one(str(path))
    stopping = reader.stop()
    path.write_text("read to the end")
    assert call.get(timeout=WAIT) == "read to the end"
    stopping.get(timeout=WAIT)


class Reads(Actor):
    @endpoint
    def read(self, path: str) -> str:
        return Path(path).read_text()


@pytest.mark.parametrize("doing", ["swallow", "block_signals"])
def test_an_endpoint_that_cannot_be_interrupted_is_given_up(
    fresh: Fresh, tmp_path: Path, doing: str
) -> None:
    """The exception is raised once; then actor and process end without waiting for the endpoint."""
    path = tmp_path / "noted"
    with configured(cleanup_timeout="1s"):
        procs, actor, call = begin(fresh, path, Endless, doing)
    pid = procs.spawn("beside", Inside).pid.call_one().get(timeout=WAIT)
    actor.stop("it is late", timeout=0).get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="it is late"):
        call.get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)
    assert not Path(f"/proc/{pid}").exists()
    assert path.exists() == (doing == "swallow")
    assert doing != "swallow" or path.read_text() == "finally\n"


class Stuck(Actor):
    def __init__(self, port: Any) -> None:
        port.send("begun")
        try:
            threading.Event().wait()
        finally:
            port.send("finally")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_constructor_is_interrupted(fresh: Fresh) -> None:
    port, said = Channel[str].open()
    stuck = fresh().spawn("stuck", Stuck, port)
    assert said.recv().get(timeout=WAIT) == "begun"
    stuck.stop("it is late", timeout=0).get(timeout=WAIT)
    assert said.recv().get(timeout=WAIT) == "finally"
    with pytest.raises(SupervisionError, match="it is late"):
        stuck.pid.call_one().get(timeout=WAIT)
