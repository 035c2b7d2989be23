"""From `kill -9` of a supervised worker to its successor's answer after a torch operation."""

import os
import signal
from time import perf_counter

import torch
from timing import emit, rounds

from monarch.actor import Actor, SupervisionError, Supervisor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def step(self) -> float:
        return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


def main() -> None:
    # Without a delay, since the failures are deliberate; a rank's first restart has none anyway.
    supervisor = Supervisor(max_restarts=1_000_000, backoff=0.0)
    procs = this_host().spawn_procs({"gpus": 4})
    trainers = supervisor.spawn(procs, "trainers", Trainer)
    victim = trainers.slice(gpus=1)
    assert trainers.step.call().get().values() == [512.0] * 4

    def kill_and_step() -> float:
        pid = victim.pid.call_one().get()
        killed = perf_counter()
        os.kill(pid, signal.SIGKILL)
        while True:
            try:
                assert victim.step.call_one().get() == 512.0
            except SupervisionError:
                supervisor.healthy.get()
            else:
                break
        taken = perf_counter() - killed
        assert victim.pid.call_one().get() != pid
        return taken

    kill_and_step()
    emit(restart=[kill_and_step() for _ in rounds(at_least=3)])
    procs.stop().get()


if __name__ == "__main__":
    main()
