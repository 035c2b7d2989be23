"""Memory per idle process of a mesh of 8: that of all processes of the program, divided by 8.

`pss` counts the 8 processes only.
"""

import os
import time

from memory_of import pss, pss_below
from timing import emit

from monarch.actor import Actor, endpoint, this_host


class Idle(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 8})
    pids = procs.spawn("idle", Idle).pid.call().get().values()
    time.sleep(1.0)  # by then a process has finished its work after the first call

    emit(
        pss_of_all=pss_below(os.getpid()) / len(pids),
        pss=sum(map(pss, pids)) / len(pids),
    )
    procs.stop().get()


if __name__ == "__main__":
    main()
