"""Failures that reach the script: how they are printed and interrupt the main thread."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import monarch.actor
from monarch._engine.base.errors import ActorError, SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, SYSTEM, Verdict
from monarch._engine.mesh.results import faults as module
from monarch._engine.mesh.results.faults import Faults
from monarch._engine.runtime.io import environment as environments

pytestmark = pytest.mark.failures


class World(environments.Environment):
    """A driver whose time advances only on demand and whose threads run at once."""

    def __init__(self) -> None:
        self.time = 100.0
        self.interrupts = 0
        self.main_runs = True
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def start_thread(self, name: str, run: Callable[[], None]) -> Any:
        run()
        return SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)

    def interrupt_main(self) -> bool:
        self.interrupts += self.main_runs
        return self.main_runs

    def is_traceback_printed(self) -> bool:
        return not self.main_runs

    def let_waits_end(self, looks: Callable[[Any], bool | None], inside: Any) -> None: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.time + delay, callback))

    def pass_time(self) -> None:
        while self.timers:
            self.time, callback = self.timers.pop(0)
            callback()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def unhandled(failure: Any) -> None:
        sys.exit(1)

    world = World()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", unhandled)
    monkeypatch.setattr(module, "client_proc", lambda: SimpleNamespace(reactor=world))
    former = environments.install(world)
    yield world
    environments.install(former)


def fault(rank: int, error: str = "oh", mesh: str = "w-1", **fields: Any) -> Failure:
    verdict = Verdict(FAILED, error, SYSTEM, "vm", 100 + rank, 1.5e9 + rank)
    return Failure(f"<root>.<W {mesh} {rank}>", verdict, mesh, (rank,), **fields)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return each printed line that begins a report or stands for one."""
    lines = capsys.readouterr().err.splitlines()
    return [line.split(" and all")[0] for line in lines if line.startswith("The ")]


