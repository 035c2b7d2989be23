"""Memory for an idle process of a mesh of 8: of all that the program started, divided by 8.

`pss` is that of the 8 alone.
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
    time.sleep(1.0)  # what a process does after its first call is over by then

    emit(
        pss_of_all=pss_below(os.getpid()) / len(pids),
        pss=sum(map(pss, pids)) / len(pids),
    )
    procs.stop().get()


if __name__ == "__main__":
    main()
