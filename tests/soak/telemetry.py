"""`python tests/soak/telemetry.py [--seconds 60] [--procs 16]`: cost and bounds of recording.

A script sends messages without answers to actors, one in each of `--procs` processes, in rounds of
`--round` seconds: in turns without telemetry and with it, each time in new processes. Printed are
the messages per second of each round, and the median ratio of neighbours. With ``--rate`` as many
messages are sent in a second, and the processor time for each is compared. With ``--answered`` each
message has an answer.

Then messages are sent with telemetry for `--seconds`, while the store may take `--limit` MiB.
Printed are, from time to time, the memory of the observer and of a worker, the rows that are there
and those that were dropped. The run fails if the observer's memory grows beyond three times the
limit and what it has at its start, or the script's by more than its queues may hold. For an hour:
``--rounds 0 --minutes 60``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import end

from monarch.actor import Actor, endpoint, this_host

PAGE = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
BURST = 50  # messages to each process between two looks at the clock
QUEUES = 256.0  # MiB of a process's queues, generously
EMPTY = 256.0  # MiB of an observer whose store is empty, generously


class Receiver(Actor):
    """Takes messages."""

    @endpoint
    def take(self, step: int, loss: float) -> None:
        """Take one."""

    @endpoint
    def cpu(self) -> tuple[int, float]:
        """Return the process number, and its processor time in seconds."""
        times = os.times()
        return os.getpid(), times.user + times.system


def resident(pid: int) -> float:
    """Return the memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def send(
    procs: int, seconds: float, rate: float, look: Any = None, *, answered: bool = False
) -> dict[str, float]:
    """Send for so long; return messages per second, and the processor time of each in us."""
    receivers = this_host().spawn_procs({"procs": procs}).spawn("receivers", Receiver)
    receivers.take.call(0, 0.5).get()
    before = sum(one for _, one in receivers.cpu.call().get().values())
    own = sum(os.times()[:2])
    began = time.perf_counter()
    sent = 0
    while (passed := time.perf_counter() - began) < seconds:
        if answered:
            for future in [receivers.take.stream(step, 0.5) for step in range(BURST)]:
                for answer in future:
                    answer.get()
        for step in range(0 if answered else BURST):
            receivers.take.broadcast(step, 0.5)
        sent += BURST * procs
        receivers.take.call(0, 0.5).get()
        sent += procs
        if rate and (ahead := sent / rate - passed) > 0:
            time.sleep(ahead)
        if look is not None:
            look(passed)
    passed = time.perf_counter() - began
    after = sum(one for _, one in receivers.cpu.call().get().values())
    spent = after - before + sum(os.times()[:2]) - own
    return {"rate": sent / passed, "us": 1e6 * spent / sent}


def measure(options: argparse.Namespace, on: bool) -> dict[str, float]:
    """Measure one round in a script of its own."""
    words = ["--child", "--procs", str(options.procs), "--round", str(options.round)]
    words += ["--answered"] if options.answered else []
    environ = {**os.environ, "MONARCH_TELEMETRY": "1" if on else "0"}
    command = [sys.executable, __file__, *words, "--rate", str(options.rate)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def fill(options: argparse.Namespace) -> list[str]:
    """Send for long with telemetry; return what is wrong."""
    from monarch._observer.handle import observe
    from monarch._observer.places import folder
    from monarch._store.client import QueryEngineClient
    from monarch.config import configure

    configure(telemetry=True, telemetry_limit=options.limit << 20)
    faults: list[str] = []
    most = 0.0
    shown = -60.0
    own: list[float] = []

    def look(passed: float) -> None:
        nonlocal most, shown
        place = observe(telemetry=True).wait()
        content = json.loads(Path(folder(), f"{os.getpid()}.json").read_text())
        memory = resident(content["observer"])
        most = max(most, memory)
        if passed - shown >= max(options.seconds / 20, 5.0):
            shown = passed
            client = QueryEngineClient(place.telemetry_url)
            rows = client.query("SELECT count(*) AS n FROM messages", 60.0)["rows"][0]["n"]
            own.append(resident(os.getpid()))
            print(f"{passed:7.0f} s  observer {memory:6.0f} MiB, script {own[-1]:4.0f} MiB", end="")
            print(f", {rows:,} rows")

    found = send(options.procs, options.seconds, options.rate, look)
    print(f"{found['rate']:,.0f} messages a second")
    bound = EMPTY + 3 * options.limit
    if most > bound:
        faults.append(f"the observer had {most:.0f} MiB, more than {bound:.0f}")
    if own[-1] > own[0] + QUEUES:
        faults.append(f"the script has {own[-1]:.0f} MiB, and had {own[0]:.0f}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="What telemetry costs, and its bounds.")
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of filling the store")
    add("--minutes", type=float, help="of filling the store, instead of --seconds")
    add("--procs", type=int, default=16)
    add("--round", type=float, default=5.0, help="seconds of a round")
    add("--rounds", type=int, default=5, help="of each kind")
    add("--rate", type=float, default=0.0, help="messages a second; 0: as many as possible")
    add("--limit", type=int, default=64, help="of the store, in MiB")
    add("--answered", action="store_true", help="messages have answers, which their caller times")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.minutes is not None:
        options.seconds = 60 * options.minutes
    if options.child:
        print(
            json.dumps(send(options.procs, options.round, options.rate, answered=options.answered))
        )
        return
    start = time.perf_counter()
    ratios: list[float] = []
    costs: list[float] = []
    for _ in range(options.rounds):
        off, on = measure(options, on=False), measure(options, on=True)
        ratios.append(on["rate"] / off["rate"])
        costs.append(on["us"] - off["us"])
        print(
            f"off {off['rate']:,.0f}/s {off['us']:.2f} us, on {on['rate']:,.0f}/s {on['us']:.2f} us"
        )
    if ratios:
        ratio, cost = statistics.median(ratios), statistics.median(costs)
        print(f"throughput with telemetry: {ratio:.3f} of that without; {cost:+.2f} us a message")
    faults = fill(options) if options.seconds else []
    end("telemetry", time.perf_counter() - start, faults)


if __name__ == "__main__":
    main()
