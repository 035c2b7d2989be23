"""``monarch debug --dap``: an editor debugs ranks, by the real debugpy in their processes."""

# ruff: noqa: T100 - breakpoint() is what is tested

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from monarch._debug.pauses import PAUSES
from monarch.actor import Actor, ActorError, current_rank, debug_controller, endpoint, this_host
from monarch.config import configure, get_global_config
from tests.editor import Editor
from tests.person import Person

pytest.importorskip("debugpy", reason="needs the extra debugger")
if sys.platform != "linux":
    pytest.skip("the door of a script needs Linux", allow_module_level=True)

WAIT = 60.0


class Ready(Actor):
    @endpoint
    def ready(self) -> None:
        """Answer."""


class Trainer(Ready):
    """Stops in some endpoints, and not in others."""

    @endpoint
    def step(self, x: int) -> int:
        loss = x + current_rank().rank
        breakpoint()
        loss = loss + helper(x)
        return loss  # noqa: RET504 - where a step ends

    @endpoint
    def plain(self, x: int) -> int:
        return helper(x)

    @endpoint
    def twice(self, x: int) -> int:
        breakpoint()
        breakpoint()
        return x

    @endpoint
    def fails(self, x: int) -> int:
        return x // 0

    @endpoint
    def lacks(self, module: str) -> None:
        sys.modules[module] = None  # type: ignore[assignment]  # it cannot be imported then

    @endpoint
    def is_traced(self) -> bool:
        return sys.gettrace() is not None


def helper(x: int) -> int:
    y = x + 1
    return y  # noqa: RET504 - the breakpoint of several tests


class Coroutines(Actor):
    @endpoint
    async def ready(self) -> None:
        """Answer."""

    @endpoint
    async def step(self, x: int) -> int:
        y = x * 2
        breakpoint()
        await asyncio.sleep(0)
        return y


class Neighbour(Ready):
    @endpoint
    def ping(self) -> str:
        return "pong"


def line(function: Callable[..., Any], text: str) -> int:
    """Return the first line of a function, or of an endpoint, that has this text."""
    code = getattr(function, "_method", function).__code__
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    return next(at for at in range(code.co_firstlineno, len(lines)) if text in lines[at - 1])


LAST = line(helper, "return")
STOP = line(Trainer.step, "breakpoint()")
HELPED = line(Trainer.step, "helper(x)")
AFTER = STOP if sys.version_info >= (3, 13) else STOP + 1
"""Where pdb stops, and so an editor to which it hands over: at breakpoint(), or after it."""


@pytest.fixture(scope="module")
def controller() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
        yield debug_controller()


@pytest.fixture
def procs(controller: Any) -> Iterator[Any]:
    made = this_host().spawn_procs({"gpus": 2})
    yield made
    made.stop().get(timeout=WAIT)


def spawned(procs: Any, name: str, cls: type) -> Any:
    """Spawn actors, and wait until the command can see them."""
    mesh = procs.spawn(name, cls)
    mesh.ready.call().get(timeout=WAIT)
    return mesh


def command(*words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "monarch.cli", "debug", "--dap", "--pid", str(os.getpid())),
        *words,
    ]


@contextlib.contextmanager
def serving(*words: str) -> Generator[dict[str, Any]]:
    """Run the command, and yield the configurations that it prints."""
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            text = b""
            while not text.endswith(b"\n}\n"):
                assert select.select([process.stdout], [], [], WAIT)[0], text
                data = os.read(process.stdout.fileno(), 65536)
                assert data, text
                text += data
            yield json.loads(text)
        finally:
            process.kill()


@contextlib.contextmanager
def attached(launch: dict[str, Any], *lines: int) -> Generator[list[Editor]]:
    """Yield an editor for each configuration, attached with breakpoints in lines of this file."""
    editors: list[Editor] = []
    try:
        for one in launch["configurations"]:
            editors.append(Editor(one["connect"]["port"]))
            editors[-1].attach(__file__, *lines)
        yield editors
    finally:
        for editor in editors:
            editor.close()