def test_a_fault_is_printed_and_interrupts(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults()
    faults.add(fault(0))
    text = capsys.readouterr().err
    assert text.startswith("Unhandled monarch error on the root actor, hostname=")
    assert fault(0).report() in text
    assert world.interrupts == 1
    faults.close()
    assert not faults.at_exit(1.0)


def test_what_the_hook_handles_is_no_fault(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    faults = Faults()
    faults.add(fault(0))
    faults.close()
    faults.add(fault(1))
    assert (capsys.readouterr().err, world.interrupts) == ("", 0)
    assert not faults.at_exit(1.0)


def test_ranks_that_fail_of_the_same_are_one_fault(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults()
    for rank in range(3):
        faults.add(fault(rank))
    assert printed(capsys) == [
        "The actor <root>.<W w-1 0>",
        f"The same happened to <root>.<W w-1 1> {fault(1).where()}",
        f"The same happened to <root>.<W w-1 2> {fault(2).where()}",
    ]
    world.pass_time()
    assert world.interrupts == 1


def test_whom_the_first_report_named_needs_no_other(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"w-1": (0,), "helpers-1": (0,)}
    faults = Faults()
    faults.add(fault(0, others=others))
    faults.add(fault(0, mesh="helpers-1", others=others))
    assert printed(capsys) == ["The actor <root>.<W w-1 0>"]
    world.pass_time()
    assert world.interrupts == 1


def test_interrupts_for_different_causes_keep_a_distance(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reaction to the first must not be disturbed; a program that continues gets both."""
    faults = Faults()
    for rank in range(4):
        faults.add(fault(rank, f"cause {rank}"))
    assert len(printed(capsys)) == 4
    assert world.interrupts == 1
    world.pass_time()
    assert (world.interrupts, world.time) == (2, 101.0)


def test_the_same_again_in_a_new_mesh_is_a_new_fault(world: World) -> None:
    faults = Faults()
    faults.add(fault(0))
    world.time += 60
    faults.add(fault(0, mesh="w-2"))
    assert world.interrupts == 2


def test_a_program_that_ends_before_it_is_interrupted_does_not_end_well(world: World) -> None:
    faults = Faults()
    faults.add(fault(0))
    faults.add(fault(0, "another"))
    faults.close()
    world.pass_time()
    assert world.interrupts == 1
    assert faults.at_exit(1.0)


def test_a_fault_after_the_end_of_the_program(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults()
    faults.close()
    faults.add(fault(0))
    assert printed(capsys) == ["The actor <root>.<W w-1 0>"]
    assert world.interrupts == 0
    assert faults.at_exit(1.0)


def test_a_fault_that_was_told_is_no_news_at_the_end(world: World) -> None:
    faults = Faults()
    faults.add(fault(0))
    faults.close()
    faults.add(fault(1))
    assert world.interrupts == 1
    assert not faults.at_exit(1.0)


def test_a_fault_while_an_exception_ends_the_program(world: World) -> None:
    world.main_runs = False
    faults = Faults()
    faults.add(fault(0))
    faults.close()
    assert faults.at_exit(1.0)


def raised(failure: Failure) -> SupervisionError:
    return SupervisionError.of(failure, "w.f()")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_script", lambda: True)


@pytest.mark.usefixtures("script")
def test_what_a_call_of_the_script_raised_does_not_interrupt_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults()
    faults.given(ActorError(raised(fault(0))))
    faults.add(fault(0))
    assert (capsys.readouterr().err, world.interrupts) == ("", 0)
    faults.add(fault(1))  # a failure in the same mesh with the same cause
    assert capsys.readouterr().err.startswith("The same happened to <root>.<W w-1 1>")
    assert world.interrupts == 0
    faults.add(fault(0, "another cause"))
    assert world.interrupts == 1
    faults.close()
    assert not faults.at_exit(1.0)


def test_what_an_actor_was_given_is_not_the_scripts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_script", lambda: False)
    faults = Faults()
    faults.given(raised(fault(0)))
    faults.add(fault(0))
    assert world.interrupts == 1


def test_a_report_says_how_to_go_on(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    Faults().add(fault(0))
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Supervisor" in last
    assert "unhandled_fault_hook" in last
    assert "docs/failures.md" in last


def test_a_report_waits_for_the_traceback_that_ends_the_program(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.main_runs = False
    faults = Faults()
    faults.add(fault(0))
    assert capsys.readouterr().err == ""
    faults.close()
    assert faults.at_exit(1.0)
    assert printed(capsys) == ["The actor <root>.<W w-1 0>"]


def test_where_no_thread_can_be_started_the_hook_is_asked_at_the_exit(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, run: Callable[[], None]) -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(world, "start_thread", refuse)
    faults = Faults()
    faults.close()
    faults.add(fault(0))
    assert printed(capsys) == []
    assert faults.at_exit(1.0)
    assert printed(capsys) == ["The actor <root>.<W w-1 0>"]


INTERRUPT = """
import signal, threading
from monarch._engine.base.errors import ActorError
from monarch._engine.runtime.io.environment import Environment

def interrupt():
    print("interrupts", Environment().interrupt_main(), flush=True)

class First:
    "What an ActorError says happened first; it is looked at while that is printed."
    actor = ""
    where = str

    @property
    def error(self):
        aside = threading.Thread(target=interrupt)
        aside.start()
        aside.join()
"""
WAIT = "threading.Thread(target=interrupt, daemon=True).start()\nsignal.pause()\n"
PROGRAMS = {
    "waits": (WAIT, -signal.SIGINT),
    "waits and ignores SIGINT": (
        f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WAIT}",
        -signal.SIGTERM,
    ),
    "ends by an exception that is being printed": (
        "raise ActorError(ValueError(), failure=First())",
        1,
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_interrupting_a_program_that(program: str) -> None:
    text, code = PROGRAMS[program]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT + text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    if code == 1:
        assert done.stdout == "interrupts False\n"
        assert "KeyboardInterrupt" not in done.stderr
