"""`python tests/soak/debugger_speed.py [64]`: how fast the debugger answers with many ranks.

So many processes, of one mesh, stop in `breakpoint()`. A program that is connected to the debug
server, as `monarch debug` is, then asks. Printed are five times, in seconds: from the call of one
actor to its pdb prompt, when a debugger is attached to nothing; from the call of all actors until
all are listed, the first time (each process loads the debugger then) and later; for `list`; and for
a `cast` of a pdb command to all, until each has executed it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import count, end

from monarch.actor import Actor, debug_controller, endpoint, this_host
from tests.person import Person

LIMITS = {"first prompt": 0.3, "first listed": 1.0, "list": 1.0, "cast": 1.0}
ROUNDS = 5


class Stopper(Actor):
    """Stops in each call."""

    @endpoint
    def work(self, path: str) -> int:
        value = 1
        breakpoint()  # noqa: T100 - what is measured
        return value

    @endpoint
    def ready(self) -> None:
        """Answer."""


def listed() -> list[Any]:
    found: list[Any] = debug_controller().list.call_one(print_output=False).get()
    return found


def measure(ranks: int, folder: Path) -> dict[str, list[float]]:
    stoppers = this_host().spawn_procs({"ranks": ranks}).spawn("stoppers", Stopper)
    stoppers.ready.call().get()
    person = Person(debug_controller().address.call_one().get())
    person.read()
    names = ("first prompt", "first listed", "all listed", "list", "cast")
    times: dict[str, list[float]] = {name: [] for name in names}
    one = stoppers.slice(ranks=0)
    for number in range(ROUNDS):
        began = time.perf_counter()
        everyone = stoppers.work.call("")
        while len(listed()) < ranks:
            assert time.perf_counter() - began < 60
        times["all listed" if number else "first listed"].append(time.perf_counter() - began)
        began = time.perf_counter()
        assert person.ask("list").count("| stoppers") == ranks
        times["list"].append(time.perf_counter() - began)
        marks = folder / str(number)
        marks.mkdir()
        began = time.perf_counter()
        write = f"import os; open(os.path.join({str(marks)!r}, str(os.getpid())), 'w').close()"
        person.ask(f"cast stoppers ranks(0:{ranks}) {write}")
        while len(os.listdir(marks)) < ranks:
            assert time.perf_counter() - began < 60
        times["cast"].append(time.perf_counter() - began)
        person.ask("continue")
        everyone.get(timeout=60)

        began = time.perf_counter()
        call = one.work.call_one("")
        debug_controller().wait_pending_session.call_one().get(timeout=60)
        person.ask("attach stoppers 0", "(Pdb) ")
        times["first prompt"].append(time.perf_counter() - began)
        person.ask("c")
        call.get(timeout=60)
    return times


def main() -> None:
    ranks = count(64)
    os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="monarch-debugger-") as folder:
        times = measure(ranks, Path(folder))
    faults: list[str] = []
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name}: {middle:.3f} s ({min(values):.3f} to {max(values):.3f})")
        if middle > LIMITS.get(name, 60.0):
            faults.append(f"{name} took {middle:.3f} s, more than {LIMITS[name]}")
    end(f"{ranks} ranks, {ROUNDS} rounds", time.monotonic() - began, faults)


if __name__ == "__main__":
    main()
