"""One process has a checkpoint, and many load it: directly, through a tree, and by message.

The loader maps the file into memory and registers the mapping read-only. It reads no data itself:
the system reads a page from the disk when another process accesses the page. Each other process has
memory for the weights already, as a model has. It reads the checkpoint piece by piece from its
*source*, which is the loader or another process that has registered its memory. A number beside the
memory counts the pieces that have arrived. A reader reads the number of its source one-sidedly, and
then the new pieces. So in a tree the pieces pass through all levels at once, and no process waits
for a whole checkpoint.

    python examples/checkpoint_fanout.py                      # 256 MB of noise, eight processes
    python examples/checkpoint_fanout.py --file model.safetensors --procs 4
    python examples/checkpoint_fanout.py --degree 3           # a tree in which each feeds three
    python examples/checkpoint_fanout.py --damage 1           # process 1 damages a byte: see where

On one host all ways are limited by the same memory, and a tree gains little. Between hosts a tree
does: without one, the loader's network card sends the checkpoint once per process; with one, only
`degree` times. A message is copied into memory that all receivers share, anew for each message, and
then into the memory of each receiver.

The check: each process compares the checksum of its memory with that of the file. Needs numpy and
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
PAUSE = 0.0005  # seconds between two readings of the count by a process that waits for a piece

Source = tuple[RDMABuffer, RDMABuffer]
"""The checkpoint in some process, and the number of pieces that are there."""


class Loader(Actor):
    """The process that has the checkpoint, as a mapped file."""

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
    """A process with memory for the weights, from which other processes may read."""

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
        """Clear the memory and the count of pieces."""
        self.pieces[0] = 0
        self.memory[:] = 0

    @endpoint
    def load(self, sources: list[Source]) -> None:
        """Read the checkpoint from this process's source, and offer each piece to others."""
        checkpoint, there = sources[current_rank().rank]
        size = len(self.memory)
        come = np.zeros(1, np.uint64)
        done = 0
        while done * PIECE < size:
            # `fetch_add` of zero reads the number atomically, while its owner may be changing it.
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
        """Receive the checkpoint as a message."""
        self.memory[:] = checkpoint
        self.have(-(-len(self.memory) // PIECE))

    def have(self, more: int) -> None:
        """Add `more` to the count of pieces, which others read."""
        if self.damages and not self.pieces[0]:
            self.memory[0] ^= 1
        RDMAAction().fetch_add(self.count, np.zeros(1, np.uint64), more).submit().get()

    @endpoint
    def checksum(self) -> int:
        return zlib.crc32(self.memory)


def affordable(wanted: int, copies: int) -> int:
    """Return `wanted` megabytes, or less if `copies` of them exceed half of the free memory."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
    except FileNotFoundError:  # not Linux: use the size that the user gave
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
    """The processes, and the measurements of their loading."""

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
        """Return the source of each process in a tree of this degree; 0: the loader for all."""
        if not degree:
            return [self.origin] * self.procs
        parents = [(rank - degree) // degree for rank in range(self.procs)]
        return [self.origin if parent < 0 else self.published[parent] for parent in parents]

    def load(self, title: str, degree: int) -> float:
        """Let all processes read, from the loader or in a tree; return the seconds taken."""
        return self.watch(title, self.replicas.load, self.sources(degree))

    def send(self, title: str) -> float:
        """Send the checkpoint to all processes by message; return the seconds taken."""
        return self.watch(title, self.replicas.take, np.fromfile(self.path, np.uint8))

    def watch(self, title: str, endpoint: Any, argument: Any) -> float:
        """Call `endpoint` of all processes, show their progress, and compare the checksums."""
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
        """Return the number of bytes that have arrived, from the processes' counts of pieces."""
        found = np.zeros(self.procs, np.uint64)
        action = RDMAAction()
        for rank, (_, count) in enumerate(self.published):
            action.fetch_add(count, found[rank : rank + 1], 0)
        action.submit().get()
        return sum(min(int(pieces) * PIECE, self.size) for pieces in found)

    def bandwidth(self, seconds: float) -> float:
        """Return the GB/s that all processes together received."""
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
    fan.load("the first time", 0)  # reads pages from the disk, and touches new memory
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
