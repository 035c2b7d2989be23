"""One trainer publishes weights, many generators pull them, and no generator uses a torn version.

The loop of reinforcement learning: the trainer makes version after version of the weights, and the
generators work with the newest version that they can get. Weights are not sent in messages. The
trainer registers its memory once, and the generators read it (`RDMABuffer.read_into`) at any time.
The trainer runs no Python code for a read, and does not know how many generators there are.

    python examples/weight_sync.py                        # 1 GB, eight generators
    python examples/weight_sync.py --megabytes 64 --generators 4 --versions 50 --step 0
    python examples/weight_sync.py --slots 1 --step 0     # only one copy: many pulls are overtaken
    python examples/weight_sync.py --slots 1 --step 0 --unchecked      # and without the check: torn

A one-sided read can see memory in the middle of a write. So each copy of the weights has a
*generation*, a number beside it: twice the version, and odd while the copy is written (a seqlock).
A generator reads the number, then the weights, then the number again. It waits for each read before
it starts the next, since the operations of one action have no order. If both numbers are equal and
even, the weights are of that version. Otherwise the read was *overtaken*, and the generator starts
again.

Two copies in turn make that rare: while the trainer writes one copy, the newest version is
untouched in the other, which is overwritten only by the version after the next. Rejected: one copy
(a generator succeeds only while the trainer pauses), and locks (a generator that dies while it
holds a lock would stop the trainer). The numbers are read and written by `fetch_add`, which is
atomic on every route.

The check: every number of the weights encodes its place and its version, and each generator checks
all of them before it uses them. Needs numpy and rich: pip install 'pymonarch[examples]'
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

try:
    import numpy as np
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer, explain

ROW = 1 << 18  # numbers that are written or checked at a time: 1 MB, which fits into a cache
PAUSE = 0.002  # seconds between two looks for a newer version

Array = Any  # a numpy array, whose type differs between releases of numpy
RAMP = np.arange(ROW, dtype=np.uint32)


@dataclass
class Published:
    """The memory that generators read: the copies of the weights, and their generations."""

    copies: list[RDMABuffer]
    generations: list[RDMABuffer]


def generations_of(published: Published) -> list[int]:
    """Read and return the present generation of each copy."""
    found = np.zeros(len(published.generations), np.uint64)
    action = RDMAAction()
    for place, generation in enumerate(published.generations):
        action.fetch_add(generation, found[place : place + 1], 0)
    action.submit().get()
    return [int(number) for number in found]


class Trainer(Actor):
    """The writer of versions 1, 2, 3, ... of the weights. Version v goes to copy v % slots."""

    def __init__(self, rows: int, slots: int) -> None:
        self.copies = [np.empty((rows, ROW), np.uint32) for _ in range(slots)]
        self.generations = np.zeros(slots, np.uint64)
        numbers = RDMABuffer(self.generations)
        self.published = Published(
            # Read-only: no other process can write to the weights.
            [RDMABuffer(copy, read_only=True) for copy in self.copies],
            [numbers[8 * slot : 8 * slot + 8] for slot in range(slots)],
        )
        self.version = 0
        self.make_version()

    @endpoint
    def publish(self) -> Published:
        return self.published

    @endpoint
    def train(self, versions: int, step: float) -> None:
        for _ in range(versions):
            time.sleep(step)  # in place of a training step on a GPU
            self.make_version()

    def make_version(self) -> None:
        self.version += 1
        slot = self.version % len(self.copies)
        self.mark(slot, 2 * self.version - 1)
        for row, numbers in enumerate(self.copies[slot]):
            np.add(RAMP, np.uint32(row * ROW + self.version & 0xFFFFFFFF), out=numbers)
        self.mark(slot, 2 * self.version)

    def mark(self, slot: int, generation: int) -> None:
        """Set the generation of a copy atomically."""
        before = np.zeros(1, np.uint64)
        more = generation - int(self.generations[slot])
        buffer = self.published.generations[slot]
        RDMAAction().fetch_add(buffer, before, more).submit().get()


class Generator(Actor):
    """A user of the newest version of the weights. The script reads `status` one-sidedly."""

    def __init__(self, published: Published, unchecked: bool) -> None:
        self.published = published
        self.unchecked = unchecked
        self.weights = np.zeros(published.copies[0].size() // 4, np.uint32).reshape(-1, ROW)
        self.status = np.zeros(4, np.uint64)  # newest version, pulls, overtaken, torn
        self.shown = RDMABuffer(self.status, read_only=True)

    @endpoint
    def show(self) -> RDMABuffer:
        return self.shown

    @endpoint
    def route(self) -> str:
        return explain(self.published.copies[0]).route or "none"

    @endpoint
    def pull(self, times: int) -> None:
        """Read the weights without a check, to measure the time."""
        for _ in range(times):
            self.published.copies[0].read_into(self.weights).get()

    @endpoint
    def generate(self, last: int) -> None:
        """Pull and use newer versions, until the last one."""
        while self.status[0] < last:
            version = self.pull_newer()
            if version is None:
                time.sleep(PAUSE)
                continue
            torn = not self.holds(version)
            self.status += np.array([version - int(self.status[0]), 1, 0, torn], np.uint64)

    def pull_newer(self) -> int | None:
        """Pull the newest version and return its number.

        Return None if there is no newer version than before, or if the read was overtaken.
        """
        before = generations_of(self.published)
        generation = max((number for number in before if number % 2 == 0), default=0)
        if generation <= 2 * self.status[0]:
            return None
        slot = before.index(generation)
        self.published.copies[slot].read_into(self.weights).get()
        if not self.unchecked and generations_of(self.published)[slot] != generation:
            self.status[2] += np.uint64(1)
            return None
        return generation // 2

    def holds(self, version: int) -> bool:
        """Whether each of the weights is of this version, and in its place."""
        return all(
            np.array_equal(numbers, RAMP + np.uint32(row * ROW + version & 0xFFFFFFFF))
            for row, numbers in enumerate(self.weights)
        )


def affordable(wanted: int, copies: int) -> int:
    """Return `wanted` megabytes, or less if `copies` of them exceed half of the free memory."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
    except FileNotFoundError:  # not Linux: use the size that the user gave
        return wanted
    free = int(sizes["MemAvailable"].split()[0]) >> 10
    return max(1, min(wanted, free // 2 // copies))


def seconds_of_pulls(generators: Any, times: int) -> float:
    """Return the seconds until all generators have pulled `times` times: the best of three."""
    took = []
    for _ in range(3):
        started = time.perf_counter()
        generators.pull.call(times).get()
        took.append(time.perf_counter() - started)
    return min(took)


def main() -> int:
    parser = argparse.ArgumentParser(description="Weights from one trainer to many generators.")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the weights (1024)")
    parser.add_argument("--generators", type=int, default=8, help="processes that pull (8)")
    parser.add_argument("--versions", type=int, default=10, help="how many are made (10)")
    parser.add_argument("--slots", type=int, default=2, help="copies written in turn (2)")
    parser.add_argument("--step", type=float, help="seconds of training (as all pulls take)")
    parser.add_argument("--unchecked", action="store_true", help="ignore generations: it will fail")
    args = parser.parse_args()
    if min(args.generators, args.versions, args.megabytes, args.slots) < 1:
        parser.error("--generators, --versions, --megabytes and --slots must be at least 1")

    console = Console(highlight=False)
    megabytes = affordable(args.megabytes, args.generators + args.slots)
    if megabytes < args.megabytes:
        console.print(f"[yellow]too little memory for {args.megabytes} MB: {megabytes} MB instead")
    size = megabytes << 20
    with console.status("starting ..."):
        trainer_proc = this_host().spawn_procs()
        procs = this_host().spawn_procs({"generators": args.generators})
        trainer = trainer_proc.spawn("trainer", Trainer, size // 4 // ROW, args.slots)
        published = trainer.publish.call_one().get()
        generators = procs.spawn("generators", Generator, published, args.unchecked)
        shown = generators.show.call().get().values()
        (route,) = set(generators.route.call().get().values())
        generators.pull.call(1).get()  # the first pull touches new memory and is not timed
        seconds = seconds_of_pulls(generators, 1)
        moved = args.generators * size
        together = moved / seconds
        alone = moved / seconds_of_pulls(generators.slice(generators=0), args.generators)
    step = seconds if args.step is None else args.step
    console.print(
        f"{megabytes} MB of weights, {args.generators} generators, route {route}\n"
        f"pulling together: {together / 1e9:.1f} GB/s, one alone: {alone / 1e9:.1f} GB/s "
        f"({together / alone:.0%})\n"
        f"copies in turn: {args.slots}; a step of training takes {step:.2f} s"
    )

    status = np.zeros((len(shown), 4), np.uint64)

    def look() -> list[int]:
        """Return the sums of the generators' figures, and the version of the slowest."""
        action = RDMAAction()
        for buffer, row in zip(shown, status, strict=True):
            action.read_remote(row, buffer)
        action.submit().get()
        return [int(status[:, 0].min()), *(int(n) for n in status[:, 1:].sum(axis=0))]

    last = args.versions + 1  # version 1 exists from the beginning
    words = TextColumn("{task.fields[words]}")
    columns = (TextColumn("version"), BarColumn(), MofNCompleteColumn(), words)
    started = time.perf_counter()
    training = trainer.train.call_one(args.versions, step)
    generating = generators.generate.call(last)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=last, words="")
        printed = 0
        while True:
            try:
                generating.get(timeout=0.1)
                break
            except TimeoutError:
                slowest, pulls, overtaken, torn = look()
            figures = f"{pulls} pulls, {overtaken} overtaken, {torn} torn"
            progress.update(task, completed=slowest, words=figures)
            if not console.is_terminal and slowest >= printed + max(1, last // 5):
                printed = slowest
                console.print(f"version {slowest:3}/{last}  {figures}")
    training.get()
    elapsed = time.perf_counter() - started
    slowest, pulls, overtaken, torn = look()
    procs.stop().get()
    trainer_proc.stop().get()

    summary = Table("generator", "pulls used", "overtaken", "torn", box=box.SIMPLE)
    for rank, (_, *counts) in enumerate(status.tolist()):
        summary.add_row(str(rank), *map(str, counts))
    console.print(summary)
    moved = (pulls + overtaken) * size
    console.print(
        f"{pulls} versions used, {overtaken} reads overtaken and repeated\n"
        f"{elapsed:.1f} s, {moved / elapsed / 1e9:.1f} GB/s beside training and checking"
    )
    if torn or slowest != last:
        print(
            f"error: {torn} torn versions were used; the slowest generator has version {slowest}",
            file=sys.stderr,
        )
        return 1
    console.print("no generator ever used a torn version, and all have the last one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
