"""Ray: from `kill -9` of a worker to the exception in the caller that waits for it."""

import os
import signal
import time
from time import perf_counter

import ray
from ray.exceptions import RayActorError
from ray_start import start
from timing import emit, rounds


@ray.remote(num_cpus=0)
class Victim:
    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        time.sleep(600)


def kill_one() -> float:
    victim = Victim.remote()
    pid = ray.get(victim.pid.remote())
    waiting = victim.hang.remote()
    time.sleep(0.2)  # Ray offers the call no means to report that it has begun

    killed = perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        ray.get(waiting, timeout=60)
    except RayActorError:
        return perf_counter() - killed
    raise AssertionError("the call of a killed actor returned")


def main() -> None:
    start()
    emit(exception=[kill_one() for _ in rounds(at_least=3)])


if __name__ == "__main__":
    main()
