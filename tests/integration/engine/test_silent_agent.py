"""When a host agent is suspended, waits that need it fail with the reason; others continue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Program = Callable[[str], str]

_READY = """
class Spawner(Echo):
    @endpoint
    def spawn(self):
        return this_host().spawn_procs().spawn("inner", Echo).pid.call_one().get(timeout=60)
    @endpoint
    def nap(self):
        threading.Event().wait()
    @endpoint
    def hurry(self):
        configure(agent_timeout="500ms")
    @endpoint
    def ask(self, other):
        return other.pid.call_one().get(timeout=60)

def text_of(function):
    try:
        return function()
    except Exception as error:
        return error

procs = this_host().spawn_procs({"n": 2})
actors = procs.spawn("actors", Spawner)
one, other = actors.slice(n=0), actors.slice(n=1)
pids = actors.pid.call().get(timeout=60).values()
"""

_STOP = """
actors.hurry.call().get(timeout=60)
configure(agent_timeout="500ms")  # from now on: the agent has had the time to start
os.kill(agent_pid(), signal.SIGSTOP)
"""

_STOPPED = _READY + _STOP

# Requests count as unanswered until the agent has answered a heartbeat after them.
_ANSWERED = """
import time
from monarch._engine.runtime.agent.client import client_proc
until = time.monotonic() + 60
while client_proc().agent_watch._armed:
    assert time.monotonic() < until
    time.sleep(0.01)
"""


@pytest.mark.failures
@pytest.mark.parametrize(
    "waits",
    [
        "this_host().spawn_procs().spawn('late', Echo).pid.call_one().get(timeout=60)",
        "one.ask.call_one(other).get(timeout=60)",
        "one.spawn.call_one().get(timeout=60)",
        "[os.kill(pids[0], 9), one.nap.call_one().get(timeout=60)]",
    ],
    ids=["a spawn", "a new link", "a spawn in a proc", "why a process ended"],
)
def test_what_waits_for_a_stopped_agent_ends_with_the_reason(program: Program, waits: str) -> None:
    said = program(_STOPPED + f"print(text_of(lambda: {waits}))")
    assert "the host agent of this machine (pid" in said
    assert "became unresponsive" in said
    assert "was stopped, by a signal or a debugger, and answered nothing for 0.5 s" in said
    assert "kill -CONT" in said
    assert "agent_timeout" in said


@pytest.mark.failures
def test_a_stop_ends_and_leaves_nothing(program: Program) -> None:
    """A stop finishes though the suspended agent does not report the exits of the processes."""
    said = program(
        _STOPPED
        + """
print(text_of(lambda: procs.stop().get(timeout=60)))
print(text_of(lambda: this_host().spawn_procs().spawn("late", Echo).pid.call_one().get(timeout=60)))
"""
    )
    first, second = said.split("\n", 1)
    assert first == "None"
    assert "became unresponsive" in second


def test_an_agent_for_which_nothing_waits_may_be_stopped(program: Program) -> None:
    said = program(
        _READY
        + _ANSWERED
        + _STOP
        + """
until = time.monotonic() + 1.5
while time.monotonic() < until:
    assert actors.pid.call().get(timeout=60).values() == pids
configure(agent_timeout="30s")
os.kill(agent_pid(), signal.SIGCONT)
print(this_host().spawn_procs().spawn("late", Echo).pid.call_one().get(timeout=60) > 0)
"""
    )
    assert said == "True"


def test_time_in_which_the_client_does_not_run_is_not_counted(program: Program) -> None:
    """The agent's timeout excludes time during which the client itself was suspended.

    A debugger, or the suspension of the whole machine, has this effect.
    """
    said = program(
        _STOPPED
        + """
import subprocess
configure(agent_timeout="2s")
script = f"sleep 0.5; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()} {agent_pid()}"
helper = subprocess.Popen(["sh", "-c", script])
print(this_host().spawn_procs().spawn("late", Echo).pid.call_one().get(timeout=60) > 0)
helper.wait()
"""
    )
    assert said == "True"
