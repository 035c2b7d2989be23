"""The logs of two hosts as files of this machine, while they are written there.

`gather_mount` shows a directory of every host below one directory here, read only: `hosts_0`,
`hosts_1` and so on. Each look asks the host, so a log that grows there grows here, and any program
can read it: `tail -f`, `grep`, TensorBoard. Files are not copied ahead, so a checkpoint of the
hosts costs nothing here before it is read.

    python examples/hello_gather_mount.py --hosts 2
    python examples/hello_gather_mount.py --stay         # look with your own tools meanwhile

The hosts are processes of this machine. Hosts of a cluster differ in the line that describes the
job. Needs /dev/fuse and fusermount3 (Debian: package fuse3) on this machine only.
"""

import argparse
import hashlib
import os
import sys
import tempfile

from monarch.actor import Actor, current_rank, endpoint
from monarch.gather_mount import gather_mount
from monarch.job import ProcessJob

SIZE = 3 << 20  # bytes of a checkpoint


class Trainer(Actor):
    """A program on a host, which knows nothing of the mount."""

    def __init__(self, folder: str) -> None:
        self.name = f"hosts_{current_rank()['hosts']}"
        self.folder = os.path.join(folder, self.name)
        os.mkdir(self.folder)

    @endpoint
    def step(self, number: int) -> None:
        with open(os.path.join(self.folder, "log"), "a") as log:
            log.write(f"{self.name}: step {number}\n")

    @endpoint
    def checkpoint(self) -> str:
        content = os.urandom(SIZE)
        with open(os.path.join(self.folder, "weights"), "wb") as file:
            file.write(content)
        return hashlib.sha256(content).hexdigest()


def read(*path: str) -> bytes:
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def main() -> int:
    parser = argparse.ArgumentParser(description="Show directories of several hosts here.")
    parser.add_argument("--hosts", type=int, default=2, help="whose logs are shown (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="lines of each log (default: 3)")
    parser.add_argument("--stay", action="store_true", help="keep the mount until Enter is pressed")
    args = parser.parse_args()
    if args.hosts < 1 or args.steps < 1:
        parser.error("--hosts and --steps must be at least 1")

    with tempfile.TemporaryDirectory() as folder:
        there, here = os.path.join(folder, "there"), os.path.join(folder, "here")
        os.mkdir(there)
        job = ProcessJob({"hosts": args.hosts})
        try:
            hosts = job.state(cached_path=None).hosts
            trainers = hosts.spawn_procs().spawn("trainers", Trainer, there)
            trainers.step.call(1).get()
            # $SUBDIR: these hosts share a machine, so each has a directory of its own name there.
            with gather_mount(hosts, os.path.join(there, "$SUBDIR"), here):
                return watch(trainers, here, args)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        finally:
            job.kill()


def watch(trainers: Trainer, here: str, args: argparse.Namespace) -> int:
    print(f"{here}: {', '.join(sorted(os.listdir(here)))}")
    names = [f"hosts_{number}" for number in range(args.hosts)]
    for number in range(2, args.steps + 1):
        trainers.step.call(number).get()
        print(", ".join(read(here, name, "log").decode().splitlines()[-1] for name in names))
    written = trainers.checkpoint.call().get().values()
    found = [hashlib.sha256(read(here, name, "weights")).hexdigest() for name in names]
    if args.stay:
        print("The directory stays until you press Enter.", flush=True)
        sys.stdin.readline()
    lines = {name: read(here, name, "log").decode().splitlines() for name in names}
    expected = {n: [f"{n}: step {k + 1}" for k in range(args.steps)] for n in names}
    if found != list(written) or lines != expected:
        print("error: a file here is not what a host has written", file=sys.stderr)
        return 1
    print(f"{len(names)} logs and {len(names)} checkpoints are here what they are there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
