"""Actors that train a small network at the same time, with default threads and with one each.

With the argument `spinning` it prints a table instead: one and two plain processes with two threads
each, by the number of rounds that their threads spin while they wait for each other.
"""

import os
import subprocess
import sys
from time import perf_counter

import torch
from timing import SECONDS, emit, rounds, samples

from monarch.actor import Actor, endpoint, this_host

STEPS = 20


class Trains(Actor):
    def __init__(self) -> None:
        layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch = torch.rand(32, 64)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    @endpoint
    def train(self) -> float:
        """Return the seconds of a step."""
        started = perf_counter()
        for _ in range(STEPS):
            self.step()
        return (perf_counter() - started) / STEPS


def main(count: int) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    meshes = {}
    for name, threads in (("default", ""), ("single", "1")):
        if threads:
            os.environ["OMP_NUM_THREADS"] = threads
        procs = this_host().spawn_procs({"gpus": count})
        meshes[name] = procs.spawn("trains", Trains)
        meshes[name].train.call().get()
    taken: dict[str, list[float]] = {name: [] for name in meshes}
    for _ in rounds(SECONDS, at_least=10):
        for name, mesh in meshes.items():
            taken[name].append(max(mesh.train.call().get().values()))
    emit(**taken)


def spinning() -> None:
    for count in (1, 2):
        for spins in ("0", "300", "1000", "10000", "default"):
            environ = os.environ | {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": spins}
            if spins == "default":
                del environ["GOMP_SPINCOUNT"]
            command = [sys.executable, __file__, "plain"]
            processes = [
                subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
                for _ in range(count)
            ]
            steps = [float(process.communicate()[0]) for process in processes]
            print(f"{count} processes, spin count {spins}: {max(steps) * 1e3:.2f} ms a step")


def plain() -> None:
    taken = samples(Trains().step, span=3.0)
    print(sum(taken) / len(taken))


if __name__ == "__main__":
    if sys.argv[1] == "spinning":
        spinning()
    elif sys.argv[1] == "plain":
        plain()
    else:
        main(int(sys.argv[1]))
