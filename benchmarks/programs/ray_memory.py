"""Ray: memory of an idle actor's process, mean of 8, without the daemons of Ray."""

import os
import time

import ray
from memory_of import pss
from ray_start import start
from timing import emit


@ray.remote(num_cpus=0)
class Idle:
    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    start()
    idle = [Idle.remote() for _ in range(8)]
    pids = ray.get([actor.pid.remote() for actor in idle])
    time.sleep(1.0)  # by then a process has finished its work after the first call

    emit(pss_of_all=sum(map(pss, pids)) / len(pids))


if __name__ == "__main__":
    main()
