"""Hello from machines that SkyPilot rents in a cloud: an actor on each.

The machines cost money. They are torn down at the end of this program, however it ends; with
`--keep` they stay for the next run, until `monarch kill` in this directory, or until no program has
used them for `--idle-minutes`.

    python examples/hello_skypilot.py                                   # two small machines
    python examples/hello_skypilot.py --infra aws --accelerators A100:8
    python examples/hello_skypilot.py --infra kubernetes --setup true  # an image that has pymonarch

No package index has a release of pymonarch yet. Until there is one, `--setup` says how a machine
gets it: docs/jobs/skypilot.md.

Run it where the internal addresses of the machines can be reached: docs/jobs/skypilot.md. SkyPilot
has to know your cloud: `sky check` shows whether it does.

Needs SkyPilot: pip install 'pymonarch[skypilot]'
"""

import argparse
import os
import platform
import sys

from monarch.actor import Actor, current_rank, endpoint
from monarch.job import SkyPilotJob


class Greeter(Actor):
    """An actor on a machine."""

    @endpoint
    def hello(self) -> str:
        node, rank = os.environ.get("SKYPILOT_NODE_RANK", "?"), current_rank().rank
        return f"hello from rank {rank}: node {node} of SkyPilot, {platform.node()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Say hello from machines of a cloud.")
    parser.add_argument("--hosts", type=int, default=2, help="machines (default: 2)")
    parser.add_argument(
        "--infra", help="aws, gcp/us-east1, kubernetes, ... (default: the cheapest)"
    )
    parser.add_argument("--accelerators", metavar="NAME:N", help="GPUs of each machine")
    parser.add_argument("--python", default="python", help="of the machines (default: python)")
    parser.add_argument("--setup", metavar="COMMAND", help="instead of an installation by pip")
    parser.add_argument("--idle-minutes", type=int, default=10, help="then they end (default: 10)")
    parser.add_argument("--keep", action="store_true", help="leave the machines for the next run")
    args = parser.parse_args()
    if args.hosts < 1:
        parser.error("--hosts must be at least 1")

    given = {"infra": args.infra, "accelerators": args.accelerators}
    try:
        job = SkyPilotJob(
            {"workers": args.hosts},
            resources={name: value for name, value in given.items() if value} or None,
            idle_minutes_to_autostop=args.idle_minutes,
            python_exe=args.python,
            setup_commands=args.setup,
        )
        # Without a file for the next run, the machines end with this program, even if it is killed.
        hosts = job.state(".monarch/job_state.pkl" if args.keep else None).workers
    except (ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        greeters = hosts.spawn_procs().spawn("greeters", Greeter)
        print(*greeters.hello.call().get().values(), sep="\n")
    finally:
        if not args.keep:
            job.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
