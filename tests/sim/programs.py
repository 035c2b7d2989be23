"""Programs that use the whole runtime, and check its promises as far as a program can.

Each program tolerates any injected fault, and fails only if a promise is broken.
``tests/soak/simulation.py`` runs the programs with many seeds, ``test_seeds.py`` with some.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import monarch.actor
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    SupervisionError,
    Supervisor,
    endpoint,
    this_host,
)
from monarch.testing import Rates


class Ledger(Actor):
    """An actor that stores the notes that it receives, by sender."""

    def __init__(self):
        self.notes = []

    @endpoint
    def note(self, sender, number):
        self.notes.append((sender, number))
        if number % 7 == 3:
            time.sleep(random.random() / 100)
        if number % 11 == 5:
            raise ValueError(number)
        return number

    @endpoint
    def tell(self, sender, number):
        self.notes.append((sender, number))

    @endpoint
    def all_notes(self):
        return self.notes

    def __cleanup__(self, error):
        self.notes.append(("over", 0))


class AsyncLedger(Actor):
    def __init__(self):
        self.notes = []

    @endpoint
    async def note(self, sender, number):
        self.notes.append((sender, number))
        if number % 7 == 3:
            await asyncio.sleep(random.random() / 100)
        if number % 11 == 5:
            raise ValueError(number)
        return number

    @endpoint
    async def tell(self, sender, number):
        self.notes.append((sender, number))

    @endpoint
    async def all_notes(self):
        return self.notes


class Writer(Actor):
    """An actor that sends numbered notes to ledgers."""

    @endpoint
    def write(self, name, ledgers, count, port):
        outcomes = []
        for number in range(count):
            ledgers.tell.broadcast(name, 2 * number)
            try:
                answers = ledgers.note.call(name, 2 * number + 1).get()
                assert set(answers.values()) == {2 * number + 1}
                outcomes.append("value")
            except ActorError as error:
                outcomes.append("raised" if error.exception.args == (2 * number + 1,) else error)
            except SupervisionError:
                outcomes.append("lost")
        port.send((name, outcomes))
        return len(outcomes)


class Manager(Actor):
    """The owner of ledgers and writers, on the given hosts."""

    def __init__(self, hosts, cls):
        self.failures = []
        self.stopped = False
        self.ledger_procs = hosts.spawn_procs({"gpus": 2}, name="ledger")
        self.ledgers = self.ledger_procs.spawn("ledger", cls)
        self.writer_procs = this_host().spawn_procs({"n": 3}, name="writer")
        self.writers = self.writer_procs.spawn("writer", Writer)

    @endpoint
    def run(self, count):
        port, receiver = Channel.open()
        futures = []
        for index in range(3):
            writer = self.writers.slice(n=index)
            futures.append(writer.write.call_one(index, self.ledgers, count, port))
        done = set()
        for index, future in enumerate(futures):
            with contextlib.suppress(SupervisionError):
                assert future.get() == count
                done.add(index)
        heard = {}
        for _ in done:
            name, outcomes = receiver.recv().get(timeout=60)
            assert len(outcomes) == count
            assert set(outcomes) <= {"value", "raised", "lost"}
            heard[name] = outcomes
        assert len(heard) == len(done)
        self.check_notes()
        self.ledger_procs.stop().get()
        return len(done)

    def check_notes(self):
        for future in self.ledgers.all_notes.stream():
            try:
                notes = future.get()
            except SupervisionError:
                continue
            for sender in range(3):
                numbers = [number for name, number in notes if name == sender]
                assert numbers == sorted(set(numbers)), f"out of order or twice: {numbers}"

    @endpoint
    def told(self):
        return self.failures

    def __supervise__(self, failure):
        self.failures += [(failure.mesh_name, rank) for rank in failure.crashed_ranks]
        assert len(self.failures) == len(set(self.failures)), "told twice"
        return True


def managed(cls, count=6):
    """Return a program in which writers send to ledgers of `cls`, through all adverbs."""

    def main(hosts):
        with quiet_faults():
            manager = this_host().spawn_procs(name="manager").spawn("manager", Manager, hosts, cls)
            try:
                manager.run.call_one(count).get()
                manager.told.call_one().get()
            except SupervisionError:
                pass  # the manager's own process was hit

    return main


class Keeper(Actor):
    """The owner of supervised ledgers, which are restarted when they fail."""

    def __init__(self, hosts, cls, strategy, fresh):
        self.failures = []
        procs = hosts.spawn_procs({"gpus": 2}, name="ledger")
        self.supervisor = Supervisor(
            strategy, max_restarts=5, within=60, backoff=0.01, fresh_process=fresh
        )
        self.ledgers = self.supervisor.spawn(procs, "ledger", cls)

    @endpoint
    def run(self, rounds):
        answered = 0
        for number in range(rounds):
            for future in self.ledgers.note.stream("keeper", 2 * number):
                try:
                    assert future.get(timeout=120) == 2 * number
                    answered += 1
                except (ActorError, SupervisionError):
                    continue
        self.check_notes()
        return answered, len(self.supervisor.restarts)

    def check_notes(self):
        for future in self.ledgers.all_notes.stream():
            try:
                numbers = [number for name, number in future.get(timeout=120) if name == "keeper"]
            except SupervisionError:
                continue
            assert numbers == sorted(set(numbers)), f"out of order or twice: {numbers}"

    @endpoint
    def check(self):
        """Check, after the recovery, that all ledgers run, or that the supervisor has given up."""
        while True:
            try:
                self.supervisor.healthy.get(timeout=120)
            except SupervisionError:
                return "gave up"
            try:
                return len(self.ledgers.all_notes.call().get(timeout=120).values())
            except SupervisionError:
                continue  # the plan had a fault for this very request

    @endpoint
    def told(self):
        return self.failures

    def __supervise__(self, failure):
        self.failures.append(failure.report())
        return True


def kept(cls, strategy, fresh):
    """Return a program whose ledgers are restarted when they fail."""

    def main(hosts):
        with quiet_faults():
            keeper = (
                this_host()
                .spawn_procs(name="keeper")
                .spawn("keeper", Keeper, hosts, cls, strategy, fresh)
            )
            try:
                keeper.run.call_one(8).get()
                time.sleep(5)
                found = keeper.check.call_one().get()
                told = keeper.told.call_one().get()
                assert found == 2 * len(hosts) or (found == "gave up" and told), (found, told)
            except SupervisionError:
                pass  # the keeper's own process was hit

    return main


@contextlib.contextmanager
def quiet_faults():
    """Ignore failures that reach the script: the plan caused them."""
    former = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    try:
        yield
    finally:
        monarch.actor.unhandled_fault_hook = former


async def streams(hosts):
    """An async script that consumes streams of answers, and stops meshes in between."""
    with quiet_faults():
        procs = hosts.spawn_procs({"gpus": 2}, name="s")
        ledgers = procs.spawn("ledger", AsyncLedger)
        late = procs.spawn("late", Ledger)
        for number in range(1, 5):
            for future in ledgers.note.stream("script", number):
                with contextlib.suppress(ActorError, SupervisionError):
                    assert await future == number
        pending = [late.note.call("script", number) for number in range(10)]
        stopping = late.stop()
        for number, future in enumerate(pending):
            with contextlib.suppress(ActorError, SupervisionError):
                assert set((await future).values()) == {number}
        with contextlib.suppress(SupervisionError):
            await stopping
        try:
            await late.note.call("script", 1)
        except SupervisionError:
            pass
        else:
            raise AssertionError("a stopped mesh answered")
        await procs.stop()


def rates(hosts):
    """Return the rates of faults for a program on so many hosts: most runs have some."""
    if hosts == 1:
        return Rates(crash=1.0, pause=0.5, slow=0.5, within=0.05)
    return Rates(
        crash=0.7,
        pause=0.3,
        slow=0.3,
        crash_host=0.2,
        partition=0.5,
        drop=0.3,
        duplicate=0.3,
        delay=0.3,
        reorder=0.3,
        within=0.1,
        longest=2.0,
    )


def cases(seeds):
    """Yield a program and its number of hosts for each seed, so that all pairs occur."""
    for seed in seeds:
        name = list(PROGRAMS)[seed % len(PROGRAMS)]
        yield seed, name, 1 + seed // len(PROGRAMS) % 3


PROGRAMS = {
    "sync ledgers": managed(Ledger),
    "async ledgers": managed(AsyncLedger),
    "streams": streams,
    "kept": kept(Ledger, "one_for_one", False),
    "kept all": kept(AsyncLedger, "one_for_all", True),
}
