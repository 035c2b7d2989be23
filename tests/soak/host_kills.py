"""`python tests/soak/host_kills.py [N=5] [--groups 2] [--width 1]`: hosts are lost under training.

Each rank of a training is on a host of its own: a network namespace and a pid namespace, so that
states and gradients go through TCP. N times a random host is lost at a random moment: its packets
are dropped, and its processes get SIGKILL, or go on, cut off from the others. Its rank has to come
back on the spare host. Then the lost host answers again, and is the next spare one.

In the end all replicas have to equal, bit for bit, a training on this machine without any loss.
With one group the only copy of a rank's state is in the memory of its neighbour, and comes from
there. Prints the time from the loss until it is reported (which takes `host_timeout`, 3 s), the
time from the report until all ranks train again, the steps that were lost, and the steps that were
under way, which are repeated. A spare host has to import torch first: a process that does so is
timed after the first losses. Needs root, as `tests/network.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo  # an optimizer imports it: once here, or in each process again
from report import end

from monarch.actor import Actor, HostMesh, attach_to_workers, endpoint, this_host
from monarch.training import Coordinator, Manager, Replicas
from tests.network import Host, network, unavailable

LIMIT = 300.0  # seconds for everything that is waited for
IMPORTS = 5  # how often that of torch is timed
STEPS = 100  # of the training between two losses
SHARES = 4
PORT = 26600
WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Trainer(Actor):
    """Trains a network with statistics that change in each forward pass."""

    def __init__(self, coordinator: Coordinator, least: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 256),
            torch.nn.BatchNorm1d(256),
            torch.nn.Tanh(),
            torch.nn.Linear(256, 1),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.manager = Manager(coordinator, self.model, self.optimizer)
        self.least = least

    @endpoint
    def train(self, until: int) -> list[bytes]:
        while self.manager.quorum(until=until):
            began = time.monotonic()
            for share in self.manager.shares():
                seed = torch.Generator().manual_seed(share.step)
                batch = share.of(torch.randn(64, 16, generator=seed))
                ((self.model(batch).squeeze(1) - batch.sum(1)) ** 2).mean().backward()
            time.sleep(max(0.0, began + self.least - time.monotonic()))
            if self.manager.should_commit():
                self.optimizer.step()
        state = [*self.model.state_dict().values()]
        state += [value for each in self.optimizer.state.values() for value in each.values()]
        return [value.numpy().tobytes() for value in state]


class Machine:
    """A host whose power can be cut, and its worker."""

    def __init__(self, host: Host, script: Path) -> None:
        self.host = host
        self.address = f"tcp://{host.address}:{PORT}"
        self._script = script
        self.start()

    def start(self) -> None:
        """Start the worker, and wait until it listens."""
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        with self._script.with_suffix(".log").open("ab") as log:
            self._worker = self.host.start(
                *own, sys.executable, str(self._script), self.address, stderr=log
            )
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                socket.create_connection((self.host.address, PORT), timeout=5).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._worker.poll() is not None:
                    sys.stderr.write(self._script.with_suffix(".log").read_text())
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        """End all processes of the host: the worker is the first one of its pid namespace."""
        self._worker.kill()
        self._worker.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while self._pids():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of {self.host.name} do not end")
            time.sleep(0.01)

    def _pids(self) -> bytes:
        command = ["ip", "netns", "pids", self.host.name]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


class Loss:
    """The cost of one loss."""

    def __init__(self, replicas: Replicas, start: float, moment: float, groups: int) -> None:
        events = [each for each in replicas.events if start + each.seconds >= moment]
        reports = [each.seconds for each in events if each.kind == "lost"]
        self.count = len(reports)
        self.reported = self.whole = float("nan")
        self.back = sum(each.rolled_back for each in events)
        self.again = sum(each.kind == "abort" for each in events)
        if reports:
            self.reported = start + reports[0] - moment
            whole = [
                each.seconds
                for each in events
                if each.kind == "begin" and len(each.groups) == groups
                if each.seconds > reports[0]
            ]
            if whole:
                self.whole = whole[0] - reports[0]


def undisturbed(groups: int, width: int, steps: int) -> dict[int, Any]:
    """Return the states of the same training without a loss."""
    replicas = Replicas(groups, width=width, shares=SHARES)
    procs = this_host().spawn_procs({"ranks": groups * width})
    trainers = replicas.spawn(procs, "undisturbed", Trainer, replicas.coordinator, 0.0)
    states = replicas.run(trainers, "train", steps)
    procs.stop().get(LIMIT)
    return states


def import_of_torch() -> float:
    """Return the seconds that a process takes to import what the ranks need."""
    began = time.monotonic()
    command = [sys.executable, "-c", "import torch, torch._dynamo"]
    subprocess.run(command, check=True, timeout=LIMIT)
    return time.monotonic() - began


def line(title: str, values: list[float]) -> None:
    print(
        f"  {title}: median {statistics.median(values):.2f} s, "
        f"range {min(values):.2f} - {max(values):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("losses", type=int, nargs="?", default=5)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--step-time", type=float, default=0.02, help="seconds, at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if missing := unavailable():
        sys.exit(f"no hosts of their own here: {missing}")
    size = options.groups * options.width
    chance = random.Random(options.seed)
    faults: list[str] = []
    losses: list[Loss] = []
    imports: list[float] = []
    began = time.monotonic()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        secret, script = folder / "secret", folder / "worker.py"
        secret.touch(0o600)
        secret.write_text(os.urandom(32).hex())
        script.write_text(WORKER)
        os.environ["MONARCH_SECRET_FILE"] = str(secret)
        made = ends.enter_context(network(size + 1))
        machines: dict[str, Machine] = {}
        for host in made.hosts:
            machine = Machine(host, script)
            machines[machine.address] = machine
            ends.callback(machine.kill)
        addresses = [*machines]
        hosts: HostMesh = attach_to_workers(ca="trust_all_connections", workers=addresses[:-1])
        spares: HostMesh = attach_to_workers(ca="trust_all_connections", workers=addresses[-1:])
        for mesh in (hosts, spares):
            mesh.initialized.get(LIMIT)
        start = time.monotonic()
        replicas = Replicas(
            options.groups,
            width=options.width,
            shares=SHARES,
            copy_every=1,
            max_restarts=1_000_000,
            spares=spares,
        )
        procs = hosts.spawn_procs({"ranks": 1})
        least = options.step_time
        trainers = replicas.spawn(procs, "trainers", Trainer, replicas.coordinator, least)
        places = dict(enumerate(addresses[:-1]))
        pool = ends.enter_context(ThreadPoolExecutor(1))
        states = replicas.run(trainers, "train", STEPS)
        for number in range(options.losses):
            known = len(replicas.restarts)
            running = pool.submit(replicas.run, trainers, "train", (number + 2) * STEPS)
            time.sleep(chance.uniform(0, STEPS * least))
            machine = machines[places[chance.randrange(size)]]
            killed = chance.random() < 0.5
            moment = time.monotonic()
            machine.host.lose(100)
            if killed:
                machine.kill()
            states = running.result(LIMIT)
            loss = Loss(replicas, start, moment, options.groups)
            losses.append(loss)
            places.update((each.rank, each.host) for each in replicas.restarts[known:])
            what = "killed " if killed else "cut off"
            print(
                f"  {what}: reported after {loss.reported:.2f} s, whole {loss.whole:.2f} s later; "
                f"steps lost: {loss.back}, repeated: {loss.again}",
                flush=True,
            )
            if len(states) != size or loss.count != 1 or loss.back > 1:
                faults.append(
                    f"loss {number}: {len(states)} ranks have returned, {loss.count} losses were "
                    f"reported, {loss.back} steps were lost"
                )
            machine.host.heal()
            if killed:
                machine.start()
            else:
                machine.wait()
            if number < IMPORTS:
                imports.append(import_of_torch())
        expected = undisturbed(options.groups, options.width, (options.losses + 1) * STEPS)
        if states != expected:
            faults.append("the states differ from those of an undisturbed training")
        for mesh in (hosts, spares):
            mesh.stop().get(LIMIT)
    line("reported", [each.reported for each in losses])
    line("all ranks train again, after the report", [each.whole for each in losses])
    line("a process that imports torch and torch._dynamo", imports)
    back, again = (sum(values) for values in zip(*((e.back, e.again) for e in losses), strict=True))
    print(f"  steps lost: {back}, under way and repeated: {again}")
    what = f"{options.losses} losses of one of {size} hosts, {replicas.committed} steps"
    end(what, time.monotonic() - began, faults)


if __name__ == "__main__":
    main()
