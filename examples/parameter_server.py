"""A parameter server: workers improve one set of weights without waiting for each other.

Each worker takes the current weights from the server, computes a gradient on its own data, and
sends the gradient back. Meanwhile other workers may have changed the weights: the gradient is
*stale* by the number of these changes. The server applies it nevertheless, with a step that is the
smaller the staler the gradient is. An actor handles one message at a time, so the server needs no
lock.

    python examples/parameter_server.py --workers 4 --steps 200

Needs torch: pip install 'pymonarch[torch]'
"""

import argparse
import sys
from collections import Counter

try:
    import torch
    from torch import Tensor
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")

from monarch.actor import Actor, Channel, Port, current_rank, endpoint, this_host

FEATURES = 50
NOISE = 0.1  # in the data: no weights can have a loss below NOISE ** 2


class Server(Actor):
    """The owner of the weights. `version` counts the gradients that were applied to them."""

    def __init__(self, rate: float, progress: Port[tuple[int, float]]) -> None:
        self.weights, self.version = torch.zeros(FEATURES), 0
        self.rate, self.progress = rate, progress
        self.staleness: Counter[int] = Counter()

    @endpoint
    def pull(self) -> tuple[Tensor, int]:
        return self.weights, self.version

    @endpoint
    def push(self, gradient: Tensor, version: int, loss: float) -> None:
        stale = self.version - version
        # A new tensor each time: a worker's reference to the old weights stays valid.
        self.weights = self.weights - self.rate / (1 + stale) * gradient
        self.version += 1
        self.staleness[stale] += 1
        self.progress.send((self.version, loss))

    @endpoint
    def result(self) -> tuple[Tensor, Counter[int]]:
        return self.weights, self.staleness


class Worker(Actor):
    """A process that computes gradients of a linear regression on data of its own."""

    def __init__(self, server: Server, truth: Tensor) -> None:
        torch.manual_seed(current_rank().rank)
        self.server = server
        self.inputs = torch.randn(2000, FEATURES)
        self.targets = self.inputs @ truth + NOISE * torch.randn(2000)

    @endpoint
    def work(self, steps: int, batch: int = 64) -> None:
        for _ in range(steps):
            weights, version = self.server.pull.call_one().get()
            chosen = torch.randint(len(self.targets), (batch,))
            error = self.inputs[chosen] @ weights - self.targets[chosen]
            gradient = 2 / batch * error @ self.inputs[chosen]
            # Without a reply: the next step need not wait until the server has used this gradient.
            self.server.push.broadcast(gradient, version, float(error.square().mean()))

    @endpoint
    def loss(self, weights: Tensor) -> float:
        """Return the mean squared error of `weights` on all data of this worker."""
        return float((self.inputs @ weights - self.targets).square().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description="Asynchronous SGD with a parameter server.")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (default: 4)")
    parser.add_argument("--steps", type=int, default=200, help="steps per worker (default: 200)")
    args = parser.parse_args()
    if args.workers < 1 or args.steps < 1:
        parser.error("--workers and --steps must be at least 1")

    updates, receiver = Channel[tuple[int, float]].open()
    truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(42))
    server_proc = this_host().spawn_procs()
    worker_procs = this_host().spawn_procs({"workers": args.workers})
    server = server_proc.spawn("server", Server, 0.03, updates)
    workers = worker_procs.spawn("workers", Worker, server, truth)

    working = workers.work.call(args.steps)
    total = args.workers * args.steps
    for _ in range(total):
        version, loss = receiver.recv().get()
        if version % max(1, total // 10) == 0:
            print(f"update {version:5}/{total}  loss {loss:.4f}", flush=True)
    working.get()

    weights, staleness = server.result.call_one().get()
    losses = workers.loss.call(weights).get().values()
    worker_procs.stop().get()
    server_proc.stop().get()

    print("staleness of the gradients, in versions:")
    for stale in range(10):
        count = staleness[stale] if stale < 9 else sum(staleness[s] for s in staleness if s >= 9)
        print(f"  {stale}{'+' if stale == 9 else ' '} {count:5}  {'#' * round(50 * count / total)}")
    loss = sum(losses) / len(losses)
    print(f"final loss: {loss:.4f} (the noise in the data is {NOISE**2:.4f})")
    if loss > 2 * NOISE**2:
        print(
            "error: the loss is still more than twice the noise; more --steps help", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