def stopped(controller: Any, count: int) -> list[Any]:
    """Wait until so many ranks are in pdb."""
    while True:
        controller.wait_pending_session.call_one().get(timeout=WAIT)
        found: list[Any] = controller.list.call_one(print_output=False).get(timeout=WAIT)
        if len(found) == count:
            return found


def test_one_rank_that_is_at_a_breakpoint(controller: Any, procs: Any) -> None:
    """It is handed over at its line; later the debugger of the terminal has it again."""
    trainers = spawned(procs.slice(gpus=0), "trainers", Trainer)
    call = trainers.step.call_one(10)
    stopped(controller, 1)
    with serving() as launch:
        (configuration,) = launch["configurations"]
        assert configuration["name"] == "trainers 0"
        assert (configuration["type"], configuration["request"]) == ("debugpy", "attach")
        assert "pathMappings" not in configuration
        assert "compounds" not in launch
        with attached(launch, LAST) as (editor,):
            stop = editor.stop()
            assert stop.stack == [("step", __file__, AFTER)]
            assert stop.evaluate("loss") == "10"
            assert controller.list.call_one(print_output=False).get(timeout=WAIT) == []
            stop.go()
            stop = editor.stop()
            assert [place[::2] for place in stop.stack] == [("helper", LAST), ("step", HELPED)]
            stop.assign("y", "100")
            stop.go("stepOut")
            stop = editor.stop()
            assert stop.place == ("step", HELPED)
            stop.go()
            assert call.get(timeout=WAIT) == 110
            call = trainers.step.call_one(20)
            assert editor.stop().place == ("step", STOP)
            editor.ask("disconnect")
            assert call.get(timeout=WAIT) == 41
    call = trainers.step.call_one(30)
    stopped(controller, 1)
    person = Person(controller.address.call_one().get(timeout=WAIT))
    person.read()
    person.ask("attach trainers 0", "(Pdb) ")
    assert person.ask("p loss", "(Pdb) ") == "30\n(Pdb) "
    person.ask("c")
    person.socket.close()
    assert call.get(timeout=WAIT) == 61
    assert not trainers.is_traced.call_one().get(timeout=WAIT)


def test_several_ranks_at_once(controller: Any, procs: Any) -> None:
    trainers = spawned(procs, "trainers", Trainer)
    call = trainers.step.call(10)
    stopped(controller, 2)
    with serving() as launch:
        names = [each["name"] for each in launch["configurations"]]
        assert names == ["trainers 0", "trainers 1"]
        assert [each["configurations"] for each in launch["compounds"]] == [names]
        with attached(launch) as editors:
            stops = [editor.stop() for editor in editors]
            assert [stop.evaluate("loss") for stop in stops] == ["10", "11"]
            stops[0].assign("loss", "100")
            person = Person(controller.address.call_one().get(timeout=WAIT))
            person.read()
            assert "In an editor: trainers 0, trainers 1\n" in person.ask("list")
            person.socket.close()
            for stop in stops:
                stop.go("next")
            for editor in editors:
                editor.stop().go()
            assert list(call.get(timeout=WAIT).values()) == [111, 22]


def test_ranks_that_are_named(procs: Any) -> None:
    """Before they stop, and by the grammar of `cast`; other actors of the process go on."""
    trainers = spawned(procs, "trainers", Trainer)
    neighbour = spawned(procs.slice(gpus=1), "neighbour", Neighbour)
    with serving("trainers", "gpus=1") as launch:
        assert [each["name"] for each in launch["configurations"]] == ["trainers 1"]
        with attached(launch, LAST) as (editor,):
            call = trainers.plain.call(1)
            stop = editor.stop()
            assert stop.place == ("helper", LAST)
            assert neighbour.ping.call_one().get(timeout=WAIT) == "pong"
            stop.go()
            assert list(call.get(timeout=WAIT).values()) == [2, 2]


