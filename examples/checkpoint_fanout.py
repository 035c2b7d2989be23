"""One process has a checkpoint, and many load it: from the one, through a tree, and by message.

The loader maps the file into memory and registers the mapping, read-only: it reads nothing itself,
and pages come from the disk when somebody wants them. Every other process has memory for the
weights already, as a model has, and reads into it, piece by piece, from its *source*: the loader,
or another process that is registered as well. A number beside the memory counts the pieces that
have come; who reads from a process looks at its number, one-sidedly, and takes what is there. So in
a tree the pieces travel through all levels at once, and no process waits for whole checkpoints.

    python examples/checkpoint_fanout.py                      # 256 MB made up, eight processes
    python examples/checkpoint_fanout.py --file model.safetensors --procs 4
    python examples/checkpoint_fanout.py --degree 3           # a tree in which each feeds three
    python examples/checkpoint_fanout.py --damage 1           # process 1 spoils a byte: who has it?

On one host all ways are bound by the same memory, and a tree gains little. It is between hosts
that the loader's network card sends the checkpoint once per process, or in a tree `degree` times,
however many there are. A message is a copy into memory that all receivers share, made anew for each
message, and then one for each into its own.

The check: each process compares the checksum of what it has with that of the file. Needs numpy and
rich: pip install 'pymonarch[examples]'
"""

import argparse
import mmap
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

try:
    import numpy as np
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer, explain

PIECE = 8 << 20
PAUSE = 0.0005  # seconds until somebody who waits for a piece looks again

Source = tuple[RDMABuffer, RDMABuffer]
"""The checkpoint in some process, and the number of pieces that are there."""


