"""This host and another one, where a worker listens: calls, large arrays, and both at once.

    python hosts_net.py ADDRESS MEGABYTES GIGABYTES

Calls to an actor on this host and to one on the other take turns, so that a load of the machine
slows both.
"""

import sys
import threading
from time import perf_counter

import numpy as np
from timing import emit, rounds, samples

from monarch.actor import Actor, attach_to_workers, endpoint, this_host

TURN = 100
HALF = 500_000_000


class Echo(Actor):
    @endpoint
    def echo(self, value: object) -> object:
        return value


class Sink(Actor):
    @endpoint
    def take(self, array: np.ndarray) -> int:
        return array.nbytes


def times(echo: object, value: object, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        started = perf_counter()
        echo.echo.call_one(value).get()
        taken.append(perf_counter() - started)
    return taken


def main() -> None:
    address, megabytes, gigabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    there = hosts.spawn_procs(per_host={"gpus": 2})
    here = this_host().spawn_procs().spawn("here", Echo)
    echo = there.slice(gpus=0).spawn("echo", Echo)
    sink = there.slice(gpus=1).spawn("sink", Sink)
    one_host, two_hosts = [], []
    times(here, 7, TURN), times(echo, 7, TURN)
    for _ in rounds():
        one_host += times(here, 7, TURN)
        two_hosts += times(echo, 7, TURN)
    figures = {"one_host": one_host, "two_hosts": two_hosts}
    if megabytes:
        array = np.ones(megabytes * 1_000_000, np.uint8)
        figures["array"] = samples(lambda: sink.take.call_one(array).get())
    if gigabytes:
        array = np.ones(HALF, np.uint8)
        sink.take.call_one(array).get()
        over = threading.Event()

        def transfer() -> None:
            sent = [sink.take.call_one(array)]
            for _ in range(2 * gigabytes - 1):
                sent.append(sink.take.call_one(array))  # at least one array is always in flight
                sent.pop(0).get()
            sent.pop().get()
            over.set()

        started = perf_counter()
        threading.Thread(target=transfer).start()
        meanwhile = []
        while not over.is_set():
            meanwhile += times(echo, b"ten bytes.", 1)
        figures["meanwhile"] = meanwhile
        figures["transfer"] = perf_counter() - started
    emit(**figures)
    hosts.shutdown().get()


if __name__ == "__main__":
    main()
