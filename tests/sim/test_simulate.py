"""Programs on simulated hosts: virtual time, one interpreter, the real runtime."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    SupervisionError,
    current_rank,
    endpoint,
    shutdown_context,
    this_host,
)
from monarch.testing import (
    StepBlockedError,
    StuckError,
    TimeLimitError,
    UnhandledFaultError,
    simulate,
)

LOCKS: dict = {}
CLEANED: list = []


class Worker(Actor):
    def __init__(self, base=0):
        self.base = base

    @endpoint
    def add(self, x):
        return self.base + x + current_rank().rank

    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)
        return time.monotonic()

    @endpoint
    def ask(self, other):
        return other.add.call_one(5).get()

    @endpoint
    def fail(self):
        raise ValueError("as told")

    @endpoint
    def leave(self, code):
        os._exit(code)

    @endpoint
    def end_by(self, number):
        os.kill(os.getpid(), number)

    @endpoint
    def who(self):
        return os.getpid()


class Sleeper(Actor):
    @endpoint
    async def nap(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def ask(self, other):
        return await other.add.call_one(5)

    @endpoint
    async def in_thread(self, seconds):
        return await asyncio.to_thread(time.sleep, seconds)

    @endpoint
    async def leave(self, code):
        os._exit(code)

    @endpoint
    async def wait(self):
        await asyncio.get_running_loop().create_future()


class Blocking(Actor):
    @endpoint
    def block(self):
        LOCKS["gate"].acquire()


class Tidy(Actor):
    @endpoint
    def nothing(self):
        pass

    def __cleanup__(self, error):
        CLEANED.append(os.getpid())


class Owner(Actor):
    """An actor that spawns workers, and keeps the failures that are reported to it."""

    def __init__(self, cls=Worker):
        self.failures = []
        self.procs = this_host().spawn_procs({"gpus": 2}, name="w")
        self.workers = self.procs.spawn("w", cls)

    @endpoint
    def call(self, method, *args):
        try:
            return list(getattr(self.workers, method).call(*args).get().values())
        except SupervisionError as error:
            return str(error)

    @endpoint
    def told(self):
        return self.failures

    def __supervise__(self, failure):
        self.failures.append(failure.crashed_ranks)
        return True


def spawn(cls=Worker, *args, gpus=2):
    return this_host().spawn_procs({"gpus": gpus}).spawn("workers", cls, *args)


def test_a_program_runs_in_virtual_time():
    def main():
        workers = spawn(Worker, 10)
        sums = workers.add.call(1).get().values()
        naps = workers.slice(gpus=0).nap.call_one(3600).get()
        return list(sums), naps

    started = time.monotonic()
    done = simulate(main, time_limit=4000)

    sums, naps = done.value
    assert sums == [11, 12]
    assert 3600 < naps < 3601
    assert done.elapsed == pytest.approx(naps, abs=0.01)
    assert time.monotonic() - started < 60


def test_async_programs_and_actors_run_in_virtual_time_too():
    async def main():
        sleepers, workers = spawn(Sleeper), spawn(Worker)
        together = await asyncio.gather(sleepers.nap.call(100), sleepers.nap.call(50))
        await sleepers.in_thread.call(10)
        answers = await sleepers.ask.call(workers.slice(gpus=1))
        await asyncio.sleep(7)
        return [list(mesh.values()) for mesh in together], list(answers.values())

    done = simulate(main)

    assert done.value == ([[100, 100], [50, 50]], [5, 5])
    assert 167 <= done.elapsed < 168


def test_the_same_seed_gives_the_same_trace():
    def main():
        workers = spawn(gpus=8)
        random.shuffle(order := list(range(8)))
        return [future.get() for future in workers.add.stream(1)], order

    first, again = (simulate(main, seed=7, trace=True) for _ in range(2))
    assert first.value == again.value
    assert first.trace == again.trace
    assert len(first.trace) > 8
    assert any(simulate(main, seed=seed).value != first.value for seed in range(8, 12))


def test_chance_and_time_are_as_before_once_it_is_over():
    random.seed(3)
    before = random.getstate()
    functions = (time.sleep, time.time, os.getpid, os.kill, os._exit, asyncio.new_event_loop)

    simulate(lambda: (random.random(), time.sleep(10)))

    assert before == random.getstate()
    assert functions == (
        time.sleep,
        time.time,
        os.getpid,
        os.kill,
        os._exit,
        asyncio.new_event_loop,
    )


def test_other_threads_keep_their_time_and_their_process():
    seen = {}

    def outside():
        seen["pid"] = os.getpid()
        seen["now"] = time.monotonic()

    def main():
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
        return os.getpid(), time.monotonic()

    pid, now = simulate(main).value
    assert seen["pid"] == os.getpid() != pid
    assert seen["now"] > now


def test_an_exception_of_an_endpoint_reaches_the_caller():
    def main():
        with pytest.raises(ActorError, match="as told"):
            spawn().fail.call().get()

    simulate(main)


def test_what_main_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        simulate(lambda: 1 / 0)


@pytest.mark.parametrize("cls", [Worker, Sleeper])
def test_an_exit_is_that_of_the_simulated_process(cls):
    def main():
        owner = this_host().spawn_procs().spawn("owner", Owner, cls)
        report = owner.call.call_one("leave", 3).get()
        time.sleep(1)
        return report, owner.told.call_one().get()

    report, told = simulate(main).value
    assert "exited with non-zero code 3" in report
    assert sorted(told) == [[0], [1]]


def test_a_signal_ends_the_simulated_process():
    def main():
        owner = this_host().spawn_procs().spawn("owner", Owner)
        return owner.call.call_one("end_by", int(signal.SIGKILL)).get()

    assert "Killed(sig=9), SIGKILL" in simulate(main).value


def test_a_stopped_process_goes_on_where_it_was():
    def main():
        workers = spawn()
        pid = workers.slice(gpus=1).who.call_one().get()
        os.kill(pid, signal.SIGSTOP)
        answer = workers.add.call(1)
        with pytest.raises(TimeoutError):
            answer.get(timeout=50)
        os.kill(pid, signal.SIGCONT)
        return list(answer.get().values())

    assert simulate(main).value == [1, 2]


def test_channels_work():
    def main():
        port, receiver = Channel.open()
        port.send(1)
        port.send(2)
        return [receiver.recv().get(), receiver.recv().get()]

    assert simulate(main).value == [1, 2]


def test_a_report_says_who_waits_for_what_and_where():
    def main():
        first = spawn(gpus=2)
        zero, one = first.slice(gpus=0), first.slice(gpus=1)
        one.nap.broadcast(1e9)
        zero.ask.call_one(one).get()

    with pytest.raises(TimeLimitError) as caught:
        simulate(main, time_limit=1e6)
    report = str(caught.value)
    assert "main waits for workers.ask()" in report
    assert "waits for workers.add()" in report
    assert "in ask: return other.add.call_one(5).get()" in report


def test_waiting_for_ever_on_a_loop_is_a_deadlock():
    with pytest.raises(StuckError, match=r"(?s)main waits.*has tasks:.*in .*wait"):
        simulate(lambda: spawn(Sleeper).wait.call().get())


def test_a_program_that_never_ends_is_found():
    def main():
        while True:
            time.sleep(1)

    with pytest.raises(TimeLimitError, match="after 100 virtual seconds"):
        simulate(main, time_limit=100)


def test_a_step_that_blocks_for_real_is_found(capsys):
    gate = LOCKS["gate"] = threading.Lock()
    gate.acquire()
    try:
        with pytest.raises(StepBlockedError, match=r'LOCKS\["gate"\].acquire\(\)'):
            simulate(lambda: spawn(Blocking, gpus=1).block.call().get(), step_limit=0.3)
    finally:
        gate.release()
    assert "blocked outside the simulation" in capsys.readouterr().err


DEBUGGED = """
import io, select, sys, time
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import simulate