class Loader(Actor):
    """Has the checkpoint, as a mapped file."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.checkpoint = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.pieces = np.array([-(-len(self.checkpoint) // PIECE)], np.uint64)

    @endpoint
    def publish(self) -> Source:
        return RDMABuffer(self.checkpoint), RDMABuffer(self.pieces)

    @endpoint
    def checksum(self) -> int:
        return zlib.crc32(self.checkpoint)


class Replica(Actor):
    """A process with memory for the weights, which also serves others from it."""

    def __init__(self, size: int, damage: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.pieces = np.zeros(1, np.uint64)
        self.count = RDMABuffer(self.pieces)
        self.damages = damage == current_rank().rank

    @endpoint
    def publish(self) -> Source:
        return RDMABuffer(self.memory, read_only=True), self.count

    @endpoint
    def route(self, source: Source) -> str:
        return explain(source[0]).route or "none"

    @endpoint
    def clear(self) -> None:
        """Forget the checkpoint."""
        self.pieces[0] = 0
        self.memory[:] = 0

    @endpoint
    def load(self, sources: list[Source]) -> None:
        """Get the checkpoint from this process's source, passing on what has come."""
        checkpoint, there = sources[current_rank().rank]
        size = len(self.memory)
        come = np.zeros(1, np.uint64)
        done = 0
        while done * PIECE < size:
            # `fetch_add` of nothing: a look at the number while its owner may be changing it.
            RDMAAction().fetch_add(there, come, 0).submit().get()
            if come[0] == done:
                time.sleep(PAUSE)
            for piece in range(done, int(come[0])):
                start, end = piece * PIECE, min((piece + 1) * PIECE, size)
                checkpoint[start:end].read_into(self.memory[start:end]).get()
                self.have(1)
            done = int(come[0])

    @endpoint
    def take(self, checkpoint: Any) -> None:
        """Get the checkpoint as a message."""
        self.memory[:] = checkpoint
        self.have(-(-len(self.memory) // PIECE))

    def have(self, more: int) -> None:
        """So many more pieces are here, for everybody to see."""
        if self.damages and not self.pieces[0]:
            self.memory[0] ^= 1
        RDMAAction().fetch_add(self.count, np.zeros(1, np.uint64), more).submit().get()

    @endpoint
    def checksum(self) -> int:
        return zlib.crc32(self.memory)


def affordable(wanted: int, copies: int) -> int:
    """`wanted` megabytes, or what half of the free memory has room for, `copies` times."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
    except FileNotFoundError:  # not Linux: the user knows
        return wanted
    free = int(sizes["MemAvailable"].split()[0]) >> 10
    return max(1, min(wanted, free // 2 // copies))


def make_checkpoint(path: Path, megabytes: int) -> None:
    """Write random numbers, each megabyte different from the others."""
    noise = np.random.default_rng(1).integers(1 << 32, size=1 << 18, dtype=np.uint32)
    with path.open("wb") as file:
        for number in range(megabytes):
            file.write(np.roll(noise, number) ^ np.uint32(number))


class FanOut:
    """The processes, and what happened in them."""

    def __init__(self, path: Path, procs: int, damage: int, console: Console) -> None:
        self.size = path.stat().st_size
        self.procs = procs
        self.console = console
        self.path = path
        self.meshes = [this_host().spawn_procs(), this_host().spawn_procs({"procs": procs})]
        self.loader = self.meshes[0].spawn("loader", Loader, str(path))
        self.replicas = self.meshes[1].spawn("replicas", Replica, self.size, damage)
        self.origin: Source = self.loader.publish.call_one().get()
        self.published: list[Source] = self.replicas.publish.call().get().values()
        self.wanted = self.loader.checksum.call_one().get()
        self.wrong: dict[str, list[int]] = {}

    def sources(self, degree: int) -> list[Source]:
        """Where each process reads from if each feeds `degree` others; 0: all from the loader."""
        if not degree:
            return [self.origin] * self.procs
        parents = [(rank - degree) // degree for rank in range(self.procs)]
        return [self.origin if parent < 0 else self.published[parent] for parent in parents]

    def load(self, title: str, degree: int) -> float:
        """All read, from one or in a tree; the seconds that it took."""
        return self.watch(title, self.replicas.load, self.sources(degree))

    def send(self, title: str) -> float:
        """All get the checkpoint by message."""
        return self.watch(title, self.replicas.take, np.fromfile(self.path, np.uint8))

    def watch(self, title: str, endpoint: Any, argument: Any) -> float:
        """Call all with this; look at their memory meanwhile; compare the checksums at the end."""
        self.replicas.clear.call().get()
        columns = (
            TextColumn("{task.description:16}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        live = self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not live) as progress:
            task = progress.add_task(title, total=self.procs * self.size)
            started = time.perf_counter()
            loading = endpoint.call(argument)
            while True:
                try:
                    loading.get(timeout=0.1)
                    break
                except TimeoutError:
                    progress.update(task, completed=self.come())
            seconds = time.perf_counter() - started
            progress.update(task, completed=self.procs * self.size)
        if not live:
            self.console.print(f"{title:16} {self.bandwidth(seconds):6.2f} GB/s")
        sums = self.replicas.checksum.call().get().values()
        self.wrong[title] = [rank for rank, found in enumerate(sums) if found != self.wanted]
        return seconds

    def come(self) -> int:
        """Bytes that are where they belong, read from the processes' numbers."""
        found = np.zeros(self.procs, np.uint64)
        action = RDMAAction()
        for rank, (_, count) in enumerate(self.published):
            action.fetch_add(count, found[rank : rank + 1], 0)
        action.submit().get()
        return sum(min(int(pieces) * PIECE, self.size) for pieces in found)

    def bandwidth(self, seconds: float) -> float:
        """GB/s that arrived, over all processes."""
        return self.procs * self.size / seconds / 1e9

    def stop(self) -> None:
        for mesh in self.meshes:
            mesh.stop().get()


def main() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint from one process to many.")
    parser.add_argument("--megabytes", type=int, default=256, help="of the made-up one (256)")
    parser.add_argument("--file", type=Path, help="a file to use instead of a made-up one")
    parser.add_argument("--procs", type=int, default=8, help="processes that load it (8)")
    parser.add_argument("--degree", type=int, default=2, help="how many each feeds in the tree (2)")
    parser.add_argument("--damage", type=int, default=-1, metavar="RANK", help="spoil its copy")
    args = parser.parse_args()
    if min(args.procs, args.degree, args.megabytes) < 1:
        parser.error("--procs, --degree and --megabytes must be at least 1")
    if args.file is not None and not (args.file.is_file() and args.file.stat().st_size):
        parser.error(f"--file: {args.file} is no file with something in it")

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="monarch_checkpoint_") as folder:
        path = args.file
        if path is None:
            path = Path(folder) / "checkpoint"
            megabytes = affordable(args.megabytes, args.procs + 2)
            if megabytes < args.megabytes:
                console.print(f"too little memory for {args.megabytes} MB: {megabytes} MB instead")
            make_checkpoint(path, megabytes)
        return fan_out(path.absolute(), args, console)


def fan_out(path: Path, args: argparse.Namespace, console: Console) -> int:
    with console.status("starting ..."):
        fan = FanOut(path, args.procs, args.damage, console)
    ways = sorted(set(fan.replicas.route.call(fan.origin).get().values()))
    console.print(
        f"{os.path.getsize(path) / 1e6:,.0f} MB from one process to {args.procs}, "
        f"route {', '.join(ways)}, CRC {fan.wanted:08x}"
    )
    fan.load("the first time", 0)  # pages from the disk, and memory that is new
    took = {
        "all from one": fan.load("all from one", 0),
        f"tree of {args.degree}": fan.load(f"tree of {args.degree}", args.degree),
        "by message": fan.send("by message"),
    }
    fan.stop()

    summary = Table("", "seconds", "GB/s", "against the message", box=box.SIMPLE)
    for title, seconds in took.items():
        ratio = took["by message"] / seconds
        summary.add_row(title, f"{seconds:.3f}", f"{fan.bandwidth(seconds):.2f}", f"{ratio:.2f}x")
    console.print(summary)
    for title, ranks in fan.wrong.items():
        if ranks:
            print(f"error: {title}: wrong checksums at {ranks}", file=sys.stderr)
    if any(fan.wrong.values()):
        return 1
    console.print(f"every process had the right checksum, {len(fan.wrong)} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
