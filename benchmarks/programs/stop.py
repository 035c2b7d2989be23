"""Stop N processes, each with an actor that cleans up."""

import os
import tempfile
from time import perf_counter

from timing import argument, emit, rounds

from monarch.actor import Actor, endpoint, this_host


class Tidy(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def noop(self) -> None:
        pass

    def __cleanup__(self, _error: Exception | None) -> None:
        with open(self.path, "ab") as file:
            file.write(b"1")


def seconds_to_stop(size: int) -> float:
    with tempfile.NamedTemporaryFile() as cleaned:
        procs = this_host().spawn_procs({"gpus": size})
        procs.spawn("tidy", Tidy, cleaned.name).noop.call().get()
        started = perf_counter()
        procs.stop().get()
        taken = perf_counter() - started
        assert os.path.getsize(cleaned.name) == size
    return taken


def main() -> None:
    size = int(argument())
    seconds_to_stop(size)
    emit(stop=[seconds_to_stop(size) for _ in rounds(at_least=2)])


if __name__ == "__main__":
    main()
