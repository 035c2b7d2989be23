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
    @endpoint
    def attach(self):
        workers = ["tcp://127.0.0.1:1"]
        self.hosts = attach_to_workers(ca="trust_all_connections", workers=workers)
        return text_of(lambda: self.hosts.initialized.get(timeout=60))
    @endpoint
    def detach(self):
        workers = ["tcp://127.0.0.1:1"]
        hosts = attach_to_workers(ca="trust_all_connections", workers=workers)
        return text_of(lambda: hosts.stop().get(timeout=60))
    @endpoint
    def flush(self):
        from monarch._output.logging_option import _Flushed
        return text_of(lambda: _Flushed.of().get(timeout=60))

class Logger(Actor):
    @endpoint
    async def log(self, procs):
        await procs.logging_option(level=30)

def text_of(function):
    try:
        return function()
    except Exception as error:
        return error

procs = this_host().spawn_procs({"n": 2})
actors = procs.spawn("actors", Spawner)
logger = procs.slice(n=0).spawn("logger", Logger)
one, other = actors.slice(n=0), actors.slice(n=1)
logger.initialized.get(timeout=60)
pids = actors.pid.call().get(timeout=60).values()
"""

# A process stops when it is scheduled next, which takes a while on a busy machine: before that, the
# system does not call it stopped, and no short timeout may run.
_STOP = """
import time
os.kill(agent_pid(), signal.SIGSTOP)
until = time.monotonic() + 60
while open(f"/proc/{agent_pid()}/stat").read().rpartition(")")[2].split()[0] != "T":
    assert time.monotonic() < until
    time.sleep(0.01)
actors.hurry.call().get(timeout=60)
configure(agent_timeout="500ms")
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


# Only the procs give the agent up.
_STOPPED_FOR_PROCS = (
    _READY
    + _ANSWERED
    + """
actors.hurry.call().get(timeout=60)
os.kill(agent_pid(), signal.SIGSTOP)
"""
)

# Otherwise the program would wait for its agent when it ends.
_CONTINUE = """
os.kill(agent_pid(), signal.SIGCONT)
"""


@pytest.mark.failures
@pytest.mark.parametrize(
    ("waits", "result"),
    [
        ("one.attach.call_one()", "attach failed: no connection to 1 host"),
        ("one.detach.call_one()", "the hosts may not have been released: "),
        (
            "logger.log.call_one(procs.slice(n=0))",
            "logging_option may have had no effect on some procs: ",
        ),
    ],
    ids=["attach", "detach", "logging"],
)
def test_a_request_of_a_proc_to_a_stopped_agent_ends(
    program: Program, waits: str, result: str
) -> None:
    said = program(
        _STOPPED_FOR_PROCS + f"print(text_of(lambda: {waits}.get(timeout=90)))" + _CONTINUE
    )
    assert result in said
    assert "the host agent of this machine (pid" in said
    assert "became unresponsive" in said


@pytest.mark.failures
def test_a_flush_in_a_proc_ends_though_the_agent_is_stopped(program: Program) -> None:
    """It promises no more than what has arrived."""
    flush = "print(one.flush.call_one().get(timeout=90))"
    assert program(_STOPPED_FOR_PROCS + flush + _CONTINUE) == "None"


@pytest.mark.failures
def test_answers_of_an_agent_that_was_given_up_are_ignored(program: Program) -> None:
    """The proc asks again, and gets an answer, once the agent is continued."""
    said = program(
        _STOPPED_FOR_PROCS
        + """
for request in one.detach, one.flush, one.attach:
    request.call_one().get(timeout=90)
os.kill(agent_pid(), signal.SIGCONT)
print(one.flush.call_one().get(timeout=90), one.detach.call_one().get(timeout=90))
"""
    )
    assert said == "None None"


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
