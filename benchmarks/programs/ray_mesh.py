"""Ray: N actors from first to last.

Each Ray actor is a process. `bootstrap` includes the start of Ray itself.

`stop` ends when the last process has exited, as it does for a mesh.
"""

import os
import time
from pathlib import Path
from time import perf_counter

import ray
from ray.actor import ActorHandle
from ray_start import start
from timing import argument, emit, rounds, samples


@ray.remote(num_cpus=0)
class Worker:
    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()


def call_all(workers: list[ActorHandle]) -> int:
    return len(ray.get([worker.noop.remote() for worker in workers]))


def spawn_and_call(size: int) -> tuple[float, list[ActorHandle]]:
    started = perf_counter()
    workers = [Worker.remote() for _ in range(size)]
    assert call_all(workers) == size
    return perf_counter() - started, workers


def seconds_to_stop(workers: list[ActorHandle]) -> float:
    pids = ray.get([worker.pid.remote() for worker in workers])
    started = perf_counter()
    for worker in workers:
        ray.kill(worker)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.001)
    return perf_counter() - started


def main() -> None:
    size = int(argument())
    started = perf_counter()
    start()
    _, workers = spawn_and_call(size)
    bootstrap = perf_counter() - started
    call = samples(lambda: call_all(workers))
    stop = [seconds_to_stop(workers)]

    spawn = []
    for _ in rounds():
        taken, workers = spawn_and_call(size)
        spawn.append(taken)
        stop.append(seconds_to_stop(workers))

    emit(bootstrap=bootstrap, call=call, stop=stop, spawn=spawn)


if __name__ == "__main__":
    main()