class Person(io.StringIO):
    def readline(self, size=-1):
        select.select([], [], [], 2)  # longer than a step may last
        return super().readline(size)

class Debugged(Actor):
    @endpoint
    def work(self):
        began = time.time()
        value = 41
        breakpoint()
        return value, time.time() - began

def main():
    return this_host().spawn_procs().spawn("debugged", Debugged).work.call_one().get()

sys.stdin = Person("p value + 1\\ncontinue\\n")
value, took = simulate(main, step_limit=1).value
print(value, took < 0.1)
"""


def test_virtual_time_stands_still_at_a_breakpoint(tmp_path):
    """A person who thinks for longer than a step may last ends nothing."""
    program = tmp_path / "debugged.py"
    program.write_text(DEBUGGED)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "(Pdb) 42\n" in done.stdout
    assert done.stdout.endswith("41 True\n")


def test_a_failure_that_nobody_handles_ends_the_program(capsys):
    def main():
        spawn().leave.broadcast(1)
        time.sleep(10)

    with pytest.raises(UnhandledFaultError, match=r"handled it:\n(.|\n)*with non-zero code 1"):
        simulate(main)
    assert "exited with non-zero code 1" in capsys.readouterr().err


def test_actors_clean_up_when_the_script_ends():
    CLEANED.clear()
    simulate(lambda: spawn(Tidy).nothing.call().get())
    assert len(CLEANED) == 2


class Spawner(Actor):
    def __init__(self, procs):
        self.tidy = procs.spawn("tidy", Tidy)

    @endpoint
    def mesh(self):
        return self.tidy

    @endpoint
    def leave(self):
        os._exit(0)


class Untidy(Actor):
    @endpoint
    def nothing(self):
        pass

    def __cleanup__(self, error):
        raise ValueError("no room")


def test_what_a_cleanup_raises_is_told_with_its_place(capsys):
    simulate(lambda: spawn(Untidy, gpus=1).nothing.call().get())
    told = capsys.readouterr().err
    assert "Untidy workers{'gpus': 0/1}> raised ValueError: no room\n" in told
    assert 'raise ValueError("no room")' in told
    assert "_engine" not in told


def test_actors_whose_owner_vanished_end_after_a_time():
    def main():
        procs = this_host().spawn_procs({"gpus": 2})
        spawner = this_host().spawn_procs().spawn("spawner", Spawner, procs)
        tidy = spawner.mesh.call_one().get()
        spawner.leave.broadcast()
        time.sleep(30)
        tidy.nothing.call().get()
        assert not CLEANED
        time.sleep(31)
        with pytest.raises(SupervisionError, match="the process of its owner ended"):
            tidy.nothing.call().get()
        return len(CLEANED)

    CLEANED.clear()
    assert simulate(main).value == 2


def test_a_program_may_shut_down_itself():
    def main():
        spawn().add.call(1).get()
        shutdown_context().get()

    simulate(main)


def test_a_real_runtime_in_the_same_process_goes_on():
    with_real = this_host().spawn_procs({"gpus": 1})
    real = with_real.spawn("real", Worker, 1).slice(gpus=0)
    assert real.add.call_one(1).get() == 2

    assert list(simulate(lambda: spawn().add.call(1).get().values()).value) == [1, 2]

    assert real.add.call_one(2).get() == 3
    with_real.stop().get()


SCRIPT = """
from time import sleep
from monarch.actor import Actor, endpoint, this_host

FACTOR = 1

class Sleeper(Actor):
    @endpoint
    def nap(self, seconds):
        sleep(seconds)
        return self.scaled(seconds)

    def scaled(self, seconds):
        return seconds * FACTOR

def naps():
    sleep(10)
    sleeper = this_host().spawn_procs().spawn("sleeper", Sleeper)
    return sleeper.nap.call_one(1000).get()
"""


def test_a_script_is_as_it_was_after_each_of_its_simulations(monkeypatch):
    """Its classes are pickled by value, and functions that it imported by name are virtual."""
    names = {}
    exec(SCRIPT, names)
    script = vars(sys.modules["__main__"])
    for name, value in names.items():
        if not name.startswith("__"):
            monkeypatch.setitem(script, name, value)
    exec(SCRIPT, script)
    for factor in (1, 2):
        script["FACTOR"] = factor
        done = simulate(script["naps"])
        assert (done.value, int(done.elapsed)) == (1000 * factor, 1010)
        assert script["sleep"] is time.sleep
        assert script["Sleeper"].scaled(None, 1) == factor
