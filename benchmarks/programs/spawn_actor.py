"""One more actor on a process that runs already, and the first call of it."""

from time import perf_counter

from timing import WARM_UP, emit, rounds

from monarch.actor import Actor, endpoint, this_host


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 1})

    def spawn_and_call() -> float:
        started = perf_counter()
        echo = procs.spawn("echo", Echo)
        assert echo.echo.call_one(7).get() == 7
        taken = perf_counter() - started
        echo.stop().get()
        return taken

    for _ in rounds(WARM_UP):
        spawn_and_call()
    emit(spawn=[spawn_and_call() for _ in rounds(at_least=3)])
    procs.stop().get()


if __name__ == "__main__":
    main()
