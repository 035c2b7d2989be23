"""`python tests/soak/network.py [--seconds 300] [--seed N]`: hosts on a network that fails.

Three hosts run in network namespaces, with a worker loop each, on an emulator of cables. Callers
here and on the hosts send numbered calls, several at a time, to one actor and to all. Meanwhile one
host after the other has a fault:

* it loses 1 % of its packets;
* its packets are delayed by 50 ms +/- 20 ms each way (so that they overtake each other), or delayed
  and duplicated;
* it may send no more than 200 kB a second;
* it is cut off, inbound, outbound or both ways, for up to half of `host_timeout`, once or
  repeatedly.

Afterwards every call must have been answered, and every actor must have executed the messages of
each caller once and in order. No other error may occur.

That is a round. At the end of each round one host is cut off for 10 s. The host must be reported as
unreachable once `host_timeout` is over and not before, and calls to other hosts must continue. When
the network works again, the next round begins with the same workers. There are three rounds, one
for each direction of the cut.

Needs root, iproute2, nftables and TAP devices.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import monarch.actor  # noqa: E402
from monarch.actor import Actor, SupervisionError, attach_to_workers, endpoint  # noqa: E402
from tests.emulator import Conditions  # noqa: E402
from tests.network import Network, network, unavailable  # noqa: E402

HOSTS = 3
TIMEOUT = 3.0
HEARTBEAT = 0.25
LATE = 0.5
"""Seconds that a report may come late: a heartbeat, and other processes that are to run."""
LONG = 10.0
WAYS = ("both ways", "inbound", "outbound")
LASTING = ("loss", "delay", "all of it", "rate")
KINDS = (*WAYS, *LASTING, "flapping")
DELAYED = Conditions(delay=0.05, jitter=0.02)
BAD = Conditions(delay=0.05, jitter=0.02, loss=0.01, double=0.01)
WAIT = 60.0
WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Ledger(Actor):
    def __init__(self) -> None:
        self.noted: dict[str, list[int]] = {}

    @endpoint
    def note(self, who: str, number: int) -> int:
        self.noted.setdefault(who, []).append(number)
        return number

    @endpoint
    def wrong(self) -> list[str]:
        """Return the callers whose messages did not arrive once and in order."""
        return [who for who, got in self.noted.items() if got != list(range(len(got)))]

    @endpoint
    def noted_of(self, who: str) -> int:
        return len(self.noted.get(who, ()))


class Teller(Actor):
    def __init__(self) -> None:
        self.sent: dict[str, int] = {}

    @endpoint
    async def tell(self, who: str, other: Any, count: int) -> int:
        first = self.sent.get(who, 0)
        futures = [other.note.call_one(who, first + number) for number in range(count)]
        for number, future in enumerate(futures):
            assert await asyncio.wait_for(future, WAIT) == first + number
        self.sent[who] = first + count
        return first + count


class Caller(threading.Thread):
    """A thread that sends calls to one ledger until `over` is set, and counts the answers."""

    def __init__(self, name: str, ledger: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.ledger = ledger
        self.answered = 0
        self.slowest = 0.0
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                began = time.perf_counter()
                self.once()
                self.slowest = max(self.slowest, time.perf_counter() - began)
        except BaseException as error:
            self.error = error

    def once(self) -> None:
        numbers = range(self.answered, self.answered + 20)
        futures = [self.ledger.note.call_one(self.name, number) for number in numbers]
        for number, future in zip(numbers, futures, strict=True):
            assert future.get(timeout=WAIT) == number
        self.answered += len(numbers)


class Between(Caller):
    """A thread that lets one ledger send calls to another."""

    def __init__(self, name: str, ledger: Any, other: Any) -> None:
        super().__init__(name, ledger)
        self.other = other

    def once(self) -> None:
        self.answered = self.ledger.tell.call_one(self.name, self.other, 20).get(timeout=WAIT)


class ToAll(Caller):
    """A thread that calls all actors of a mesh, some times by one call, others one by one."""

    def __init__(self, name: str, crowd: Any) -> None:
        super().__init__(name, crowd)
        flat = crowd.flatten("rank")
        self.members = [flat.slice(rank=rank) for rank in range(len(flat))]

    def once(self) -> None:
        numbers = range(self.answered, self.answered + 20)
        futures: list[Any] = []
        for number in numbers:
            if number % 7 < 5:
                futures.append(self.ledger.note.call(self.name, number))
            else:
                futures += [member.note.call_one(self.name, number) for member in self.members]
        for future in futures:
            future.get(timeout=WAIT)
        self.answered += len(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    problem = unavailable(emulator=True)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        network(HOSTS, emulator_seed=options.seed) as made,
    ):
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(16).hex())
        os.environ.update(MONARCH_SECRET_FILE=str(secret), MONARCH_HOST_TIMEOUT=f"{TIMEOUT}s")
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        addresses = [f"tcp://{host.address}:26600" for host in made.hosts]
        workers = [
            host.start(sys.executable, str(script), address)
            for host, address in zip(made.hosts, addresses, strict=True)
        ]
        try:
            return soak(made, addresses, options.seconds, options.seed)
        finally:
            for worker in workers:
                end(worker)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def soak(made: Network, addresses: list[str], seconds: float, seed: int) -> int:
    faults: list[Any] = []
    monarch.actor.unhandled_fault_hook = faults.append
    chance = random.Random(seed)
    done = dict.fromkeys(KINDS, 0)
    calls, slowest = 0, 0.0
    taken: list[float] = []
    problems: list[str] = []
    for way in WAYS:
        one = Round(addresses)
        one.start()
        befall(made, chance, done, time.monotonic() + seconds / len(WAYS), one.callers)
        problems += one.finish()
        problems += [f"unexpected failure: {fault}" for fault in faults]
        calls += sum(caller.answered for caller in one.callers)
        slowest = max(slowest, *(caller.slowest for caller in one.callers))
        if problems:
            break
        number = chance.randrange(HOSTS)
        taken.append(cut_off(made, one, number, way, problems))
        one.stop()
        lost = f"host {number}"
        problems += [f"{lost} was cut off, and: {fault}" for fault in faults if not reported(fault)]
        faults.clear()
    print(
        f"seed {seed}: {calls:,} calls, "
        + ", ".join(f"{kind} {count}" for kind, count in done.items())
        + f"; slowest 20 calls {slowest:.2f} s"
    )
    if taken:
        times = ", ".join(f"{way} {took:.2f} s" for way, took in zip(WAYS, taken, strict=False))
        print(f"cut off for {LONG:g} s, reported after: {times} (host_timeout {TIMEOUT:g} s)")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(
        f"{HOSTS} hosts on a failing network for {seconds:.0f} s: {'failed' if problems else 'ok'}"
    )
    return 1 if problems else 0


def reported(fault: Any) -> bool:
    """Whether the fault is the expected one for a host that is cut off."""
    return "unreachable" in str(fault)


class Round:
    """Meshes on all hosts, and callers."""

    def __init__(self, addresses: list[str]) -> None:
        self.hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
        self.hosts.initialized.get(timeout=WAIT)
        procs = self.hosts.spawn_procs()
        ledgers, tellers = procs.spawn("ledger", Ledger), procs.spawn("teller", Teller)
        self.each = [ledgers.slice(hosts=number) for number in range(HOSTS)]
        self.callers = [Caller(f"to {number}", self.each[number]) for number in range(HOSTS)]
        self.crowd = self.hosts.spawn_procs({"gpus": 2}).spawn("crowd", Ledger)
        self.callers += [ToAll(f"to all, {number}", self.crowd) for number in range(2)]
        self.callers += [
            Between(f"{one} to {other}", tellers.slice(hosts=one), self.each[other])
            for one in range(HOSTS)
            for other in range(HOSTS)
            if other != one
        ]

    def start(self) -> None:
        for caller in self.callers:
            caller.start()

    def finish(self) -> list[str]:
        """End the callers; return the problems."""
        for caller in self.callers:
            caller.over.set()
        for caller in self.callers:
            caller.join(2 * WAIT)
        problems = [
            f"{caller.name}: {caller.error}" for caller in self.callers if caller.error is not None
        ]
        if problems:
            return problems
        for ledgers in (*self.each, self.crowd):
            for wrong in ledgers.wrong.call().get(timeout=WAIT).values():
                problems += wrong
        for caller in self.callers:
            at = caller.other if isinstance(caller, Between) else caller.ledger
            for noted in at.noted_of.call(caller.name).get(timeout=WAIT).values():
                if noted != caller.answered:
                    problems.append(f"{caller.name}: {caller.answered} answered, {noted} executed")
        return problems

    def stop(self) -> None:
        with contextlib.suppress(SupervisionError, RuntimeError):  # a host was lost
            self.hosts.stop().get(timeout=WAIT)


def befall(
    made: Network, chance: random.Random, done: dict[str, int], until: float, callers: list[Caller]
) -> None:
    """Inject a fault into one host after the other."""
    while time.monotonic() < until and all(caller.error is None for caller in callers):
        host = chance.choice(made.hosts)
        kind = chance.choice(KINDS)
        done[kind] += 1
        if kind == "loss":
            host.lose(1)
        elif kind == "delay":
            host.impair(DELAYED, DELAYED)
        elif kind == "all of it":
            host.impair(BAD, BAD)
        elif kind == "rate":
            host.limit(200)
        elif kind == "flapping":
            for _ in range(8):
                way = chance.choice(WAYS)
                host.lose(100, inbound=way != "outbound", outbound=way != "inbound")
                time.sleep(chance.uniform(0.05, 0.2))
                host.heal()
                time.sleep(chance.uniform(0.05, 0.2))
        else:
            host.lose(100, inbound=kind != "outbound", outbound=kind != "inbound")
            time.sleep(chance.uniform(0.05, TIMEOUT / 2))
        if kind in LASTING:
            time.sleep(chance.uniform(0.5, 5.0))
        host.heal()
        host.impair(Conditions(), Conditions())
        if kind == "rate":
            host.limit(None)
        time.sleep(chance.uniform(1.0, 2.0))  # otherwise two outages would be one long outage


def cut_off(made: Network, one: Round, number: int, way: str, problems: list[str]) -> float:
    """Cut a host off; return the seconds until a call in flight fails. Others must answer."""
    host, lost = made.hosts[number], one.each[number]
    others = [Caller(f"during, to {i}", one.each[i]) for i in range(HOSTS) if i != number]
    for caller in others:
        caller.start()
    host.lose(100, inbound=way != "outbound", outbound=way != "inbound")
    began = time.perf_counter()
    until = time.monotonic() + LONG
    took = 0.0
    try:
        lost.wrong.call_one().get(timeout=WAIT)
        problems.append(f"host {number}, cut off {way}, has answered")
    except SupervisionError as error:
        took = time.perf_counter() - began
        if "unreachable" not in str(error):
            problems.append(f"host {number}, cut off {way}, is called something else: {error}")
    # At the cut, the host's last packet is at most one heartbeat old.
    if not TIMEOUT - HEARTBEAT - 0.05 <= took <= TIMEOUT + LATE:
        problems.append(f"host {number}, cut off {way}, was reported after {took:.2f} s")
    time.sleep(max(0.0, until - time.monotonic()))
    host.heal()
    for caller in others:
        caller.over.set()
        caller.join(2 * WAIT)
        if caller.error is not None:
            problems.append(f"{caller.name}: {caller.error}")
    return took


if __name__ == "__main__":
    sys.exit(main())
