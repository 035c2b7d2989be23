"""A mesh of N processes from first to last: bootstrap, no-op call, stop, and spawn again.

`bootstrap` is the total time until a fresh program's first answer: host, processes, actors and the
first call. `spawn` is the same time in a program that has spawned a mesh before.
"""

from time import perf_counter

from timing import argument, emit, rounds, samples

from monarch.actor import Actor, ProcMesh, endpoint, this_host


class Worker(Actor):
    @endpoint
    def noop(self) -> None:
        pass


def spawn_and_call(size: int) -> tuple[float, ProcMesh, Worker]:
    started = perf_counter()
    procs = this_host().spawn_procs({"gpus": size})
    workers = procs.spawn("workers", Worker)
    assert len(workers.noop.call().get()) == size
    return perf_counter() - started, procs, workers


def seconds_to_stop(procs: ProcMesh) -> float:
    started = perf_counter()
    procs.stop().get()
    return perf_counter() - started


def main() -> None:
    size = int(argument())
    bootstrap, procs, workers = spawn_and_call(size)
    call = samples(lambda: workers.noop.call().get())
    stop = [seconds_to_stop(procs)]

    spawn = []
    for _ in rounds():
        taken, procs, workers = spawn_and_call(size)
        spawn.append(taken)
        stop.append(seconds_to_stop(procs))

    emit(bootstrap=bootstrap, call=call, stop=stop, spawn=spawn)


if __name__ == "__main__":
    main()
