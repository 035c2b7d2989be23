"""Ray: 8 processes that have run a torch operation, the first time in a program and again."""

from time import perf_counter

import ray
import torch
from ray_start import start
from timing import emit


@ray.remote(num_cpus=0)
class Trainer:
    def step(self) -> float:
        return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


def spawn_and_step() -> float:
    started = perf_counter()
    trainers = [Trainer.remote() for _ in range(8)]
    assert ray.get([trainer.step.remote() for trainer in trainers]) == [512.0] * 8
    taken = perf_counter() - started
    for trainer in trainers:
        ray.kill(trainer)
    return taken


def main() -> None:
    start()
    emit(first=spawn_and_step(), again=spawn_and_step())


if __name__ == "__main__":
    main()
