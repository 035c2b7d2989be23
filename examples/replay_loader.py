"""Learn from a replay buffer through a DataLoader: its workers ask the buffer for batches.

Players walk at random in a corridor of eleven places, and are paid at its right end. They put each
step into a replay buffer, an actor. The script learns the worth of each place from old steps, which
the workers of an ordinary `DataLoader` fetch while the script computes: these children of the
script use its handle of the buffer, as a player does.

    python examples/replay_loader.py --workers 2

Needs torch, and matplotlib for the picture: pip install 'pymonarch[examples]'
"""

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

try:
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, IterableDataset
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from monarch.actor import Actor, current_rank, endpoint, this_host

PLACES = 11  # without the two ends
TRUTH = torch.arange(1, PLACES + 1) / (PLACES + 1)  # the chance to reach the right end first
RATE = 4.0  # at first; it becomes smaller
Step = tuple[int, float, int]  # place, reward, next place; -1 and PLACES are the ends


class Buffer(Actor):
    """The newest steps of all players."""

    def __init__(self, size: int) -> None:
        self.steps: deque[Step] = deque(maxlen=size)
        self.random = random.Random(0)

    @endpoint
    def add(self, steps: list[Step]) -> None:
        self.steps.extend(steps)

    @endpoint
    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return places, rewards and next places."""
        chosen = self.random.choices(self.steps, k=count)
        places, rewards, after = zip(*chosen, strict=True)
        return torch.tensor(places), torch.tensor(rewards), torch.tensor(after)


class Player(Actor):
    """A process that walks through the corridor again and again."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.random = random.Random(current_rank().rank)

    @endpoint
    def play(self, walks: int) -> None:
        for _ in range(walks):
            steps: list[Step] = []
            place = PLACES // 2
            while 0 <= place < PLACES:
                after = place + self.random.choice((-1, 1))
                steps.append((place, float(after == PLACES), after))
                place = after
            self.buffer.add.broadcast(steps)


class Replay(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches from the buffer, without end. Each worker of the loader has a copy of this object."""

    def __init__(self, buffer: Buffer, batch: int) -> None:
        self.buffer, self.batch = buffer, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            yield self.buffer.sample.call_one(self.batch).get()


def learn(loader: "DataLoader[tuple[Tensor, Tensor, Tensor]]", steps: int) -> list[float]:
    """Learn the worth of each place; return the error before each tenth step."""
    worth = torch.nn.Embedding(PLACES, 1)
    torch.nn.init.constant_(worth.weight, 0.5)
    optimizer = torch.optim.SGD(worth.parameters(), lr=RATE)
    errors = []
    for number, (places, rewards, after) in zip(range(steps), loader, strict=False):
        with torch.no_grad():
            if number % 10 == 0:
                errors.append(float((worth.weight.squeeze() - TRUTH).square().mean().sqrt()))
            inside = (after >= 0) & (after < PLACES)
            target = rewards + inside * worth(after.clamp(0, PLACES - 1)).squeeze()
        loss = (worth(places).squeeze() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + 10 * number / steps)
    return errors


def draw(errors: list[float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(0, 10 * len(errors), 10), errors)
    axes.set(xlabel="step", ylabel="error of the learned worth", yscale="log")
    axes.set_title("Learning from a replay buffer through a DataLoader")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn from a replay buffer by a DataLoader.")
    parser.add_argument("--players", type=int, default=2, help="player processes (default: 2)")
    parser.add_argument("--workers", type=int, default=2, help="workers of the loader (default: 2)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of learning (default: 1000)")
    parser.add_argument("--no-picture", action="store_true", help="draw no curve")
    args = parser.parse_args()
    if args.players < 1 or args.workers < 0 or args.steps < 1:
        parser.error("--players and --steps must be at least 1, --workers at least 0")

    buffers, playing = this_host().spawn_procs(), this_host().spawn_procs({"players": args.players})
    buffer = buffers.spawn("buffer", Buffer, 50_000)
    players = playing.spawn("players", Player, buffer)
    players.play.call(50).get()  # so that there is something to learn from
    more = players.play.call(1000)

    begin = time.perf_counter()
    loader = DataLoader(Replay(buffer, 256), batch_size=None, num_workers=args.workers)
    errors = learn(loader, args.steps)
    took = time.perf_counter() - begin
    more.get()

    print(f"{args.steps} batches by {args.workers} workers in {took:.1f} s")
    print(f"error of the learned worth: {errors[0]:.3f} at first, {errors[-1]:.3f} at the end")
    if not args.no_picture:
        draw(errors, Path("out/replay_loader.png"))
        print("wrote out/replay_loader.png")
    playing.stop().get()
    buffers.stop().get()
    if errors[-1] > 0.3 * errors[0]:
        print("error: it has learned too little; more --steps help", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
