"""`python tests/soak/telemetry_memory.py [--minutes 60]`: the memory of telemetry while a job runs.

A program with 4 processes calls, logs, opens spans and counts, about 2,000 messages a second, and
now and then replaces a process. Its store may take 64 MiB, which is full after some minutes. Every
30 seconds the memory of each process is read. Printed is the most that each kind of process took in
the first and in the second half, the rows that the store holds and has dropped, and whether memory
still grew: by more than 10 MiB and 5 percent from half to half is a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import end

from monarch._observer.handle import observe
from monarch._observer.places import folder, wanted
from monarch._store.client import QueryEngineClient
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.config import configure

LIMIT = 64 << 20
INTERVAL = 30.0  # seconds between two samples
PAUSE = 0.02  # seconds between two rounds of the program
ROUND = 40  # messages
LIFE = 60.0  # seconds until the fourth process is replaced
PAGE = os.sysconf("SC_PAGE_SIZE") / (1 << 20)

logger = logging.getLogger("telemetry_memory")


class Worker(Actor):
    """Adds numbers, and logs the sum."""

    def __init__(self) -> None:
        self.total = 0

    @endpoint
    def add(self, value: int) -> int:
        self.total += value
        logger.warning("the total is %d", self.total, extra={"step": value})
        return self.total

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def resident(pid: int) -> float:
    """Return the memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def observer(pid: int) -> int:
    """Return the process number of the observer of script `pid`, once it serves."""
    observe().wait()
    return int(json.loads((Path(folder()) / f"{pid}.json").read_text())["observer"])


class Program(threading.Thread):
    """The program whose telemetry is recorded."""

    def __init__(self, procs: ProcMesh) -> None:
        super().__init__(daemon=True)
        self.workers = procs.spawn("workers", Worker)
        self.done = threading.Event()
        self.rounds = 0
        self.replaced = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        spare = this_host().spawn_procs({"procs": 1}, name="spare", bootstrap=_quiet)
        extra = spare.spawn("extra", Worker)
        born = time.monotonic()
        while not self.done.wait(PAUSE):
            self.rounds += 1
            for value in range(ROUND // 4 - 1):
                self.workers.add.call(value).get(timeout=60)
            extra.add.call_one(self.rounds).get(timeout=60)
            if time.monotonic() - born > LIFE:
                spare.stop().get(timeout=60)
                spare = this_host().spawn_procs({"procs": 1}, name="spare", bootstrap=_quiet)
                extra = spare.spawn("extra", Worker)
                born = time.monotonic()
                self.replaced += 1


def _quiet() -> None:
    """Print no log records: they are rows only."""
    logging.getLogger().handlers[:] = [logging.NullHandler()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    logging.getLogger().setLevel(logging.WARNING)
    configure(telemetry=True, telemetry_limit=LIMIT)
    procs = this_host().spawn_procs({"procs": 3}, bootstrap=_quiet)
    program = Program(procs)
    pids = list(program.workers.pid.call().get().values())
    watched = {"script": [os.getpid()], "processes": pids, "observer": [observer(os.getpid())]}
    program.start()
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    until = began + 60 * minutes
    while time.monotonic() < until and program.is_alive():
        time.sleep(min(INTERVAL, minutes * 6))
        samples.append({kind: max(map(resident, pids)) for kind, pids in watched.items()})
        print(len(samples), {kind: round(size) for kind, size in samples[-1].items()}, flush=True)
    program.done.set()
    program.join(60)
    engine = QueryEngineClient(wanted(os.getpid()).telemetry_url)
    rows: list[dict[str, Any]] = engine.query("SELECT count(*) AS n FROM messages")["rows"]
    middle = len(samples) // 2
    failures = [] if program.error is None else [f"the program failed: {program.error!r}"]
    print(f"{program.rounds} rounds of {ROUND} messages, {program.replaced} processes replaced")
    print(f"the store holds {rows[0]['n']} messages")
    for kind in watched:
        first = max(sample[kind] for sample in samples[:middle])
        second = max(sample[kind] for sample in samples[middle:])
        print(f"{kind}: at most {first:.0f} MiB in the first half, {second:.0f} MiB in the second")
        if second - first > max(10.0, 0.05 * first):
            failures.append(f"the memory of {kind} grew from {first:.0f} to {second:.0f} MiB")
    end(f"{program.rounds * ROUND} messages", time.monotonic() - began, failures)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="monarch-memory-") as scratch:
        os.chdir(scratch)
        main()
