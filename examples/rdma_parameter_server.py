"""A parameter server whose workers read weights and write gradients without a single message.

The server registers three areas of memory: the weights; for each worker a *mailbox*, with room for
one gradient and a few numbers; and a counter of tickets, one ticket for each step to do. A worker
takes a ticket (`fetch_add`), reads the weights, computes a gradient and writes it into its mailbox.
Then it continues with the next ticket, and waits only if the server has not yet emptied the
mailbox. So a fast worker does more steps, and a worker that dies holds at most one ticket. The
server visits the mailboxes in turn and applies the gradients. The more updates there were since a
worker read the weights, the *staler* its gradient is, and the smaller the step.

    python examples/rdma_parameter_server.py                     # 16 MB of weights, 4 workers
    python examples/rdma_parameter_server.py --megabytes 64 --workers 8 --steps 400

Reads that may be torn, and writes that may not. Weights are read while the server changes them, so
a worker may see some weights before an update and some after it. Asynchronous descent tolerates
that (as if some weights were a little staler), and needs no generation number; weight_sync.py shows
the method where it matters. A gradient must be whole, and applied once. So each mailbox has a
number for the turn. While the number is 0, the worker may write a gradient; it waits until the
write is complete, and only then writes 1. While the number is 1, the server may use the gradient;
then it writes 0. Only one byte of the number ever changes, and only the side whose turn it is
changes it. examples/parameter_server.py does the same by messages.

The task is artificial and of any size, and its answer is known: each worker computes the gradient
towards the answer and adds noise. The check: every ticket was applied exactly once, and the weights
are near the answer. Needs numpy and rich: pip install 'pymonarch[examples]'
"""

import argparse
import sys
import time
from collections import Counter
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

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer, explain

RATE = 0.2
NOISE = 0.1
PAUSE = 0.0002  # seconds between two readings of the turn by the side that waits
TURN, TICKET, VERSION = range(3)  # the numbers in a mailbox
WORDS = 3

Array = Any  # a numpy array, whose type differs between releases of numpy


@dataclass
class Mailbox:
    """The memory that one worker writes to."""

    numbers: RDMABuffer
    gradient: RDMABuffer


@dataclass
class Shared:
    """The memory of the server that a worker uses."""

    weights: RDMABuffer
    version: RDMABuffer
    tickets: RDMABuffer
    mailboxes: list[Mailbox]


def answer(size: int) -> Array:
    """Return the weights that the training should find."""
    return np.random.default_rng(42).standard_normal(size, np.float32)


class Server(Actor):
    """The owner of the weights. `version` counts the gradients that were applied to them."""

    def __init__(self, size: int, workers: int) -> None:
        self.weights = np.zeros(size, np.float32)
        self.version = np.zeros(1, np.uint64)
        self.tickets = np.zeros(1, np.uint64)
        self.numbers = np.zeros((workers, WORDS), np.uint64)
        self.gradients = np.zeros((workers, size), np.float32)
        self.shared = Shared(
            RDMABuffer(self.weights, read_only=True),
            RDMABuffer(self.version, read_only=True),
            RDMABuffer(self.tickets),
            [
                Mailbox(RDMABuffer(numbers), RDMABuffer(gradient))
                for numbers, gradient in zip(self.numbers, self.gradients, strict=True)
            ],
        )

    @endpoint
    def share(self) -> Shared:
        return self.shared

    @endpoint
    def serve(self, steps: int) -> tuple[Counter[int], Counter[int]]:
        """Apply `steps` gradients; return how often each ticket and each staleness occurred."""
        tickets: Counter[int] = Counter()
        staleness: Counter[int] = Counter()
        while self.version[0] < steps:
            full = np.flatnonzero(self.numbers[:, TURN])
            if not len(full):
                time.sleep(PAUSE)
            for worker in full:
                _, ticket, version = map(int, self.numbers[worker])
                stale = int(self.version[0]) - version
                gradient = self.gradients[worker]
                gradient *= np.float32(-RATE / (1 + stale))
                self.weights += gradient
                self.version[0] += np.uint64(1)
                self.numbers[worker, TURN] = 0
                tickets[ticket] += 1
                staleness[stale] += 1
        return tickets, staleness

    @endpoint
    def loss(self) -> float:
        """Return the mean squared distance from the answer."""
        return float(np.square(self.weights - answer(len(self.weights))).mean())


