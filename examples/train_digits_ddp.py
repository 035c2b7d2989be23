"""Train the digits network of train_digits.py with a plain script for torchrun.

There is nothing of pymonarch in this file. It is a data-parallel training as people have it, with
`DistributedDataParallel` over gloo and a checkpoint on disk, from which it goes on when restarted.

    torchrun --nproc-per-node 2 examples/train_digits_ddp.py
    monarch run --nproc-per-node 2 examples/train_digits_ddp.py
    monarch run --nproc-per-node 2 --max-restarts 3 examples/train_digits_ddp.py --steps 2000

The batch of a step follows from its number, so a training that was interrupted equals one that was
not. All ranks read the checkpoint, so all hosts must share its folder.

Needs torch and scikit-learn.
"""

import argparse
import functools
import json
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 128  # images per step of all ranks, so the result hardly depends on their number
TEST_IMAGES = 360
GOAL = 0.95

Images = tuple[Tensor, Tensor]
"""Pictures of 8 x 8 grey values between 0 and 1, and which digit each of them shows."""


def load(seed: int) -> tuple[Images, Images]:
    """Return a training and a test part of the digits, in a random order given by `seed`."""
    from sklearn.datasets import load_digits  # not above: train_digits_replicas needs the rest

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    pictures = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order]
    labels = torch.tensor(digits.target)[order]
    return (
        (pictures[TEST_IMAGES:], labels[TEST_IMAGES:]),
        (pictures[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


def network(seed: int) -> nn.Module:
    """Return a network with random weights that `seed` determines."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def shuffled(images: int, seed: int) -> Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed))


def batch(step: int, images: int, seed: int) -> Tensor:
    """Return the numbers of the images of a step, in the order in which ranks share them out."""
    epoch, place = divmod(step, images // GLOBAL_BATCH)  # without the incomplete last batch
    return shuffled(images, seed + epoch)[place * GLOBAL_BATCH :][:GLOBAL_BATCH]


def accuracy_of(model: nn.Module, test_set: Images) -> float:
    """Return the part of the test images that the network recognizes."""
    images, labels = test_set
    with torch.inference_mode():
        return float((model(images).argmax(1) == labels).float().mean())


def checksum(model: nn.Module) -> int:
    """Return a number that differs between models of which a single bit differs."""
    return functools.reduce(
        lambda value, each: zlib.crc32(each.detach().numpy().tobytes(), value),
        model.parameters(),
        0,
    )


class Events:
    """A file to which all ranks append: one line of JSON for each event, in a single write."""

    def __init__(self, path: Path | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.file = os.open(path, flags, 0o644) if path else None

    def note(self, event: str, **more: object) -> None:
        if self.file is not None:
            line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **more})
            os.write(self.file, f"{line}\n".encode())


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint. It is complete at any time, also if this process is killed."""
    saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    new = path.with_suffix(".new")
    torch.save(saved, new)
    new.replace(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network on handwritten digits, under torchrun or monarch run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="train up to this step")
    add("--seed", type=int, default=0, help="order of the data, first weights")
    add(
        "--checkpoint", type=Path, default=Path("out/digits_ddp.pt"), help="to write, to go on from"
    )
    add("--save-every", type=int, default=50, metavar="STEPS", help="between two checkpoints")
    add("--print-every", type=int, default=100, metavar="STEPS", help="between two lines")
    add("--events", type=Path, help="file to which each step is appended, as a line of JSON")
    add("--test-every", type=int, metavar="STEPS", help="between two tests among the events")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: at least 1, not {args.steps}")
    return args


def main() -> int:
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    (images, labels), test_set = load(args.seed)
    model = network(args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    elif rank == 0:
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    parallel = DistributedDataParallel(model)
    events = Events(args.events)
    events.note("began", rank=rank, step=first)
    if rank == 0 and first:
        print(f"going on after step {first}", flush=True)
    for step in range(first, args.steps):
        share = batch(step, len(labels), args.seed)[rank::world]
        loss = nn.functional.cross_entropy(parallel(images[share]), labels[share])
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over all ranks
        optimizer.step()
        done = step + 1
        if rank == 0:
            events.note("step", step=done)
            if args.test_every and done % args.test_every == 0:
                accuracy = accuracy_of(model, test_set)
                events.note("test", step=done, accuracy=accuracy, weights=checksum(model))
            if done % args.save_every == 0 or done == args.steps:
                save(args.checkpoint, done, model, optimizer)
            if done % args.print_every == 0:
                print(f"step {done:4}/{args.steps}  loss {loss.item():.4f}", flush=True)
    accuracy = accuracy_of(model, test_set)
    dist.destroy_process_group()
    if rank == 0:
        print(f"test accuracy: {accuracy:.4f}", flush=True)
        if accuracy < GOAL:
            print(f"error: the test accuracy is below {GOAL}; more --steps help", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
