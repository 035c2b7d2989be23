"""A torchrun command as a job: hosts that stay, and a script that runs on them again and again.

`serve` takes the words of a torchrun command and allocates hosts for it. `run_spmd` runs the
command; the second run starts at once, since hosts and their launchers are there already. The
script is ordinary: it is examples/train_digits_ddp.py, and `torchrun` itself would run it as well.

    python examples/spmd_job.py --procs 2 --steps 100

On a cluster, only the words for the scheduler differ; the script has to be at the same path there:

    python examples/spmd_job.py --procs 8 --scheduler slurm --option partition=gpu
    python examples/spmd_job.py --procs 8 --scheduler k8s --option namespace=ml \
        --option image=registry.example.org/train:1 --option kubeconfig=/home/me/.kube/config

A command is for one host. For several, `serve` takes an AppDef of torchx; ddp_actors.py trains on
several hosts without torchrun.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from monarch.job.spmd import serve

SCRIPT = Path(__file__).with_name("train_digits_ddp.py")


def value_of(text: str) -> object:
    """Return what a text says as JSON, such as 8 or false; other texts mean themselves."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a torchrun script on hosts that stay.")
    parser.add_argument("--procs", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    parser.add_argument("--runs", type=int, default=2, help="of the script (default: 2)")
    parser.add_argument("--scheduler", default="local_cwd", help="local_cwd, slurm or k8s")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the scheduler, a text or JSON; may be repeated",
    )
    args = parser.parse_args()
    if min(args.procs, args.steps, args.runs) < 1:
        parser.error("--procs, --steps and --runs must be at least 1")
    if wrong := [option for option in args.option if "=" not in option]:
        parser.error(f"--option {wrong[0]}: write it as NAME=VALUE")
    for module in ("torch", "sklearn"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"No module named {module!r}. Try: pip install 'pymonarch[examples]'")

    command = ["torchrun", f"--nproc-per-node={args.procs}", str(SCRIPT), "--steps"]
    given = (option.split("=", 1) for option in args.option)
    options = {name: value_of(text) for name, text in given}
    job = serve([*command, str(args.steps)], scheduler=args.scheduler, scheduler_cfg=options)
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
