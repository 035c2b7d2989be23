"""`python tests/soak/network.py [--seconds 300] [--seed N]`: hosts on a network that fails.

Three hosts in network namespaces, with a worker loop each. Callers here and on the hosts send
numbered calls, several at a time, while one host after the other loses 1 % of its packets or is cut
off, inbound, outbound or both ways, for up to half of `host_timeout`. Afterwards every call was
answered, and every actor executed what each caller sent, once and in order. Nothing else may fail.

At the end each host is cut off for good, and the time until its caller knows is measured. Needs
root, iproute2 and nftables.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
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
from tests.network import Network, network, unavailable  # noqa: E402

HOSTS = 3
TIMEOUT = 3.0
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
        """Who sent something that did not come once and in order."""
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
    """Sends calls to one ledger until told to stop; counts the answers."""

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
    """Has one ledger send calls to another."""

    def __init__(self, name: str, ledger: Any, other: Any) -> None:
        super().__init__(name, ledger)
        self.other = other

    def once(self) -> None:
        self.answered = self.ledger.tell.call_one(self.name, self.other, 20).get(timeout=WAIT)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    problem = unavailable()
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, network(HOSTS) as made:
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
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
    hosts.initialized.get(timeout=WAIT)
    procs = hosts.spawn_procs()
    ledgers, tellers = procs.spawn("ledger", Ledger), procs.spawn("teller", Teller)
    each = [ledgers.slice(hosts=number) for number in range(HOSTS)]
    callers = [Caller(f"to {number}", ledger) for number, ledger in enumerate(each)]
    callers += [
        Between(f"{one} to {other}", tellers.slice(hosts=one), each[other])
        for one in range(HOSTS)
        for other in range(HOSTS)
        if other != one
    ]
    for caller in callers:
        caller.start()
    chance = random.Random(seed)
    done = {"loss": 0, "inbound": 0, "outbound": 0, "both ways": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until and all(caller.error is None for caller in callers):
        host = chance.choice(made.hosts)
        kind = chance.choice(list(done))
        done[kind] += 1
        if kind == "loss":
            host.lose(1)
            time.sleep(chance.uniform(0.5, 3.0))
        else:
            host.lose(100, inbound=kind != "outbound", outbound=kind != "inbound")
            time.sleep(chance.uniform(0.05, TIMEOUT / 2))
        host.heal()
        time.sleep(chance.uniform(1.0, 2.0))  # else two outages would be one long one
    for caller in callers:
        caller.over.set()
    for caller in callers:
        caller.join(2 * WAIT)
    problems = [f"{caller.name}: {caller.error}" for caller in callers if caller.error is not None]
    problems += [f"unexpected failure: {fault}" for fault in faults]
    if not problems:
        for ledger in each:
            problems += ledger.wrong.call_one().get(timeout=WAIT)
        for caller in callers:
            at = caller.other if isinstance(caller, Between) else caller.ledger
            noted = at.noted_of.call_one(caller.name).get(timeout=WAIT)
            if noted != caller.answered:
                problems.append(f"{caller.name}: {caller.answered} answered, {noted} executed")
    taken = [] if problems else [cut_off(made, each, number) for number in range(HOSTS)]
    print(
        f"seed {seed}: {sum(caller.answered for caller in callers):,} calls, "
        + ", ".join(f"{kind} {count}" for kind, count in done.items())
        + f"; slowest 20 calls {max(caller.slowest for caller in callers):.2f} s"
    )
    if taken:
        print(
            f"cut off until reported: {min(taken):.2f} to {max(taken):.2f} s, "
            f"median {statistics.median(taken):.2f} s (host_timeout {TIMEOUT:g} s)"
        )
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(
        f"{HOSTS} hosts on a failing network for {seconds:.0f} s: {'failed' if problems else 'ok'}"
    )
    return 1 if problems else 0


def cut_off(made: Network, each: list[Any], number: int) -> float:
    """Seconds from the cut to the error of a call that was on its way."""
    ledger = each[number]
    made.hosts[number].lose(100)
    began = time.perf_counter()
    try:
        ledger.wrong.call_one().get(timeout=WAIT)
    except SupervisionError:
        return time.perf_counter() - began
    raise AssertionError("a host that is cut off has answered")


if __name__ == "__main__":
    sys.exit(main())