class Worker(Actor):
    """A process that computes gradients, for as long as there are tickets."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.mailbox = shared.mailboxes[current_rank().rank]
        size = shared.weights.size() // 4
        self.weights = np.zeros(size, np.float32)
        self.answer = answer(size)
        self.chance = np.random.default_rng(current_rank().rank)
        # Each step uses a random window of this array, which is cheaper than new noise.
        self.noise = NOISE * self.chance.standard_normal(size + 1000, np.float32)
        self.numbers = np.zeros(WORDS, np.uint64)  # as the mailbox has them

    @endpoint
    def route(self) -> str:
        return explain(self.shared.weights).route or "none"

    @endpoint
    def work(self, steps: int) -> int:
        """Take tickets until there are none; return how many this worker got."""
        done = 0
        ticket, version = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        while True:
            RDMAAction().fetch_add(self.shared.tickets, ticket, 1).submit().get()
            if ticket[0] >= steps:
                return done
            # The version is read first, so the weights are of this version or newer.
            self.shared.version.read_into(version).get()
            self.shared.weights.read_into(self.weights).get()
            self.post(self.gradient(), int(ticket[0]), int(version[0]))
            done += 1

    def gradient(self) -> Array:
        start = self.chance.integers(1000)
        self.weights -= self.answer
        self.weights += self.noise[start : start + len(self.weights)]
        return self.weights

    def post(self, gradient: Array, ticket: int, version: int) -> None:
        """Wait until the mailbox is empty, and write a gradient into it."""
        while True:
            self.mailbox.numbers.read_into(self.numbers).get()
            if not self.numbers[TURN]:
                break
            time.sleep(PAUSE)
        self.numbers[TICKET], self.numbers[VERSION] = ticket, version
        content = RDMAAction().write_remote(self.mailbox.gradient, gradient)
        content.write_remote(self.mailbox.numbers, self.numbers).submit().get()
        # The gradient is complete. With the next write the turn goes to the server.
        self.numbers[TURN] = 1
        self.mailbox.numbers[:8].write_from(self.numbers[:1]).get()


def main() -> int:
    parser = argparse.ArgumentParser(description="Asynchronous descent through shared memory.")
    parser.add_argument("--megabytes", type=int, default=16, help="size of the weights (16)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of all together (200)")
    args = parser.parse_args()
    if min(args.megabytes, args.workers, args.steps) < 1:
        parser.error("--megabytes, --workers and --steps must be at least 1")

    console = Console(highlight=False)
    size = args.megabytes << 18
    with console.status("starting ..."):
        server_proc = this_host().spawn_procs()
        worker_procs = this_host().spawn_procs({"workers": args.workers})
        server = server_proc.spawn("server", Server, size, args.workers)
        shared = server.share.call_one().get()
        workers = worker_procs.spawn("workers", Worker, shared)
        ways = sorted(set(workers.route.call().get().values()))
        before = server.loss.call_one().get()
    console.print(
        f"{args.megabytes} MB of weights, {args.workers} workers, route {', '.join(ways)}, "
        f"loss {before:.4f}"
    )

    version = np.zeros(1, np.uint64)
    started = time.perf_counter()
    serving = server.serve.call_one(args.steps)
    working = workers.work.call(args.steps)
    columns = (TextColumn("updates"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=args.steps)
        printed = 0
        while True:
            try:
                working.get(timeout=0.1)
                break
            except TimeoutError:
                shared.version.read_into(version).get()
            progress.update(task, completed=int(version[0]))
            if not console.is_terminal and version[0] >= printed + args.steps // 5:
                printed = int(version[0])
                console.print(f"update {printed:5}/{args.steps}")
    tickets, staleness = serving.get()
    seconds = time.perf_counter() - started
    done = working.get().values()
    loss = server.loss.call_one().get()
    worker_procs.stop().get()
    server_proc.stop().get()

    summary = Table("staleness", "gradients", "", box=box.SIMPLE)
    for stale in range(10):
        count = staleness[stale] if stale < 9 else sum(staleness[s] for s in staleness if s >= 9)
        bar = "#" * round(40 * count / args.steps)
        summary.add_row(f"{stale}{'+' if stale == 9 else ''}", str(count), bar)
    console.print(summary)
    console.print(f"steps by worker: {', '.join(map(str, done))}")
    moved = 2 * args.steps * size * 4
    console.print(
        f"{args.steps} steps in {seconds:.2f} s: {moved / seconds / 1e9:.2f} GB/s of weights read "
        "and gradients written"
    )
    console.print(f"final loss: {loss:.4f} (the noise in the gradients is {NOISE**2:.4f})")
    if tickets != Counter(range(args.steps)):
        print("error: some steps were lost, or applied twice", file=sys.stderr)
        return 1
    console.print(f"each of {args.steps} steps was applied exactly once")
    if loss > NOISE**2:
        print("error: the loss is still above the noise; more --steps help", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
