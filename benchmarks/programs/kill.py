"""From `kill -9` of a worker to the exception in the caller that waits for it."""

import os
import signal
import time
from time import perf_counter

from timing import emit, rounds

import monarch.actor
from monarch.actor import Actor, Channel, Port, endpoint, this_host


class Victim(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def hang(self, started: Port) -> None:
        started.send(None)
        time.sleep(600)


def kill_one() -> float:
    procs = this_host().spawn_procs({"gpus": 1})
    victim = procs.spawn("victim", Victim)
    pid = victim.pid.call_one().get()
    port, started_hanging = Channel.open()
    waiting = victim.hang.call_one(port)
    started_hanging.recv().get()

    killed = perf_counter()
    os.kill(pid, signal.SIGKILL)
    failure = waiting.exception(timeout=60)
    taken = perf_counter() - killed
    assert type(failure).__name__ == "SupervisionError", repr(failure)
    return taken


def main() -> None:
    # The default hook ends the program when a worker dies.
    monarch.actor.unhandled_fault_hook = lambda _failure: None

    emit(exception=[kill_one() for _ in rounds()])


if __name__ == "__main__":
    main()
