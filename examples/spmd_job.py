"""A torchrun command as a job: hosts that stay, and a script that runs on them again and again.

`serve` takes the words of a torchrun command and allocates hosts for it. `run_spmd` runs the
command; the second run starts at once, since hosts and their launchers are there already. The
script is ordinary: it is examples/train_digits_ddp.py, and `torchrun` itself would run it as well.

    python examples/spmd_job.py --procs 2 --steps 100

On a cluster, only the words for the scheduler differ:
`serve(command, scheduler="slurm", scheduler_cfg={"partition": "gpu"})`.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from monarch.job.spmd import serve

SCRIPT = Path(__file__).with_name("train_digits_ddp.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a torchrun script on hosts that stay.")
    parser.add_argument("--procs", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    parser.add_argument("--runs", type=int, default=2, help="of the script (default: 2)")
    args = parser.parse_args()
    if min(args.procs, args.steps, args.runs) < 1:
        parser.error("--procs, --steps and --runs must be at least 1")
    for module in ("torch", "sklearn"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"No module named {module!r}. Try: pip install 'pymonarch[examples]'")

    command = ["torchrun", f"--nproc-per-node={args.procs}", str(SCRIPT), "--steps"]
    job = serve([*command, str(args.steps)], scheduler="local_cwd")
    try:
        for number in range(1, args.runs + 1):
            began = time.perf_counter()
            job.run_spmd()
            print(f"run {number} took {time.perf_counter() - began:.1f} s", flush=True)
    finally:
        job.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