def test_async_endpoint(controller: Any, procs: Any) -> None:
    actor = spawned(procs.slice(gpus=0), "coroutines", Coroutines)
    call = actor.step.call_one(4)
    stopped(controller, 1)
    with serving() as launch, attached(launch) as (editor,):
        stop = editor.stop()
        assert stop.stack[0][0] == "step"
        assert stop.evaluate("y") == "8"
        stop.go()
        assert call.get(timeout=WAIT) == 8
        call = actor.step.call_one(5)
        stop = editor.stop()
        assert stop.place == ("step", line(Coroutines.step, "breakpoint()"))
        stop.go("next")
        stop = editor.stop()
        assert stop.place == ("step", line(Coroutines.step, "await"))
        stop.go()
        assert call.get(timeout=WAIT) == 10


def test_an_editor_that_is_lost_lets_its_ranks_go_on(procs: Any) -> None:
    """Another one can attach afterwards, and not before."""
    trainers = spawned(procs.slice(gpus=0), "trainers", Trainer)
    with serving("trainers") as launch:
        with attached(launch) as (editor,):
            call = trainers.twice.call_one(3)
            assert editor.stop().place[0] == "twice"
            late = Editor(launch["configurations"][0]["connect"]["port"])
            with pytest.raises(AssertionError, match="the connection has ended"):
                late.event("initialized")
            late.close()
            editor.close()
        person = Person(debug_controller().address.call_one().get(timeout=WAIT))
        person.read()
        stopped(debug_controller(), 1)  # at the second breakpoint, since there is no editor
        person.ask("continue")
        person.socket.close()
        assert call.get(timeout=WAIT) == 3
        with attached(launch, LAST) as (editor,):
            call = trainers.plain.call_one(3)
            editor.stop().go()
            assert call.get(timeout=WAIT) == 4


def test_time_limits_stand_still(procs: Any) -> None:
    trainers = spawned(procs.slice(gpus=0), "trainers", Trainer)
    PAUSES.begin("test")  # while the rank is on its way to the breakpoint, and back
    try:
        with serving("trainers") as launch, attached(launch) as (editor,):
            call = trainers.step.options(timeout=0.5).call_one(1)
            stop = editor.stop()
            PAUSES.end("test")
            threading.Event().wait(1.2)  # more than twice the limit
            PAUSES.begin("test")
            stop.go()
            assert call.get(timeout=0.5) == 3
    finally:
        PAUSES.end("test")


def test_after_an_error(procs: Any) -> None:
    before = get_global_config()["postmortem"]
    configure(postmortem=True)
    try:
        failing = this_host().spawn_procs()  # with the setting
        trainers = spawned(failing, "trainers", Trainer)
        with serving("trainers") as launch, attached(launch) as (editor,):
            call = trainers.fails.call_one(7)
            stop = editor.stop()
            assert stop.place == ("fails", line(Trainer.fails, "x // 0"))
            assert stop.evaluate("x") == "7"
            stop.go()
            with pytest.raises(ActorError, match="ZeroDivisionError"):
                call.get(timeout=WAIT)
        failing.stop().get(timeout=WAIT)
    finally:
        configure(postmortem=before)


def refused(*words: str) -> str:
    """Return the error of a command that prints nothing else."""
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=2 * WAIT, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_errors_name_the_remedy(procs: Any) -> None:
    trainers = spawned(procs, "trainers", Trainer)
    trainers.lacks.call("debugpy").get(timeout=WAIT)
    assert "no rank is at a breakpoint; name those" in refused()
    assert "there is no losers" in (error := refused("losers"))
    assert "trainers" in error
    assert "there is no trainers 7" in refused("trainers", "7")
    assert "expected a rank" in refused("trainers", "x")
    error = refused("trainers", "0")
    assert "trainers 0: an editor needs debugpy on " in error
    assert "pip install 'pymonarch[debugger]'" in error
