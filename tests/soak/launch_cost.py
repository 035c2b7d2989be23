"""`python tests/soak/launch_cost.py [RUNS=5] [RANKS=8] [HOSTS=0]`: a launch, by torchrun and here.

The script imports torch, forms a process group of gloo, makes two steps of
DistributedDataParallel, and ends. Times are those of the whole command, in seconds. In each run
there is one launch by torchrun, one by ``monarch run`` that finds no process of an earlier launch,
and one that finds that of the launch before. Printed are the medians, the ranges, and the medians
of the ratios within a run. The files are in the cache of the system: a launch of each kind that
does not count comes first. With HOSTS the launches here are on the hosts of a `ProcessJob`, each
with its share of the ranks; the time to connect to them counts, their start does not. Figures of a
machine that does other work at the same time are larger.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 600.0  # seconds for a launch
KEEP = 60  # seconds for which a process waits for the next launch

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(2):
    model(torch.randn(32, 64)).square().mean().backward()
dist.destroy_process_group()
"""

OURS = ["-m", "monarch.cli", "run"]
KINDS = ("torchrun", "first launch", "next launch")


JOB = """
from monarch.job import ProcessJob
job = ProcessJob({{"hosts": {hosts}}})
"""


def command(folder: str, *words: str) -> None:
    """Run a command of `monarch` in a directory."""
    line = [sys.executable, "-m", "monarch.cli", *words]
    subprocess.run(line, cwd=folder, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)


def launch(words: list[str], ranks: int, folder: str, mark: str) -> float:
    """Run the script once; return how long the command took.

    Launches with other values of `mark` in the environment share no process.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, f"--nproc-per-node={ranks}", "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LAUNCH_MARK": mark},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}status {done.returncode}")
    return time.monotonic() - began


def measure(ranks: int, hosts: int, folder: str, mark: str) -> tuple[float, float, float]:
    """Return the times of a launch of each kind."""
    ours, here = [*OURS, f"--keep={KEEP}"], ranks
    torchrun = launch(["-m", "torch.distributed.run", "--standalone"], ranks, folder, mark)
    if hosts:
        (Path(folder) / "described.py").write_text(JOB.format(hosts=hosts))
        ours, here = [*ours, "--mesh=hosts"], ranks // hosts
        command(folder, "apply", "described.job")  # new hosts: they have no process yet
    try:
        return torchrun, launch(ours, here, folder, mark), launch(ours, here, folder, mark)
    finally:
        if hosts:
            command(folder, "kill")


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    hosts = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if hosts and ranks % hosts:
        raise SystemExit("RANKS must be a multiple of HOSTS")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        measure(ranks, hosts, folder, f"{os.getpid()}-0")
        marks = [f"{os.getpid()}-{run}" for run in range(1, runs + 1)]
        found = [measure(ranks, hosts, folder, mark) for mark in marks]
    where = f" on {hosts} hosts" if hosts else ""
    print(f"seconds of a launch of {ranks} ranks{where}; {runs} runs")
    for index, kind in enumerate(KINDS):
        times = [run[index] for run in found]
        ratio = statistics.median(run[index] / run[0] for run in found)
        print(
            f"{kind:13}{statistics.median(times):7.2f}   {min(times):.2f} - {max(times):.2f}"
            f"   {ratio:.2f} of torchrun's"
        )


if __name__ == "__main__":
    main()
