"""`python tests/soak/restart_cost.py [RUNS=3] [RANKS=2]`: a killed rank, under torchrun and here.

A script trains with an all-reduce in each step and goes on from its checkpoint. Once it is under
way, one rank gets SIGKILL; both launchers have ``--max-restarts 3`` and use three of them in each
run, so a run has three figures. Runs of the two launchers alternate. All times are seconds after
the kill: until the script's first line on the last rank, until the process group is formed on the
last rank, and until the first step is done. Printed are the median of all kills, and the range of
the last. torchrun shares one store between its attempts, where a rank may read the address of a
process of the attempt before, and fails then; so it has ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``.
Figures of a machine that does other work at the same time are larger.
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
STEPS = 20  # steps of an attempt before its rank is killed, and of the last attempt

# Each line of the log is one write, so those of several ranks do not mix.
SCRIPT = """
import os, sys, time
began = time.monotonic()
import torch, torch.distributed as dist

kills, steps = map(int, sys.argv[1:])
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(event, at=None):
    at = time.monotonic() if at is None else at
    os.write(log, f"{attempt} {rank} {os.getpid()} {event} {at}\\n".encode())

note("began", began)
dist.init_process_group("gloo")
note("formed")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
done = 0
if os.path.exists("checkpoint"):
    saved = torch.load("checkpoint", weights_only=True)
    model.load_state_dict(saved["model"])
    done = saved["done"]
own = 0
while own < steps or attempt < kills:
    model(torch.randn(32, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    own += 1
    if rank == "0" and done % 5 == 0:
        torch.save({"model": model.state_dict(), "done": done}, "checkpoint.new")
        os.replace("checkpoint.new", "checkpoint")
    if own == 1:
        note("stepped")
    if own == steps:
        note("ready")
dist.destroy_process_group()
"""

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "monarch run": ["-m", "monarch.cli", "run", "--keep=0"],  # nothing is warm from another run
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


def measure(launcher: str, ranks: int) -> list[dict[str, float]]:
    """Run the script once; return the times after each kill."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        log = Path(folder) / "log"
        words = [f"--nproc-per-node={ranks}", f"--max-restarts={KILLS}", "train.py"]
        words += [str(KILLS), str(STEPS)]
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher], *words],
                cwd=folder,
                env={**os.environ, **VARIABLES},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        kills: list[float] = []
        try:
            for attempt in range(KILLS):
                pid = wait(process, log, attempt, "ready", ranks)
                kills.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
            wait(process, log, KILLS, "ready", ranks)
            if process.wait(LIMIT):
                raise SystemExit(f"{launcher} ended with status {process.returncode}")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its ranks
                process.wait(LIMIT)
        notes = list(read(log))
    return [
        {
            event: max(at for n, _, _, name, at in notes if (n, name) == (attempt + 1, event))
            - killed
            for event in EVENTS
        }
        for attempt, killed in enumerate(kills)
    ]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    found: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(runs):
        for launcher, figures in found.items():
            figures += measure(launcher, ranks)
    print(f"seconds after the kill of one of {ranks} ranks; {runs * KILLS} kills of each launcher")
    print(f"{'':12}{'script begun':>14}{'group formed':>14}{'first step':>12}   range")
    for launcher, figures in found.items():
        medians = [statistics.median(one[event] for one in figures) for event in EVENTS]
        steps = [one["stepped"] for one in figures]
        print(
            f"{launcher:12}{medians[0]:14.2f}{medians[1]:14.2f}{medians[2]:12.2f}"
            f"   {min(steps):.2f} - {max(steps):.2f}"
        )


if __name__ == "__main__":
    main()
