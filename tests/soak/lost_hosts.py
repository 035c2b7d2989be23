"""`python tests/soak/lost_hosts.py [N=50] [--seed S] [--within 1]`: a mesh loses hosts.

Hosts run in network namespaces: one that keeps a ledger, three with the ranks of a supervised mesh,
and a spare one. N times, at a random moment one of the three is lost, in one of three ways:

* `power`: its cable is cut, then all processes in its namespace get SIGKILL. It starts anew later;
* `kill`: the processes get SIGKILL. The kernel closes their connections;
* `cable`: its cable is cut for a while, and its processes go on.

Each time these are violations:

* a call in flight does not fail, or later than `host_timeout` and half a second after the fault;
* not all ranks answer within a second (`--within`) of that report;
* the ranks that an actor on another host finds are not those that are found here;
* a call of ranks on other hosts fails, or a rank of another host is replaced;
* the ledger executes a message of an old rank after the new ranks have answered. Ranks send
  messages all the time, and those that were cut off go on when their network is back;
* the ledger executes a message twice, or has not executed one that was answered;
* an old process runs `host_timeout` and some seconds after its network is back.

Prints the times as histograms, and every violation. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recovery import histogram
from report import end

import monarch.actor
from monarch.actor import Actor, SupervisionError, Supervisor, attach_to_workers, endpoint
from tests.network import Host, network, unavailable

TIMEOUT = 3.0
LATE = 0.5
"""Seconds that a report may come late: a heartbeat, and other processes that are to run."""
RANKS = 2
"""On each host."""
WAIT = 120.0
WAYS = ("power", "kill", "cable")
WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Ledger(Actor):
    def __init__(self) -> None:
        self.noted: dict[str, set[int]] = {}
        self.twice: list[tuple[str, int]] = []

    @endpoint
    def note(self, name: str, number: int) -> None:
        noted = self.noted.setdefault(name, set())
        if number in noted:
            self.twice.append((name, number))
        noted.add(number)

    @endpoint
    def counts(self, names: list[str]) -> list[int]:
        return [len(self.noted.get(name, ())) for name in names]

    @endpoint
    def missing(self, written: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of these messages that were not executed."""
        return [(name, number) for name, number in written if number not in self.noted[name]]

    @endpoint
    def repeated(self) -> list[tuple[str, int]]:
        return self.twice


