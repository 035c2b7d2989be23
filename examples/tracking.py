"""Track an experiment from every rank: Weights & Biases and TensorBoard, both without a server.

Each rank trains with data of its own, and writes its curves itself: no value goes through the
script. With Weights & Biases each rank is a run of one group, so its web page folds them into one.
With TensorBoard each rank has a folder, which is a run there.

    python examples/tracking.py --procs 4
    tensorboard --logdir out/tracking/tensorboard
    wandb sync out/tracking/wandb/offline-run-*         # uploads the runs, if you have an account

Needs torch, tensorboard and wandb: pip install 'pymonarch[tensorboard,wandb]'
"""

import argparse
import sys
from pathlib import Path

try:
    import torch
    import wandb
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[tensorboard,wandb]'")

from monarch.actor import Actor, current_rank, current_size, endpoint, this_host


class Trainer(Actor):
    """Learns the weights of a sum from random examples."""

    def __init__(self, folder: Path, group: str) -> None:
        self.rank = current_rank().rank
        name = f"rank{self.rank}"
        self.run = wandb.init(
            mode="offline",
            dir=folder,
            project="tracking",
            group=group,
            name=name,
            config={"rank": self.rank, **current_size()},
            settings=wandb.Settings(silent=True),
        )
        self.board = SummaryWriter(str(folder / "tensorboard" / name))
        torch.manual_seed(self.rank)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @endpoint
    def train(self, steps: int) -> float:
        loss = torch.zeros(())
        for step in range(steps):
            batch = torch.randn(32, 4)
            loss = (self.model(batch).squeeze(1) - batch.sum(1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.run.log({"loss": loss.item()}, step=step)
            self.board.add_scalar("loss", loss.item(), step)
        return loss.item()

    def __cleanup__(self, error: Exception | None) -> None:
        """Close the files: it is called when the mesh stops, also after an error."""
        self.board.close()
        self.run.finish(exit_code=0 if error is None else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Track an experiment from every rank.")
    parser.add_argument("--procs", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each rank (default: 100)")
    parser.add_argument("--group", default="first try", help="name of the group in W&B")
    parser.add_argument("--out", type=Path, default=Path("out/tracking"), help="folder")
    args = parser.parse_args()
    if args.procs < 1 or args.steps < 1:
        parser.error("--procs and --steps must be positive")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    procs = this_host().spawn_procs({"procs": args.procs})
    trainers = procs.spawn("trainers", Trainer, out, args.group)
    losses = trainers.train.call(args.steps).get()
    print("last loss by rank:", *(f"{loss:.1e}" for loss in losses.values()))
    trainers.stop().get()  # the files are complete
    procs.stop().get()
    print(f"tensorboard --logdir {out / 'tensorboard'}")
    print(f"wandb sync {out / 'wandb' / 'offline-run-*'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
