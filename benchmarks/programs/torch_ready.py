"""8 processes that have run a torch operation, the first time in a program and again."""

from time import perf_counter

import torch
from timing import emit

from monarch.actor import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self) -> float:
        return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


def spawn_and_step() -> float:
    started = perf_counter()
    procs = this_host().spawn_procs({"gpus": 8})
    trainers = procs.spawn("trainers", Trainer)
    assert trainers.step.call().get().values() == [512.0] * 8
    taken = perf_counter() - started
    procs.stop().get()
    return taken


def main() -> None:
    emit(first=spawn_and_step(), again=spawn_and_step())


if __name__ == "__main__":
    main()