class Rank(Actor):
    """Writes to the ledger under a name of its own, which a replacement does not have."""

    def __init__(self, ledger: Any) -> None:
        self.ledger = ledger
        self.name = secrets.token_hex(4)
        self.number = 0

    @endpoint
    def write(self) -> tuple[str, int]:
        self.number += 1
        self.ledger.note.call_one(self.name, self.number).get(timeout=WAIT)
        return self.name, self.number

    @endpoint
    def babble(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.number += 1
            self.ledger.note.broadcast(self.name, self.number)
            time.sleep(0.02)

    @endpoint
    def who(self) -> tuple[str, int]:
        return self.name, os.getpid()

    @endpoint
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Holder(Actor):
    """Calls a mesh from another host."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def ask(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = self.mesh.who.call().get(timeout=WAIT).values()
        return found


class Place:
    """A host and its worker loop."""

    def __init__(self, host: Host, script: Path) -> None:
        self.host = host
        self.script = script
        self.address = f"tcp:{host.address}:26600"
        self.url = f"tcp://{host.address}:26600"
        self.start()

    def start(self) -> None:
        self.worker = self.host.start(sys.executable, str(self.script), self.url)
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.host.address, 26600), timeout=1),
            ):
                return
            time.sleep(0.02)
        raise TimeoutError(f"the worker at {self.url} does not listen")

    def pids(self) -> list[int]:
        command = ["ip", "netns", "pids", self.host.name]
        return [int(pid) for pid in subprocess.check_output(command, text=True).split()]

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.worker.wait(0.01)
        self.worker.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Soak:
    """The mesh, its hosts, and the violations so far."""

    def __init__(self, places: list[Place], chance: random.Random, within: float) -> None:
        self.chance = chance
        self.within = within
        self.places = {place.address: place for place in places}
        first, *served, spare = places
        self.serving = [place.address for place in served]
        self.violations: list[str] = []
        self.faults: list[Any] = []
        self.reported: dict[str, list[float]] = {way: [] for way in WAYS}
        self.recovered: dict[str, list[float]] = {way: [] for way in WAYS}
        self.answered: list[tuple[str, int]] = []
        monarch.actor.unhandled_fault_hook = self.faults.append
        home = attach([first])
        self.hosts = [home, attach(served), attach([spare])]
        self.ledger = home.spawn_procs().spawn("ledger", Ledger)
        self.supervisor = Supervisor(
            "one_for_one", max_restarts=10**6, within=3600, backoff=0, spares=self.hosts[2]
        )
        self.procs = procs = self.hosts[1].spawn_procs({"gpus": RANKS})
        self.mesh = self.supervisor.spawn(procs, "ranks", Rank, self.ledger)
        self.noisy = self.supervisor.spawn(procs, "noisy", Rank, self.ledger)
        self.holder = home.spawn_procs().spawn("holder", Holder, self.mesh)
        self.noise(range(len(served)))

    def noise(self, hosts: Any) -> None:
        for number in hosts:
            self.noisy.slice(hosts=number).babble.broadcast(3600.0)

    def names(self) -> list[tuple[str, int]]:
        return list(self.mesh.who.call().get(timeout=WAIT).values())

    def round(self, number: int) -> None:
        """Lose a host, and check all promises; then let it come back."""
        chance = self.chance
        way, lost = chance.choice(WAYS), chance.randrange(len(self.serving))
        place = self.places[self.serving[lost]]
        what = f"{number}, {way} of host {lost} at {place.address}"

        def violated(text: str) -> None:
            self.violations.append(f"{what}: {text}")
            print(f"  VIOLATION {self.violations[-1]}", flush=True)

        before = self.names()
        ranks = slice(lost * RANKS, (lost + 1) * RANKS)
        old = [name for name, _ in before[ranks]]
        pids = [pid for pid in place.pids() if pid != place.worker.pid]
        others = [
            self.mesh.slice(hosts=other).nap.call(TIMEOUT)
            for other in range(len(self.serving))
            if other != lost
        ]
        napping = self.mesh.slice(hosts=lost).nap.call(WAIT)
        time.sleep(chance.uniform(0.0, 2.0))
        began = time.monotonic()
        if way != "kill":
            place.host.lose(100)
        if way != "cable":
            place.kill()
        try:
            napping.get(timeout=WAIT)
            violated("a call in flight had an answer")
        except SupervisionError as error:
            if "unreachable" not in str(error):
                violated(f"reported as {error}")
        except TimeoutError:
            violated("a call in flight did not fail")
        reported = time.monotonic()
        self.reported[way].append(reported - began)
        if reported - began > TIMEOUT + LATE:
            violated(f"reported after {reported - began:.2f} s")
        try:
            self.supervisor.healthy.get(timeout=WAIT)
            after = self.names()
        except (SupervisionError, TimeoutError) as error:
            violated(f"not recovered: {error}")
            raise
        seconds = time.monotonic() - reported
        self.recovered[way].append(seconds)
        if seconds > self.within:
            violated(f"all ranks answered {seconds:.2f} s after the report")
        for call in others:
            try:
                call.get(timeout=WAIT)
            except (SupervisionError, TimeoutError) as error:
                violated(f"a call of ranks on other hosts: {error}")
        for rank, (one, other) in enumerate(zip(before, after, strict=True)):
            if (one == other) == (rank in range(*ranks.indices(len(before)))):
                violated(f"rank {rank} was {one} and is {other}")
        if (held := self.holder.ask.call_one().get(timeout=WAIT)) != after:
            violated(f"on another host the ranks are {held}, not {after}")
        last = [event for event in self.supervisor.restarts if event.mesh_name == "ranks"][-RANKS:]
        (at,) = {event.host for event in last}
        self.serving[lost] = str(
            next(one.address for one in self.places.values() if at in (one.address, one.url))
        )
        self.noise([lost])
        sizes = self.ledger.counts.call_one(old).get(timeout=WAIT)
        self.come_back(place, way, pids, violated)
        for _ in range(3):
            self.answered += self.mesh.write.call().get(timeout=WAIT).values()
        if sizes != (now := self.ledger.counts.call_one(old).get(timeout=WAIT)):
            violated(f"old ranks had an effect: {sizes} messages, and then {now}")
        for fault in self.faults:
            violated(f"a failure at the root: {fault}")
        self.faults.clear()
        print(
            f"{what}: reported after {self.reported[way][-1]:.2f} s, all ranks answered "
            f"{seconds:.2f} s later, at {self.serving[lost]}",
            flush=True,
        )

    def come_back(self, place: Place, way: str, pids: list[int], violated: Any) -> None:
        """Let the lost host answer again."""
        time.sleep(self.chance.uniform(0.0, 4.0))
        place.host.heal()
        if way != "cable":
            place.start()
            return
        deadline = time.monotonic() + TIMEOUT + 10
        while time.monotonic() < deadline:
            if not (left := [pid for pid in pids if alive(pid)]):
                return
            time.sleep(0.02)
        violated(f"old processes run: {left}")

    def finish(self) -> None:
        ledger = self.ledger
        if missing := ledger.missing.call_one(self.answered).get(timeout=WAIT):
            self.violations.append(f"answered and not executed: {missing}")
        if twice := ledger.repeated.call_one().get(timeout=WAIT):
            self.violations.append(f"executed twice: {twice}")
        self.procs.stop(timeout=1).get(timeout=WAIT)  # they send messages, and are killed
        for hosts in reversed(self.hosts):
            hosts.stop().get(timeout=WAIT)


def attach(places: list[Place]) -> Any:
    hosts = attach_to_workers(ca="trust_all_connections", workers=[one.url for one in places])
    hosts.initialized.get(timeout=WAIT)
    return hosts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("losses", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--within", type=float, default=1.0)
    options = parser.parse_args()
    problem = unavailable()
    if problem is not None:
        sys.exit(f"error: {problem}")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, network(5) as made:
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(16).hex())
        os.environ.update(MONARCH_SECRET_FILE=str(secret), MONARCH_HOST_TIMEOUT=f"{TIMEOUT}s")
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        places = [Place(host, script) for host in made.hosts]
        try:
            soak = Soak(places, random.Random(options.seed), options.within)
            for number in range(options.losses):
                soak.round(number)
            soak.finish()
        finally:
            for place in places:
                place.kill()
    for way in WAYS:
        histogram(f"{way}: from the fault until it was reported", soak.reported[way])
        histogram(f"{way}: from the report until all ranks answered", soak.recovered[way])
    load = os.getloadavg()[0]
    what = f"seed {options.seed}: {options.losses} hosts lost, load {load:.1f}"
    end(what, time.perf_counter() - start, soak.violations)


if __name__ == "__main__":
    main()
