"""`python tests/soak/restart_cost.py [RUNS=3] [RANKS=2] [SETUP=0]`: the cost of a killed rank.

A script trains with an all-reduce in each step and goes on from its checkpoint. Once it is under
way, its last rank gets SIGKILL. It is started by torchrun, by ``monarch run``, and by ``monarch
run`` with a loop over `monarch.spmd.restarts`, in turns; each has ``--max-restarts 3`` and uses
three of them in each run, so a run has three figures. `SETUP` is how many seconds of processor time
each new process needs before its first attempt, for a model or a data set.

All times are seconds after the kill: until the first line of the script, or of the next attempt,
has run on all ranks, until the process group is formed on all, and until the first step is done.
Printed are the median of all kills, the range of the last time, and the median of the steps that
were done again. torchrun shares one store between its attempts, where a rank may read the address
of a process of the attempt before, and fails then; so it has
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. Figures of a machine that does other work at the same time
are larger.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KILLS = 3
LIMIT = 300.0  # seconds for an event of a run
STEPS = 23  # steps of an attempt before its rank is killed; there is a checkpoint after each fifth

# Each line of the log is one write, so those of several ranks do not mix.
SCRIPT = """
import time
began = time.monotonic()
import contextlib, copy, os, sys
import torch, torch.distributed as dist

kills, steps, setup, keep = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
attempts = [contextlib.nullcontext()]
if keep:
    from monarch.spmd import restarts
    attempts = restarts()
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(event, at=None):
    at = time.monotonic() if at is None else at
    os.write(log, f"{attempt} {rank} {os.getpid()} {event} {at}\\n".encode())

def train(saved):
    dist.init_process_group("gloo")
    note("formed")
    if keep:
        newest = [0] * dist.get_world_size()
        dist.all_gather_object(newest, saved["done"])
        state = [saved]
        dist.broadcast_object_list(state, src=newest.index(max(newest)))
        saved.update(state[0])
    elif os.path.exists("checkpoint"):
        saved.update(torch.load("checkpoint", weights_only=True))
    model.load_state_dict(saved["model"])
    done, own = saved["done"], 0
    note(f"from-{done}")
    while own < steps or attempt < kills:
        model(torch.randn(32, 64)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        own += 1
        if keep:
            saved.update({"model": copy.deepcopy(model.state_dict()), "done": done})
        elif rank == "0" and done % 5 == 0:
            torch.save({"model": model.state_dict(), "done": done}, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint")
        if own == 1:
            note("stepped")
        if own == steps:
            note("ready")
        os.pwrite(steps_done, f"{done:9}\\n".encode(), 10 * int(rank))
    dist.destroy_process_group()

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
saved = {"model": copy.deepcopy(model.state_dict()), "done": 0}
steps_done = os.open("steps", os.O_WRONLY | os.O_CREAT)
used = time.process_time()
while time.process_time() < used + setup: sum(range(10000))
for block in attempts:
    with block:
        rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        note("began", began)
        began = None
        train(saved)
"""

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "monarch run": ["-m", "monarch.cli", "run", "--keep=0"],  # nothing is warm from another run
    "restarts()": ["-m", "monarch.cli", "run", "--keep=0"],
}
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EVENTS = ("began", "formed", "stepped")


def read(log: Path) -> Iterator[tuple[int, int, int, str, float]]:
    """Yield the attempt, rank, process, event and time of each line."""
    lines = log.read_text().splitlines() if log.exists() else []
    for line in lines:
        attempt, rank, pid, event, at = line.split()
        yield int(attempt), int(rank), int(pid), event, float(at)


def wait(process: subprocess.Popen[bytes], log: Path, attempt: int, event: str, ranks: int) -> int:
    """Wait until all ranks have noted an event. Return the process of the last rank."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = {rank: pid for n, rank, pid, name, _ in read(log) if (n, name) == (attempt, event)}
        if len(found) == ranks:
            return found[ranks - 1]
        if process.poll() is not None or time.monotonic() > deadline:
            output = (log.parent / "output").read_text()
            raise SystemExit(f"{output}attempt {attempt} does not come to {event!r}")
        time.sleep(0.005)


def measure(launcher: str, ranks: int, setup: float) -> list[dict[str, float]]:
    """Run the script once; return the times after each kill."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        log = Path(folder) / "log"
        words = [f"--nproc-per-node={ranks}", f"--max-restarts={KILLS}", "train.py"]
        words += [str(KILLS), str(STEPS), str(setup), *["keep"] * (launcher == "restarts()")]
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher], *words],
                cwd=folder,
                env={**os.environ, **VARIABLES},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        kills: list[float] = []
        done: list[int] = []
        try:
            for attempt in range(KILLS):
                pid = wait(process, log, attempt, "ready", ranks)
                kills.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
                done.append(max(map(int, (Path(folder) / "steps").read_bytes().split())))
            wait(process, log, KILLS, "ready", ranks)
            if process.wait(LIMIT):
                raise SystemExit(f"{launcher} ended with status {process.returncode}")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its ranks
                process.wait(LIMIT)
        notes = list(read(log))
    found: list[dict[str, float]] = []
    for attempt, killed in enumerate(kills):
        events = [(name, at - killed) for n, _, _, name, at in notes if n == attempt + 1]
        times = {event: max(at for name, at in events if name == event) for event in EVENTS}
        begins = next(int(name[5:]) for name, _ in events if name.startswith("from-"))
        found.append({**times, "again": max(done[attempt] - begins, 0)})
    return found


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    setup = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    found: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(runs):
        for launcher, figures in found.items():
            figures += measure(launcher, ranks, setup)
    print(f"seconds after the kill of one of {ranks} ranks; {runs * KILLS} kills of each launcher")
    print(f"{'':12}{'ranks begun':>14}{'group formed':>14}{'first step':>12}   range        again")
    for launcher, figures in found.items():
        medians = [statistics.median(one[event] for one in figures) for event in EVENTS]
        steps = [one["stepped"] for one in figures]
        print(
            f"{launcher:12}{medians[0]:14.2f}{medians[1]:14.2f}{medians[2]:12.2f}"
            f"   {min(steps):.2f} - {max(steps):.2f}"
            f"{statistics.median(one['again'] for one in figures):8g}"
        )


if __name__ == "__main__":
    main()
