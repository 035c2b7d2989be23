"""From `kill -9` of a worker to the exception in its caller, many times, in one of three ways.

`idle`: there is no other load. `load`: a thread of the caller keeps other workers busy with calls.
`gloo`: the survivors wait in a collective that the victim will never enter.

The program kills 200 times, or as often as fits into a minute, which is a few times for an engine
that takes ten seconds per kill. The report shows the number.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from time import perf_counter

from timing import SECONDS, argument, emit, rounds

import monarch.actor
from monarch.actor import Actor, Channel, Port, ProcMesh, current_rank, endpoint, this_host

WORKERS = 3  # the first is the victim; of three, each is a neighbour of each in a ring
KILLS = 200


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def noop(self) -> None:
        pass

    @endpoint
    def hang(self, started: Port) -> None:
        started.send(None)
        time.sleep(600)


class Member(Worker):
    """A worker in a process group."""

    @endpoint
    def join(self, port: int) -> None:
        import torch.distributed as dist

        rank = current_rank().rank
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=WORKERS)

    @endpoint
    def reduce(self, started: Port) -> None:
        import torch
        import torch.distributed as dist

        started.send(None)
        dist.all_reduce(torch.ones(1000))


class Load:
    """A thread that calls some workers, until the end of the block."""

    def __init__(self, workers: Worker) -> None:
        self.workers = workers
        self.running = True
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while self.running:
            for sent in [self.workers.noop.call() for _ in range(50)]:
                sent.get()

    def __enter__(self) -> None:
        self.workers.noop.call().get()
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def kill_one(victim: Worker) -> float:
    """Return the seconds from the kill to the exception in the victim's caller."""
    pid = victim.pid.call_one().get()
    port, started = Channel.open()
    waiting = victim.hang.call_one(port)
    started.recv().get()

    killed = perf_counter()
    os.kill(pid, signal.SIGKILL)
    failure = waiting.exception(timeout=60)
    taken = perf_counter() - killed
    assert type(failure).__name__ == "SupervisionError", repr(failure)
    return taken


def idle() -> float:
    return kill_one(this_host().spawn_procs({"gpus": 1}).spawn("victim", Worker))


def load() -> float:
    procs = this_host().spawn_procs({"gpus": WORKERS})
    workers = procs.spawn("workers", Worker)
    survivors = workers.slice(gpus=slice(1, None))
    with Load(survivors):
        taken = kill_one(workers.slice(gpus=0))
    stop(procs)
    return taken


def gloo() -> float:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    procs = this_host().spawn_procs({"gpus": WORKERS})
    members = procs.spawn("members", Member)
    members.join.call(store.port).get()
    port, started = Channel.open()
    survivors = members.slice(gpus=slice(1, None))
    blocked = survivors.reduce.call(port)
    for _ in range(WORKERS - 1):
        started.recv().get()
    taken = kill_one(members.slice(gpus=0))
    assert blocked.exception(timeout=60) is not None  # gloo has detected the kill, too
    stop(procs)
    return taken


def stop(procs: ProcMesh) -> None:
    """Stop the survivors, if the engine can stop a mesh with an exited process."""
    with contextlib.suppress(Exception):
        procs.stop().get(timeout=30)


def main() -> None:
    # The default hook ends the program when a worker dies.
    monarch.actor.unhandled_fault_hook = lambda _failure: None
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    if argument() == "gloo":
        import torch  # noqa: F401 - so that the workers may share it

    action = {"idle": idle, "load": load, "gloo": gloo}[argument()]
    action()
    emit(exception=[action() for _ in rounds(60 * SECONDS, at_least=2, at_most=KILLS)])


if __name__ == "__main__":
    main()
